"""What columns rows have on their way into the sink, as far as that can be said without Spark.

Owns: the schema that a transform sees, and the columns of what a Python function returns. Must not know: Spark, or any
sink. Neighbours: ``task`` (which runs the function), ``sql`` (the same for a query).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from avow import schema
from avow.engines.task import python_transform
from avow.errors import ConfigError
from avow.formats.rows import row_schema
from avow.kafka.batches import HEADERS
from avow.settings import PipelineConfig

Columns = tuple[tuple[schema.Field, ...], bool]  # the payload's, and whether unknown fields are kept beside them


def sink_columns(pipeline: PipelineConfig) -> Columns:
    """The payload's columns in the sink, of a pipeline without SQL."""
    if pipeline.transform is None:
        return pipeline.decode.columns.fields, pipeline.decode.keeps_unknown_fields
    transform = python_transform(pipeline)
    assert transform is not None, "Spark knows what a query gives"
    out = transform(pa.RecordBatch.from_pylist([], schema=_decoded_schema(pipeline)))
    if not isinstance(out, pa.RecordBatch):
        raise ConfigError(
            f"transform.python: it gave a {type(out).__name__} for an empty batch",
            advice="Take a pyarrow.RecordBatch and give one, also when it has no rows.",
        )
    return output_fields(((f.name, _spelling(f.type), f.nullable) for f in out.schema), pipeline), False


def output_fields(columns: Iterable[tuple[str, str, bool]], pipeline: PipelineConfig) -> tuple[schema.Field, ...]:
    """What a transform gives (name, type, nullable), lineage left out. Refuses one that loses lineage."""
    columns = list(columns)
    lineage = (*pipeline.sink.lineage, *pipeline.carried.values())
    missing = [name for name in lineage if name not in {name for name, _, _ in columns}]
    if missing:
        raise ConfigError(
            f"transform: the result has lost {', '.join(missing)}",
            advice="Every row keeps its record's identity: SELECT * keeps these columns, or name them.",
        )
    quoted = ", ".join(
        f"`{name.replace('`', '``')}` {type_}{'' if nullable else ' not null'}"
        for name, type_, nullable in columns
        if name not in lineage
    )
    try:
        return schema.parse(quoted).fields
    except ConfigError as error:
        raise ConfigError(f"transform: the result cannot be stored: {error}", advice=error.advice) from error


def _decoded_schema(pipeline: PipelineConfig) -> pa.Schema:
    types = (pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"))
    carried = [pa.field(column, CARRIED[part].type) for part, column in pipeline.carried.items()]
    return pa.schema([*row_schema(pipeline.decode), *map(pa.field, pipeline.sink.lineage, types), *carried])


class Carried(NamedTuple):
    spelling: str  # Spark's: headers go through its JVM as text
    type: pa.DataType


# What of a record can travel beside its row.
CARRIED = {
    "key": Carried("binary", pa.binary()),
    "value": Carried("binary", pa.binary()),
    "headers": Carried("string", HEADERS),
    "tombstone": Carried("boolean", pa.bool_()),
}


_SPELLINGS = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
}


def _spelling(type_: pa.DataType) -> str:
    """An Arrow type in our schema's spelling."""
    if pa.types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_list(type_):
        return f"array<{_spelling(type_.value_type)}>"
    if pa.types.is_map(type_):
        return f"map<string,{_spelling(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return "struct<" + ", ".join(f"`{f.name}`: {_spelling(f.type)}" for f in type_.fields) + ">"
    if type_ not in _SPELLINGS:
        raise ConfigError(
            f"transform.python: a column of type {type_} cannot be stored",
            advice=f"Cast it to one of {', '.join(map(str, _SPELLINGS))}, a decimal, list, map or struct.",
        )
    return _SPELLINGS[type_]
