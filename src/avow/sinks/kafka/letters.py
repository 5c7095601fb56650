"""Dead letters in a topic: how one is written, and which there are.

A letter is a record of the dead-letter topic. Its key is the record's identity (``topic/partition/offset``), its value
the record's own value, untouched; the headers begin with what avow says of it and go on with the record's own. A record
with the same key and no value takes the letter back: it was redriven. The topic is compacted, so what was taken back
goes away in time, and what was not stays.

A letter that is larger than the topic takes is shortened: the beginning of its value and key, without the record's own
headers, and ``avow-shortened`` in the place of ``avow-null`` says how many bytes the value had. It is never redriven as
it is: a redrive reads the record from its own topic again.

Owns: that form. Must not know: transactions (``task`` puts letters and rows into one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import confluent_kafka as client

from avow.kafka.headers import headers_of
from avow.kafka.log import TopicPartition
from avow.settings import PipelineConfig
from avow.sinks.base import GLIMPSE_BYTES, DeadLetter, Glimpse, Selection
from avow.sinks.kafka import register
from avow.sinks.kafka.clients import Clients
from avow.sinks.kafka.config import dead_letter_topic
from avow.sinks.kafka.messages import ORIGIN, Headers, origin, read_origin, record_bytes

Kept = TypeVar("Kept")
AnyLetter = TypeVar("AnyLetter", DeadLetter, Glimpse)

# In this order, before the record's own headers.
OURS = (ORIGIN, "avow-reason", "avow-detail", "avow-timestamp", "avow-record-key", "avow-null")
SHORTENED = (*OURS[:-1], "avow-shortened")
LEAST_BYTES = 16_384  # that a dead-letter topic must take: more than any shortened letter
SHORT_BYTES = 1_024  # of value, key and detail each


def key(letter: DeadLetter) -> str:
    return origin(letter.topic, letter.partition, letter.offset)


def message(letter: DeadLetter, bytes_max: int) -> tuple[bytes, Headers]:
    """Value and headers of a letter; shortened, if the topic does not take it whole. A value that was null is empty,
    and a header says so."""
    null = (OURS[-1], "1" if letter.value is None else "0")
    value, headers = letter.value or b"", [*_ours(letter), null, *letter.headers]
    size = record_bytes(key(letter), value, headers)
    if size <= bytes_max:
        return value, headers
    detail = letter.detail.encode(errors="backslashreplace")[:SHORT_BYTES].decode(errors="ignore")
    detail += (
        f" (its letter has {size:,} bytes, and the dead-letter topic takes {bytes_max:,}: only its beginning is kept)"
    )
    short = replace(letter, key=letter.key and letter.key[:SHORT_BYTES], detail=detail)
    return value[:SHORT_BYTES], [*_ours(short), (SHORTENED[-1], str(len(value)))]


def _ours(letter: DeadLetter) -> Headers:
    said = (
        key(letter),
        letter.reason,
        # It may quote what is no text, and that must not keep the letter out.
        letter.detail.encode(errors="backslashreplace"),
        str(letter.timestamp_ms),
        letter.key,
    )
    return list(zip(OURS, said, strict=False))


def read(record: client.Message) -> tuple[DeadLetter, datetime] | None:
    """A letter and when it died; None if somebody else put this record here."""
    headers: list[tuple[str, Any]] = list(headers_of(record))
    names = tuple(name for name, _ in headers[: len(OURS)])
    if names not in (OURS, SHORTENED):
        return None
    where, reason, detail, timestamp, key_, last = (value for _, value in headers[: len(OURS)])
    shortened = names == SHORTENED
    identity = read_origin(where)
    if identity is None:
        return None
    letter = DeadLetter(
        *identity,
        int(timestamp),
        key_,
        None if last == b"1" and not shortened else _bytes(record.value()),
        headers[len(OURS) :],
        reason.decode(),
        detail.decode(),
        int(last) if shortened else None,
    )
    return letter, datetime.fromtimestamp(record.timestamp()[1] / 1000, UTC)


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def meant(letter: DeadLetter, died: datetime, selection: Selection) -> bool:
    wanted = (
        (selection.reason, letter.reason),
        (selection.topic, letter.topic),
        (selection.partition, letter.partition),
    )
    return (
        all(want is None or want == found for want, found in wanted)
        and (selection.from_offset is None or letter.offset >= selection.from_offset)
        and (selection.until_offset is None or letter.offset < selection.until_offset)
        and (selection.since is None or died >= selection.since)
        and (selection.until is None or died < selection.until)
    )


def standing(clients: Clients, topic: str, selection: Selection) -> dict[str, tuple[DeadLetter, datetime]]:
    """The letters that are meant and were not taken back, by key. A topic of another pipeline's is refused."""
    return Standing(clients, topic, selection, lambda letter: letter).read()


class Standing(Generic[Kept]):
    """The same, for who asks again: then only what came since is read."""

    def __init__(self, clients: Clients, topic: str, selection: Selection, kept: Callable[[DeadLetter], Kept]) -> None:
        self.selection = selection
        self._clients, self._topic, self._kept = clients, topic, kept
        self._read_to: dict[int, int] = {}
        self._found: dict[str, tuple[Kept, datetime]] = {}

    def read(self) -> dict[str, tuple[Kept, datetime]]:
        for record in self._clients.committed_records(self._topic, self._read_to):
            register.refuse_foreign(record, self._clients.group)
            name = _bytes(record.key()).decode(errors="replace")
            said = None if record.value() is None else read(record)
            if said is not None and meant(*said, self.selection):
                self._found[name] = (self._kept(said[0]), said[1])
            else:
                self._found.pop(name, None)
        return self._found


def glimpse(letter: DeadLetter) -> Glimpse:
    value = letter.value
    return Glimpse(
        letter.topic,
        letter.partition,
        letter.offset,
        letter.timestamp_ms,
        letter.reason,
        letter.detail,
        None if value is None else value[:GLIMPSE_BYTES],
        len(value or b"") if letter.full_bytes is None else letter.full_bytes,
    )


class KafkaLetters:
    """The dead letters of one pipeline, for looking at. Each question reads the topic once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._topic = dead_letter_topic(pipeline)
        self._clients = Clients(pipeline)

    def __enter__(self) -> KafkaLetters:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    def _standing(
        self, selection: Selection, kept: Callable[[DeadLetter], AnyLetter]
    ) -> list[tuple[AnyLetter, datetime]]:
        found = Standing(self._clients, self._topic, selection, kept).read().values()
        return sorted(found, key=lambda said: (said[0].topic, said[0].partition, said[0].offset))

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        """Reason, how many, when the last one died."""
        by: dict[str, list[datetime]] = {}
        for letter, died in self._standing(selection, glimpse):
            by.setdefault(letter.reason, []).append(died)
        return sorted(((reason, len(when), max(when)) for reason, when in by.items()), key=lambda row: -row[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        found = self._standing(selection, glimpse)
        return sorted({TopicPartition(letter.topic, letter.partition) for letter, _ in found})

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return [letter for letter, _ in self._standing(selection, lambda letter: letter)][:limit]

    def glimpses(self, selection: Selection, limit: int) -> list[Glimpse]:
        return [letter for letter, _ in self._standing(selection, glimpse)][:limit]
