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

from avow.errors import SourceError
from avow.kafka.log import NO_TIMESTAMP, Log, TopicPartition


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
    stable_end: int | None  # None: not known, because the partition has no leader
    records: int | None  # an upper bound: markers and aborted records in between are counted
    seconds: float | None  # None: nothing to wait for, or not known; then the note says why
    note: str
    metadata: str


def names(log: Log) -> dict[str, str]:
    """Every group -> its state."""
    listed = sorted(log.admin.list_groups(), key=lambda group: group.group_id)
    return {group.group_id: _word(group.state) for group in listed}


def describe(log: Log, groups: Iterable[str]) -> list[Group]:
    return [
        Group(
            name,
            _word(group.state),
            tuple(
                Member(
                    member.client_id,
                    member.host.lstrip("/"),
                    tuple(f"{p.topic}/{p.partition}" for p in member.assignment.topic_partitions),
                )
                for member in group.members
            ),
        )
        for name, group in log.admin.describe_groups(set(groups)).items()
    ]


def lag(log: Log, group: str) -> list[Lag]:
    """Of every partition for which the group has a position."""
    partitions = {partition.tp: partition for partition in log.cluster().partitions}
    committed = log.admin.committed_offsets([group], partitions)[group]
    # A question about a partition without a leader has no answer, and would take the others' with it.
    led = {tp: offset for tp, (offset, _) in committed.items() if partitions[tp].leader >= 0}
    offsets, stable = log.offsets(led), log.stable_ends(led)
    behind = {tp: offset for tp, offset in led.items() if offset < stable[tp]}
    # Retention may have passed a position: the oldest record that is left is then what it waits for.
    stamps = log.timestamps_at({tp: max(offset, offsets[tp][0]) for tp, offset in behind.items()})
    now = time.time()

    def of(tp: TopicPartition) -> Lag:
        position, metadata = committed[tp]
        if tp not in led:
            note = "the partition has no leader"
            return Lag(group, tp.topic, tp.partition, position, None, None, None, note, metadata)
        records, seconds, note = _behind(position, *offsets[tp], stable[tp], stamps.get(tp), now)
        return Lag(group, tp.topic, tp.partition, position, stable[tp], records, seconds, note, metadata)

    return [of(tp) for tp in sorted(committed)]


def refuse_missing(log: Log, groups: Iterable[str]) -> None:
    """Raises ``SourceError`` for a group that does not exist."""
    known = names(log)
    for group in groups:
        if group not in known and not positions(log, [group])[group]:
            raise SourceError(
                f"consumer group {group} does not exist",
                advice="`avow groups` lists the groups. Kafka removes a group without members and committed offsets.",
            )


def positions(log: Log, groups: Iterable[str]) -> dict[str, dict[TopicPartition, int]]:
    """What many groups have committed. All are asked at once."""
    tps = [partition.tp for partition in log.cluster().partitions]
    return {
        group: {tp: at for tp, (at, _) in offsets.items()}
        for group, offsets in log.admin.committed_offsets(list(groups), tps).items()
    }


def _behind(
    position: int, earliest: int, end: int, stable: int, stamp_ms: int | None, now: float
) -> tuple[int, float | None, str]:
    """How many records, how many seconds, and the note."""
    notes = []
    if position < earliest:
        notes.append(f"retention has deleted {earliest - position:,} unread offsets")
    if position > end:
        notes.append(f"the log ends at {end:,}, before the position")
    if end > stable:
        notes.append(f"a transaction is open: {end - stable:,} offsets wait for it to end")
    # Without a record that is visible, all that follows are markers or aborted records.
    records = stable - max(position, earliest) if stamp_ms is not None else 0
    seconds = max(0.0, now - stamp_ms / 1000) if stamp_ms is not None and stamp_ms != NO_TIMESTAMP else None
    if stamp_ms == NO_TIMESTAMP:
        notes.append("age unknown: the oldest unread record has no timestamp")
    return records, seconds, "; ".join(notes)


def _word(state: Any) -> str:
    return str(getattr(state, "name", state)).lower().replace("_", "-")
