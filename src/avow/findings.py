"""What an audit can find: anomalies by name, and where they are.

Many offsets can be wrong at once, so they are kept as *spans* in arrays and never as objects one by one. A span joins
neighbours: two lost records with nothing but a transaction marker between them are one span of two.

Owns: the names, and spans. Must not know: Kafka, any sink, or why something is wrong. Neighbours: ``compare``, ``keys``
and ``judge``, which find, and ``avow.guarantee``, whose anomalies have the same names here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from avow.guarantee import Guarantee

Offsets = npt.NDArray[np.int64]  # ascending

SPANS_MAX = 10_000  # kept per kind and partition; all are counted


class Kind(StrEnum):
    """An anomaly that an audit can name. The first group is about records, the second about ledger and log."""

    LOST = "lost"  # a claimed record that is neither in the table nor among the dead letters
    DUPLICATED = "duplicated"  # more rows than the record gives
    PHANTOM = "phantom"  # a row or a dead letter with no record
    ABORTED_READ = "aborted-read"  # the same, and its record is there, in a transaction that was not committed
    CORRUPTED = "corrupted"  # a row that is not what its record gives
    COERCED = "coerced"  # the same, and all of the difference is a value nulled, rounded or cut
    DOUBLE_COUNTED = "double-counted"  # both in the table and among the dead letters
    REORDERED = "reordered"  # behind a later record of its partition, in a sink that keeps order

    SKIPPED_RANGE = "skipped-range"  # offsets between two claims that no claim covers
    OVERLAPPING_RANGE = "overlapping-range"  # offsets that two claims cover
    LEDGER_AHEAD = "ledger-ahead"  # the position is past what was claimed, or past what could be read
    LEDGER_BEHIND = "ledger-behind"  # rows or claims at or beyond the position: they will be written again
    MISCOUNTED = "miscounted"  # the ledger's counts cannot have come from these records
    RETENTION_LOSS = "retention-loss"  # deleted by Kafka before they were claimed
    TOPIC_RECREATED = "topic-recreated"  # the topic is not the one that was claimed
    LOG_TRUNCATED = "log-truncated"  # records that were claimed are gone from the log, or replaced


def permits(guarantee: Guarantee, kind: Kind) -> bool:
    """Whether the guarantee allows it. A position that is behind can only cause duplicates, so it goes with them."""
    return str(kind) in guarantee.permits or (kind is Kind.LEDGER_BEHIND and guarantee is Guarantee.AT_LEAST_ONCE)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Offsets ``[start, until)``, of which ``count`` are concerned; any others in between hold nothing to judge."""

    start: int
    until: int
    count: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.until})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of anomaly in one partition."""

    kind: Kind
    topic: str
    partition: int
    spans: tuple[Span, ...]  # the first SPANS_MAX
    count: int  # all of them: records, or for the ledger's own kinds, offsets
    columns: tuple[str, ...] = ()  # corrupted and coerced: where the values differ
    detail: str = ""  # for a person, where the kind alone does not say it


class Spans:
    """Collects offsets of one kind, and joins neighbours when asked. One row: joins, start, until, reach, count."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []

    def add(self, bad: Offsets, among: Offsets | None = None, begin: int = 0, end: int = 0) -> None:
        """``bad`` offsets of a stretch ``[begin, end)``. ``among``: all offsets there that could be bad, so that two
        are neighbours if none of these is between them; without it, neighbours are neighbouring numbers."""
        if not len(bad):
            return
        if among is None:
            joins, reach = bad, bad + 1
        else:
            at = np.searchsorted(among, bad)
            joins = np.where(at == 0, begin, bad)
            reach = np.append(among, end)[at + 1]
        first = np.append(True, bad[1:] != reach[:-1])
        heads = np.flatnonzero(first)
        tails = np.append(heads[1:], len(bad)) - 1
        self._parts.append(np.column_stack([joins[heads], bad[heads], bad[tails] + 1, reach[tails], tails - heads + 1]))

    @property
    def count(self) -> int:
        return sum(int(part[:, 4].sum()) for part in self._parts)

    def joined(self) -> tuple[Span, ...]:
        """Neighbours joined, ascending; no more than SPANS_MAX of them."""
        if not self._parts:
            return ()
        parts = np.concatenate(self._parts)
        joins, start, until, reach, count = parts[np.argsort(parts[:, 1], kind="stable")].T
        apart = joins[1:] > np.maximum.accumulate(reach)[:-1]
        heads = np.flatnonzero(np.append(True, apart))
        columns = (start[heads], np.maximum.reduceat(until, heads), np.add.reduceat(count, heads))
        first = (column[:SPANS_MAX].tolist() for column in columns)
        return tuple(Span(*row) for row in zip(*first, strict=True))


def split_phantoms(finding: Finding, uncommitted: Offsets) -> list[Finding]:
    """Phantoms, split: those whose records exist but are not committed are aborted reads."""
    offsets = np.concatenate([np.arange(span.start, span.until) for span in finding.spans])
    aborted = Spans()
    aborted.add(offsets[np.isin(offsets, uncommitted)])
    phantoms = Spans()
    phantoms.add(offsets[~np.isin(offsets, uncommitted)])
    # Those beyond the spans that were kept could not be looked up: they stay what they are.
    count = finding.count - aborted.count
    findings = [replace(finding, spans=phantoms.joined(), count=count)] if count else []
    if aborted.count:
        findings.append(replace(finding, kind=Kind.ABORTED_READ, spans=aborted.joined(), count=aborted.count))
    return findings
