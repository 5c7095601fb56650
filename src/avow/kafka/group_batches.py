"""A member of a consumer group that gathers its records into Arrow batches, by partition, until they are wanted.

There are two ways, as in ``fetch``, and both give the same batches. By avow-native, the client's own queue has only
callbacks and errors, so that records can also be gathered without serving callbacks (``gather_more``): while a batch is
delivered by other threads, no partition is taken away.

Owns: what was fetched and not passed on. Must not know: what is done with it. Its neighbours are ``group``, the
membership, and the consumer engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import confluent_kafka as client
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from avow import native
from avow.kafka.fetch import SERVE, Buffer, MessageBuffer, NativeBuffer, native_queues
from avow.kafka.group import GroupMember, Positions
from avow.kafka.metadata import TopicPartition
from avow.kafka.reader import TAKE_RECORDS

# What all partitions together may have waiting in the client. A queue of its own for each would else multiply them.
QUEUED_RECORDS = 200_000
QUEUED_KBYTES = 64 * 1024
FETCH_BYTES = 16 * 1024 * 1024


def fetch_limits(partitions: int) -> dict[str, Any]:
    """Client settings with which a member of so many partitions fetches ahead, and not more than memory allows."""
    if native.library() is None:
        return {}
    each = max(1, partitions)
    return {
        "queued.min.messages": min(50_000, max(1_000, QUEUED_RECORDS // each)),
        "queued.max.messages.kbytes": max(64, QUEUED_KBYTES // each),
        "max.partition.fetch.bytes": min(1024 * 1024, max(64 * 1024, FETCH_BYTES // each)),
    }


@dataclass(frozen=True, slots=True)
class Gathered:
    """The records of one partition up to an offset; none if there are only markers and aborted ones."""

    until: int
    records: pa.RecordBatch | None


class BatchMember(GroupMember):
    """One membership. Its records are gathered, and not taken (``take``) as those of a ``GroupMember``."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._buffers: dict[TopicPartition, Buffer] = {}
        self._queues = native_queues(self._client)

    def close(self) -> None:
        self._forget(list(self._buffers))
        if self._queues is not None:
            self._queues.close()
        super().close()

    @property
    def is_native(self) -> bool:
        return self._queues is not None

    @property
    def count(self) -> int:
        """Records that are gathered."""
        return sum(buffer.count for buffer in self._buffers.values())

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(buffer.size for buffer in self._buffers.values())

    @property
    def partitions_gathered(self) -> int:
        """In how many partitions there are records, or offsets that hold none."""
        return sum(buffer.until > buffer.start for buffer in self._buffers.values())

    def gather(self, most: int, most_bytes: int, wait_s: float) -> None:
        """What is at hand; where there is nothing, what comes next. Partitions come and go meanwhile."""
        if self._queues is None:
            for fetched in self.take(min(most, TAKE_RECORDS), wait_s):
                buffer = self._buffers[fetched.tp]
                assert isinstance(buffer, MessageBuffer)
                buffer.add(fetched.messages, fetched.until)
            return
        self.before_take()
        self._serve_callbacks()
        if self._take_natively(most, most_bytes):
            return
        self._queues.wait(wait_s)
        self._serve_callbacks()
        if not self._take_natively(most, most_bytes):
            self.raise_permanent()

    def gather_more(self, most: int, most_bytes: int) -> None:
        """What is at hand, with no callback served: no partition comes or goes. Natively alone; else nothing."""
        if self._queues is not None:
            self._take_natively(most, most_bytes)

    def cut(self) -> dict[TopicPartition, Gathered]:
        """All that was gathered. It is not kept."""
        return {
            tp: Gathered(buffer.until, buffer.cut())
            for tp, buffer in self._buffers.items()
            if buffer.until > buffer.start
        }

    # Partitions come, go, and are read from elsewhere

    def _opened(self, consumer: client.Consumer, positions: Positions) -> None:  # noqa: ARG002 - it is our client
        for tp, position in positions.items():
            queues = self._queues
            self._buffers[tp] = MessageBuffer(tp, position) if queues is None else queues.buffer(tp, position)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            buffer = self._buffers.pop(tp, None)
            if buffer is not None:
                buffer.close()

    def _moved(self, tp: TopicPartition, position: int) -> None:
        if self._buffers[tp].until != position:
            self._buffers[tp].restart(position)

    # By avow-native

    def _serve_callbacks(self) -> None:
        for message in self._client.consume(SERVE, 0):
            tp = TopicPartition(message.topic() or "", message.partition() or 0)
            if message.topic() is None:
                self._raise_error(message.error())
            elif tp in self._next:
                # librdkafka has forgotten the partition meanwhile, and with it where its records are to go.
                lost = KafkaError(KafkaError._STATE, f"the client has lost its place in {tp}")
                raise self.failure(message.error() or lost)

    def _take_natively(self, most: int, most_bytes: int) -> bool:
        """Whether there was anything: a record, or the end of a partition."""
        assert self._queues is not None
        # One that is astray is not read until the client has sought.
        reading = [
            (tp, buffer)
            for tp, buffer in self._buffers.items()
            if tp in self._next and tp not in self._astray and isinstance(buffer, NativeBuffer)
        ]
        try:
            numbers = self._queues.take([buffer for _, buffer in reading], most, most_bytes)
        except KafkaException as error:
            raise self.failure(error.args[0]) from None
        for number in numbers:
            tp, buffer = reading[number]
            self._next[tp] = buffer.until
        return bool(numbers)
