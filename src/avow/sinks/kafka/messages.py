"""Rows as output records: topic, key, value, headers, timestamp.

Without a transform a record goes out with the bytes it came with. With one, the value is the row's columns as a JSON
object. The output topic is declared: a name, or a template whose braces name columns, and then only topics of
``sink.routes`` are written to. What cannot go out is named by its row, with the reason, before anything is sent.

Owns: that mapping. Must not know: clients, transactions. Its neighbours are ``task``, which sends what this gives, and
``avow.audit``, which asks it what should be there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.errors import ConfigError
from avow.kafka.headers import CHECKSUM
from avow.settings import PipelineConfig
from avow.sinks import json as as_json
from avow.sinks.kafka.clients import Limits
from avow.sinks.kafka.config import KafkaConfig

ORIGIN = "avow-origin"  # the header that carries a record's identity: topic/partition/offset
REDRIVEN = "avow-redriven"  # and the one of records that were dead letters: they come late, out of their order
Headers = list[tuple[str, bytes | str | None]]

# A record's own framing in a batch, and the batch's: varints, attributes, counts. Generously.
FRAMING_BYTES = 128
HEADER_FRAMING_BYTES = 16
CLOCKS_APART_MS = 10_000  # ours and the broker's


@dataclass(slots=True)
class Messages:
    """Output records, each a place in every list."""

    topics: list[str | None]  # None: refused
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]
    timestamps_ms: list[int]  # 0: the producer's own time
    refused: dict[int, str] = field(default_factory=dict)  # row -> why


def output_topics(sink: KafkaConfig, source_topics: Iterable[str]) -> list[str]:
    """Every topic that rows may go to."""
    if sink.routes:
        return sorted(sink.routes)
    return sorted({sink.topic.format_map({sink.lineage[0]: topic}) for topic in source_topics})


def origin(topic: str, partition: int, offset: int) -> str:
    return f"{topic}/{partition}/{offset}"


def read_origin(text: bytes | str) -> tuple[str, int, int] | None:
    """Topic, partition and offset, or None if it is not such a text."""
    said = text.decode(errors="replace") if isinstance(text, bytes) else text
    topic, _, rest = said.partition("/")
    partition, _, offset = rest.partition("/")
    if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        return None
    return topic, int(partition), int(offset)


class Mapper:
    """Turns rows of one pipeline into output records."""

    def __init__(self, pipeline: PipelineConfig, *, redriven: bool = False) -> None:
        assert isinstance(pipeline.sink, KafkaConfig)
        self._sink = pipeline.sink
        self._own: Headers = [(REDRIVEN, "1")] if redriven else []
        self._ours = {*pipeline.sink.lineage, *pipeline.carried.values()}
        self._carried = pipeline.carried
        self._routed = pipeline.sink.routed_by
        # A value that is made here is not the one whose checksum came with the record.
        self._dropped: frozenset[str] = frozenset() if self._untouched else frozenset({CHECKSUM})

    @property
    def _untouched(self) -> bool:
        """Whether records go out with the value they came with."""
        return self._sink.value_column is None and "value" in self._carried

    def messages(self, rows: pa.RecordBatch) -> Messages:
        """All of these rows. They are of one partition."""
        values, refused = self._values(rows)
        topics, astray = self._topics(rows)
        return Messages(
            topics,
            self._column(rows, self._sink.key_column or self._carried["key"]).to_pylist(),
            values.to_pylist(),
            self._headers(rows),
            self._timestamps(rows),
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

    def _topics(self, rows: pa.RecordBatch) -> tuple[list[str | None], dict[int, str]]:
        if not self._routed:
            return [self._sink.topic] * rows.num_rows, {}
        template, allowed = self._sink.topic, frozenset(self._sink.routes)
        columns = [rows.column(name).to_pylist() for name in self._routed]
        known: dict[tuple[Any, ...], str | None] = {}
        topics: list[str | None] = []
        refused: dict[int, str] = {}
        for row, said in enumerate(zip(*columns, strict=True)):
            if said not in known:
                named = template.format_map(dict(zip(self._routed, said, strict=True)))
                known[said] = named if None not in said and (not allowed or named in allowed) else None
            if known[said] is None:
                values = ", ".join(f"{name} = {value!r}" for name, value in zip(self._routed, said, strict=True))
                refused[row] = f"no topic of sink.routes is meant: {values}"
            topics.append(known[said])
        return topics, refused

    def _headers(self, rows: pa.RecordBatch) -> list[Headers]:
        sink = self._sink
        column = rows.column(self._carried["headers"])
        kept: Sequence[list[dict[str, Any]] | None] = [None] * rows.num_rows
        if sink.headers == "keep" and column.null_count < len(column):
            kept = column.to_pylist()
        if not sink.origin:
            return [[*self._pairs(given), *self._own] for given in kept]
        if not rows.num_rows:
            return []
        topic, partition, offset, _ = sink.lineage
        before = origin(rows.column(topic)[0].as_py(), rows.column(partition)[0].as_py(), 0)[:-1]
        offsets = rows.column(offset).to_pylist()
        return [
            [*self._pairs(given), *self._own, (ORIGIN, f"{before}{number}")]
            if given or self._own
            else [(ORIGIN, f"{before}{number}")]
            for number, given in zip(offsets, kept, strict=True)
        ]

    def _pairs(self, given: list[dict[str, Any]] | None) -> Headers:
        return [(pair["key"], pair["value"]) for pair in given or () if pair["key"] not in self._dropped]

    def _timestamps(self, rows: pa.RecordBatch) -> list[int]:
        if self._sink.timestamps == "now":
            return [0] * rows.num_rows
        column = rows.column(self._sink.lineage[3]).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        # A record without a timestamp has -1; librdkafka takes 0 for "now".
        return [0 if ms is None or ms < 0 else ms for ms in column.to_pylist()]


def refuse_unfit(messages: Messages, limits: Mapping[str, Limits]) -> None:
    """Set aside what the topics would refuse. In a transaction one refused record would take all others with it."""
    sizes = np.fromiter(map(_size, messages.keys), np.int64) + np.fromiter(map(_size, messages.values), np.int64)
    now_ms = time.time() * 1000
    smallest = min(limit.message_bytes_max for limit in limits.values())
    headers_bytes = 0 if not messages.headers else max(map(_headers_size, messages.headers))
    stamps = messages.timestamps_ms
    latest = now_ms + min(limit.after_max_ms for limit in limits.values()) - CLOCKS_APART_MS
    earliest = now_ms - min(limit.before_max_ms for limit in limits.values()) + CLOCKS_APART_MS
    in_size = not len(sizes) or int(sizes.max()) + headers_bytes + FRAMING_BYTES <= smallest
    in_time = not stamps or (max(stamps) <= latest and min((s for s in stamps if s), default=now_ms) >= earliest)
    keyed = not any(limit.compacted for limit in limits.values()) or None not in messages.keys
    if in_size and in_time and keyed:
        return
    for row, topic in enumerate(messages.topics):
        if topic is None or row in messages.refused:
            continue
        size = record_bytes(messages.keys[row], messages.values[row], messages.headers[row])
        why = _why_not(messages.keys[row], size, stamps[row], now_ms, limits[topic])
        if why:
            messages.refused[row] = f"topic {topic}: {why}"


def _why_not(key: bytes | None, size: int, stamp: int, now_ms: float, limit: Limits) -> str:
    if key is None and limit.compacted:
        return f"it has no key, and a compacted topic takes none without (cleanup.policy is {limit.cleanup_policy})"
    if size > limit.message_bytes_max:
        return f"{size:,} bytes before compression, and max.message.bytes is {limit.message_bytes_max:,}"
    if stamp and stamp > now_ms + limit.after_max_ms - CLOCKS_APART_MS:
        return f"the timestamp {stamp} lies too far ahead (message.timestamp.after.max.ms)"
    if stamp and stamp < now_ms - limit.before_max_ms + CLOCKS_APART_MS:
        return f"the timestamp {stamp} lies too far back (message.timestamp.before.max.ms)"
    return ""


def record_bytes(key: bytes | str | None, value: bytes | None, headers: Headers) -> int:
    """What a record needs in a batch, before compression and rather too much."""
    return len(key or b"") + _size(value) + _headers_size(headers) + FRAMING_BYTES


def _size(part: bytes | None) -> int:
    return len(part) if part else 0


def _headers_size(headers: Headers) -> int:
    return sum(len(name) * 4 + len(value or b"") + HEADER_FRAMING_BYTES for name, value in headers)
