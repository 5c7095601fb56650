"""The records of an offset range, as Arrow batches, straight from the broker into the task that needs them.

Theory of operation
-------------------
A task is given a range and reads it with librdkafka, by a consumer that is assigned and never subscribes. There is one
for each process, kept from task to task: a Spark worker lives through many, and a connection costs more than a small
range. A range has ended when a record beyond it comes, or the end of the partition does: its last offsets may be
markers or aborted records, which nobody sees.

Records become columns a few tens of thousands at a time. The client makes a Python object of each, and that is all that
is done for each: the columns are made of whole lists. A batch is bounded in records and in bytes, and so is what the
client fetches ahead, since at the end of a range that is thrown away.

Owns: reading a range. Must not know: what records mean, or where ranges come from. Its neighbour is ``log``, which
answers questions about the log and reads single records.
"""

from __future__ import annotations

import base64
import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from typing import Any

import confluent_kafka as client
import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError

from avow.client_cache import ClientCache
from avow.errors import ConfigError, ProtocolViolation, SourceError
from avow.kafka.connect import first_permanent, grant, is_permanent, made, of_the_group, settings_of, strike, words
from avow.kafka.headers import Headers, headers_of, size_of
from avow.ledger import OffsetRange
from avow.settings import Source, revealed

BATCH_RECORDS = 50_000
BATCH_BYTES = 16 * 1024 * 1024
TAKE_RECORDS = 10_000
TAKE_S = 0.1  # also bounds what comes in one take of large records
SILENCE_S = 30.0

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),  # as Kafka has it: in microseconds not every one fits
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS),
    ]
)

# The user's own win over these.
FETCH = {
    "fetch.wait.max.ms": 50,  # how late the end of a partition is told
    "fetch.queue.backoff.ms": 5,  # else a full queue rests for a second
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 32 * 1024,
    "check.crcs": True,
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
    """Reads ranges of one source, one after another."""

    def __init__(
        self, source: Source, group: str, *, silence_s: float = SILENCE_S, isolation: str = "read_committed"
    ) -> None:
        self._source = source
        self._silence_s = silence_s
        # librdkafka wants a group; nothing is committed to it from here.
        self._complaints: deque[KafkaError] = deque(maxlen=100)
        own = {"group.id": group, "isolation.level": isolation, "error_cb": self._complaints.append}
        settings = settings_of(source) | FETCH | revealed(source.kafka) | FIXED | own
        self._consumer = made(client.Consumer, settings, revealed(source.kafka))

    def close(self) -> None:
        self._consumer.close()

    def read(self, wanted: OffsetRange) -> Generator[pa.RecordBatch]:
        """The visible records of the range, in order. Nobody else may read from this reader meanwhile."""
        self._consumer.assign([client.TopicPartition(wanted.topic, wanted.partition, wanted.start)])
        try:
            pending: list[client.Message] = []
            size = 0
            for messages in self._takes(wanted):
                pending += messages
                size += sum(map(size_of, messages))
                if len(pending) >= BATCH_RECORDS or size >= BATCH_BYTES:
                    yield as_batch(wanted, pending)
                    pending, size = [], 0
            if pending:
                yield as_batch(wanted, pending)
        finally:
            self._consumer.unassign()

    def _takes(self, wanted: OffsetRange) -> Iterator[list[client.Message]]:
        """What the client has at a time, until the range has ended."""
        position = wanted.start
        heard_at = time.monotonic()
        while position < wanted.until:
            taken = self._consumer.consume(min(TAKE_RECORDS, wanted.until - position), TAKE_S)
            ended = False
            if any(map(client.Message.error, taken)):
                taken, ended = self._without_errors(taken, wanted)
            if not taken and not ended:
                if (complaint := first_permanent(c for c in self._complaints if not of_the_group(c))) is not None:
                    raise self._refusal(wanted, complaint)
                if time.monotonic() - heard_at > self._silence_s:
                    raise self._failure(wanted, f"nothing came for {self._silence_s:g} s at offset {position}")
                continue
            heard_at = time.monotonic()
            if taken:
                position = taken[-1].offset() + 1  # type: ignore[operator]
                if position > wanted.until:
                    taken = [message for message in taken if message.offset() < wanted.until]  # type: ignore[operator]
                yield taken
            if ended:
                return

    def _without_errors(self, taken: list[client.Message], wanted: OffsetRange) -> tuple[list[client.Message], bool]:
        """The records, and whether the range has ended with them."""
        records, ended = [], False
        for message in taken:
            error = message.error()
            if error is None:
                records.append(message)
            elif of_the_group(error):
                continue
            elif is_permanent(error):
                raise self._refusal(wanted, error)
            elif error.code() != KafkaError._PARTITION_EOF:
                raise self._failure(wanted, strike(revealed(self._source.kafka).values(), error.str()))
            else:
                # Before its end was planned from, the log may look shorter to one broker: then more will come.
                ended = ended or message.offset() >= wanted.until  # type: ignore[operator]
        return records, ended

    def _refusal(self, wanted: OffsetRange, error: KafkaError) -> ConfigError:
        said = strike(revealed(self._source.kafka).values(), words(error))
        return ConfigError(
            f"Kafka at {self._source.shown('brokers')} refuses to give {wanted}: {said}",
            advice=grant(error, topics=[wanted.topic]),
        )

    def _failure(self, wanted: OffsetRange, problem: str) -> SourceError:
        return SourceError(
            f"Kafka at {self._source.shown('brokers')} was asked for {wanted}: {problem}",
            advice="It is tried again from the ledger. If it stays so, check the brokers and the partition's leader.",
        )


_readers: ClientCache[tuple[Source, Reader]] = ClientCache(lambda kept: kept[1].close(), keep=1)


def reader(source: Source, group: str) -> Reader:
    """This thread's reader."""
    known, found = _readers.get("reader", lambda: (source, Reader(source, group)))
    if known != source:
        _readers.drop("reader")
        return reader(source, group)
    return found


def as_batch(wanted: OffsetRange, messages: list[client.Message]) -> pa.RecordBatch:
    """Messages of one partition as columns."""
    count = len(messages)
    places = set(zip(map(client.Message.topic, messages), map(client.Message.partition, messages), strict=True))
    if places != {(wanted.topic, wanted.partition)}:
        raise ProtocolViolation(f"records of {places} came for {wanted}")
    offsets = np.fromiter(map(client.Message.offset, messages), np.int64, count)
    stamps = np.fromiter([stamp for _, stamp in map(client.Message.timestamp, messages)], np.int64, count)
    topic = wanted.topic.encode()
    columns = [
        _binary(pa.string(), topic * count, np.full(count, len(topic))),
        _numbers(pa.int32(), np.full(count, wanted.partition, np.int32)),
        _numbers(pa.int64(), offsets),
        _numbers(pa.timestamp("ms", "UTC"), stamps),
        _binaries(list(map(client.Message.key, messages))),
        _binaries(list(map(client.Message.value, messages))),
        headers_column(list(map(headers_of, messages))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


# Columns are made from buffers: ``pa.array`` is slower, and imports pandas where it is installed, half a second for a
# worker's first task.


def _numbers(type_: pa.DataType, values: np.ndarray[Any, np.dtype[Any]]) -> pa.Array:
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def _binary(
    type_: pa.DataType, data: bytes, lengths: np.ndarray[Any, np.dtype[Any]], there: pa.Buffer | None = None
) -> pa.Array:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise ProtocolViolation(f"{ends[-1]} bytes of records in one batch")
    return pa.Array.from_buffers(type_, len(lengths), [there, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(data)])


def _binaries(values: list[bytes | None], type_: pa.DataType | None = None) -> pa.Array:
    type_ = type_ or pa.binary()
    nulls = values.count(None)
    if nulls == len(values):
        return pa.nulls(nulls, type_)
    filled: list[bytes] = [value or b"" for value in values] if nulls else values  # type: ignore[assignment]
    there = None
    if nulls:
        bits = np.fromiter([value is not None for value in values], np.bool_, len(values))
        there = pa.py_buffer(np.packbits(bits, bitorder="little"))
    return _binary(type_, b"".join(filled), np.fromiter(map(len, filled), np.int64, len(filled)), there)


def headers_column(headers: Sequence[Headers | None]) -> pa.Array:
    """A column of headers; null for a record that has none."""
    if not any(headers):
        return pa.nulls(len(headers), HEADERS)
    pairs = list(chain.from_iterable(one for one in headers if one))
    keys = _binaries([key.encode() for key, _ in pairs], pa.string())
    values = _binaries([value for _, value in pairs])
    both = pa.StructArray.from_arrays([keys, values], names=["key", "value"])
    ends = np.zeros(len(headers) + 1, np.int64)
    np.cumsum(np.fromiter([len(one or ()) for one in headers], np.int64, len(headers)), out=ends[1:])
    there = pa.py_buffer(np.packbits(np.fromiter(map(bool, headers), np.bool_, len(headers)), bitorder="little"))
    buffers = [there, pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(HEADERS, len(headers), buffers, children=[both])


def headers_to_text(headers: pa.Array) -> pa.Array:
    """A column of headers as JSON text, in which it goes through Spark's JVM: over a nested column Spark 4.1 recounts
    its whole batch for every row it adds."""
    if headers.null_count == len(headers):
        return pa.nulls(len(headers), pa.string())
    texts = [
        None
        if pairs is None
        else json.dumps(
            [
                {"k": pair["key"]} | ({} if pair["value"] is None else {"v": base64.b64encode(pair["value"]).decode()})
                for pair in pairs
            ]
        )
        for pairs in headers.to_pylist()
    ]
    return pa.array(texts, pa.string())


def headers_from_text(texts: pa.Array) -> pa.Array:
    """The same column back. Spark's own ``to_json`` leaves a null value out as this does."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), HEADERS)
    return headers_column(
        [
            [(pair["k"], base64.b64decode(pair["v"]) if "v" in pair else None) for pair in json.loads(text)]
            if text
            else None
            for text in texts.to_pylist()
        ]
    )
