"""What a consumer fetches of its partitions, gathered into Arrow batches.

There are two ways, which give the same batches. By the client's messages: a Python object for each. Or by avow-native,
where that library is loaded and knows the client: each partition has a queue of its own then, and ``kafka.c`` copies
what is in it into Arrow's buffers. The client's own queue has only callbacks and errors. The consumer, its settings and
its callbacks are the same for both.

Owns: buffers of partitions, and the assignment of ranges. Must not know: how much makes a batch, how long to wait. Its
neighbours are ``reader``, which reads ranges, and ``group_batches``, whose partitions come and go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import confluent_kafka as client
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from avow import native
from avow.errors import ProtocolViolation
from avow.kafka.batches import COLUMNS, as_batch
from avow.kafka.connect import of_the_group
from avow.kafka.headers import NOT_UTF8, size_of
from avow.kafka.metadata import TopicPartition
from avow.ledger import OffsetRange

if TYPE_CHECKING:
    from avow_native.kafka import Kafka, Source, Sources, Waiter

SERVE = 100  # callbacks are not counted, only what is no callback
NO_END = 2**63 - 1

Ranges = Mapping[TopicPartition, OffsetRange]


class Buffer(ABC):
    """What has come of one partition since it was last cut."""

    start: int  # where it was last cut
    until: int  # one past the last record that has come, or where the partition was said to end
    count: int
    size: int  # bytes

    @abstractmethod
    def restart(self, position: int) -> None:
        """Drop what has come: it is read from there on."""

    @abstractmethod
    def cut(self) -> pa.RecordBatch | None:
        """The records, which are not kept. None: there are none, at most markers and aborted ones."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        pass


class MessageBuffer(Buffer):
    """As the client's messages. Records from ``limit`` on are dropped."""

    def __init__(self, tp: TopicPartition, position: int, limit: int = NO_END) -> None:
        self._range = OffsetRange(tp.topic, tp.partition, 0, 0)
        self._limit = limit
        self.restart(position)

    def restart(self, position: int) -> None:
        self.start = self.until = position
        self.count = self.size = 0
        self._messages: list[client.Message] = []

    def add(self, messages: Sequence[client.Message], until: int) -> None:
        if until > self._limit:
            messages = [message for message in messages if message.offset() < self._limit]  # type: ignore[operator]
        self._messages += messages
        self.count += len(messages)
        self.size += sum(map(size_of, messages))
        self.until = max(self.until, until)

    def cut(self) -> pa.RecordBatch | None:
        batch = as_batch(self._range, self._messages) if self._messages else None
        self.restart(self.until)
        return batch


class NativeBuffer(Buffer):
    """The same in Arrow's buffers."""

    def __init__(self, source: Source, position: int, limit: int = NO_END) -> None:
        self.source = source
        self._limit = limit
        self.restart(position)

    def restart(self, position: int) -> None:
        self.start = self.until = position
        self.count = self.size = 0
        self._part = self.source.part(self._limit)

    def refresh(self) -> None:
        """After a take: how much there is now."""
        state = self._part.state()
        self.count, self.size = state.rows, state.bytes
        self.until = max(self.until, state.position, state.end)

    def cut(self) -> pa.RecordBatch | None:
        batch = self._part.batch(COLUMNS) if self.count else None
        self.restart(self.until)
        return batch

    def close(self) -> None:
        self.source.close()


class NativeQueues:
    """avow-native's way to the partitions of one consumer. Close it after their buffers, and before the consumer."""

    def __init__(self, consumer: client.Consumer, kafka: Kafka, waiter: Waiter) -> None:
        self._consumer, self._kafka = consumer, kafka
        self._waiter = waiter
        self._buffers: list[NativeBuffer] = []  # of ``_sources``
        self._sources: Sources | None = None

    def buffer(self, tp: TopicPartition, position: int, limit: int = NO_END) -> NativeBuffer:
        """Of a partition that is not assigned yet. From now on the consumer itself gives none of its messages."""
        source = self._kafka.source(self._consumer, tp.topic, tp.partition, self._waiter)
        try:
            return NativeBuffer(source, position, limit)
        except BaseException:
            source.close()
            raise

    def take(self, buffers: list[NativeBuffer], most: int, most_bytes: int, *, ignored: int = 0) -> list[int]:
        """What is at hand of these, without waiting. The numbers of those of which there was something. Raises a
        ``KafkaException`` for a message that is an error, unless its code is ``ignored``."""
        if self._sources is None or buffers != self._buffers:
            self._buffers = list(buffers)
            self._sources = self._kafka.sources([buffer.source for buffer in buffers])
        try:
            numbers = self._sources.take(most, most_bytes, ignored=ignored)
        except (LookupError, OverflowError) as error:
            raise ProtocolViolation(f"the client has fetched {error}") from None
        for number in numbers:
            buffers[number].refresh()
        return numbers

    def wait(self, wait_s: float) -> None:
        """Until there is something in a queue, or a callback to serve."""
        self._waiter.wait(wait_s)

    def close(self) -> None:
        self._waiter.close()


def native_queues(consumer: client.Consumer) -> NativeQueues | None:
    """avow-native, if it can read from this consumer. To be asked once for each: what it has read of a partition, the
    consumer itself does not give any more."""
    if (library := native.library()) is None:
        return None
    from avow_native.kafka import bind

    kafka = bind(library, not_utf8=NOT_UTF8)
    if kafka is None or kafka.handle(consumer) is None or (waiter := kafka.waiter(consumer)) is None:
        return None
    return NativeQueues(consumer, kafka, waiter)


class RangesFetch(ABC):
    """Ranges of different partitions that are assigned to a consumer, which reports ends of partitions, until this is
    closed."""

    def __init__(self, consumer: client.Consumer, ranges: Ranges, buffers: Mapping[TopicPartition, Buffer]) -> None:
        self.ranges = ranges
        self._consumer = consumer
        self._buffers = buffers
        self.left = {tp for tp, range_ in ranges.items() if range_}  # more records of these may come
        consumer.assign([client.TopicPartition(tp.topic, tp.partition, r.start) for tp, r in ranges.items()])

    @property
    def count(self) -> int:
        """Records since they were last cut."""
        return sum(buffer.count for buffer in self._buffers.values())

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(buffer.size for buffer in self._buffers.values())

    @property
    def offsets_left(self) -> int:
        """How many offsets are still to come, at the most."""
        return sum(self.ranges[tp].until - self._buffers[tp].until for tp in self.left)

    def position(self, tp: TopicPartition) -> int:
        return self._buffers[tp].until

    def take(self, most: int, most_bytes: int, wait_s: float) -> bool:
        """Gather what is at hand, or comes in this time. Whether there was a record, or the end of a range. Raises
        ``KafkaException``."""
        left = self.offsets_left
        self._take(most, most_bytes, wait_s)
        # Before its end was planned from, the log may look shorter to one broker: then more will come.
        self.left -= {tp for tp in self.left if self._buffers[tp].until >= self.ranges[tp].until}
        return self.offsets_left < left

    @abstractmethod
    def _take(self, most: int, most_bytes: int, wait_s: float) -> None: ...

    def cut(self, tp: TopicPartition) -> pa.RecordBatch | None:
        return self._buffers[tp].cut()

    def close(self) -> None:
        try:
            self._consumer.unassign()
        finally:
            for buffer in self._buffers.values():
                buffer.close()


def open_fetch(consumer: client.Consumer, ranges: Ranges, queues: NativeQueues | None) -> RangesFetch:
    """Begin to read ranges."""
    return MessagesFetch(consumer, ranges) if queues is None else NativeFetch(consumer, ranges, queues)


class MessagesFetch(RangesFetch):
    """By the client's messages."""

    def __init__(self, consumer: client.Consumer, ranges: Ranges) -> None:
        buffers = {tp: MessageBuffer(tp, range_.start, range_.until) for tp, range_ in ranges.items()}
        self._by_place = {(tp.topic, tp.partition): buffer for tp, buffer in buffers.items()}
        super().__init__(consumer, ranges, buffers)

    def _take(self, most: int, most_bytes: int, wait_s: float) -> None:  # noqa: ARG002 - the client has no such bound
        messages = self._consumer.consume(most, wait_s)
        if any(map(client.Message.error, messages)):
            messages = self._without_errors(messages)
        # Of a single range they are its own, as ``as_batch`` makes sure.
        single = messages and len(self._by_place) == 1
        for place, of_partition in [(next(iter(self._by_place)), messages)] if single else groupby(messages, _place):
            if (buffer := self._by_place.get(place)) is None:
                raise ProtocolViolation(f"a record of {place} came, which is not read")
            records = list(of_partition)
            buffer.add(records, records[-1].offset() + 1)  # type: ignore[operator]

    def _without_errors(self, messages: list[client.Message]) -> list[client.Message]:
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(message)
            elif of_the_group(error):
                continue
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            elif (buffer := self._by_place.get(_place(message))) is not None:
                buffer.add([], message.offset() or 0)
        return records


def _place(message: client.Message) -> tuple[str, int]:
    return message.topic(), message.partition()  # type: ignore[return-value]


class NativeFetch(RangesFetch):
    """By avow-native."""

    def __init__(self, consumer: client.Consumer, ranges: Ranges, queues: NativeQueues) -> None:
        self._queues = queues
        buffers: dict[TopicPartition, NativeBuffer] = {}
        try:
            for tp, range_ in ranges.items():
                buffers[tp] = queues.buffer(tp, range_.start, range_.until)
            self._of_queues = list(buffers.values())
            super().__init__(consumer, ranges, buffers)
        except BaseException:
            for buffer in buffers.values():
                buffer.close()
            raise

    def _take(self, most: int, most_bytes: int, wait_s: float) -> None:
        if not self._take_at_hand(most, most_bytes):
            self._queues.wait(wait_s)
            self._take_at_hand(most, most_bytes)
        self._serve_callbacks()

    def _take_at_hand(self, most: int, most_bytes: int) -> bool:
        ignored = KafkaError.GROUP_AUTHORIZATION_FAILED  # see of_the_group
        return bool(self._queues.take(self._of_queues, most, most_bytes, ignored=ignored))

    def _serve_callbacks(self) -> None:
        for message in self._consumer.consume(SERVE, 0):
            error = message.error()
            if error is None:
                # librdkafka has forgotten the partition meanwhile, and with it where its records are to go.
                place = f"{message.topic()}-{message.partition()}"
                raise KafkaException(KafkaError(KafkaError._STATE, f"the client has lost its place in {place}"))
            if not of_the_group(error):
                raise KafkaException(error)
