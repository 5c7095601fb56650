"""Dead letters in a topic: how one is written, and which there are.

A letter is a record of the dead-letter topic. Its key is the record's identity (``topic/partition/offset``), its value
the record's own value, untouched; the headers begin with what avow says of it and go on with the record's own. A record
with the same key and no value takes the letter back: it was redriven. The topic is compacted, so what was taken back
goes away in time, and what was not stays.

Owns: that form. Must not know: transactions (``task`` puts letters and rows into one).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.kafka.log import TopicPartition
from avow.settings import Pipeline
from avow.sinks.base import DeadLetter, Selection
from avow.sinks.kafka.clients import PATIENCE_S, Clients, as_ours
from avow.sinks.kafka.messages import ORIGIN, Headers, origin, read_origin

# In this order, before the record's own headers.
OURS = (ORIGIN, "avow-reason", "avow-detail", "avow-timestamp", "avow-key", "avow-null")


def key(letter: DeadLetter) -> str:
    return origin(letter.topic, letter.partition, letter.offset)


def message(letter: DeadLetter) -> tuple[bytes, Headers]:
    """Value and headers of a letter. A value that was null is empty, and a header says so."""
    headers: Headers = [
        (ORIGIN, key(letter)),
        ("avow-reason", letter.reason),
        ("avow-detail", letter.detail),
        ("avow-timestamp", str(letter.timestamp_ms)),
        ("avow-key", letter.key),
        ("avow-null", "1" if letter.value is None else "0"),
        *letter.headers,
    ]
    return letter.value or b"", headers


def read(record: client.Message) -> tuple[DeadLetter, datetime] | None:
    """A letter and when it died; None if somebody else put this record here."""
    headers: list[tuple[str, Any]] = list(record.headers() or [])  # type: ignore[arg-type]
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
    """The letters that are meant and were not taken back, by key."""
    found: dict[str, tuple[DeadLetter, datetime]] = {}
    for record in committed_records(clients, topic):
        name = _bytes(record.key()).decode(errors="replace")
        said = None if record.value() is None else read(record)
        if said is not None and meant(*said, selection):
            found[name] = said
        else:
            found.pop(name, None)
    return found


def committed_records(clients: Clients, topic: str) -> Iterator[client.Message]:
    """Every committed record of a topic of the output's cluster, up to where its log ends now.

    Not up to where committed records end now: a transaction that somebody else has open would hide what was committed
    after it began, such as the taking back of a letter. It is waited for.
    """
    ends = clients.settled_ends(topic)
    reader = clients.output_reader()
    try:
        left = {number for number, end in ends.items() if end > 0}
        reader.assign([client.TopicPartition(topic, number, client.OFFSET_BEGINNING) for number in left])
        heard = time.monotonic()
        while left:
            with as_ours(f"the reading of topic {topic}"):
                for record in reader.consume(10_000, 0.2):
                    heard = time.monotonic()
                    number = record.partition()
                    error = record.error()
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if number in left and error is None and (record.offset() or 0) < ends[number]:
                        yield record
                    elif number is not None:
                        left.discard(number)
                if time.monotonic() - heard > PATIENCE_S:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    finally:
        reader.close()


class KafkaLetters:
    """The dead letters of one pipeline, for looking at. Each question reads the topic once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._topic = pipeline.dead_letter_topic
        self._clients = Clients(pipeline)

    def __enter__(self) -> KafkaLetters:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    def _standing(self, selection: Selection) -> list[tuple[DeadLetter, datetime]]:
        found = standing(self._clients, self._topic, selection).values()
        return sorted(found, key=lambda said: (said[0].topic, said[0].partition, said[0].offset))

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        """Reason, how many, when the last one died."""
        by: dict[str, list[datetime]] = {}
        for letter, died in self._standing(selection):
            by.setdefault(letter.reason, []).append(died)
        return sorted(((reason, len(when), max(when)) for reason, when in by.items()), key=lambda row: -row[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        return sorted({TopicPartition(letter.topic, letter.partition) for letter, _ in self._standing(selection)})

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return [letter for letter, _ in self._standing(selection)][:limit]
