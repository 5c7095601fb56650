"""Dead letters in a topic: how one is written, and which there are.

A dead letter is a record of the dead-letter topic. Its key is the record's identity (``topic/partition/offset``), its
value the record's own value, untouched; the headers begin with what avow says of it and go on with the record's own. A
record with the same key and no value removes the dead letter: it was redriven. The topic is compacted, so what was
removed goes away in time, and what was not stays.

A dead letter that is larger than the topic takes is shortened: the beginning of its value and key, without the record's
own headers, and ``avow-shortened`` in the place of ``avow-null`` says how many bytes the value had. It is never
redriven as it is: a redrive reads the record from its own topic again.

Owns: that form. Must not know: transactions (``task`` puts dead letters and rows into one).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import confluent_kafka as client

from avow.kafka.headers import headers_of
from avow.kafka.log import TopicPartition
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, DeadLetterPreview, DeadLetterReader, Selection, preview
from avow.sinks.kafka import start_records
from avow.sinks.kafka.clients import KafkaClients
from avow.sinks.kafka.config import dead_letter_topic
from avow.sinks.kafka.messages import ORIGIN, Headers, origin, read_origin, record_bytes

Item = TypeVar("Item", DeadLetter, DeadLetterPreview)
COMPARED = {"=": operator.eq, ">=": operator.ge, "<": operator.lt}

# In this order, before the record's own headers.
OURS = (ORIGIN, "avow-reason", "avow-detail", "avow-timestamp", "avow-record-key", "avow-null")
SHORTENED = (*OURS[:-1], "avow-shortened")
LEAST_BYTES = 16_384  # that a dead-letter topic must take: more than any shortened one
SHORT_BYTES = 1_024  # of value, key and detail each


def key(dead_letter: DeadLetter) -> str:
    return origin(dead_letter.topic, dead_letter.partition, dead_letter.offset)


def message(dead_letter: DeadLetter, bytes_max: int) -> tuple[bytes, Headers]:
    """Value and headers of a dead letter; shortened, if the topic does not take it whole. A value that was null is
    empty, and a header says so."""
    null = (OURS[-1], "1" if dead_letter.value is None else "0")
    value, headers = dead_letter.value or b"", [*_ours(dead_letter), null, *dead_letter.headers]
    size = record_bytes(key(dead_letter), value, headers)
    if size <= bytes_max:
        return value, headers
    detail = dead_letter.detail.encode(errors="backslashreplace")[:SHORT_BYTES].decode(errors="ignore")
    detail += (
        f" (the dead letter has {size:,} bytes, but max.message.bytes of its topic is {bytes_max:,}: it was shortened)"
    )
    short = replace(dead_letter, key=dead_letter.key and dead_letter.key[:SHORT_BYTES], detail=detail)
    return value[:SHORT_BYTES], [*_ours(short), (SHORTENED[-1], str(len(value)))]


def _ours(dead_letter: DeadLetter) -> Headers:
    values = (
        key(dead_letter),
        dead_letter.reason,
        # It may quote what is no text, and that must not keep the dead letter out.
        dead_letter.detail.encode(errors="backslashreplace"),
        str(dead_letter.timestamp_ms),
        dead_letter.key,
    )
    return list(zip(OURS, values, strict=False))


def read(record: client.Message) -> tuple[DeadLetter, datetime] | None:
    """A dead letter and when it died; None if somebody else put this record here."""
    headers: list[tuple[str, Any]] = list(headers_of(record))
    names = tuple(name for name, _ in headers[: len(OURS)])
    if names not in (OURS, SHORTENED):
        return None
    tp, reason, detail, timestamp, key_, last = (value for _, value in headers[: len(OURS)])
    shortened = names == SHORTENED
    identity = read_origin(tp)
    if identity is None:
        return None
    dead_letter = DeadLetter(
        *identity,
        int(timestamp),
        key_,
        None if last == b"1" and not shortened else _bytes(record.value()),
        headers[len(OURS) :],
        reason.decode(),
        detail.decode(),
        int(last) if shortened else None,
    )
    return dead_letter, datetime.fromtimestamp(record.timestamp()[1] / 1000, UTC)


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def matches(dead_letter: DeadLetter, died: datetime, selection: Selection) -> bool:
    return all(
        COMPARED[compared](died if column == "died_at" else getattr(dead_letter, column), value)
        for column, compared, value in selection.conditions()
    )


def whole(dead_letter: DeadLetter) -> DeadLetter:
    return dead_letter


class DeadLetterScan(Generic[Item]):
    """The dead letters that are selected and were not removed, by key: whole ones, or what ``preview`` makes of them.
    Who asks again reads only what came since. A topic of another pipeline's is refused."""

    def __init__(
        self, clients: KafkaClients, topic: str, selection: Selection, convert: Callable[[DeadLetter], Item]
    ) -> None:
        self.selection = selection
        self._clients, self._topic = clients, topic
        self._convert: Callable[[DeadLetter], Item] = convert
        self._read_to: dict[int, int] = {}
        self._found: dict[str, tuple[Item, datetime]] = {}

    def read(self) -> dict[str, tuple[Item, datetime]]:
        for record in self._clients.committed_records(self._topic, self._read_to):
            start_records.refuse_foreign(record, self._clients.group)
            name = _bytes(record.key()).decode(errors="replace")
            parsed = None if record.value() is None else read(record)
            if parsed is not None and matches(*parsed, self.selection):
                self._found[name] = (self._convert(parsed[0]), parsed[1])
            else:
                self._found.pop(name, None)
        return self._found


class KafkaDeadLetters(DeadLetterReader):
    """The dead letters of one pipeline, to be read. Each query reads the topic once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._topic = dead_letter_topic(pipeline)
        self._clients = KafkaClients(pipeline)

    def close(self) -> None:
        self._clients.close()

    def _scan(self, selection: Selection, convert: Callable[[DeadLetter], Item]) -> list[tuple[Item, datetime]]:
        items = DeadLetterScan(self._clients, self._topic, selection, convert).read().values()
        return sorted(items, key=lambda item: (item[0].topic, item[0].partition, item[0].offset))

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        by: dict[str, list[datetime]] = {}
        for dead_letter, died in self._scan(selection, preview):
            by.setdefault(dead_letter.reason, []).append(died)
        return sorted(((reason, len(when), max(when)) for reason, when in by.items()), key=lambda row: -row[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        items = self._scan(selection, preview)
        return sorted({TopicPartition(dead_letter.topic, dead_letter.partition) for dead_letter, _ in items})

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return [dead_letter for dead_letter, _ in self._scan(selection, whole)][:limit]

    def previews(self, selection: Selection, limit: int) -> list[DeadLetterPreview]:
        return [dead_letter for dead_letter, _ in self._scan(selection, preview)][:limit]
