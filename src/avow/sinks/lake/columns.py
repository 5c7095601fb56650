"""The columns that a lake table must have for a pipeline's rows, and how an existing table differs from that.

Owns: that comparison. Must not know: any format, commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from avow.arrow import arrow_type
from avow.errors import ConfigError
from avow.schema import Array, Field, Map, Struct, Type
from avow.settings import REST_COLUMN
from avow.sinks.evolution import advice, missing
from avow.sinks.lake.config import LakeConfig, PartitionBy
from avow.sinks.lake.table import LakeTable, TableLayout


def table_layout(fields: tuple[Field, ...], sink: LakeConfig, table: LakeTable, *, rest: bool) -> TableLayout:
    """What the table must have: the payload, ``_rest`` where unknown fields are kept, and the lineage."""
    topic, partition, offset, timestamp = sink.lineage
    columns = [
        pa.field(
            field.name, table.storable(arrow_type(field.type)), nullable=not (field.required or field.name in sink.key)
        )
        for field in fields
    ]
    columns += [pa.field(REST_COLUMN, pa.string())] if rest else []
    columns += [
        pa.field(topic, pa.string(), nullable=False),
        pa.field(partition, pa.int32(), nullable=False),
        pa.field(offset, pa.int64(), nullable=False),
        pa.field(timestamp, pa.timestamp("us", "UTC")),
    ]
    schema = pa.schema(columns)
    required = frozenset(path for field in fields for path in _required(field.type, field.name))
    if problem := sink.partition_problem(fields):
        raise ConfigError(f"sink.partition_by: {problem[0]}", advice=f"Allowed is {problem[1]}.")
    return partitioned(schema, sink.partition_by, required)


def partitioned(schema: pa.Schema, by: PartitionBy | None, required: frozenset[str] = frozenset()) -> TableLayout:
    """A table of these columns whose files are put so."""
    if by is None:
        return TableLayout(schema, required=required)
    if not by.day:
        return TableLayout(schema, schema.field(by.column), required=required)
    return TableLayout(schema, pa.field(f"{by.column}_day", pa.date32()), by.column, required)


def differences(wanted: TableLayout, existing: pa.Schema, *, evolve: str) -> list[str]:
    table_fields = {field.name: field for field in existing}
    evolves = evolve == "add"
    lines = []
    for field in wanted.schema:
        found = table_fields.get(field.name)
        if found is None:
            lines.append(missing(field.name, field.type, table_fields, evolves=evolves, required=not field.nullable))
        elif not (_plain(found.type) == _plain(field.type) or (evolves and is_wider(found.type, field.type))):
            lines.append(f"column {field.name!r} has type {found.type} instead of {field.type}")
        else:
            stricter = [path for path in _stricter(found, field, field.name) if path not in wanted.required]
            lines += [f"column {path!r} is NOT NULL, but the pipeline's column is nullable" for path in stricter]
    ours = {*wanted.schema.names, *([wanted.partition.name] if wanted.partition is not None else [])}
    lines += [
        f"column {name!r} is NOT NULL, but the pipeline does not write it"
        for name, found in table_fields.items()
        if name not in ours and not found.nullable
    ]
    return lines


def is_wider(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether a type holds all values of another one as they are, in the way that a column may become of it."""
    for kind in (pa.types.is_signed_integer, pa.types.is_floating):
        if kind(wide) and kind(narrow):
            return bool(wide.bit_width > narrow.bit_width)
    both = pa.types.is_decimal(wide) and pa.types.is_decimal(narrow)
    return bool(both and wide.scale == narrow.scale and wide.precision > narrow.precision)


def changes(wanted: TableLayout, existing: pa.Schema, widens: Callable[[str], bool]) -> list[pa.Field]:
    """The columns that the table lacks, and those that it can have in a wider type: it is asked which."""
    names = {name.lower() for name in existing.names}
    found = []
    for field in wanted.schema:
        if field.name not in existing.names:
            if field.nullable and field.name.lower() not in names:
                found.append(field)
        elif is_wider(field.type, existing.field(field.name).type) and widens(field.name):
            found.append(existing.field(field.name).with_type(field.type))
    return found


def changed(existing: pa.Schema, fields: Sequence[pa.Field]) -> pa.Schema:
    """The columns of a table with these, which it has in another type or lacks."""
    for field in fields:
        at = existing.get_field_index(field.name)
        existing = existing.append(field) if at < 0 else existing.set(at, field)
    return existing


def as_table_has(layout: TableLayout, existing: pa.Schema) -> TableLayout:
    """Our columns in the types in which the table has them, where these are wider: so they are written."""
    schema = layout.schema
    for at, field in enumerate(schema):
        type_ = existing.field(field.name).type
        if is_wider(type_, field.type):
            schema = schema.set(at, field.with_type(type_))
    by = layout.partition
    if by is not None and by.name in schema.names:
        by = schema.field(by.name)
    return replace(layout, schema=schema, partition=by)


def _stricter(existing: pa.Field, wanted: pa.Field, path: str) -> Iterator[str]:
    """Where a table's values, or parts of them, must be there, and ours may be null."""
    if wanted.nullable and not existing.nullable:
        yield path
    for name, theirs, ours in _parts(existing.type, wanted.type):
        yield from _stricter(theirs, ours, f"{path}.{name}")


def _parts(existing: pa.DataType, wanted: pa.DataType) -> Iterator[tuple[str, pa.Field, pa.Field]]:
    if pa.types.is_struct(wanted):
        yield from ((field.name, existing.field(field.name), field) for field in wanted.fields)
    elif pa.types.is_map(wanted):
        yield "value", existing.item_field, wanted.item_field
    elif pa.types.is_list(wanted):
        yield "element", existing.value_field, wanted.value_field


def _required(type_: Type, path: str) -> Iterator[str]:
    """The parts of a declared type that are never null, by their paths."""
    match type_:
        case Struct():
            for field in type_.fields:
                yield from [f"{path}.{field.name}"] if field.required else []
                yield from _required(field.type, f"{path}.{field.name}")
        case Array():
            yield from _required(type_.element, f"{path}.element")
        case Map():
            yield from _required(type_.value, f"{path}.value")


def _plain(type_: pa.DataType) -> pa.DataType:
    """One of the several types that Arrow has for one type of a table."""
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(pa.field("element", _plain(type_.value_type)))
    if pa.types.is_map(type_):
        return pa.map_(_plain(type_.key_type), pa.field("value", _plain(type_.item_type)))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in type_.fields])
    if pa.types.is_timestamp(type_):
        return pa.timestamp(type_.unit, "UTC" if type_.tz else None)
    return type_


def refuse_differences(shown: str, lines: Sequence[str], evolve: str | None, reason: str = "") -> None:
    """``evolve``: what the pipeline says, of a table whose columns it declares. ``reason``: why the table cannot have a
    wider column, if it cannot."""
    if lines:
        raise ConfigError(
            f"table {shown} does not fit this pipeline's rows:\n" + "\n".join(f"  {line}" for line in lines),
            advice=advice(lines, evolve, reason),
        )
