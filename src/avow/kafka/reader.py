"""The records of an offset range, as Arrow batches, straight from the broker into the task that needs them.

Theory of operation
-------------------
A task is given a range and reads it with librdkafka, by a consumer that is assigned and never subscribes. There is one
for each process, kept from task to task: a Spark worker lives through many, and a connection costs more than a small
range. A range has ended when a record beyond it comes, or the end of the partition does: its last offsets may be
markers or aborted records, which consumers do not see.

Records become columns a few tens of thousands at a time, in ``fetch``: nothing is done for each of them but what the
client does itself. A batch is bounded in records and in bytes, and so is what the client fetches ahead, since at the
end of a range that is thrown away.

Owns: reading a range. Must not know: what records mean, or where ranges come from. Its neighbours are ``fetch``, which
takes what has come, and ``log``, which answers questions about the log and reads single records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

import confluent_kafka as client
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from avow.client_cache import ClientCache
from avow.errors import AvowError
from avow.kafka.admin import several
from avow.kafka.connect import Connection, RecentErrors, first_permanent, of_the_group
from avow.kafka.fetch import RangesFetch, native_queues, open_fetch
from avow.kafka.metadata import TopicPartition
from avow.ledger import OffsetRange
from avow.settings import Source

BATCH_RECORDS = 50_000
BATCH_BYTES = 16 * 1024 * 1024
TAKE_RECORDS = 10_000
TAKE_S = 0.1  # also bounds what comes in one take of large records, as messages
SILENCE_S = 30.0

# The user's own win over these.
FETCH = {
    "fetch.wait.max.ms": 50,  # the longest delay before the end of a partition is reported
    "fetch.queue.backoff.ms": 5,  # else a full queue rests for a second
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 32 * 1024,
    "check.crcs": True,
}
# For many partitions at the same time: each may have so much waiting.
FETCH_LITTLE = {
    "queued.min.messages": 1_000,
    "queued.max.messages.kbytes": 256,
    "max.partition.fetch.bytes": 128 * 1024,
}
# These are the promise.
FIXED = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
}


class Reader:
    """Reads ranges of one source, one after another, or several small ones at the same time."""

    def __init__(
        self,
        source: Source,
        group: str,
        *,
        silence_s: float = SILENCE_S,
        isolation: str = "read_committed",
        fetch_ahead: Mapping[str, int | bool] = FETCH,
    ) -> None:
        self._connection = Connection.of(source, group)
        self._silence_s = silence_s
        self._errors = RecentErrors()
        # librdkafka wants a group; nothing is committed to it from here.
        own = {"group.id": group, "isolation.level": isolation, "error_cb": self._errors.append}
        self._consumer = self._connection.make_client(client.Consumer, FIXED | own, defaults=fetch_ahead)
        self._queues = native_queues(self._consumer)
        self._fetch: RangesFetch | None = None  # of what is being read
        self._progress_at = 0.0

    def close(self) -> None:
        with ExitStack() as closing:  # in reverse, all of them
            closing.callback(self._consumer.close)
            if self._queues is not None:
                closing.callback(self._queues.close)
            self._end_fetch()

    def read(self, wanted: OffsetRange) -> Generator[pa.RecordBatch]:
        """The visible records of the range, in order. Nobody else may read from this reader meanwhile."""
        tp = TopicPartition(wanted.topic, wanted.partition)
        fetch = self._open({tp: wanted})
        try:
            while fetch.left:
                self._take(fetch, BATCH_BYTES)
                if fetch.count >= BATCH_RECORDS or fetch.size >= BATCH_BYTES:
                    yield fetch.cut(tp)
            if fetch.count:
                yield fetch.cut(tp)
        finally:
            if self._fetch is fetch:
                self._end_fetch()

    def gather(
        self, ranges: Mapping[TopicPartition, OffsetRange], most_bytes: int
    ) -> dict[TopicPartition, pa.RecordBatch | None]:
        """The visible records of ranges, which are read at the same time; None where there are none. Once there are so
        many bytes, it gives those that have been read whole by then, and not the others."""
        fetch = self._open(ranges)
        try:
            while fetch.left and fetch.size < most_bytes:
                self._take(fetch, most_bytes)
            return {tp: fetch.cut(tp) for tp in ranges if tp not in fetch.left}
        finally:
            self._end_fetch()

    def _open(self, ranges: Mapping[TopicPartition, OffsetRange]) -> RangesFetch:
        self._fetch = fetch = open_fetch(self._consumer, ranges, self._queues)
        self._progress_at = time.monotonic()
        return fetch

    def _end_fetch(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.close()

    def _take(self, fetch: RangesFetch, most_bytes: int) -> None:
        try:
            progressed = fetch.take(min(TAKE_RECORDS, fetch.offsets_left), most_bytes - fetch.size, TAKE_S)
        except KafkaException as error:
            raise self._failure(fetch, error.args[0]) from None
        if progressed:
            self._progress_at = time.monotonic()
            return
        if (permanent := first_permanent(e for e in self._errors if not of_the_group(e))) is not None:
            raise self._failure(fetch, permanent)
        if time.monotonic() - self._progress_at > self._silence_s:
            at = min(fetch.position(tp) for tp in fetch.left)
            silence = f"nothing came for {self._silence_s:g} s at offset {at}"
            raise self._failure(fetch, KafkaError(KafkaError._TIMED_OUT, silence))

    def _failure(self, fetch: RangesFetch, error: KafkaError) -> AvowError:
        left = [fetch.ranges[tp] for tp in sorted(fetch.left)]
        connection = replace(self._connection, topics=sorted({range_.topic for range_ in left}))
        return connection.translate(
            f"read {several(left)}",
            error,
            "It is retried from the ledger. If it persists, check the brokers and the partition's leader.",
        )


def scan(
    consumer: client.Consumer,
    spans: Mapping[TopicPartition, tuple[int, int]],
    left: set[TopicPartition],
    proceed: Callable[[], bool],
    *,
    take: int = TAKE_RECORDS,
    take_s: float = TAKE_S,
) -> Iterator[tuple[TopicPartition, client.Message | None]]:
    """What the consumer sees of these spans, until all are read, or ``proceed`` says no; None where a partition has
    reached its end. ``left`` holds what is still read: who has enough of a partition removes it. The consumer must
    report ends of partitions. Raises ``KafkaException``."""
    starts = {tp: spans[tp][0] or client.OFFSET_BEGINNING for tp in left}
    by_place = {(tp.topic, tp.partition): tp for tp in left}
    consumer.assign([client.TopicPartition(tp.topic, tp.partition, start) for tp, start in starts.items()])
    try:
        while left and proceed():
            for message in consumer.consume(take, take_s):
                error, offset = message.error(), message.offset() or 0
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if of_the_group(error):
                        continue
                    raise KafkaException(error)
                tp = by_place.get((message.topic() or "", message.partition() or 0))
                if tp is None or tp not in left:
                    continue
                end = spans[tp][1]
                if error is None and offset < end:
                    yield tp, message
                # A leader that is new, or a follower that is late, may say that the partition ends before this.
                if offset >= (end if error is not None else end - 1):
                    left.discard(tp)
                    yield tp, None
    finally:
        consumer.unassign()


def read_to_end(
    consumer: client.Consumer,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    *,
    silence_s: float = SILENCE_S,
) -> Iterator[client.Message]:
    """What the consumer sees of these partitions from the starts, or their beginnings, up to the ends. Raises
    ``KafkaException``, also if nothing comes for ``silence_s``."""
    progress_at = time.monotonic()

    def proceed() -> bool:
        if time.monotonic() - progress_at > silence_s:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return True

    spans = {tp: (starts.get(tp, 0), end) for tp, end in ends.items() if end > starts.get(tp, 0)}
    for _, message in scan(consumer, spans, set(spans), proceed):
        progress_at = time.monotonic()
        if message is not None:
            yield message


_readers = ClientCache(Reader.close, keep=1)
_gatherers = ClientCache(Reader.close, keep=1)


def reader(source: Source, group: str) -> Reader:
    """This thread's reader."""
    return _readers.get((source, group), lambda: Reader(source, group))


def gatherer(source: Source, group: str) -> Reader:
    """This thread's reader of many small ranges at the same time."""
    return _gatherers.get((source, group), lambda: Reader(source, group, fetch_ahead=FETCH | FETCH_LITTLE))
