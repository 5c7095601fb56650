"""Records for browsing: some at a time, forwards or backwards, with the state of their transaction.

Theory of operation
-------------------
A look is bounded in records, in bytes and in time, however large the topic is: what it did not reach, it says, and the
next look goes on from there. So a place is a *cursor*, an offset for each partition. Kafka is read forwards only: a
look backwards shows a span that it has read to its end, and takes a narrower one where that was too much.

Kafka does not show a reader whether a record was committed. So records are read twice: once with everything, once
by a reader of committed records. What only the first has is *aborted* if it lies below the last stable offset, and else
*open*: its own transaction, or one before it, has not ended. Markers and compacted records are seen by neither.

Owns: these looks. Must not know: pipelines, or how a record is shown. Its neighbours are ``log`` (offsets) and
``reader`` (ranges as columns, for those who want all of them).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.errors import SourceError
from avow.kafka.connect import Connection, of_the_group
from avow.kafka.headers import headers_of, size_of
from avow.kafka.log import Log, TopicPartition, as_bytes, timestamp_of
from avow.kafka.reader import scan
from avow.settings import Source

Cursor = Mapping[int, int]  # partition -> offset
Meant = Callable[["BrowsedRecord"], bool]

WINDOW = 2_000  # offsets of a partition that are looked at first; a search takes twice as many each time
WINDOW_MAX = 32_000
KEPT_BYTES_MAX = 24 * 1024 * 1024  # of one look
READ_BYTES_MAX = 256 * 1024 * 1024
TAKE = 500
TAKE_S = 0.02  # a take lasts so long if there is less


class RecordState(StrEnum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BrowsedRecord:
    """One record."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    state: RecordState = RecordState.COMMITTED


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one read."""

    seen: tuple[BrowsedRecord, ...]
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


@dataclass(slots=True)
class _ReadResult:
    """What was read of some spans."""

    seen: list[BrowsedRecord] = field(default_factory=list)  # those that are meant
    counts: Counter[int] = field(default_factory=Counter)  # partition -> how many were read
    reached: dict[int, int] = field(default_factory=dict)  # partition -> the first offset that was not read


@dataclass(slots=True)
class _Scan:
    """How far a look has come."""

    here: dict[int, int]
    budget: _Budget
    seen: list[BrowsedRecord] = field(default_factory=list)
    looked_at: int = 0

    def add(self, result: _ReadResult, partitions: Collection[int]) -> None:
        self.seen += (record for record in result.seen if record.partition in partitions)
        self.looked_at += sum(result.counts[p] for p in partitions)


class Browser:
    """Looks through the topics of one cluster. Not for use by two threads at once."""

    def __init__(self, source: Source, *, timeout_s: float = 5) -> None:
        self._connection = Connection.of(source)
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
        tps = [tp for tp in self._log.partitions_of([topic]) if partitions is None or tp.partition in partitions]
        offsets = self._log.offsets(tps)
        return (
            {tp.partition: first for tp, (first, _) in offsets.items()},
            {tp.partition: end for tp, (_, end) in offsets.items()},
        )

    def at_time(self, topic: str, moment: Any, partitions: list[int]) -> dict[int, int]:
        """Where the first record stands that is not older than a moment."""
        offsets = self._log.declared_start(moment, [TopicPartition(topic, number) for number in partitions])
        return {tp.partition: offset for tp, offset in offsets.items()}

    # Looks

    def forwards(self, topic: str, cursor: Cursor, limit: int, meant: Meant | None = None) -> Look:
        """The first ``limit`` records from the cursor on that are meant, oldest first."""
        _, ends = self.bounds(topic, list(cursor))
        walk = _Scan(dict(cursor), _Budget(time.monotonic() + self._timeout_s))
        width = WINDOW
        while len(walk.seen) < limit and walk.budget.left() and any(at < ends[p] for p, at in walk.here.items()):
            spans = {p: (at, min(at + width, ends[p])) for p, at in walk.here.items() if at < ends[p]}
            result = self._take(topic, spans, walk.budget, meant, enough=limit)
            walk.add(result, spans)
            walk.here |= result.reached
            width = min(2 * width, WINDOW_MAX)
        walk.seen.sort(key=lambda record: (record.timestamp_ms, record.partition, record.offset))
        left_out = walk.seen[limit:]
        for record in left_out:  # what was found and not shown is where the next look begins
            walk.here[record.partition] = min(walk.here[record.partition], record.offset)
        done = not left_out and all(at >= ends[p] for p, at in walk.here.items())
        return self._shown(topic, walk, limit, done)

    def backwards(self, topic: str, cursor: Cursor, limit: int, meant: Meant | None = None) -> Look:
        """The last ``limit`` records before the cursor that are meant, newest first."""
        firsts, _ = self.bounds(topic, list(cursor))
        until = time.monotonic() + self._timeout_s
        walk = _Scan(dict(cursor), _Budget(_halfway(until)))
        # A record that is looked for may be far back; without a search the last few offsets will do.
        width, widest = WINDOW if meant else min(limit, WINDOW), WINDOW_MAX
        while len(walk.seen) < limit and walk.budget.left() and any(at > firsts[p] for p, at in walk.here.items()):
            spans = {p: (max(firsts[p], at - width), at) for p, at in walk.here.items() if at > firsts[p]}
            result = self._take(topic, spans, walk.budget, meant)
            # One that was not read to its end is not done: its later records would be passed over.
            whole = {p for p, (_, end) in spans.items() if result.reached[p] >= end}
            walk.add(result, whole)
            walk.here |= {p: spans[p][0] for p in whole}
            if whole:
                walk.budget.until = until
                width = min(2 * max(width, WINDOW), widest)
            elif walk.here == cursor and width > 1:
                # The next look would begin at the same place, for ever: this one takes less, and what it can keep.
                width = widest = _narrower(spans, result)
                walk.budget = _Budget(_halfway(until))
        walk.seen.sort(key=lambda record: (-record.timestamp_ms, record.partition, -record.offset))
        left_out = walk.seen[limit:]
        for record in left_out:
            walk.here[record.partition] = max(walk.here[record.partition], record.offset + 1)
        done = not left_out and all(at <= firsts[p] for p, at in walk.here.items())
        return self._shown(topic, walk, limit, done)

    def _shown(self, topic: str, walk: _Scan, limit: int, done: bool) -> Look:
        return Look(self._judged(topic, walk.seen[:limit]), walk.here, walk.looked_at, done, walk.budget.spent)

    def one(self, topic: str, partition: int, offset: int) -> BrowsedRecord | None:
        """The record at an offset, if one is there."""
        budget = _Budget(time.monotonic() + self._timeout_s)
        result = self._take(topic, {partition: (offset, offset + 1)}, budget)
        if not result.seen and budget.spent:  # else the record would be reported as missing
            raise SourceError(
                f"offset {offset} of {topic}/{partition} could not be read in {self._timeout_s:g} s",
                advice="Try again.",
            )
        return next(iter(self._judged(topic, result.seen)), None)

    def follow(self, topic: str, cursor: Cursor, stopped: Callable[[], bool]) -> Iterator[list[BrowsedRecord]]:
        """Committed records as they come, from the cursor on; an empty list every so often while none does."""
        reader = self._reader("read_committed")
        reader.assign([client.TopicPartition(topic, number, at) for number, at in cursor.items()])
        try:
            while not stopped():
                messages = reader.consume(TAKE, 0.5)
                for error in (message.error() for message in messages):
                    if error is not None and error.code() != KafkaError._PARTITION_EOF and not of_the_group(error):
                        raise self._failure(topic, error)
                yield [_seen(message) for message in messages if message.error() is None]
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
    ) -> _ReadResult:
        """The records of these spans that are meant; of each partition no more than ``enough``."""
        result = _ReadResult(reached={p: start for p, (start, _) in spans.items()})
        by_partition = {TopicPartition(topic, p): span for p, span in spans.items()}
        left, matches = set(by_partition), Counter[int]()
        reader = self._reader(isolation)
        try:
            # Else the client looks for a topic that is new to it in its own time, a second or two.
            reader.list_topics(topic, timeout=self._timeout_s)
            for tp, message in scan(reader, by_partition, left, budget.left, take=TAKE, take_s=TAKE_S):
                number = tp.partition
                if message is None:
                    result.reached[number] = spans[number][1]
                    continue
                seen = _seen(message)
                budget.read -= size_of(message)
                result.counts[number] += 1
                result.reached[number] = seen.offset + 1
                if meant is None or meant(seen):
                    result.seen.append(seen)
                    budget.kept -= size_of(message)
                    matches[number] += 1
                    if enough is not None and matches[number] >= enough:
                        left.discard(tp)
        except KafkaException as error:
            raise self._failure(topic, error.args[0]) from None
        return result

    def _judged(self, topic: str, seen: list[BrowsedRecord]) -> tuple[BrowsedRecord, ...]:
        """The same, with the state of each."""
        spans: dict[int, tuple[int, int]] = {}
        for record in seen:
            low, high = spans.get(record.partition, (record.offset, record.offset + 1))
            spans[record.partition] = (min(low, record.offset), max(high, record.offset + 1))
        if not spans:
            return ()
        # Before the reading: what it does not find below this end never comes.
        ends = self._log.stable_ends(TopicPartition(topic, number) for number in spans)
        stable = {tp.partition: end for tp, end in ends.items()}
        readable = {p: (low, min(high, stable[p])) for p, (low, high) in spans.items() if low < stable[p]}
        committed: set[tuple[int, int]] = set()

        def noted(record: BrowsedRecord) -> bool:
            committed.add((record.partition, record.offset))
            return False  # its bytes are here already

        budget = _Budget(time.monotonic() + self._timeout_s)
        if readable:
            self._take(topic, readable, budget, noted, isolation="read_committed")
        if budget.spent:
            raise SourceError(
                f"the transaction state of records of {topic} could not be read in {self._timeout_s:g} s",
                advice="Try again, or request fewer records.",
            )
        return tuple(_with_state(record, committed, stable[record.partition]) for record in seen)

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
            self._readers[isolation] = self._connection.make_client(client.Consumer, own)
        return self._readers[isolation]

    def _failure(self, topic: str, error: KafkaError) -> SourceError:
        refused = error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        return SourceError(
            f"Kafka at {self._connection} could not read records of {topic}: {self._connection.redact(error.str())}",
            advice=f"Grant the Kafka user Read on topic {topic}."
            if refused
            else "Check the brokers, and that the topic exists and has a leader.",
        )


def _halfway(until: float) -> float:
    """So that there is time for another try."""
    now = time.monotonic()
    return now + (until - now) / 2


def _narrower(spans: Mapping[int, tuple[int, int]], result: _ReadResult) -> int:
    """The width of spans that can be read to their end, after these could not."""
    widest = max(end - start for start, end in spans.values())
    reached = max(result.reached[p] - start for p, (start, _) in spans.items())
    return max(1, min(widest, reached) // 2)


def _seen(message: client.Message) -> BrowsedRecord:
    return BrowsedRecord(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        timestamp_of(message),
        as_bytes(message.key()),
        as_bytes(message.value()),
        tuple(headers_of(message)),
    )


def _with_state(record: BrowsedRecord, committed: set[tuple[int, int]], stable: int) -> BrowsedRecord:
    if (record.partition, record.offset) in committed:
        return record
    return replace(record, state=RecordState.ABORTED if record.offset < stable else RecordState.OPEN)
