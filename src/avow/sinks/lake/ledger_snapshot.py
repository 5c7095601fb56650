"""The ledger of one pipeline as a lake table stores it, and its JSON form.

Owns: what is stored beside the positions. Must not know: any format. The rules are ``avow.ledger``'s.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from avow import ledger
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.sinks.base import PartitionState


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The whole ledger in one version of the table. A run that is alone fences every partition, with ``run``; runs that
    share the partitions fence only theirs, each with the number of its entry. ``newest`` is the last number that any of
    them took, and ``redrives`` numbers the redrives of dead letters."""

    run: int = 0
    redrives: int = 0
    partitions: Mapping[TopicPartition, PartitionState] = field(default_factory=dict)
    newest: int = 0

    def with_entries(self, entries: Mapping[TopicPartition, Entry]) -> LedgerSnapshot:
        """The same, with these entries. A new one starts at its position."""
        states = {
            tp: PartitionState(entry, self.partitions[tp].start if tp in self.partitions else entry.position)
            for tp, entry in entries.items()
        }
        return replace(self, partitions={**self.partitions, **states})

    def entry(self, tp: TopicPartition) -> Entry:
        """As the ledger's rules want it: fenced by its own run or by the whole ledger's, whichever is newer."""
        entry = self.partitions[tp].entry
        return replace(entry, run=max(self.run, entry.run))

    def entries(self) -> dict[TopicPartition, Entry]:
        return {tp: self.entry(tp) for tp in sorted(self.partitions)}

    def fenced(self, run: int, partitions: Collection[TopicPartition] | None = None) -> LedgerSnapshot:
        """As a starting run leaves it: older runs can claim nothing more, in all partitions or in the known ones of
        these."""
        newest = max(self.newest, run)
        if partitions is None:
            return replace(self, run=ledger.fence(Entry(0, "", self.run), run).run, newest=newest)
        fenced = {tp: ledger.fence(self.entry(tp), run) for tp in partitions if tp in self.partitions}
        return replace(self.with_entries(fenced), newest=newest)

    def owners(self) -> dict[TopicPartition, int]:
        """The fences of single partitions, where the whole ledger's does not cover them."""
        return {tp: state.entry.run for tp, state in self.partitions.items() if state.entry.run > self.run}


def numbers_of(entry: Entry) -> list[int]:
    """What is stored of an entry beside its position: the counts, and the last record's fingerprint if there is one."""
    counts, last = entry.counts, entry.last
    fingerprint = [last.offset, last.timestamp_ms, last.crc32] if last else []
    return [counts.read, counts.written, counts.dead, *fingerprint]


def entry_from(position: int, topic_id: str, run: int, numbers: Sequence[int]) -> Entry:
    """An entry from its ``numbers_of``."""
    read, written, dead, *last = numbers
    counts = Counts(read, written, dead, read - written - dead)
    return Entry(position, topic_id, run, counts, Fingerprint(*last) if last else None)


def to_json(snapshot: LedgerSnapshot) -> str:
    held = [
        [tp.topic, tp.partition, state.entry.topic_id, state.start, state.entry.position, *numbers_of(state.entry)]
        for tp, state in sorted(snapshot.partitions.items())
    ]
    owners = [[tp.topic, tp.partition, run] for tp, run in sorted(snapshot.owners().items())]
    numbers = {"run": snapshot.run, "newest": snapshot.newest, "redrives": snapshot.redrives}
    return json.dumps({**numbers, "held": held, "owners": owners})


def from_json(text: str) -> LedgerSnapshot:
    stored = json.loads(text)
    run = stored["run"]
    owners = {TopicPartition(topic, partition): owner for topic, partition, owner in stored.get("owners", ())}
    states = {}
    for topic, partition, topic_id, start, position, *numbers in stored["held"]:
        tp = TopicPartition(topic, partition)
        states[tp] = PartitionState(entry_from(position, topic_id, owners.get(tp, run), numbers), start)
    return LedgerSnapshot(run, stored["redrives"], states, stored.get("newest", run))
