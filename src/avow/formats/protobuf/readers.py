"""The readers of one writer's schema, kept for a process: to compile it takes longer than to read a small batch.

Owns: which of them there are. Neighbours: ``reader`` and ``native_columns``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from avow.formats.base import DecodeError
from avow.formats.protobuf.compatibility import Incompatible, resolve
from avow.formats.protobuf.compile import Imports, compile_text
from avow.formats.protobuf.descriptors import BadSchema
from avow.formats.protobuf.frame import Place, place_bytes, read_place
from avow.formats.protobuf.layout import with_keys
from avow.formats.protobuf.native_columns import NativeColumns
from avow.formats.protobuf.reader import Rules, StrictReader
from avow.formats.registry.decoder import IncompatibleSchema

if TYPE_CHECKING:
    from avow.formats.protobuf.plugin import ProtobufSchema

OTHER_MESSAGE = "other-message"  # the reason: a message of the schema that is not the one declared
_KEPT = 512  # schemas, of all pipelines of a process


class ProtobufSchemaReader:
    """Reads what one schema has written. See ``formats.registry.decoder.SchemaReader``."""

    def __init__(
        self, message: str, places: Mapping[Place, str], strict: StrictReader | None, columns: NativeColumns | None
    ) -> None:
        self._message = message
        self._places = places
        self._strict = strict  # None: the schema has no such message
        self._columns = columns
        mine = [place for place, name in places.items() if name == message]
        self._prefix = place_bytes(mine[0]) if mine else b""

    @property
    def by_column(self) -> bool:
        return self._columns is not None

    def row(self, value: bytes, at: int) -> Mapping[str, object]:
        if at:
            at = self._begin(value, at)
        assert self._strict is not None, "a schema without the message, and no place that names one"
        return self._strict.row(value[at:])

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        assert self._columns is not None
        return self._columns.read(values, skip, self._prefix if skip else b"")

    def _begin(self, value: bytes, at: int) -> int:
        place, at = read_place(value, at)
        name = self._places.get(place)
        if name != self._message:
            found = f"is {name}" if name else f"has the place {list(place)}, where its schema has none"
            raise DecodeError(OTHER_MESSAGE, f"expected the message {self._message}, and this one {found}")
        return at


@lru_cache(maxsize=_KEPT)
def schema_reader(
    reader: ProtobufSchema, text: str, imports: Imports, rules: Rules, *, keys: frozenset[str], by_column: bool
) -> ProtobufSchemaReader:
    """``text``: the writer's schema. ``IncompatibleSchema`` if its messages cannot be read as the reader's. ``keys``:
    the columns that may not be null."""
    record = reader.record
    try:
        writer = reader.schema if (text, imports) == (reader.text, reader.imports) else compile_text(text, imports)
        if record.name not in writer.messages:
            return ProtobufSchemaReader(record.name, writer.places, None, None)
        record = with_keys(resolve(record, writer), keys)
    except (BadSchema, Incompatible) as error:
        raise IncompatibleSchema(str(error)) from None
    columns = NativeColumns(record, rules) if by_column and NativeColumns.can_read(record) else None
    return ProtobufSchemaReader(record.name, writer.places, StrictReader(record, rules), columns)
