"""The ledger of one pipeline as a lake table holds it, and its form as JSON.

Owns: what is kept beside the positions. Must not know: any format. The rules are ``avow.ledger``'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.sinks.base import Held


@dataclass(frozen=True, slots=True)
class Book:
    """All of it. ``redrives`` numbers the redrives of dead letters."""

    run: int = 0
    redrives: int = 0
    held: Mapping[TopicPartition, Held] = field(default_factory=dict)

    def with_entries(self, entries: Mapping[TopicPartition, Entry]) -> Book:
        """The same, with these entries. One that is new starts where it stands."""
        held = {
            where: Held(entry, self.held[where].start if where in self.held else entry.position)
            for where, entry in entries.items()
        }
        return replace(self, held={**self.held, **held})

    def entries(self) -> dict[TopicPartition, Entry]:
        """As the ledger's rules want them: the fence is the whole book's."""
        return {where: replace(held.entry, run=self.run) for where, held in sorted(self.held.items())}


def to_json(book: Book) -> str:
    held = []
    for where, one in sorted(book.held.items()):
        entry, counts = one.entry, one.entry.counts
        line = [where.topic, where.partition, entry.topic_id, one.start, entry.position]
        line += [counts.read, counts.written, counts.dead]
        held.append(line + ([entry.last.offset, entry.last.timestamp_ms, entry.last.crc32] if entry.last else []))
    return json.dumps({"run": book.run, "redrives": book.redrives, "held": held})


def from_json(text: str) -> Book:
    told = json.loads(text)
    held = {}
    for topic, partition, topic_id, start, position, read, written, dead, *last in told["held"]:
        counts = Counts(read, written, dead, read - written - dead)
        entry = Entry(position, topic_id, told["run"], counts, Fingerprint(*last) if last else None)
        held[TopicPartition(topic, partition)] = Held(entry, start)
    return Book(told["run"], told["redrives"], held)
