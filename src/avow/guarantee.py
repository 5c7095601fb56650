"""The three guarantees, as data: their order of acts and the anomalies they permit.

Theory of operation
-------------------
A record reaches the sink by two acts: *write* puts it there, *claim* moves the position past it in the
sink's own ledger. A crash can fall between any two acts, and only between acts. So the order of the two
decides what a crash can do:

* claim, then write: a crash in between leaves records claimed and never written. They are lost.
* write, then claim: a crash in between leaves records written and not claimed. They are written again.
* both in one act: there is no "in between".

That is all a delivery guarantee is. ``PROMISES`` below is the single place where it is written down; the
engines, the planner, the model, the auditor and the diagrams in ``docs/GUARANTEES.md`` all read it.

Owns: the words. Must not know: Kafka, Spark, any sink, the clock. Its neighbour is ``ledger``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Act(StrEnum):
    """What a task does to the sink."""

    WRITE = "write"  # put the range's records into the sink
    CLAIM = "claim"  # move the position past the range, compare-and-set


class Anomaly(StrEnum):
    """What can be wrong with delivered records. Only the first two are ever permitted."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    PHANTOM = "phantom"  # a row with no record
    ABORTED_READ = "aborted-read"  # a row of a record whose transaction was aborted
    TORN = "torn"  # a part of an atomic batch
    CORRUPTED = "corrupted"  # the value's hash differs
    REORDERED = "reordered"  # within one partition, where order is kept
    COERCED = "coerced"  # a value was silently nulled, rounded or cut


class Guarantee(StrEnum):
    """The one word a pipeline declares."""

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"

    @property
    def steps(self) -> tuple[frozenset[Act], ...]:
        """The acts in order. A crash can fall between two steps, never inside one."""
        return PROMISES[self].steps

    @property
    def permits(self) -> frozenset[Anomaly]:
        return PROMISES[self].permits

    @property
    def meaning(self) -> str:
        return PROMISES[self].meaning

    @property
    def atomic(self) -> bool:
        """Whether write and claim must be one act of the sink."""
        return len(self.steps) == 1


@dataclass(frozen=True, slots=True)
class Promise:
    """One row of the table."""

    steps: tuple[frozenset[Act], ...]
    permits: frozenset[Anomaly]
    meaning: str  # one sentence, shown to users as it is


PROMISES: Mapping[Guarantee, Promise] = MappingProxyType(
    {
        Guarantee.AT_MOST_ONCE: Promise(
            steps=(frozenset({Act.CLAIM}), frozenset({Act.WRITE})),
            permits=frozenset({Anomaly.LOST}),
            meaning="Claim, then write: a crash in between can lose records but never duplicates them.",
        ),
        Guarantee.AT_LEAST_ONCE: Promise(
            steps=(frozenset({Act.WRITE}), frozenset({Act.CLAIM})),
            permits=frozenset({Anomaly.DUPLICATED}),
            meaning="Write, then claim: a crash in between can duplicate records but never loses them.",
        ),
        Guarantee.EXACTLY_ONCE: Promise(
            steps=(frozenset({Act.WRITE, Act.CLAIM}),),
            permits=frozenset(),
            meaning="Write and claim in one atomic act of the sink: no crash can lose or duplicate a record.",
        ),
    }
)


def diagram(guarantee: Guarantee) -> str:
    """The order of acts as a Mermaid sequence diagram, for ``docs/GUARANTEES.md``."""
    lines = ["sequenceDiagram", "    participant task", "    participant sink", "    participant ledger"]
    for number, step in enumerate(guarantee.steps):
        if number:
            (anomaly,) = guarantee.permits
            lines.append(f"    Note over task,ledger: a crash here: {anomaly}")
        arrows = {Act.WRITE: "task->>sink: write", Act.CLAIM: "task->>ledger: claim"}
        acts = [f"    {arrows[act]}" for act in (Act.WRITE, Act.CLAIM) if act in step]
        if len(acts) > 1:
            acts = ["    rect rgba(128, 128, 128, 0.2)", "    Note over task,ledger: one atomic act", *acts, "    end"]
        lines += acts
    return "\n".join(lines)
