"""Dead letters in a topic: how one is written, and which there are.

A letter is a record of the dead-letter topic. Its key is the record's identity (``topic/partition/offset``), its value
the record's own value, untouched; the headers begin with what avow says of it and go on with the record's own. A record
with the same key and no value takes the letter back: it was redriven. The topic is compacted, so what was taken back
goes away in time, and what was not stays.

Owns: that form. Must not know: transactions (``task`` puts letters and rows into one).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import confluent_kafka as client

from avow.kafka.headers import headers_of
from avow.kafka.log import TopicPartition
from avow.settings import Pipeline
from avow.sinks.base import GLIMPSE_BYTES, DeadLetter, Glimpse, Selection
from avow.sinks.kafka import register
from avow.sinks.kafka.clients import Clients
from avow.sinks.kafka.messages import ORIGIN, Headers, origin, read_origin

Kept = TypeVar("Kept")
AnyLetter = TypeVar("AnyLetter", DeadLetter, Glimpse)

# In this order, before the record's own headers.
OURS = (ORIGIN, "avow-reason", "avow-detail", "avow-timestamp", "avow-record-key", "avow-null")


def key(letter: DeadLetter) -> str:
    return origin(letter.topic, letter.partition, letter.offset)


def message(letter: DeadLetter) -> tuple[bytes, Headers]:
    """Value and headers of a letter. A value that was null is empty, and a header says so."""
    headers: Headers = [
        (ORIGIN, key(letter)),
        ("avow-reason", letter.reason),
        ("avow-detail", letter.detail),
        ("avow-timestamp", str(letter.timestamp_ms)),
        ("avow-record-key", letter.key),
        ("avow-null", "1" if letter.value is None else "0"),
        *letter.headers,
    ]
    return letter.value or b"", headers


def read(record: client.Message) -> tuple[DeadLetter, datetime] | None:
    """A letter and when it died; None if somebody else put this record here."""
    headers: list[tuple[str, Any]] = list(headers_of(record))
    if tuple(name for name, _ in headers[: len(OURS)]) != OURS:
        return None
    where, reason, detail, timestamp, key_, null = (value for _, value in headers[: len(OURS)])
    identity = read_origin(where)
    if identity is None:
        return None
    letter = DeadLetter(
        *identity,
        int(timestamp),
        key_,
        None if null == b"1" else _bytes(record.value()),
        headers[len(OURS) :],
        reason.decode(),
        detail.decode(),
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
    return _standing(clients, topic, selection, lambda letter: letter)


def _standing(
    clients: Clients, topic: str, selection: Selection, kept: Callable[[DeadLetter], Kept]
) -> dict[str, tuple[Kept, datetime]]:
    found: dict[str, tuple[Kept, datetime]] = {}
    for record in clients.committed_records(topic):
        register.refuse_foreign(record, clients.group)
        name = _bytes(record.key()).decode(errors="replace")
        said = None if record.value() is None else read(record)
        if said is not None and meant(*said, selection):
            found[name] = (kept(said[0]), said[1])
        else:
            found.pop(name, None)
    return found


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
        len(value or b""),
    )


class KafkaLetters:
    """The dead letters of one pipeline, for looking at. Each question reads the topic once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._topic = pipeline.dead_letter_topic
        self._clients = Clients(pipeline)

    def __enter__(self) -> KafkaLetters:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    def _standing(
        self, selection: Selection, kept: Callable[[DeadLetter], AnyLetter]
    ) -> list[tuple[AnyLetter, datetime]]:
        found = _standing(self._clients, self._topic, selection, kept).values()
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
