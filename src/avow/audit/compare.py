"""What a topic's records give against what is in the table, offset by offset, for one partition.

Theory of operation
-------------------
Both sides come in ascending order of offsets, window by window; a window ends between two offsets, so all rows of one
record are in one window. A row is a number here, its *code*: equal codes stand for equal rows, within one window. For
each offset, the expected rows and the actual rows are two multisets of codes:

====================================  =======================================================
actual rows of a record               the anomaly
====================================  =======================================================
fewer than expected                   lost, unless the record is among the dead letters
more than expected                    duplicated
a code that is not expected           corrupted (the caller compares the values: perhaps coerced)
any, and a dead letter too            double-counted
====================================  =======================================================

A record can also have no row (it is a dead letter, or skipped by declaration), and a row can have no record (phantom).
``records`` decides which: it gets every visible offset, for the same window or for many windows at once, because
behind a SQL transform the records are known only at the end.

A record is *written* if it has a row, else *dead* if it has a dead letter, else *lost* if a row was expected, else
*skipped*. So read = written + dead + skipped + lost, always. With a key (dedupe, upsert) a row may rightly be absent:
another record of its key took its place. There nothing is lost by offset; ``keys`` judges that. Where rows carry no
lineage, there is nothing to compare by offset; ``content`` judges that.

Owns: these rules. Must not know: Arrow, Kafka, Spark, any sink, the ledger. Neighbours: ``findings`` (names and spans)
and ``values`` (which makes the codes).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from avow.findings import Finding, Kind, Offsets, Spans
from avow.settings import Mode

NONE: Offsets = np.empty(0, np.int64)

By = Mode | Literal["content"]


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of one window, ascending by offset."""

    offsets: Offsets  # an offset stands there once per row
    codes: npt.NDArray[np.int64]


NO_ROWS = CodedRows(NONE, NONE)


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the records of one partition, as found: read = written + dead + skipped + lost."""

    read: int = 0
    written: int = 0
    dead: int = 0
    skipped: int = 0
    lost: int = 0
    unchecked: int = 0  # rows and dead letters whose record is no longer in the topic: retention, compaction

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Compared:
    """What comparing one partition came to."""

    topic: str
    partition: int
    tally: Tally
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Pending:
    """Of windows whose records are not known yet."""

    begin: int
    unexpected: list[Offsets] = field(default_factory=list)  # have rows, and none is due
    doubled: list[Offsets] = field(default_factory=list)  # have rows and a dead letter
    dead_letters: list[Offsets] = field(default_factory=list)


class Comparison:
    """Compares one partition. ``compacted``: its topic lets records go, so a row without one proves nothing."""

    def __init__(self, topic: str, partition: int, start: int, by: By = "append", *, compacted: bool = False) -> None:
        self._tp = (topic, partition)
        self._by = by
        self._compacted = compacted
        # The last window: the offsets that are due rows, and its begin and end. A window without any such offset
        # belongs to the next, so that what lies on both sides of it can be joined.
        self._expected = (NONE, start, start)
        self._pending = _Pending(start)
        self._spans: defaultdict[Kind, Spans] = defaultdict(Spans)
        self._columns: defaultdict[Kind, set[str]] = defaultdict(set)
        self._tally = Tally()

    def rows(self, until: int, expected: CodedRows, actual: CodedRows, dead_letters: Offsets = NONE) -> Offsets:
        """The next window, up to ``until``. Gives the offsets whose rows are not what is due, for ``changed``."""
        bags = Bags.of(expected, actual)
        is_expected, is_actual = bags.expected > 0, bags.actual > 0
        has_dead_letter = np.isin(bags.offsets, dead_letters)
        before, begin, end = self._expected
        self._expected = (bags.offsets[is_expected], end if len(before) else begin, until)
        missing = bags.missing - bags.alien  # an alien row stands in a missing one's place
        surplus = bags.surplus + np.maximum(-missing, 0)
        if self._by == "append":
            self._spans[Kind.LOST].add(bags.offsets[is_expected & ~has_dead_letter & (missing > 0)], *self._expected)
        self._spans[Kind.DUPLICATED].add(bags.offsets[is_expected & (surplus > 0)], *self._expected)
        self._spans[Kind.DOUBLE_COUNTED].add(bags.offsets[is_actual & has_dead_letter])
        gone = is_expected & ~is_actual & ~has_dead_letter & (self._by == "append")
        # Under upsert a record is written when it was applied, also if a later one has replaced it since. By content it
        # counts as written until it turns out to be lost.
        written = (is_expected if self._by in ("upsert", "content") else is_expected & is_actual) & ~has_dead_letter
        self.count(lost=int(gone.sum()), written=int(written.sum()))
        self._pending.unexpected.append(bags.offsets[~is_expected])
        self._pending.doubled.append(bags.offsets[is_actual & has_dead_letter])
        self._pending.dead_letters.append(dead_letters)
        return bags.offsets[is_expected & (bags.alien > 0)]

    def changed(self, kind: Kind, offsets: Offsets, columns: set[str]) -> None:
        """Offsets that the last ``rows`` gave, named: corrupted or coerced, and in which columns."""
        self._spans[kind].add(offsets, *self._expected)
        self._columns[kind] |= columns

    def records(self, until: int, visible: Offsets, dead: Offsets = NONE, deletes: Offsets = NONE) -> None:
        """All records up to ``until`` since the last call: those that are visible, and of them those that decode makes
        dead letters of, and those that delete a row."""
        pending = self._pending
        self._pending = _Pending(until if len(visible) else pending.begin)
        unexpected, doubled, dead_letters = map(_joined, (pending.unexpected, pending.doubled, pending.dead_letters))
        has_record = np.isin(unexpected, visible)
        no_row_expected = unexpected[has_record & ~np.isin(unexpected, doubled)]
        self._spans[Kind.CORRUPTED].add(no_row_expected)
        without_record = np.union1d(unexpected[~has_record], np.setdiff1d(dead_letters, visible))
        if self._compacted:
            self.count(unchecked=len(without_record))
        else:
            self._spans[Kind.PHANTOM].add(without_record)
        lost = np.setdiff1d(dead, np.union1d(dead_letters, unexpected))
        self._spans[Kind.LOST].add(lost, visible, pending.begin, until)
        dead_visible = np.intersect1d(dead_letters, visible)
        self.count(
            read=len(visible),
            written=len(np.union1d(no_row_expected, np.setdiff1d(deletes, dead_letters))),
            dead=len(dead_visible),
            lost=len(lost),
        )

    def beyond(self, offsets: Offsets, readable_until: int) -> None:
        """Rows and dead letters at or beyond the position. There are records up to ``readable_until``, not further."""
        offsets = np.unique(offsets)
        self._spans[Kind.LEDGER_BEHIND].add(offsets[offsets < readable_until])
        self._spans[Kind.PHANTOM].add(offsets[offsets >= readable_until])

    def count(self, **more: int) -> None:
        """Add to the tally."""
        self._tally += Tally(**more)

    def result(self) -> Compared:
        tally = self._tally
        skipped = tally.read - tally.written - tally.dead - tally.lost
        findings = tuple(
            Finding(kind, *self._tp, spans.joined(), spans.count, tuple(sorted(self._columns[kind])))
            for kind in Kind
            if (spans := self._spans[kind]).count
        )
        return Compared(*self._tp, replace(tally, skipped=skipped), findings)


@dataclass(frozen=True, slots=True)
class Bags:
    """For each offset that has a row on either side, how many rows of which sort."""

    offsets: Offsets
    expected: npt.NDArray[np.int64]
    actual: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int64]  # due and not there
    surplus: npt.NDArray[np.int64]  # there more often than due
    alien: npt.NDArray[np.int64]  # there, and such a row is not due at all

    @classmethod
    def of(cls, expected: CodedRows, actual: CodedRows) -> Bags:
        if np.array_equal(expected.offsets, actual.offsets) and np.array_equal(expected.codes, actual.codes):
            heads = heads_of(expected.offsets)
            count = np.diff(np.append(heads, len(expected.offsets)))
            zero = np.zeros_like(count)
            return cls(expected.offsets[heads], count, count, zero, zero, zero)
        offsets = np.concatenate([expected.offsets, actual.offsets])
        codes = np.concatenate([expected.codes, actual.codes])
        is_actual = np.repeat([0, 1], [len(expected.offsets), len(actual.offsets)])
        order = np.lexsort((codes, offsets))
        offsets, codes, is_actual = offsets[order], codes[order], is_actual[order]
        groups = heads_of(offsets, codes)
        n_actual = np.add.reduceat(is_actual, groups)
        n_expected = np.diff(np.append(groups, len(offsets))) - n_actual
        surplus = n_actual - n_expected
        offsets = offsets[groups]
        heads = heads_of(offsets)
        numbers = (
            n_expected,
            n_actual,
            np.maximum(-surplus, 0),
            np.where(n_expected > 0, np.maximum(surplus, 0), 0),
            np.where(n_expected == 0, n_actual, 0),
        )
        return cls(offsets[heads], *(np.add.reduceat(number, heads) for number in numbers))


def heads_of(*sorted_by: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where a new value begins in arrays that are sorted by all of these."""
    if not len(sorted_by[0]):
        return NONE
    changes = np.logical_or.reduce([values[1:] != values[:-1] for values in sorted_by])
    return np.flatnonzero(np.append(True, changes))


def _joined(parts: list[Offsets]) -> Offsets:
    return np.concatenate(parts) if parts else NONE
