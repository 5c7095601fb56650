"""Rows without lineage, matched to records by their content.

Both sides are numbers here, digests of all that can be compared, in no order between partitions. For each content:

===========================  ==========================================================================
rows with it                 means
===========================  ==========================================================================
fewer than records           lost; of identical records it is not known which
more than records            duplicated
some, and no record has it   *unmatched*: changed, invented, of a record not compared, or of another writer
===========================  ==========================================================================

Order is judged among records with unique content, within one output partition. So identical records are only counted,
and a record that was changed shows as one lost record and one unmatched row.

Owns: these rules, and what they leave open. Must not know: Arrow, Kafka, Spark. Its neighbour is ``kafka``, which has
such rows when the output carries no origin; ``compare`` judges rows that say what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from avow.audit.judge import Reservation
from avow.findings import Finding, Kind, Offsets, Spans
from avow.sinks.auditing import Contents, Numbers


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected rows: one line for each."""

    content: Numbers
    part: Numbers  # an input partition, by its number
    offset: Offsets


@dataclass(frozen=True, slots=True)
class ContentMatch:
    """``lost``, ``doubled`` and ``reordered`` are lines of ``expected``."""

    expected: Expected
    lost: Numbers
    doubled: Numbers
    reordered: Numbers
    identical: int  # records with the content of another one
    unmatched: int  # rows with the content of no record

    def findings(self, partitions: Mapping[int, tuple[str, int]]) -> Iterator[Finding]:
        """``partitions``: number -> topic and partition."""
        for kind, lines, detail in (
            (Kind.LOST, self.lost, "the output has no record with this content"),
            (Kind.DUPLICATED, self.doubled, "the output has more than one record with this content"),
            (Kind.REORDERED, self.reordered, ""),
        ):
            parts, offsets = self.expected.part[lines], self.expected.offset[lines]
            for number in np.unique(parts).tolist():
                spans = Spans()
                spans.add(np.unique(offsets[parts == number]))
                yield Finding(kind, *partitions[number], spans.joined(), spans.count, detail=detail)

    @property
    def reservation(self) -> Reservation:
        unmatched = (
            f"{self.unmatched:,} records of the output match no compared record: they were changed, invented, belong "
            "to records that are not claimed yet or no longer in the topic, or come from another writer"
        )
        return Reservation(
            "Without avow-origin only counts and order could be verified.",
            unmatched if self.unmatched else "",
            "Audit while the pipeline is stopped. With sink.origin = true every record carries its origin.",
        )

    def notes(self) -> Iterator[str]:
        yield "sink.origin = false: output records have no header avow-origin, so they were compared by content."
        if self.identical:
            yield f"{self.identical:,} records have identical content; only their count was verified."
        if self.unmatched:
            yield f"{self.reservation.undecided}."


def match(expected: Expected, actual: Contents) -> ContentMatch:
    lines = np.lexsort((expected.offset, expected.part, expected.content))
    kinds, heads, n_expected = np.unique(expected.content[lines], return_index=True, return_counts=True)
    contents, first, counts = np.unique(actual.content, return_index=True, return_counts=True)
    at = np.searchsorted(contents, kinds)
    known = at < len(contents)
    known[known] = contents[at[known]] == kinds[known]
    n_actual = np.zeros(len(kinds), np.int64)
    n_actual[known] = counts[at[known]]
    rank = np.arange(len(lines)) - np.repeat(heads, n_expected)
    single = known & (n_expected == 1)
    return ContentMatch(
        expected,
        lost=lines[rank >= np.repeat(n_actual, n_expected)],
        doubled=lines[heads[n_actual > n_expected]],
        reordered=_reordered(expected, lines[heads[single]], actual, first[at[single]]),
        identical=int(n_expected[n_expected > 1].sum()),
        unmatched=len(actual.content) - int(n_actual.sum()),
    )


def _reordered(expected: Expected, lines: Numbers, actual: Contents, rows: Numbers) -> Numbers:
    """Given lines and their rows: those that come after a later record of their input partition."""
    lines, rows = lines[~actual.late[rows]], rows[~actual.late[rows]]
    reordered = [np.empty(0, np.int64)]
    pairs = np.column_stack([expected.part[lines], actual.place[rows]])
    for pair in np.unique(pairs, axis=0):
        members = np.flatnonzero((pairs == pair).all(axis=1))
        members = members[np.argsort(rows[members])]
        offsets = expected.offset[lines[members]]
        reordered.append(lines[members[offsets < np.maximum.accumulate(offsets)]])
    return np.concatenate(reordered)
