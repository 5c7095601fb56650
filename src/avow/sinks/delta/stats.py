"""Statistics of a data file as Delta's log has them, from the footer of the Parquet file.

Readers leave out files by these, so a wrong one loses rows silently: what cannot be said exactly is not said. Minimum
and maximum of texts may be cut, as long as they stay below and above; times are told in milliseconds, rounded outwards.

Owns: that mapping. Must not know: tables, commits.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow.parquet as pq

TEXT_CHARS_MAX = 32
_ABOVE_ALL = "\U0010ffff"  # sorts behind whatever was cut off
_MILLISECOND = timedelta(milliseconds=1)


def as_json(metadata: pq.FileMetaData, *, floats: bool) -> str:
    """``floats``: whether these are known to hold no NaN, which Parquet's statistics leave out."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in range(metadata.num_columns):
        name = metadata.schema.column(index).path
        if "." in name:
            continue  # nested: no reader of ours prunes by it
        found = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(one is None or not one.has_null_count for one in found):
            continue
        nulls[name] = sum(one.null_count for one in found)
        filled = [one for one in found if one.num_values]
        if not filled or not all(one.has_min_max for one in filled):
            continue
        low, high = _below(min(one.min for one in filled)), _above(max(one.max for one in filled))
        if high is not None and (isinstance(low, int | str) or (floats and isinstance(low, float))):
            least[name], greatest[name] = low, high
    told = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    return json.dumps(told)


def _below(value: Any) -> Any:
    match value:
        case str():
            return value[:TEXT_CHARS_MAX]
        case datetime():
            return _time(value - timedelta(microseconds=value.microsecond % 1_000))
        case date():
            return value.isoformat()
        case bool() | bytes() | Decimal():
            return None
    return value


def _above(value: Any) -> Any:
    match value:
        case str():
            if len(value) <= TEXT_CHARS_MAX:
                return value
            # Nothing that is short sorts behind the highest character of all.
            return None if value[TEXT_CHARS_MAX] == _ABOVE_ALL else value[:TEXT_CHARS_MAX] + _ABOVE_ALL
        case datetime():
            down = value - timedelta(microseconds=value.microsecond % 1_000)
            if down == value:
                return _time(value)
            try:
                return _time(down + _MILLISECOND)
            except OverflowError:
                return None
        case date():
            return value.isoformat()
        case bool() | bytes() | Decimal():
            return None
    return value


def _time(value: datetime) -> str:
    text = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    return text.isoformat(timespec="milliseconds") + ("Z" if value.tzinfo else "")
