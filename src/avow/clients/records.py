"""Records as a handler sees them, and the batches they come in. Must not know: groups, handlers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import confluent_kafka as client

from avow.kafka.group import Fetched
from avow.kafka.headers import KEY, headers_of
from avow.kafka.log import timestamp_of
from avow.kafka.metadata import TopicPartition


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as it stands in the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]

    @property
    def idempotency_key(self) -> bytes | None:
        """What the producer called this message, in the header ``avow-key``; the last one, if there are several."""
        return next((value for name, value in reversed(self.headers) if name == KEY), None)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one partition, and the whole range that they stand in: markers and aborted records have offsets."""

    tp: TopicPartition
    start: int
    until: int
    records: Sequence[Record]

    @classmethod
    def of(cls, fetched: Fetched) -> Batch:
        return cls(fetched.tp, fetched.start, fetched.until, [_record(message) for message in fetched.messages])

    def split(self) -> list[Batch]:
        """A batch for each record. Markers between and behind records belong to the record before."""
        if len(self.records) < 2:
            return [self]
        starts = [self.start, *(record.offset for record in self.records[1:])]
        ends = [*starts[1:], self.until]
        return [
            Batch(self.tp, start, until, [record])
            for start, until, record in zip(starts, ends, self.records, strict=True)
        ]


def _record(message: client.Message) -> Record:
    return Record(
        message.topic(),  # type: ignore[arg-type]
        message.partition(),  # type: ignore[arg-type]
        message.offset(),  # type: ignore[arg-type]
        timestamp_of(message),
        message.key(),
        message.value(),
        headers_of(message),
    )
