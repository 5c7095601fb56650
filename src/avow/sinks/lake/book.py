"""The ledger of one pipeline as a lake table holds it, and its form as JSON.

Owns: what is kept beside the positions. Must not know: any format. The rules are ``avow.ledger``'s.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from avow import ledger
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.sinks.base import Held


@dataclass(frozen=True, slots=True)
class Book:
    """All of it. A run that is alone fences every partition, with ``run``; runs that share the partitions fence only
    theirs, each with the number of its entry. ``newest`` is the last number that any of them took, and ``redrives``
    numbers the redrives of dead letters."""

    run: int = 0
    redrives: int = 0
    held: Mapping[TopicPartition, Held] = field(default_factory=dict)
    newest: int = 0

    def with_entries(self, entries: Mapping[TopicPartition, Entry]) -> Book:
        """The same, with these entries. One that is new starts where it stands."""
        held = {
            where: Held(entry, self.held[where].start if where in self.held else entry.position)
            for where, entry in entries.items()
        }
        return replace(self, held={**self.held, **held})

    def entry(self, where: TopicPartition) -> Entry:
        """As the ledger's rules want it: its fence is its own or the whole book's, whichever came later."""
        entry = self.held[where].entry
        return replace(entry, run=max(self.run, entry.run))

    def entries(self) -> dict[TopicPartition, Entry]:
        return {where: self.entry(where) for where in sorted(self.held)}

    def fenced(self, run: int, partitions: Collection[TopicPartition] | None = None) -> Book:
        """As a starting run leaves it: older ones can claim nothing more, in all partitions or in those of these that
        are held."""
        newest = max(self.newest, run)
        if partitions is None:
            return replace(self, run=ledger.fence(Entry(0, "", self.run), run).run, newest=newest)
        fenced = {where: ledger.fence(self.entry(where), run) for where in partitions if where in self.held}
        return replace(self.with_entries(fenced), newest=newest)

    def owners(self) -> dict[TopicPartition, int]:
        """The fences of single partitions, where the whole book's does not cover them."""
        return {where: held.entry.run for where, held in self.held.items() if held.entry.run > self.run}


def to_json(book: Book) -> str:
    held = []
    for where, one in sorted(book.held.items()):
        entry, counts = one.entry, one.entry.counts
        line = [where.topic, where.partition, entry.topic_id, one.start, entry.position]
        line += [counts.read, counts.written, counts.dead]
        held.append(line + ([entry.last.offset, entry.last.timestamp_ms, entry.last.crc32] if entry.last else []))
    owners = [[where.topic, where.partition, run] for where, run in sorted(book.owners().items())]
    told = {"run": book.run, "newest": book.newest, "redrives": book.redrives, "held": held, "owners": owners}
    return json.dumps(told)


def from_json(text: str) -> Book:
    told = json.loads(text)
    run = told["run"]
    owners = {TopicPartition(topic, partition): owner for topic, partition, owner in told.get("owners", ())}
    held = {}
    for topic, partition, topic_id, start, position, read, written, dead, *last in told["held"]:
        counts = Counts(read, written, dead, read - written - dead)
        where = TopicPartition(topic, partition)
        entry = Entry(position, topic_id, owners.get(where, run), counts, Fingerprint(*last) if last else None)
        held[where] = Held(entry, start)
    return Book(run, told["redrives"], held, told.get("newest", run))
