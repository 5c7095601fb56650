"""Rows as output records: topic, key, value, headers, timestamp.

Without a transform a record goes out with the bytes it came with. With one, the value is the row's columns as a JSON
object. The output topic is declared: a name, or a template whose braces name columns, and then only topics of
``sink.routes`` are written to. What cannot go out is named by its row, with the reason, before anything is sent.

Owns: that mapping. Must not know: clients, transactions. Its neighbours are ``task``, which sends what this gives, and
``avow.audit``, which asks it what should be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow.errors import ConfigError
from avow.kafka.batches import HEADERS
from avow.kafka.headers import CHECKSUM
from avow.settings import PipelineConfig
from avow.sinks import json as as_json
from avow.sinks.kafka.clients import TopicLimits
from avow.sinks.kafka.config import KafkaConfig, config_of

ORIGIN = "avow-origin"  # the header that carries a record's identity: topic/partition/offset
REDRIVEN = "avow-redriven"  # and the one of records that were dead letters: they come late, out of their order
Headers = list[tuple[str, bytes | str | None]]

# A record's own framing in a batch, and the batch's: varints, attributes, counts. Generously.
FRAMING_BYTES = 128
HEADER_FRAMING_BYTES = 16
CLOCKS_APART_MS = 10_000  # ours and the broker's
_POWERS_OF_TEN = 10 ** np.arange(1, 19, dtype=np.int64)

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Origins:
    """The text of each record's origin: a prefix that they share, and the offset."""

    prefix: str
    offsets: Numbers


@dataclass(slots=True)
class Messages:
    """Output records as columns, a place in each."""

    topics: list[str]
    routes: npt.NDArray[np.int32]  # which of the topics; -1: none, and the record is refused
    keys: pa.Array  # bytes
    values: pa.Array  # bytes
    headers: pa.Array  # HEADERS, as they came with the record
    timestamps_ms: Numbers  # 0: the producer's own time
    # Headers of ours, after those:
    redriven: bool = False
    origins: Origins | None = None
    refused: dict[int, str] = field(default_factory=dict)  # row -> why

    @property
    def has_headers(self) -> bool:
        """Whether any came with a record."""
        return bool(self.headers.null_count < len(self.headers))

    def topic_list(self) -> list[str | None]:
        return [self.topics[route] if route >= 0 else None for route in self.routes.tolist()]

    def header_lists(self) -> list[Headers]:
        """All headers of each record."""
        own: Headers = [(REDRIVEN, "1")] if self.redriven else []
        lists = self.headers.to_pylist() if self.has_headers else [None] * len(self.headers)
        if self.origins is None:
            return [[*_pairs(pairs), *own] for pairs in lists]
        prefix = self.origins.prefix
        return [
            [*_pairs(pairs), *own, (ORIGIN, f"{prefix}{offset}")] if pairs or own else [(ORIGIN, f"{prefix}{offset}")]
            for offset, pairs in zip(self.origins.offsets.tolist(), lists, strict=True)
        ]

    def sizes(self) -> Numbers:
        """Of each record what ``record_bytes`` says of one."""
        sizes = _lengths(self.keys) + _lengths(self.values) + FRAMING_BYTES
        if self.has_headers:
            pairs, ends = self.headers.values, self.headers.offsets.to_numpy()
            names, values = pc.utf8_length(pairs.field("key")).fill_null(0), _lengths(pairs.field("value"))
            sums = _running(names.to_numpy() * 4 + values + HEADER_FRAMING_BYTES)
            sizes += (sums[ends[1:]] - sums[ends[:-1]]) * self.headers.is_valid().to_numpy(zero_copy_only=False)
        if self.redriven:
            sizes += _headers_size([(REDRIVEN, "1")])
        if self.origins is not None:
            digits = np.searchsorted(_POWERS_OF_TEN, self.origins.offsets, side="right") + 1
            sizes += _headers_size([(ORIGIN, self.origins.prefix)]) + digits
        return sizes


def output_topics(sink: KafkaConfig, source_topics: Iterable[str]) -> list[str]:
    """Every topic that rows may go to."""
    if sink.routes:
        return sorted(sink.routes)
    return sorted({sink.topic.format_map({sink.lineage.topic: topic}) for topic in source_topics})


def origin(topic: str, partition: int, offset: int) -> str:
    return f"{topic}/{partition}/{offset}"


def read_origin(text: bytes | str) -> tuple[str, int, int] | None:
    """Topic, partition and offset, or None if it is not such a text."""
    origin_text = text.decode(errors="replace") if isinstance(text, bytes) else text
    topic, _, rest = origin_text.partition("/")
    partition, _, offset = rest.partition("/")
    if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        return None
    return topic, int(partition), int(offset)


class RecordMapper:
    """Turns rows of one pipeline into output records."""

    def __init__(self, pipeline: PipelineConfig, *, redriven: bool = False) -> None:
        self._sink = config_of(pipeline)
        self._redriven = redriven
        self._ours = {*self._sink.lineage, *pipeline.carried.values()}
        self._carried = pipeline.carried
        self._routed = self._sink.routed_by

    @property
    def _untouched(self) -> bool:
        """Whether records go out with the value they came with."""
        return self._sink.value_column is None and "value" in self._carried

    def messages(self, rows: pa.RecordBatch) -> Messages:
        """All of these rows. They are of one partition."""
        values, refused = self._values(rows)
        topics, routes, astray = self._topics(rows)
        return Messages(
            topics,
            routes,
            self._column(rows, self._sink.key_column or self._carried["key"]),
            values,
            self._headers(rows),
            self._timestamps(rows),
            self._redriven,
            self._origins(rows),
            refused | astray,
        )

    def _values(self, rows: pa.RecordBatch) -> tuple[pa.Array, dict[int, str]]:
        if self._sink.value_column is not None:
            return self._column(rows, self._sink.value_column), {}
        if self._untouched:
            return self._column(rows, self._carried["value"]), {}
        payload = rows.select([name for name in rows.schema.names if name not in self._ours])
        values, refused = as_json.objects(payload)
        # A null value is passed on as one, whatever the transform made of its columns.
        gone = rows.column(self._carried["tombstone"])
        if pc.any(gone).as_py():
            values = pc.if_else(gone, None, values)
            refused = {row: why for row, why in refused.items() if not gone[row].as_py()}
        return values, refused

    def _column(self, rows: pa.RecordBatch, name: str) -> pa.Array:
        if name not in rows.schema.names:
            raise ConfigError(f"sink: there is no column {name!r}", advice="Name a column of the transform's result.")
        column = rows.column(name)
        if not (pa.types.is_binary(column.type) or pa.types.is_string(column.type)):
            raise ConfigError(
                f"sink: column {name!r} is {column.type}, and a key or value is bytes or text",
                advice="Cast it in the transform: CAST(id AS STRING).",
            )
        return column.cast(pa.binary())

    def _topics(self, rows: pa.RecordBatch) -> tuple[list[str], npt.NDArray[np.int32], dict[int, str]]:
        if not self._routed:
            return [self._sink.topic], np.zeros(rows.num_rows, np.int32), {}
        columns = [rows.column(name) for name in self._routed]
        first, combinations = _combinations(columns)
        topics: dict[str, int] = {}
        routes, astray = [], []
        for row in first.tolist():
            by_name = dict(zip(self._routed, (column[row].as_py() for column in columns), strict=True))
            topic = self._sink.topic.format_map(by_name)
            permitted = None not in by_name.values() and (not self._sink.routes or topic in self._sink.routes)
            routes.append(topics.setdefault(topic, len(topics)) if permitted else -1)
            values = ", ".join(f"{name} = {value!r}" for name, value in by_name.items())
            astray.append(f"no topic of sink.routes is meant: {values}")
        of_rows = np.array(routes, np.int32)[combinations]
        refused = {row: astray[combinations[row]] for row in np.flatnonzero(of_rows < 0).tolist()}
        return list(topics), of_rows, refused

    def _headers(self, rows: pa.RecordBatch) -> pa.Array:
        if self._sink.headers == "drop":
            return pa.nulls(rows.num_rows, HEADERS)
        name = self._carried["headers"]
        headers = rows.column(name)
        if headers.type != HEADERS:
            try:
                headers = headers.cast(HEADERS)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
                raise ConfigError(
                    f"sink: column {name!r} is {headers.type}, and headers are a list of structs with key and value",
                    advice="Cast it in the transform: the key is text, the value bytes.",
                ) from None
        # A value that is made here is not the one whose checksum came with the record.
        return headers if self._untouched else _without(headers, CHECKSUM)

    def _origins(self, rows: pa.RecordBatch) -> Origins | None:
        if not self._sink.origin or not rows.num_rows:
            return None
        topic, partition, offset, _ = self._sink.lineage
        prefix = origin(rows.column(topic)[0].as_py(), rows.column(partition)[0].as_py(), 0)[:-1]
        return Origins(prefix, rows.column(offset).to_numpy())

    def _timestamps(self, rows: pa.RecordBatch) -> Numbers:
        if self._sink.timestamps == "now":
            return np.zeros(rows.num_rows, np.int64)
        column = rows.column(self._sink.lineage.timestamp).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        # A record without a timestamp has -1; librdkafka takes 0 for "now".
        stamps: Numbers = np.maximum(column.fill_null(0).to_numpy(), 0)
        return stamps


def _combinations(columns: list[pa.Array]) -> tuple[Numbers, Numbers]:
    """Rows with the same values have the same number. Of each number the first row, of each row the number."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = numbers * len(encoded.dictionary) + encoded.indices.to_numpy()
        _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
    return first, numbers


def _without(headers: pa.ListArray, name: str) -> pa.ListArray:
    """Headers without those of a name."""
    pairs = headers.values
    kept = pc.fill_null(pc.not_equal(pairs.field("key"), name), True)
    if pc.all(kept, min_count=0).as_py():
        return headers
    ends = _running(kept.to_numpy(zero_copy_only=False))[headers.offsets.to_numpy()]
    ends = pa.array(ends.astype(np.int32))
    return pa.ListArray.from_arrays(ends, pairs.filter(kept), type=HEADERS, mask=headers.is_null())


def _pairs(pairs: list[dict[str, Any]] | None) -> Headers:
    return [(pair["key"], pair["value"]) for pair in pairs or ()]


def _running(values: npt.NDArray[Any]) -> Numbers:
    """The sums of the first none, one, two and so on."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _lengths(column: pa.Array) -> Numbers:
    """How many bytes; a null has none."""
    lengths: Numbers = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return lengths


def refuse_unfit(messages: Messages, limits: Mapping[str, TopicLimits]) -> None:
    """Set aside what the topics would refuse. In a transaction one refused record would take all others with it."""
    now_ms = time.time() * 1000
    sizes = messages.sizes()
    for route, topic in enumerate(messages.topics):
        ours = messages.routes == route
        for unfit, why in _checks(messages, sizes, limits[topic], now_ms):
            for row in np.flatnonzero(unfit & ours).tolist():
                messages.refused.setdefault(row, f"topic {topic}: {why(row)}")


def _checks(
    messages: Messages, sizes: Numbers, limit: TopicLimits, now_ms: float
) -> Iterator[tuple[npt.NDArray[np.bool_], Callable[[int], str]]]:
    """Which rows a topic does not take, and why not; the first reason counts."""
    stamps, policy, most = messages.timestamps_ms, limit.cleanup_policy, limit.message_bytes_max
    if limit.compacted:
        keyless = messages.keys.is_null().to_numpy(zero_copy_only=False)
        yield keyless, lambda _: f"it has no key, and a compacted topic takes none without (cleanup.policy is {policy})"
    yield sizes > most, lambda row: f"{sizes[row]:,} bytes before compression, and max.message.bytes is {most:,}"
    ahead = stamps > now_ms + limit.after_max_ms - CLOCKS_APART_MS
    yield ahead, lambda row: f"the timestamp {stamps[row]} lies too far ahead (message.timestamp.after.max.ms)"
    back = (stamps > 0) & (stamps < now_ms - limit.before_max_ms + CLOCKS_APART_MS)
    yield back, lambda row: f"the timestamp {stamps[row]} lies too far back (message.timestamp.before.max.ms)"


def record_bytes(key: bytes | str | None, value: bytes | None, headers: Headers) -> int:
    """What a record needs in a batch, before compression and rather too much."""
    return len(key or b"") + len(value or b"") + _headers_size(headers) + FRAMING_BYTES


def _headers_size(headers: Headers) -> int:
    return sum(len(name) * 4 + len(value or b"") + HEADER_FRAMING_BYTES for name, value in headers)
