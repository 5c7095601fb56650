"""Records as a person looks through them: some at a time, forwards or backwards, with what became of their transaction.

Theory of operation
-------------------
A look is bounded in records, in bytes and in time, however large the topic is: what it did not reach, it says, and the
next look goes on from there. So a place is a *cursor*, an offset for each partition. Kafka is read forwards only: a
look backwards shows a span that it has read to its end, and takes a narrower one where that was too much.

Kafka does not tell a reader whether a record was committed. So what was found is read twice: once with everything, once
by a reader of committed records. What only the first has is *aborted* if it lies below the last stable offset, and else
*open*: its own transaction, or one before it, has not ended. Markers and compacted records are seen by neither.

Owns: these looks. Must not know: pipelines, or how a record is shown. Its neighbours are ``log`` (offsets) and
``reader`` (ranges as columns, for those who want all of them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.errors import SourceError
from avow.kafka.connect import made, of_the_group, settings_of, strike
from avow.kafka.headers import headers_of, size_of
from avow.kafka.log import Log, TopicPartition, as_bytes, timestamp_of
from avow.settings import Source, revealed

Cursor = Mapping[int, int]  # partition -> offset
Meant = Callable[["Seen"], bool]

WINDOW = 2_000  # offsets of a partition that are looked at first; a search takes twice as many each time
WINDOW_MAX = 32_000
KEPT_BYTES_MAX = 24 * 1024 * 1024  # of one look
READ_BYTES_MAX = 256 * 1024 * 1024
TAKE = 500
TAKE_S = 0.02  # a take lasts so long if there is less


class State(StrEnum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Seen:
    """One record."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    state: State = State.COMMITTED


@dataclass(frozen=True, slots=True)
class Look:
    """What one look came to."""

    seen: tuple[Seen, ...]
    cursor: dict[int, int]  # where the next look in this direction goes on
    looked_at: int  # how many records
    done: bool  # there is nothing further in this direction
    cut: str = ""  # which bound ended it early; empty if none did


@dataclass(slots=True)
class _Budget:
    """What is left of a look."""

    until: float
    kept: int = KEPT_BYTES_MAX
    read: int = READ_BYTES_MAX
    spent: str = ""

    def left(self) -> bool:
        if not self.spent and time.monotonic() > self.until:
            self.spent = "time"
        if not self.spent and min(self.kept, self.read) <= 0:
            self.spent = "bytes"
        return not self.spent


@dataclass(frozen=True, slots=True)
class _Taken:
    seen: list[Seen] = field(default_factory=list)  # those that are meant
    counts: dict[int, int] = field(default_factory=dict)  # partition -> how many were looked at
    reached: dict[int, int] = field(default_factory=dict)  # partition -> the first offset that was not looked at


class Browser:
    """Looks through the topics of one cluster. Not for use by two threads at once."""

    def __init__(self, source: Source, *, timeout_s: float = 5) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._log = Log(source, "avow", timeout_s=timeout_s)
        self._readers: dict[str, client.Consumer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()
        self._log.close()

    # Places

    def bounds(self, topic: str, partitions: list[int] | None = None) -> tuple[dict[int, int], dict[int, int]]:
        """The earliest offsets and the ends, of these partitions or of all."""
        there = [
            where for where in self._log.partitions_of([topic]) if partitions is None or where.partition in partitions
        ]
        offsets = self._log.offsets(there)
        return (
            {where.partition: first for where, (first, _) in offsets.items()},
            {where.partition: end for where, (_, end) in offsets.items()},
        )

    def at_time(self, topic: str, moment: Any, partitions: list[int]) -> dict[int, int]:
        """Where the first record stands that is not older than a moment."""
        found = self._log.declared_start(moment, [TopicPartition(topic, number) for number in partitions])
        return {where.partition: offset for where, offset in found.items()}

    # Looks

    def forwards(self, topic: str, cursor: Cursor, limit: int, meant: Meant | None = None) -> Look:
        """The first ``limit`` records from the cursor on that are meant, oldest first."""
        _, ends = self.bounds(topic, list(cursor))
        budget = _Budget(time.monotonic() + self._timeout_s)
        here = dict(cursor)
        found: list[Seen] = []
        looked_at = 0
        width = WINDOW
        while len(found) < limit and budget.left() and any(here[p] < ends[p] for p in here):
            spans = {p: (at, min(at + width, ends[p])) for p, at in here.items() if at < ends[p]}
            taken = self._take(topic, spans, budget, meant, enough=limit)
            looked_at += sum(taken.counts.values())
            found += taken.seen
            here |= taken.reached
            width = min(2 * width, WINDOW_MAX)
        found.sort(key=lambda one: (one.timestamp_ms, one.partition, one.offset))
        left_out = found[limit:]
        for one in left_out:  # what was found and not shown is where the next look begins
            here[one.partition] = min(here[one.partition], one.offset)
        done = not left_out and all(here[p] >= ends[p] for p in here)
        return Look(self._judged(topic, found[:limit]), here, looked_at, done, budget.spent)

    def backwards(self, topic: str, cursor: Cursor, limit: int, meant: Meant | None = None) -> Look:
        """The last ``limit`` records before the cursor that are meant, newest first."""
        firsts, _ = self.bounds(topic, list(cursor))
        until = time.monotonic() + self._timeout_s
        budget = _Budget(_halfway(until))
        here = dict(cursor)
        found: list[Seen] = []
        looked_at = 0
        # A record that is looked for may be far back; without a search the last few offsets will do.
        width, narrowed = WINDOW if meant else min(limit, WINDOW), False
        while len(found) < limit and budget.left() and any(here[p] > firsts[p] for p in here):
            spans = {p: (max(firsts[p], at - width), at) for p, at in here.items() if at > firsts[p]}
            taken = self._take(topic, spans, budget, meant)
            # One that was not read to its end is not done: its later records would be passed over.
            whole = {p for p, (_, end) in spans.items() if taken.reached[p] >= end}
            looked_at += sum(taken.counts[p] for p in whole)
            found += (one for one in taken.seen if one.partition in whole)
            here |= {p: spans[p][0] for p in whole}
            if whole:
                budget.until = until
                width = width if narrowed else min(2 * max(width, WINDOW), WINDOW_MAX)
            elif here == cursor and width > 1:
                # The next look would begin at the same place, for ever: this one takes less, and what it can keep.
                width, narrowed = _narrower(spans, taken), True
                budget = _Budget(_halfway(until))
        found.sort(key=lambda one: (-one.timestamp_ms, one.partition, -one.offset))
        left_out = found[limit:]
        for one in left_out:
            here[one.partition] = max(here[one.partition], one.offset + 1)
        done = not left_out and all(here[p] <= firsts[p] for p in here)
        return Look(self._judged(topic, found[:limit]), here, looked_at, done, budget.spent)

    def one(self, topic: str, partition: int, offset: int) -> Seen | None:
        """The record at an offset, if one is there."""
        budget = _Budget(time.monotonic() + self._timeout_s)
        taken = self._take(topic, {partition: (offset, offset + 1)}, budget)
        if not taken.seen and budget.spent:  # else it would be said that there is none
            raise SourceError(
                f"offset {offset} of {topic}/{partition} could not be read in {self._timeout_s:g} s",
                advice="Try again.",
            )
        return next(iter(self._judged(topic, taken.seen)), None)

    def follow(self, topic: str, cursor: Cursor, stopped: Callable[[], bool]) -> Iterator[list[Seen]]:
        """Committed records as they come, from the cursor on; an empty list every so often while none does."""
        reader = self._reader("read_committed")
        reader.assign([client.TopicPartition(topic, number, at) for number, at in cursor.items()])
        try:
            while not stopped():
                yield [_seen(message) for message in self._whole(reader.consume(TAKE, 0.5))]
        finally:
            reader.unassign()

    # How records are read

    def _take(
        self,
        topic: str,
        spans: Mapping[int, tuple[int, int]],
        budget: _Budget,
        meant: Meant | None = None,
        *,
        enough: int | None = None,
        isolation: str = "read_uncommitted",
    ) -> _Taken:
        """The records of these spans that are meant; of each partition no more than ``enough``."""
        taken = _Taken(counts=dict.fromkeys(spans, 0), reached={p: start for p, (start, _) in spans.items()})
        found = dict.fromkeys(spans, 0)
        left = set(spans)
        reader = self._reader(isolation)
        try:
            # Else the client looks for a topic that is new to it in its own time, a second or two.
            reader.list_topics(topic, timeout=self._timeout_s)
            reader.assign([client.TopicPartition(topic, p, start) for p, (start, _) in spans.items()])
            while left and budget.left():
                for message in reader.consume(TAKE, TAKE_S):
                    number, offset = message.partition() or 0, message.offset() or 0
                    error = message.error()
                    if number not in left or of_the_group(error):
                        continue
                    until = spans[number][1]
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise self._failure(topic, error)
                    if error is None and offset < until:
                        budget.read -= size_of(message)
                        taken.counts[number] += 1
                        taken.reached[number] = offset + 1
                        seen = _seen(message)
                        if meant is None or meant(seen):
                            taken.seen.append(seen)
                            budget.kept -= size_of(message)
                            found[number] += 1
                    if error is not None or offset >= until - 1:
                        taken.reached[number] = until
                        left.discard(number)
                    elif enough is not None and found[number] >= enough:
                        left.discard(number)
        except KafkaException as error:
            raise self._failure(topic, error.args[0]) from None
        finally:
            reader.unassign()
        return taken

    def _judged(self, topic: str, seen: list[Seen]) -> tuple[Seen, ...]:
        """The same, with the state of each."""
        spans: dict[int, tuple[int, int]] = {}
        for one in seen:
            low, high = spans.get(one.partition, (one.offset, one.offset + 1))
            spans[one.partition] = (min(low, one.offset), max(high, one.offset + 1))
        if not spans:
            return ()
        # Before the reading: what it does not find below this end never comes.
        stable = self._log.stable_ends(TopicPartition(topic, number) for number in spans)
        readable = {
            number: (low, min(high, stable[TopicPartition(topic, number)]))
            for number, (low, high) in spans.items()
            if low < stable[TopicPartition(topic, number)]
        }
        committed: set[tuple[int, int]] = set()

        def noted(one: Seen) -> bool:
            committed.add((one.partition, one.offset))
            return False  # its bytes are here already

        budget = _Budget(time.monotonic() + self._timeout_s)
        if readable:
            self._take(topic, readable, budget, noted, isolation="read_committed")
        if budget.spent:
            raise SourceError(
                f"whether records of {topic} were committed could not be found out in {self._timeout_s:g} s",
                advice="Try again, or look at fewer records at a time.",
            )
        return tuple(_with_state(one, committed, stable[TopicPartition(topic, one.partition)]) for one in seen)

    def _whole(self, messages: list[client.Message]) -> Iterator[client.Message]:
        for message in messages:
            error = message.error()
            if error is None:
                yield message
            elif error.code() != KafkaError._PARTITION_EOF and not of_the_group(error):
                raise self._failure(message.topic() or "", error)

    def _reader(self, isolation: str) -> client.Consumer:
        if isolation not in self._readers:
            own = {
                "group.id": "avow",  # librdkafka wants one; nothing is committed to it, and no right to it is needed
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",  # retention may pass a cursor while a person reads
                "isolation.level": isolation,
                "enable.partition.eof": True,
                "queued.min.messages": WINDOW,
                "queued.max.messages.kbytes": 8 * 1024,
                "fetch.wait.max.ms": 20,
                "fetch.queue.backoff.ms": 5,
            }
            settings = settings_of(self._source) | own
            self._readers[isolation] = made(client.Consumer, settings, revealed(self._source.kafka))
        return self._readers[isolation]

    def _failure(self, topic: str, error: KafkaError) -> SourceError:
        refused = error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        return SourceError(
            f"Kafka at {self._source.shown('brokers')} was asked for records of {topic}: "
            f"{strike(revealed(self._source.kafka).values(), error.str())}",
            advice=f"Give the Kafka user the right to read topic {topic}."
            if refused
            else "Check the brokers, and that the topic and its leader are there.",
        )


def _halfway(until: float) -> float:
    """So that there is time for another try."""
    now = time.monotonic()
    return now + (until - now) / 2


def _narrower(spans: Mapping[int, tuple[int, int]], taken: _Taken) -> int:
    """The width of spans that can be read to their end, after these could not."""
    widest = max(end - start for start, end in spans.values())
    reached = max(taken.reached[p] - start for p, (start, _) in spans.items())
    return max(1, min(widest, reached) // 2)


def _seen(message: client.Message) -> Seen:
    return Seen(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        timestamp_of(message),
        as_bytes(message.key()),
        as_bytes(message.value()),
        tuple(headers_of(message)),
    )


def _with_state(one: Seen, committed: set[tuple[int, int]], stable: int) -> Seen:
    if (one.partition, one.offset) in committed:
        return one
    state = State.ABORTED if one.offset < stable else State.OPEN
    return replace(one, state=state)
