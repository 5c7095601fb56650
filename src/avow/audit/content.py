"""Rows that do not say which record they came from, told by what they hold.

Both sides are numbers here, digests of all that can be compared, in no order between partitions. Of each content:

===========================  ==========================================================================
rows of it                   means
===========================  ==========================================================================
fewer than records           lost; of records that are alike, which one cannot be told
more than records            duplicated
some, and no record is such  *unlike*: changed, made up, of a record that is not compared, or not ours
===========================  ==========================================================================

Order is judged among records that have no other like them, row by row as they stand in one place. So records that are
alike are counted and no more, and a record that was changed shows as one that is lost and one that is unlike.

Owns: these rules, and what they leave open. Must not know: Arrow, Kafka, Spark. Its neighbour is ``kafka``, which has
such rows when the output carries no origin; ``compare`` judges rows that say what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from avow.audit.judge import Reservation
from avow.findings import Finding, Kind, Offsets, Spans
from avow.sinks.reading import Contents, Numbers


@dataclass(frozen=True, slots=True)
class Due:
    """What should be there: a line for each row that a record gives."""

    content: Numbers
    part: Numbers  # an input partition, by its number
    offset: Offsets


@dataclass(frozen=True, slots=True)
class Matched:
    """``lost``, ``doubled`` and ``reordered`` are lines of ``due``."""

    due: Due
    lost: Numbers
    doubled: Numbers
    reordered: Numbers
    alike: int  # records that are like another one
    unlike: int  # rows that no record is like

    def findings(self, partitions: Mapping[int, tuple[str, int]]) -> Iterator[Finding]:
        """``partitions``: number -> topic and partition."""
        for kind, lines, detail in (
            (Kind.LOST, self.lost, "nothing in the output is like it"),
            (Kind.DUPLICATED, self.doubled, "the output has more than one that is like it"),
            (Kind.REORDERED, self.reordered, ""),
        ):
            parts, offsets = self.due.part[lines], self.due.offset[lines]
            for number in np.unique(parts).tolist():
                spans = Spans()
                spans.add(np.unique(offsets[parts == number]))
                yield Finding(kind, *partitions[number], spans.joined(), spans.count, detail=detail)

    @property
    def reservation(self) -> Reservation:
        unlike = (
            f"{self.unlike:,} records of the output are like none that was compared: changed on the way, made up, of "
            "records that are not claimed yet or gone from the topic, or somebody else's"
        )
        return Reservation(
            "Without avow-origin only counts and order could be seen.",
            unlike if self.unlike else "",
            "Audit while the pipeline is at rest. With sink.origin = true every record says where it came from.",
        )

    def notes(self) -> Iterator[str]:
        yield "sink.origin = false: the output does not say which record came from where; what they hold was compared."
        if self.alike:
            yield f"{self.alike:,} records are like another one: their number was checked, and not which is which."
        if self.unlike:
            yield f"{self.reservation.undecided}."


def match(due: Due, there: Contents) -> Matched:
    lines = np.lexsort((due.offset, due.part, due.content))
    kinds, heads, n_due = np.unique(due.content[lines], return_index=True, return_counts=True)
    found, first, counts = np.unique(there.content, return_index=True, return_counts=True)
    at = np.searchsorted(found, kinds)
    known = at < len(found)
    known[known] = found[at[known]] == kinds[known]
    n_there = np.zeros(len(kinds), np.int64)
    n_there[known] = counts[at[known]]
    rank = np.arange(len(lines)) - np.repeat(heads, n_due)
    single = known & (n_due == 1)
    return Matched(
        due,
        lost=lines[rank >= np.repeat(n_there, n_due)],
        doubled=lines[heads[n_there > n_due]],
        reordered=_reordered(due, lines[heads[single]], there, first[at[single]]),
        alike=int(n_due[n_due > 1].sum()),
        unlike=len(there.content) - int(n_there.sum()),
    )


def _reordered(due: Due, lines: Numbers, there: Contents, rows: Numbers) -> Numbers:
    """Of lines and the rows where they stand first: those that come after a later one of their input partition."""
    lines, rows = lines[~there.late[rows]], rows[~there.late[rows]]
    wrong = [np.empty(0, np.int64)]
    ways = np.column_stack([due.part[lines], there.place[rows]])
    for way in np.unique(ways, axis=0):
        mine = np.flatnonzero((ways == way).all(axis=1))
        mine = mine[np.argsort(rows[mine])]
        offsets = due.offset[lines[mine]]
        wrong.append(lines[mine[offsets < np.maximum.accumulate(offsets)]])
    return np.concatenate(wrong)
