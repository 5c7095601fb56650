"""Many Avro records at once, by avow's own C library: the steps of ``resolution`` as it wants them.

Owns: that translation. Must not know: why a record is refused. Its neighbour is ``avow_native.avro``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from avow import native
from avow.formats.avro.resolution import (
    Branches,
    Entries,
    Fields,
    Items,
    Member,
    Mismatch,
    Null,
    Skip,
    Step,
    Symbols,
    Value,
)
from avow.formats.avro.schema import Array, Enum, Fixed, Map, Primitive, Record, Type, Union
from avow.formats.json.native_columns import columns
from avow.schema import Schema

if TYPE_CHECKING:
    from avow_native.avro import Node

_TIME_END = {"time-millis": 86_400_000, "time-micros": 86_400_000_000}


class NativeColumns:
    """Reads the values of one writer's schema into the columns of the reader's."""

    def __init__(self, step: Step, schema: Schema, *, refuse_nul: bool) -> None:
        from avow_native.avro import AvroReader

        library = native.library()
        assert library is not None
        self._reader = AvroReader(library, columns(schema), _Translator().node(step), refuse_nul=refuse_nul)

    @staticmethod
    def can_read(schema: Schema) -> bool:
        """Whether the library is there, and knows these types."""
        if native.library() is None:
            return False
        from avow_native.avro import AvroReader

        return AvroReader.can_read(columns(schema))

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        return self._reader.read(values, skip)


class _Translator:
    def __init__(self) -> None:
        self._skipped: dict[int, Node] = {}  # of records by their identity: they may be inside themselves

    def node(self, step: Step, column: int = -1) -> Node:
        """``column``: of the struct of the record that it is a field of."""
        node = self._node(step)
        node.column = column
        return node

    def _node(self, step: Step) -> Node:
        from avow_native.avro import Node

        match step:
            case Value():
                return _value(step)
            case Symbols(symbols):
                parts = [Node("doubt") if s is None else Node("symbol", data=s.encode()) for s in symbols]
                return Node("enum", parts=parts)
            case Items(item):
                return Node("array", parts=[self.node(item)])
            case Entries(value):
                return Node("map", parts=[self.node(value)])
            case Fields():
                fields = [self.node(f.step, -1 if f.to is None else f.to) for f in step.fields]
                for default in step.defaults:
                    inner = self.node(default.step)
                    fields.append(Node("default", column=default.to, data=default.data, parts=[inner]))
                return Node("record", parts=fields)
            case Branches(branches):
                return Node("union", parts=[self.node(branch) for branch in branches])
            case Member(number, _, inner):
                return Node("member", size=number, parts=[self.node(inner)])
            case Null():
                return Node("null")
            case Mismatch():
                return Node("doubt")
            case Skip(skipped):
                # A copy: where it stands is the node's own, and a record's node is shared by all who skip it.
                shared = self._skip(skipped)
                return Node(shared.op, shared.is_int, size=shared.size, parts=shared.parts)

    def _skip(self, type: Type) -> Node:
        from avow_native.avro import Node

        match type:
            case Primitive(name):
                return Node("bytes" if name == "string" else name, is_int=name == "int")
            case Fixed():
                return Node("fixed", size=type.size)
            case Enum(_, symbols):
                return Node("enum", parts=[Node("symbol") for _ in symbols])
            case Array(items):
                return Node("array", parts=[self._skip(items)])
            case Map(values):
                return Node("map", parts=[self._skip(values)])
            case Union(branches):
                return Node("union", parts=[self._skip(branch) for branch in branches])
            case Record():
                if id(type) not in self._skipped:
                    node = self._skipped[id(type)] = Node("record")
                    node.parts += [self._skip(field.type) for field in type.fields]
                return self._skipped[id(type)]


def _value(value: Value) -> Node:
    from avow_native.avro import Node

    is_int = value.wire == "int"
    match value.form:
        case "decimal":
            return Node("decimal-fixed" if value.wire == "fixed" else "decimal-bytes", size=value.size)
        case "uuid":
            return Node("uuid-fixed" if value.wire == "fixed" else "uuid-text", size=value.size)
        case "date" | "millis" | "micros" | "nanos":
            return Node(value.form, is_int=is_int)
        case "time-millis" | "time-micros":
            return Node("time", is_int=is_int, size=_TIME_END[value.form])
    if value.wire in ("bytes", "string"):
        return Node("bytes")
    return Node(value.wire, is_int=is_int, size=value.size)
