"""The row that each key should have (dedupe, upsert) against the row that it has.

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

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from avow.audit.compare import heads_of
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
class KeyAnomaly:
    """Keys that are not as they should be, named by the offset of one record each."""

    kind: Kind
    partition: npt.NDArray[np.int64]
    offset: Offsets


_DETAIL = "by key: its row is missing, or is not the expected one"
SHARED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys in more than one partition."""

    count: int = 0
    shown: tuple[str, ...] = ()  # a few of them, as JSON


def as_texts(rows: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """Keys, of which each row is one, as JSON."""
    return tuple(json.dumps([*row.values()], default=str) for row in rows)


def findings(anomalies: Iterable[KeyAnomaly], partitions: Mapping[int, TopicPartition]) -> list[Finding]:
    """By kind and partition, whose numbers ``partitions`` has."""
    by_place: defaultdict[tuple[Kind, int], list[Offsets]] = defaultdict(list)
    for anomaly in anomalies:
        for part in np.unique(anomaly.partition).tolist():
            by_place[anomaly.kind, part].append(anomaly.offset[anomaly.partition == part])
    findings_ = []
    for (kind, part), offsets in sorted(by_place.items()):
        spans = Spans()
        spans.add(np.unique(np.concatenate(offsets)))
        tp = partitions[part]
        findings_.append(Finding(kind, tp.topic, tp.partition, spans.joined(), spans.count, detail=_DETAIL))
    return findings_


@dataclass(frozen=True, slots=True)
class JudgedKeys:
    anomalies: tuple[KeyAnomaly, ...]
    shared: npt.NDArray[np.int64]  # the keys that are in more than one partition


def judge(histories: Histories, mode: Mode, guarantee: Guarantee) -> JudgedKeys:
    if not len(histories.key):
        return JudgedKeys((), histories.key)
    heads = heads_of(histories.key)
    counts = np.diff(np.append(heads, len(histories.key)))
    of_key = np.repeat(np.arange(len(heads)), counts)
    right, wanted = _right_and_expected(histories, mode)
    is_held = histories.held != ABSENT
    any_held = np.logical_or.reduceat(is_held, heads)
    fine = np.logical_or.reduceat(right, heads)
    if mode == "upsert":
        fine |= ~any_held & np.logical_or.reduceat(histories.deletes, heads)
    # A row that is there and wrong is named in its own partition; an absent one in the first that could have given it.
    stale = is_held & ~fine[of_key]
    absent = heads[~fine & ~any_held]
    back = stale & histories.deletes & (guarantee is Guarantee.AT_LEAST_ONCE)
    lost = np.union1d(np.flatnonzero(stale & ~back), absent)
    twice = (histories.rows > 1) | (is_held & (np.add.reduceat(histories.rows, heads) > 1)[of_key])
    named = (
        (Kind.LOST, lost, wanted),
        (Kind.DUPLICATED, np.flatnonzero(back), wanted),
        (Kind.DUPLICATED, np.flatnonzero(twice), histories.held),
    )
    anomalies = tuple(KeyAnomaly(kind, histories.partition[at], offsets[at]) for kind, at, offsets in named if len(at))
    shared = histories.key[heads][counts > 1]
    return JudgedKeys(anomalies, shared)


def _right_and_expected(histories: Histories, mode: Mode) -> tuple[npt.NDArray[np.bool_], Offsets]:
    """Whether the row is the one that should be there, and the offset that should have given it.

    Under at-least-once a late replay can bring a deleted row back: it is then named by the delete, as duplicated.
    """
    if mode == "dedupe":
        return histories.held == histories.first, histories.first
    return (histories.held == histories.last) & ~histories.deletes, histories.last
