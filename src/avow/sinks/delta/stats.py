"""Statistics of a data file as Delta's log has them, from the footer of the Parquet file.

Readers leave out files by these, so a wrong one loses rows silently. A missing one does so too: where a file has any
least and greatest values, deltalake's datasets take a column without them for null (1.6.6) and leave its rows out. So
either every plain column has both, or the file has none at all. Texts may be cut, as long as they stay below and above;
times are in milliseconds, rounded outwards.

Owns: that mapping. Must not know: tables, commits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from avow.sinks.lake.files import HIGHEST, TEXT_MAX

TEXT_CHARS_MAX = len(TEXT_MAX)
_MILLISECOND = timedelta(milliseconds=1)


def as_json(metadata: pq.FileMetaData, *, bounded: bool) -> str:
    """``bounded``: whether every value has bounds (``lake.files``)."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    fields = metadata.schema.to_arrow_schema()
    for index in range(metadata.num_columns):
        name, *parts = metadata.schema.column(index).path.split(".")
        type_ = fields.field(name).type
        if pa.types.is_struct(type_):
            least[name] = greatest[name] = {}  # nothing is said of its parts, and it is not null for that
        if parts:
            continue
        statistics = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(one is None or not one.has_null_count for one in statistics):
            bounded = False
            continue
        nulls[name] = sum(one.null_count for one in statistics)
        filled = [one for one in statistics if one.num_values]
        if not filled or pa.types.is_binary(type_):
            continue
        low: Any
        high: Any
        if all(one.has_min_max for one in filled):
            low, high = below(min(one.min for one in filled)), above(max(one.max for one in filled))
        else:  # Arrow has no statistics of texts beyond 4 KiB
            low, high = ("", TEXT_MAX) if pa.types.is_string(type_) else (None, None)
        if low is None or high is None:
            bounded = False
        least[name], greatest[name] = low, high
    bounds = f', "minValues": {_object(least)}, "maxValues": {_object(greatest)}' if bounded else ""
    return f'{{"numRecords": {metadata.num_rows}{bounds}, "nullCount": {_object(nulls)}}}'


def _object(values: Mapping[str, Any]) -> str:
    """As JSON, with decimals as numbers of all their digits."""
    texts = (f"{value:f}" if isinstance(value, Decimal) else json.dumps(value) for value in values.values())
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in zip(values, texts, strict=True)) + "}"


def below(value: Any) -> Any:
    """A bound that the log can have, at or below a value; None if there is none."""
    match value:
        case str():
            return value[:TEXT_CHARS_MAX]
        case datetime():
            return _time(value - timedelta(microseconds=value.microsecond % 1_000))
        case date():
            return value.isoformat()
        case float():
            return value if math.isfinite(value) else None
    return value


def above(value: Any) -> Any:
    """A bound that the log can have, at or above a value; None if there is none."""
    match value:
        case str():
            if len(value) <= TEXT_CHARS_MAX:
                return value
            if value[TEXT_CHARS_MAX] != HIGHEST:
                return value[:TEXT_CHARS_MAX] + HIGHEST
            return None if value.startswith(TEXT_MAX) else TEXT_MAX
        case datetime():
            down = value - timedelta(microseconds=value.microsecond % 1_000)
            try:
                return _time(down if down == value else down + _MILLISECOND)
            except OverflowError:
                return _time(down)  # the last millisecond of year 9999: readers take it for the whole of it
        case date():
            return value.isoformat()
        case float():
            return value if math.isfinite(value) else None
    return value


def _time(value: datetime) -> str:
    text = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    return text.isoformat(timespec="milliseconds") + ("Z" if value.tzinfo else "")
