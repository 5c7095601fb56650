"""Rows as JSON, for sinks that keep text: exact, column by column, without a Python object per value where it can be.

Numbers keep their digits, a float has the fewest that say which one it is, bytes are base64, times are RFC 3339. What
JSON has no word for (NaN, infinity), at any depth, is not written as something else: ``objects`` names the rows.

Owns: that spelling. Must not know: any sink. It is what ``avow.formats.json`` reads back.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_TO_ESCAPE = r'[\x00-\x1f"\\]'


class NotJson(ValueError):
    """JSON has no word for a value."""


def value_text(value: Any, type_: pa.DataType) -> str:
    """One value, or ``NotJson``."""
    if value is None:
        return "null"
    if pa.types.is_list(type_):
        return "[" + ",".join(value_text(item, type_.value_type) for item in value) + "]"
    if pa.types.is_map(type_):
        return "{" + ",".join(f"{json.dumps(k)}:{value_text(v, type_.item_type)}" for k, v in value) + "}"
    if pa.types.is_struct(type_):
        members = (f"{json.dumps(f.name)}:{value_text(value[f.name], f.type)}" for f in type_.fields)
        return "{" + ",".join(members) + "}"
    if pa.types.is_binary(type_):
        return json.dumps(base64.b64encode(value).decode())
    if pa.types.is_decimal(type_):
        return str(value)
    if pa.types.is_temporal(type_):
        return json.dumps(value.isoformat())
    if pa.types.is_floating(type_):
        if not math.isfinite(value):
            raise NotJson(f"JSON cannot represent {value}")
        return str(np.float32(value)) if pa.types.is_float32(type_) else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def objects(rows: pa.RecordBatch) -> tuple[pa.Array, dict[int, str]]:
    """Each row as an object, UTF-8. Rows that JSON has no words for are named with the reason, and are null."""
    refused: dict[int, str] = {}
    parts: list[Any] = ["{"]
    for number, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        if pa.types.is_nested(column.type):
            spelled, wrong = _nested(column)
        else:
            spelled, wrong = _column(column), _not_finite(column)
        refused |= {row: f"{field.name}: {why}" for row, why in wrong.items()}
        parts += [f"{',' if number else ''}{json.dumps(field.name, ensure_ascii=False)}:", spelled]
    if not rows.num_columns:
        return pa.repeat(pa.scalar(b"{}"), rows.num_rows), refused
    joined = pc.binary_join_element_wise(*parts, "}", "")
    if refused:
        keep = np.ones(rows.num_rows, bool)
        keep[list(refused)] = False
        joined = pc.if_else(pa.array(keep), joined, None)
    return joined.cast(pa.binary()), refused


def _not_finite(column: pa.Array) -> dict[int, str]:
    if not pa.types.is_floating(column.type):
        return {}
    bad = np.flatnonzero(pc.fill_null(pc.invert(pc.is_finite(column)), False).to_numpy(zero_copy_only=False))
    return {int(row): f"JSON cannot represent {column[int(row)].as_py()}" for row in bad}


def _nested(column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """The texts, and the rows that have none."""
    texts: list[str | None] = []
    wrong: dict[int, str] = {}
    for row, value in enumerate(column.to_pylist()):
        try:
            texts.append(value_text(value, column.type))
        except NotJson as error:
            texts.append(None)
            wrong[row] = str(error)
    return pa.array(texts, pa.string()), wrong


def _column(column: pa.Array) -> pa.Array:
    """Every value as text, ``null`` for nulls."""
    type_ = column.type
    if pa.types.is_string(type_):
        if pc.any(pc.match_substring_regex(column, _TO_ESCAPE)).as_py():
            return pa.array([value_text(value, type_) for value in column.to_pylist()], pa.string())
        spelled = pc.binary_join_element_wise('"', column, '"', "")
    elif pa.types.is_timestamp(type_):
        zone = "Z" if type_.tz else ""
        spelled = pc.strftime(column.cast(pa.timestamp("us", type_.tz)), format=f'"%Y-%m-%dT%H:%M:%S{zone}"')
    elif pa.types.is_binary(type_) or pa.types.is_date(type_):
        return pa.array([value_text(value, type_) for value in column.to_pylist()], pa.string())
    else:
        spelled = column.cast(pa.string())
    return pc.fill_null(spelled, "null")
