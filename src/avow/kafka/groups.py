"""Consumer groups as people ask about them: members, committed positions, and how far behind they are.

Lag is counted against the last stable offset: what a transaction that is still open has written is not late yet. And a
position behind which no committed record stands is not behind at all, whatever markers follow it. In seconds it is the
age of the oldest committed record that the group has not passed.

Owns: these answers. Must not know: pipelines, sinks. Its neighbour is ``log``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException

from avow.errors import SourceError
from avow.kafka.log import Log, TopicPartition
from avow.settings import Source

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    client_id: str
    host: str
    partitions: tuple[str, ...]  # topic/partition


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    state: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Lag:
    """How far one group is behind in one partition."""

    group: str
    topic: str
    partition: int
    position: int
    stable_end: int | None  # None: there is no such partition any more
    records: int | None  # an upper bound: markers and aborted records in between are counted
    seconds: float | None  # None: nothing to wait for, or not known
    note: str
    metadata: str


def names(source: Source) -> dict[str, str]:
    """Every group -> its state."""
    with Log(source, "avow") as log:
        try:
            listed = log.admin.list_consumer_groups(request_timeout=TIMEOUT_S).result(TIMEOUT_S)
        except KafkaException as error:
            raise _failed("the groups", error) from None
    return {one.group_id: _word(one.state) for one in sorted(listed.valid, key=lambda one: one.group_id)}


def describe(source: Source, groups: Iterable[str]) -> list[Group]:
    wanted = sorted(set(groups))
    if not wanted:
        return []
    with Log(source, "avow") as log:
        try:
            asked = log.admin.describe_consumer_groups(wanted, request_timeout=TIMEOUT_S)
            found = {name: asked[name].result(TIMEOUT_S) for name in wanted}
        except KafkaException as error:
            raise _failed("the members of the groups", error) from None
    return [
        Group(
            name,
            _word(one.state),
            tuple(
                Member(
                    member.client_id,
                    member.host.lstrip("/"),
                    tuple(f"{p.topic}/{p.partition}" for p in member.assignment.topic_partitions),
                )
                for member in one.members
            ),
        )
        for name, one in found.items()
    ]


def lag(source: Source, group: str) -> list[Lag]:
    """Of every partition for which the group has a position."""
    with Log(source, group) as log:
        committed = _committed(log, group)
        there = {TopicPartition(one.topic, one.partition) for one in log.cluster().partitions}
        positions = {where: offset for where, (offset, _) in committed.items() if where in there}
        offsets, stable = log.offsets(positions), log.stable_ends(positions)
        behind = {where: offset for where, offset in positions.items() if offset < stable[where]}
        # Retention may have passed a position: the oldest record that is left is then what it waits for.
        stamps = log.timestamps_at({where: max(offset, offsets[where][0]) for where, offset in behind.items()})
    now = time.time()
    return [
        _lag(group, where, *committed[where], offsets.get(where), stable.get(where), stamps.get(where), now)
        for where in sorted(committed)
    ]


def _lag(
    group: str,
    where: TopicPartition,
    position: int,
    metadata: str,
    offsets: tuple[int, int] | None,
    stable: int | None,
    stamp_ms: int | None,
    now: float,
) -> Lag:
    seconds: float | None = None
    if offsets is None or stable is None:
        records, note = None, "no such partition any more"
    else:
        earliest, end = offsets
        notes = []
        if position < earliest:
            notes.append(f"retention has deleted {earliest - position:,} offsets that it has not read")
        if position > end:
            notes.append(f"the log ends at {end:,}, before the position")
        if end > stable:
            notes.append(f"a transaction is open: {end - stable:,} offsets wait for its end")
        # Without a record that is visible, all that follows are markers or aborted records.
        records = stable - max(position, earliest) if stamp_ms is not None else 0
        if stamp_ms is not None and stamp_ms >= 0:
            seconds = max(0.0, now - stamp_ms / 1000)
        note = "; ".join(notes)
    return Lag(group, where.topic, where.partition, position, stable, records, seconds, note, metadata)


def _committed(log: Log, group: str) -> dict[TopicPartition, tuple[int, str]]:
    request = [ConsumerGroupTopicPartitions(group)]
    try:
        asked = log.admin.list_consumer_group_offsets(request, request_timeout=TIMEOUT_S)
        answer = asked[group].result(TIMEOUT_S).topic_partitions or []
    except KafkaException as error:
        raise _failed(f"the positions of group {group}", error) from None
    return {
        TopicPartition(one.topic, one.partition): (one.offset, one.metadata or "") for one in answer if one.offset >= 0
    }


def _failed(what: str, error: KafkaException) -> SourceError:
    return SourceError(
        f"Kafka was asked for {what}: {error.args[0].str()}", advice="Check that the cluster is up, and your rights."
    )


def _word(state: Any) -> str:
    return str(getattr(state, "name", state)).lower().replace("_", "-")
