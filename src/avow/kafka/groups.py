"""Consumer groups as people ask about them: members, committed positions, and how far behind they are.

Lag is counted against the last stable offset: what a transaction that is still open has written is not late yet. And a
position behind which no committed record stands is not behind at all, whatever markers follow it. In seconds it is the
age of the oldest committed record that the group has not passed.

Each question is asked through an open ``Log``, whose own group does not matter.

Owns: these answers. Must not know: pipelines, sinks. Its neighbour is ``log``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException

from avow.errors import SourceError
from avow.kafka.log import NO_TIMESTAMP, Log, TopicPartition, answers


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
    stable_end: int | None  # None: nobody says it, for the partition has no leader
    records: int | None  # an upper bound: markers and aborted records in between are counted
    seconds: float | None  # None: nothing to wait for, or not known; then the note says why
    note: str
    metadata: str


def names(log: Log) -> dict[str, str]:
    """Every group -> its state."""

    def request(timeout_s: float) -> Any:
        found = answers({"": log.admin.list_consumer_groups(request_timeout=timeout_s)}, timeout_s)[""]
        if found.errors:  # of a broker that did not answer: its groups are not in the list
            raise KafkaException(found.errors[0])
        return found

    listed = log.ask("for its groups", request)
    return {one.group_id: _word(one.state) for one in sorted(listed.valid, key=lambda one: one.group_id)}


def describe(log: Log, groups: Iterable[str]) -> list[Group]:
    wanted = sorted(set(groups))
    if not wanted:
        return []
    found = log.ask(
        "for the members of groups",
        lambda timeout_s: answers(log.admin.describe_consumer_groups(wanted, request_timeout=timeout_s), timeout_s),
    )
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


def lag(log: Log, group: str) -> list[Lag]:
    """Of every partition for which the group has a position."""
    there = {TopicPartition(one.topic, one.partition): one for one in log.cluster().partitions}
    committed = log.committed([group], there)[group]
    # A question about a partition without a leader has no answer, and would take the others' with it.
    led = {where: offset for where, (offset, _) in committed.items() if there[where].leader >= 0}
    offsets, stable = log.offsets(led), log.stable_ends(led)
    behind = {where: offset for where, offset in led.items() if offset < stable[where]}
    # Retention may have passed a position: the oldest record that is left is then what it waits for.
    stamps = log.timestamps_at({where: max(offset, offsets[where][0]) for where, offset in behind.items()})
    now = time.time()
    return [
        _lag(group, where, *committed[where], offsets[where], stable[where], stamps.get(where), now)
        if where in led
        else _unled(group, where, *committed[where])
        for where in sorted(committed)
    ]


def refuse_missing(log: Log, groups: Iterable[str]) -> None:
    """A ``SourceError`` names a group that is not there."""
    known = names(log)
    for group in groups:
        if group not in known and not positions(log, [group])[group]:
            raise SourceError(
                f"there is no group {group}",
                advice="`avow groups` lists those there are. Kafka forgets one without members and positions.",
            )


def positions(log: Log, groups: Iterable[str]) -> dict[str, dict[TopicPartition, int]]:
    """What many groups have committed. All are asked at once."""
    there = _there(log)
    return {
        group: {where: at for where, (at, _) in found.items()}
        for group, found in log.committed(list(groups), there).items()
    }


def _lag(
    group: str,
    where: TopicPartition,
    position: int,
    metadata: str,
    offsets: tuple[int, int],
    stable: int,
    stamp_ms: int | None,
    now: float,
) -> Lag:
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
    seconds = max(0.0, now - stamp_ms / 1000) if stamp_ms is not None and stamp_ms != NO_TIMESTAMP else None
    if stamp_ms == NO_TIMESTAMP:
        notes.append("how long is not known: the oldest record that waits has no timestamp")
    note = "; ".join(notes)
    return Lag(group, where.topic, where.partition, position, stable, records, seconds, note, metadata)


def _unled(group: str, where: TopicPartition, position: int, metadata: str) -> Lag:
    return Lag(group, where.topic, where.partition, position, None, None, None, "it has no leader", metadata)


def _there(log: Log) -> list[TopicPartition]:
    return [TopicPartition(one.topic, one.partition) for one in log.cluster().partitions]


def _word(state: Any) -> str:
    return str(getattr(state, "name", state)).lower().replace("_", "-")
