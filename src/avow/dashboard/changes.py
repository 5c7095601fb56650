"""Changes from the pages: create and delete topics, reset a group's offsets, start audits and redrives.

Every change is a POST of a form of ours, and answers with a redirect to where its effect shows. ``guard`` has judged
where it comes from; the form's own secret is checked before any of these is called.

Owns: these changes, and that what cannot be undone is confirmed by typing its name. Must not know: how a form looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from avow.dashboard.cluster import GroupParams, group, reserved
from avow.dashboard.fields import EMPTY_AS_NONE, GroupName, OptionalOffset, OptionalPartition, OptionalTime, TopicName
from avow.dashboard.formatting import url
from avow.dashboard.messages import in_utc
from avow.dashboard.pipelines import DeadLettersParams, loaded
from avow.dashboard.requests import NotFound, Params, check_position
from avow.dashboard.state import AppState
from avow.errors import ConfigError
from avow.kafka.log import Log, TopicPartition


class CreateTopic(Params):
    name: TopicName
    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    replicas: Annotated[int | None, Field(ge=1, le=100), EMPTY_AS_NONE] = None
    config: Annotated[str, Field(max_length=10_000)] = ""


def create_topic(state: AppState, params: CreateTopic) -> str:
    """Create a topic; ``config`` has a line ``name = value`` for each setting."""
    config = {}
    for line in filter(str.strip, params.config.splitlines()):
        name, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(f"a topic setting must have the form name = value, not {line[:80]!r}")
        config[name.strip()] = value.strip()
    with state.log() as log:
        if any(partition.topic == params.name for partition in log.cluster().partitions):
            raise ConfigError(f"topic {params.name} already exists")
        log.admin.create_topic(
            params.name, params.partitions, -1 if params.replicas is None else params.replicas, config
        )
    return url("topics", params.name)


class DeleteTopic(Params):
    topic: TopicName
    confirm: Annotated[str, Field(max_length=300)] = ""


def delete_topic(state: AppState, params: DeleteTopic) -> str:
    """Delete a topic, if its name was typed. Never an internal one: Kafka stores offsets and transactions there."""
    if params.topic.startswith("__"):
        raise ConfigError(f"{params.topic} is an internal topic of Kafka and cannot be deleted here")
    _confirmed(params.topic, params.confirm)
    with state.log() as log:
        if not any(partition.topic == params.topic for partition in log.cluster().partitions):
            raise NotFound(f"topic {params.topic} does not exist")
        log.admin.delete_topic(params.topic)
    return url("topics")


def _confirmed(name: str, typed: str) -> None:
    if typed.strip() != name:
        raise ConfigError(f"nothing was changed: the confirmation is not {name}", advice="Type the name exactly.")


class ResetGroup(Params):
    group: GroupName
    topic: TopicName
    partition: OptionalPartition = None
    to: Literal["earliest", "latest", "offset", "time"] = "earliest"
    offset: OptionalOffset = None
    time: OptionalTime = None
    confirm: Annotated[str, Field(max_length=300)] = ""

    @model_validator(mode="after")
    def _check_position(self) -> Self:
        check_position("to", self.to, offset=self.offset, time=self.time)
        return self


def reset_group(state: AppState, params: ResetGroup) -> str:
    """Reset a group's offsets in a topic. Refused for a pipeline's group, and while the group has members."""
    _confirmed(params.group, params.confirm)
    now = group(state, GroupParams(group=params.group))
    why = reserved(state, params.group, len(now.members), [lag.metadata for lag in now.lags])
    if why:
        raise ConfigError(f"the offsets of group {params.group} cannot be reset here: {why}")
    with Log(state.source, params.group, timeout_s=state.timeout_s) as log:
        partitions = [
            tp
            for tp in log.partitions_of([params.topic])
            if params.partition is None or tp.partition == params.partition
        ]
        log.commit_offsets(_positions(log, params, partitions))
    return url("groups", params.group)


def _positions(log: Log, params: ResetGroup, partitions: list[TopicPartition]) -> Mapping[TopicPartition, int]:
    offsets = log.offsets(partitions)
    match params.to:
        case "earliest":
            return {tp: first for tp, (first, _) in offsets.items()}
        case "latest":
            return {tp: end for tp, (_, end) in offsets.items()}
        case "offset":
            assert params.offset is not None
            return {tp: min(max(params.offset, first), end) for tp, (first, end) in offsets.items()}
        case "time":
            assert params.time is not None
            return log.declared_start(in_utc(params.time), partitions)


class StartAudit(Params):
    name: Annotated[str, Field(max_length=200)]


def start_audit(state: AppState, params: StartAudit) -> str:
    """Start an audit; its report is kept as evidence."""
    watched, _ = loaded(state, params.name)
    if not state.evidence.folders:
        raise ConfigError("no folder is configured for the report", advice="Start the dashboard with --evidence DIR.")
    return url("jobs", state.jobs.audit(watched.name, watched.file, state.evidence.folders[0]).number)


def start_redrive(state: AppState, params: DeadLettersParams) -> str:
    """Start a redrive of the matching dead letters."""
    watched, _ = loaded(state, params.name)
    return url("jobs", state.jobs.redrive(watched.name, watched.file, params.selection()).number)


CHANGES: tuple[tuple[str, type[Params], Callable[..., str]], ...] = (
    ("/topics", CreateTopic, create_topic),
    ("/topics/{topic}/delete", DeleteTopic, delete_topic),
    ("/groups/{group}/reset", ResetGroup, reset_group),
    ("/pipelines/{name}/audit", StartAudit, start_audit),
    ("/pipelines/{name}/redrive", DeadLettersParams, start_redrive),
)
