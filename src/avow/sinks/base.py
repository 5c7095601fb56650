"""What every sink speaks: its offers, as data for the planner, and its acts, as a protocol for the tasks.

Owns: the shape of both. Must not know: any one sink. Its neighbours are ``avow.sinks`` (the registry), ``plan`` (which
reads the offers and refuses the rest before any I/O) and ``engines.task`` (which asks for the acts in the guarantee's
order).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from avow.guarantee import Guarantee
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.settings import Mode


@dataclass(frozen=True, slots=True)
class Offer:
    """One mode of a sink: the guarantees it keeps, each with what it comes to in this mode."""

    notes: Mapping[Guarantee, str]  # one sentence each, shown to users as it is

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        return frozenset(self.notes)


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink, by the word in ``sink.kind``."""

    kind: str
    title: str  # as people write it
    offers: Mapping[Mode, Offer]
    assumes: tuple[str, ...]  # what must hold outside avow for the offers to hold

    def offered(self, mode: Mode) -> frozenset[Guarantee]:
        """The guarantees this kind keeps in a mode; none if it lacks the mode."""
        offer = self.offers.get(mode)
        return offer.guarantees if offer else frozenset()


@dataclass(frozen=True, slots=True)
class Rows:
    """What goes into the sink at once. Both have the lineage columns; rows stand in the order of their offsets."""

    rows: pa.RecordBatch  # the payload's columns
    deletes: pa.RecordBatch  # upsert only: the key columns of rows to delete


@dataclass(frozen=True, slots=True)
class Written:
    """What the sink says of rows it was given."""

    refused: Mapping[int, str] = field(default_factory=dict)  # row number (write) or offset (finish) -> why
    skipped: int = 0  # records left out by declaration: a key that is there already


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that cannot be taken, kept with its bytes and the reason."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    reason: str
    detail: str


class TaskSink(Protocol):
    """The sink as one task sees it: acts, each atomic, and what can be done inside one."""

    def act(self) -> AbstractContextManager[None]:
        """One atomic act: all that is done inside, or nothing."""

    def entry(self, topic: str, partition: int, *, lock: bool) -> Entry:
        """The ledger's entry; with ``lock``, nobody else can claim until the act ends."""

    def write(self, rows: Rows) -> Written:
        """Put rows into the sink. Refused ones are named by their number in ``rows.rows``."""

    def finish(self, done: OffsetRange) -> Written:
        """After the last ``write`` of a range: apply what was put aside. Refused ones are named by offset."""

    def bury(self, letters: list[DeadLetter]) -> None:
        """Keep dead letters."""

    def claim(self, before: Entry, after: Entry, done: OffsetRange, batch: int) -> None:
        """Store a claim that ``ledger.claim`` has made of an entry read with ``lock``."""

    def tally(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        """Add what became of records that were claimed before they were written."""
