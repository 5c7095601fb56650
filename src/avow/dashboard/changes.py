"""What a person can change from here: topics, a group's positions, and work on a pipeline that is started.

Every change is a POST of a form of ours, and answers with a redirect to where its effect shows. ``guard`` has judged
where it comes from; the form's own secret is checked before any of these is called.

Owns: these changes, and that what cannot be undone is confirmed by typing its name. Must not know: how a form looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from avow.dashboard.asking import OFFSET_MAX, PARTITION_MAX, Ask, NotThere, one_place
from avow.dashboard.cluster import GroupAsk, group, reserved
from avow.dashboard.house import House
from avow.dashboard.messages import in_utc
from avow.dashboard.pipelines import LettersAsk, loaded
from avow.dashboard.show import url
from avow.errors import ConfigError
from avow.kafka import topics
from avow.kafka.log import Log, TopicPartition

TOPIC = r"^[a-zA-Z0-9._-]{1,249}$"


class CreateTopic(Ask):
    name: Annotated[str, Field(pattern=TOPIC)]
    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    replicas: Annotated[int | None, Field(ge=1, le=100)] = None
    config: Annotated[str, Field(max_length=10_000)] = ""

    @field_validator("replicas", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return None if value == "" else value


def create_topic(house: House, ask: CreateTopic) -> str:
    """Make a topic; ``config`` has a line ``name = value`` for each setting."""
    config = {}
    for line in filter(str.strip, ask.config.splitlines()):
        name, is_there, value = line.partition("=")
        if not is_there:
            raise ConfigError(f"a setting is a line name = value, and this is not one: {line[:80]!r}")
        config[name.strip()] = value.strip()
    with house.log() as log:
        if any(one.topic == ask.name for one in log.cluster().partitions):
            raise ConfigError(f"there is a topic {ask.name} already")
        topics.create(log, ask.name, ask.partitions, ask.replicas, config)
    return url("topics", ask.name)


class DeleteTopic(Ask):
    topic: Annotated[str, Field(pattern=TOPIC)]
    confirm: Annotated[str, Field(max_length=300)] = ""


def delete_topic(house: House, ask: DeleteTopic) -> str:
    """Delete a topic, if its name was typed. Never one of Kafka's own: positions and transactions would go with it."""
    if ask.topic.startswith("__"):
        raise ConfigError(f"{ask.topic} is one of Kafka's own topics, and is not deleted from here")
    _confirmed(ask.topic, ask.confirm)
    with house.log() as log:
        if not any(one.topic == ask.topic for one in log.cluster().partitions):
            raise NotThere(f"there is no topic {ask.topic}")
        topics.delete(log, ask.topic)
    return url("topics")


def _confirmed(name: str, typed: str) -> None:
    if typed.strip() != name:
        raise ConfigError(f"nothing was changed: the name typed was not {name}", advice="Type it exactly.")


class ResetGroup(Ask):
    group: Annotated[str, Field(min_length=1, max_length=255)]
    topic: Annotated[str, Field(pattern=TOPIC)]
    partition: Annotated[int | None, Field(ge=0, le=PARTITION_MAX)] = None
    to: Literal["earliest", "latest", "offset", "time"] = "earliest"
    offset: Annotated[int | None, Field(ge=0, le=OFFSET_MAX)] = None
    time: datetime | None = None  # UTC unless it has a zone
    confirm: Annotated[str, Field(max_length=300)] = ""

    @field_validator("partition", "offset", "time", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return None if value == "" else value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        one_place("to", self.to, offset=self.offset, time=self.time)
        return self


def reset_group(house: House, ask: ResetGroup) -> str:
    """Set a group's positions in a topic. Refused for a pipeline's group, and while it has members."""
    _confirmed(ask.group, ask.confirm)
    now = group(house, GroupAsk(group=ask.group))
    why = reserved(house, ask.group, len(now.members), [lag.metadata for lag in now.lags])
    if why:
        raise ConfigError(f"the positions of group {ask.group} cannot be set here: {why}")
    with Log(house.source, ask.group, timeout_s=house.timeout_s) as log:
        there = [
            where
            for where in log.partitions_of([ask.topic])
            if ask.partition is None or where.partition == ask.partition
        ]
        log.tell(_positions(log, ask, there))
    return url("groups", ask.group)


def _positions(log: Log, ask: ResetGroup, there: list[TopicPartition]) -> Mapping[TopicPartition, int]:
    offsets = log.offsets(there)
    match ask.to:
        case "earliest":
            return {where: first for where, (first, _) in offsets.items()}
        case "latest":
            return {where: end for where, (_, end) in offsets.items()}
        case "offset":
            assert ask.offset is not None
            return {where: min(max(ask.offset, first), end) for where, (first, end) in offsets.items()}
        case "time":
            assert ask.time is not None
            return log.declared_start(in_utc(ask.time), there)


class StartAudit(Ask):
    name: Annotated[str, Field(max_length=200)]


def start_audit(house: House, ask: StartAudit) -> str:
    """Start an audit; its report is kept as evidence."""
    one, _ = loaded(house, ask.name)
    if not house.evidence.folders:
        raise ConfigError("there is no folder to keep the report in", advice="Start the dashboard with --evidence DIR.")
    return url("jobs", house.jobs.audit(one.name, one.file, house.evidence.folders[0]).number)


def start_redrive(house: House, ask: LettersAsk) -> str:
    """Start to redrive the dead letters that are meant."""
    one, _ = loaded(house, ask.name)
    meant = {name: value for name, value in asdict(ask.selection()).items() if value is not None}
    return url("jobs", house.jobs.redrive(one.name, one.file, meant).number)


CHANGES: tuple[tuple[str, type[Ask], Callable[..., str]], ...] = (
    ("/topics", CreateTopic, create_topic),
    ("/topics/{topic}/delete", DeleteTopic, delete_topic),
    ("/groups/{group}/reset", ResetGroup, reset_group),
    ("/pipelines/{name}/audit", StartAudit, start_audit),
    ("/pipelines/{name}/redrive", LettersAsk, start_redrive),
)
