"""Rows as JSON, for sinks that keep text: exact, column by column, without a Python object per value where it can be.

Numbers keep their digits, bytes are base64, times are RFC 3339. What JSON has no word for (NaN, infinity) is not
written as something else: ``objects`` names the rows.

Owns: that spelling. Must not know: any sink. It is what ``avow.decode`` reads back.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_TO_ESCAPE = r'[\x00-\x1f"\\]'


def value_text(value: Any, type_: pa.DataType) -> str:
    """One value."""
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
    return json.dumps(value, ensure_ascii=False)


def objects(rows: pa.RecordBatch) -> tuple[pa.Array, dict[int, str]]:
    """Each row as an object, UTF-8. Rows that JSON has no words for are named with the reason, and are null."""
    refused: dict[int, str] = {}
    parts: list[Any] = ["{"]
    for number, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        if pa.types.is_floating(column.type):
            bad = np.flatnonzero(pc.fill_null(pc.invert(pc.is_finite(column)), False).to_numpy(zero_copy_only=False))
            refused |= {int(row): f"{field.name}: JSON has no word for {column[int(row)].as_py()}" for row in bad}
        parts += [f"{',' if number else ''}{json.dumps(field.name, ensure_ascii=False)}:", _column(column)]
    if not rows.num_columns:
        return pa.repeat(pa.scalar(b"{}"), rows.num_rows), refused
    joined = pc.binary_join_element_wise(*parts, "}", "")
    if refused:
        keep = np.ones(rows.num_rows, bool)
        keep[list(refused)] = False
        joined = pc.if_else(pa.array(keep), joined, None)
    return joined.cast(pa.binary()), refused


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
    elif pa.types.is_nested(type_) or pa.types.is_binary(type_) or pa.types.is_date(type_):
        return pa.array([value_text(value, type_) for value in column.to_pylist()], pa.string())
    else:
        spelled = column.cast(pa.string())
    return pc.fill_null(spelled, "null")
