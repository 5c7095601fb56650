"""Dead letters as rows of a lake table of their own.

``redrive`` numbers the redrive that has taken a letter up: it is set before the letter's row enters the table of rows,
and the letter is removed after. What a crash in between leaves is settled by the number (``redriving``).

Owns: the rows' form. Must not know: any format.
"""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from avow.sinks.base import (
    DEAD_LETTER_COLUMNS,
    PREVIEW_BYTES,
    DeadLetter,
    DeadLetterPreview,
    Selection,
    dead_letter_of,
    dead_letter_values,
)

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


def as_rows(dead_letters: list[DeadLetter], run: int, now: datetime, schema: pa.Schema) -> pa.RecordBatch:
    more = {"run": run, "died_at": now, "redrive": None}
    return pa.RecordBatch.from_pylist([dead_letter_values(one) | more for one in dead_letters], schema=schema)


def from_rows(rows: pa.Table) -> list[DeadLetter]:
    return [dead_letter_of([*row.values()]) for row in rows.select(DEAD_LETTER_COLUMNS).to_pylist()]


# What counting and listing need: not the bytes of records.
SUMMARY_COLUMNS = [name for name in SCHEMA.names if name not in ("key", "value", "headers")]


def preview_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with ``SUMMARY_COLUMNS`` columns and ``value``, of which only the beginning and the size are kept."""
    value = batch["value"]
    sizes = pc.fill_null(pc.cast(pc.binary_length(value), pa.int64()), 0)
    heads = pc.binary_slice(value, 0, PREVIEW_BYTES)
    return batch.select(SUMMARY_COLUMNS).append_column("head", heads).append_column("size", sizes)


def previews(rows: pa.Table) -> list[DeadLetterPreview]:
    names = ("topic", "partition", "offset", "timestamp_ms", "reason", "detail", "head", "size")
    return [DeadLetterPreview(*(row[name] for name in names)) for row in rows.select(names).to_pylist()]


def selected(rows: pa.Table, selection: Selection) -> pa.Table:
    """The rows that are meant, in order."""
    compare = {"=": pc.equal, ">=": pc.greater_equal, "<": pc.less}
    for column, compared, wanted in selection.conditions():
        rows = rows.filter(compare[compared](rows[column], pa.scalar(wanted, rows.schema.field(column).type)))
    return rows.sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])
