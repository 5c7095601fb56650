"""What should stand under each key (dedupe, upsert) against what does.

A *history* is what one key has in one partition: the first and the last offset that it has there, whether the last one
deletes, and the offset of the row that the table holds under the key, if that row is of this partition. Rows count as
offsets too: a row whose record cannot be seen any more (retention, compaction) is the best knowledge there is of it.

* upsert: the row must be the last of its partition. No row: only if some partition's last record deletes.
* dedupe: the row must be the first of its partition.

A key with histories in two partitions has no order between them, so either is right; such keys are counted.

Owns: these rules. Must not know: what a key is, Kafka, Spark, any sink. Neighbour: ``compare``, which judges whether
each row is what the record at its own offset gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from avow.findings import Finding, Kind, Offsets, Spans
from avow.guarantee import Guarantee
from avow.kafka.log import TopicPartition
from avow.settings import Mode

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Histories:
    """One element per key and partition; those of one key stand together."""

    key: npt.NDArray[np.int64]  # a number per key
    partition: npt.NDArray[np.int64]  # a number per topic and partition
    first: Offsets
    last: Offsets
    deletes: npt.NDArray[np.bool_]  # whether the last record deletes the row
    held: Offsets  # of the row in the table, or ABSENT
    rows: npt.NDArray[np.int64]  # how many rows the table holds: more than one only without its unique index


@dataclass(frozen=True, slots=True)
class Wrong:
    """Keys that are not as they should be, named by the offset of one record each."""

    kind: Kind
    partition: npt.NDArray[np.int64]
    offset: Offsets


_DETAIL = "by key: the row under it is not the one that should be there, or is absent"
SHARED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys in more than one partition."""

    count: int = 0
    shown: tuple[str, ...] = ()  # a few of them, as JSON


def findings(wrong: Iterable[Wrong], partitions: Mapping[int, TopicPartition]) -> list[Finding]:
    """By kind and partition, whose numbers ``partitions`` has."""
    by_place: defaultdict[tuple[Kind, int], list[Offsets]] = defaultdict(list)
    for one in wrong:
        for part in np.unique(one.partition).tolist():
            by_place[one.kind, part].append(one.offset[one.partition == part])
    found = []
    for (kind, part), offsets in sorted(by_place.items()):
        spans = Spans()
        spans.add(np.unique(np.concatenate(offsets)))
        where = partitions[part]
        found.append(Finding(kind, where.topic, where.partition, spans.joined(), spans.count, detail=_DETAIL))
    return found


@dataclass(frozen=True, slots=True)
class Judged:
    wrong: tuple[Wrong, ...]
    shared: npt.NDArray[np.int64]  # the keys that are in more than one partition


def judge(found: Histories, mode: Mode, guarantee: Guarantee) -> Judged:
    if not len(found.key):
        return Judged((), found.key)
    heads = np.flatnonzero(np.append(True, found.key[1:] != found.key[:-1]))
    of_key = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, len(found.key))))
    right, wanted = _right_and_wanted(found, mode)
    is_held = found.held != ABSENT
    any_held = np.logical_or.reduceat(is_held, heads)
    fine = np.logical_or.reduceat(right, heads)
    if mode == "upsert":
        fine |= ~any_held & np.logical_or.reduceat(found.deletes, heads)
    # A row that is there and wrong is named in its own partition; an absent one in the first that could have given it.
    stale = is_held & ~fine[of_key]
    absent = heads[~fine & ~any_held]
    back = stale & found.deletes & (guarantee is Guarantee.AT_LEAST_ONCE)
    lost = np.union1d(np.flatnonzero(stale & ~back), absent)
    twice = (found.rows > 1) | (is_held & (np.add.reduceat(found.rows, heads) > 1)[of_key])
    named = (
        (Kind.LOST, lost, wanted),
        (Kind.DUPLICATED, np.flatnonzero(back), wanted),
        (Kind.DUPLICATED, np.flatnonzero(twice), found.held),
    )
    wrong = tuple(Wrong(kind, found.partition[at], offsets[at]) for kind, at, offsets in named if len(at))
    shared = found.key[heads][np.diff(np.append(heads, len(found.key))) > 1]
    return Judged(wrong, shared)


def _right_and_wanted(found: Histories, mode: Mode) -> tuple[npt.NDArray[np.bool_], Offsets]:
    """Whether the row is the one that should be there, and the offset that should have given it.

    Under at-least-once a late replay can bring a deleted row back: it is then named by the delete, as duplicated.
    """
    if mode == "dedupe":
        return found.held == found.first, found.first
    return (found.held == found.last) & ~found.deletes, found.last
