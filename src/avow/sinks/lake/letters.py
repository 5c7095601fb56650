"""Dead letters as rows of a lake table of their own.

``redrive`` numbers the redrive that has taken a letter up: it is set before the letter's row enters the table of rows,
and the letter is removed after. What a crash in between leaves is settled by the number (``redriving``).

Owns: the rows' form. Must not know: any format.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from avow.sinks.base import GLIMPSE_BYTES, DeadLetter, Glimpse, Selection

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp_ms", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("run", pa.int64(), nullable=False),
        pa.field("died_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("redrive", pa.int64()),
    ]
)


def as_rows(letters: list[DeadLetter], run: int, now: datetime, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "topic": letter.topic,
                "partition": letter.partition,
                "offset": letter.offset,
                "timestamp_ms": letter.timestamp_ms,
                "key": letter.key,
                "value": letter.value,
                "headers": json.dumps(
                    [
                        [key, None if value is None else base64.b64encode(value).decode()]
                        for key, value in letter.headers
                    ]
                ),
                "reason": letter.reason,
                "detail": letter.detail,
                "run": run,
                "died_at": now,
                "redrive": None,
            }
            for letter in letters
        ],
        schema=schema,
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def from_rows(rows: pa.Table) -> list[DeadLetter]:
    return [
        DeadLetter(
            row["topic"],
            row["partition"],
            row["offset"],
            row["timestamp_ms"],
            row["key"],
            row["value"],
            [(key, None if value is None else base64.b64decode(value)) for key, value in json.loads(row["headers"])],
            row["reason"],
            row["detail"],
        )
        for row in rows.to_pylist()
    ]


# What counting and listing need: not the bytes of records.
LIGHT = [name for name in SCHEMA.names if name not in ("key", "value", "headers")]


def shortened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with ``LIGHT`` columns and ``value``, of which only the beginning and the size are kept."""
    value = batch["value"]
    columns = [batch[name] for name in LIGHT]
    sizes = pc.fill_null(pc.cast(pc.binary_length(value), pa.int64()), 0)
    return pa.RecordBatch.from_arrays(
        [*columns, pc.binary_slice(value, 0, GLIMPSE_BYTES), sizes], names=[*LIGHT, "head", "size"]
    )


def glimpses(rows: pa.Table) -> list[Glimpse]:
    names = ("topic", "partition", "offset", "timestamp_ms", "reason", "detail", "head", "size")
    return [Glimpse(*(row[name] for name in names)) for row in rows.select(names).to_pylist()]


def selected(rows: pa.Table, selection: Selection) -> pa.Table:
    """The rows that are meant, in order."""
    for column, compare, wanted in (
        ("reason", pc.equal, selection.reason),
        ("topic", pc.equal, selection.topic),
        ("partition", pc.equal, selection.partition),
        ("offset", pc.greater_equal, selection.from_offset),
        ("offset", pc.less, selection.until_offset),
        ("died_at", pc.greater_equal, selection.since),
        ("died_at", pc.less, selection.until),
    ):
        if wanted is not None:
            rows = rows.filter(compare(rows[column], pa.scalar(wanted, rows.schema.field(column).type)))
    return rows.sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])
