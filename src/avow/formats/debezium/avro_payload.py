"""Keys and values as Connect's Avro converters write them: behind the id of their schema, which says for each type what
it stands for in Connect (``connect.name``, ``connect.parameters``, ``connect.type``).

Where a schema has none of that (``connect.meta.data=false``), Avro's own logical types say it. A map whose keys are no
text is an array of records for Avro; its values are refused.

Owns: Avro, and the way from a schema's id to Connect's types. Must not know: what is in a payload. Its neighbours are
``connect``, whose contract it keeps, ``avow.formats.avro``, and ``avow.formats.registry``, whose frame it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from avow.errors import UnknownSchema
from avow.formats.avro.plain import PlainReader
from avow.formats.avro.schema import Array, BadSchema, Connect, Enum, Fixed, Map, Primitive, Record, Type, Union, parse
from avow.formats.avro.schema import short as short_name
from avow.formats.base import DecodeError, Reason
from avow.formats.debezium.connect import ConnectType, Message, Reader, Value
from avow.formats.debezium.values import DECIMAL, NAMES_OF_LOGICAL
from avow.formats.json.document import Number
from avow.formats.json.document import describe as describe_json
from avow.formats.json.values import ReadRules, reader
from avow.formats.registry.decoder import INCOMPATIBLE
from avow.formats.registry.frame import FRAME_BYTES, UNKNOWN_ID, schema_id
from avow.schema import Decimal, Scalar
from avow.schema_registry import RegistrySettings, SchemaRegistry

_KEPT = 512  # schemas, of all pipelines of a process
_BITS = {Scalar.BYTE: 8, Scalar.SHORT: 16, Scalar.INT: 32, Scalar.LONG: 64}
_TYPES = {"int": "int32", "long": "int64"}  # Connect's names, where they are others than Avro's
_SMALL = {"int8", "int16"}  # an int for Avro
_MAP_ENTRY = "MapEntry"


@dataclass(frozen=True, slots=True)
class _Schema:
    """What one schema has written: how it is read, and what it is in Connect's terms."""

    reader: PlainReader
    type: ConnectType


class AvroPayload:
    """See ``connect.Payload``. ``refuse_nul``: the sink cannot hold NUL in text."""

    def __init__(self, registry: RegistrySettings, *, refuse_nul: bool) -> None:
        self._registry = SchemaRegistry(registry)
        self._rules = ReadRules(refuse_nul=refuse_nul, ignore_unknown=False)
        self._schemas: dict[int, _Schema | DecodeError] = {}

    def read(self, data: bytes) -> Message:
        schema = self._schema(schema_id(data))
        value = schema.reader.value(data, FRAME_BYTES)
        if schema.type.type != "struct" or value is None:
            raise DecodeError(Reason.NOT_OBJECT, f"expected a record, found {self.describe(value)}")
        return Message(schema.type, value)

    def _schema(self, schema_id: int) -> _Schema:
        if schema_id not in self._schemas:
            self._schemas[schema_id] = self._open(schema_id)
        schema = self._schemas[schema_id]
        if isinstance(schema, DecodeError):
            raise schema
        return schema

    def _open(self, schema_id: int) -> _Schema | DecodeError:
        try:
            registered = self._registry.by_id(schema_id)
        except UnknownSchema as error:
            raise DecodeError(UNKNOWN_ID, str(error)) from None  # for now: it may be registered in a moment
        if registered.kind != "AVRO":
            return DecodeError(INCOMPATIBLE, f"schema {schema_id} is {registered.kind}, and decode.payload is avro")
        try:
            return _opened(registered.text, tuple(self._registry.references(registered).values()))
        except BadSchema as error:
            return DecodeError(INCOMPATIBLE, f"schema {schema_id} cannot be read: {error}")

    def plain(self, type: Scalar | Decimal) -> Reader:
        if isinstance(type, Scalar) and type in _BITS:
            return self._whole(type)
        read = reader(type, self._rules)
        is_float = type in (Scalar.FLOAT, Scalar.DOUBLE)

        def read_plain(value: Value) -> object:
            if isinstance(value, float) and is_float:
                return value
            if isinstance(value, bytes):
                raise DecodeError(Reason.WRONG_TYPE, f"expected {type}, found {self.describe(value)}")
            return read(_as_json(value))

        return read_plain

    def _whole(self, type: Scalar) -> Reader:
        limit = 1 << (_BITS[type] - 1)

        def read(value: Value) -> int:
            number = self.integer(value)
            if not -limit <= number < limit:
                raise DecodeError(Reason.OUT_OF_RANGE, f"{self.describe(value)} does not fit into {type}")
            return number

        return read

    def integer(self, value: Value) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(value, "a whole number")
        return value

    def text(self, value: Value) -> str:
        if not isinstance(value, str):
            raise self._wrong(value, "a string")
        return value

    def data(self, value: Value) -> bytes:
        if not isinstance(value, bytes):
            raise self._wrong(value, "bytes")
        return value

    def members(self, value: Value) -> Mapping[str, Value]:
        if not isinstance(value, dict):
            raise self._wrong(value, "a record or a map")
        return value

    def elements(self, value: Value) -> list[Value]:
        if not isinstance(value, list):
            raise self._wrong(value, "an array")
        return value

    def is_number(self, value: Value) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def is_text(self, value: Value) -> bool:
        return isinstance(value, str)

    def is_object(self, value: Value) -> bool:
        return isinstance(value, dict)

    def describe(self, value: Value) -> str:
        return f"{len(value):,} bytes" if isinstance(value, bytes) else describe_json(_as_json(value))

    def _wrong(self, value: Value, expected: str) -> DecodeError:
        return DecodeError(Reason.WRONG_TYPE, f"expected {expected}, found {self.describe(value)}")


def _as_json(value: Value) -> Value:
    """Numbers in the fewest digits that say which they are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Number(repr(value).encode()) if is_number else value


@lru_cache(maxsize=_KEPT)
def _opened(text: str, references: tuple[str, ...]) -> _Schema:
    type = parse(text, references)
    return _Schema(PlainReader(type), _Translator().type(type))


class _Translator:
    """Makes Connect's types of Avro's. A record that is there twice, before and after a change, is one type."""

    def __init__(self) -> None:
        self._records: dict[Record, ConnectType] = {}

    def type(self, type: Type) -> ConnectType:
        match type:
            case Union(branches):
                others = [
                    branch for branch in branches if not (isinstance(branch, Primitive) and branch.name == "null")
                ]
                return self.type(others[0]) if len(others) == 1 else ConnectType(str(type))
            case Record():
                if type not in self._records:
                    self._records[type] = _named(
                        "struct", type.connect, {f.name: self.type(f.type) for f in type.fields}
                    )
                return self._records[type]
            case Array(Record() as entry) if _MAP_ENTRY in (entry.connect.internal, short_name(entry.fullname)):
                return ConnectType("map whose keys are no strings")
            case Array(items):
                return ConnectType("array", items=self.type(items))
            case Map(values):
                return ConnectType("map", items=self.type(values))
            case Enum():
                return ConnectType("string")
            case Fixed():
                return _logical("bytes", type)
            case Primitive(name):
                small = name == "int" and type.connect.type in _SMALL
                connect = type.connect.type if small else _TYPES.get(name, name)
                return _named(connect, type.connect, {}) if type.connect.name else _logical(connect, type)


def _named(type: str, connect: Connect, fields: dict[str, ConnectType]) -> ConnectType:
    return ConnectType(type, connect.name, dict(connect.parameters), fields)


def _logical(type: str, avro: Primitive | Fixed) -> ConnectType:
    if avro.logical == "decimal":
        return ConnectType(type, DECIMAL, {"scale": str(avro.scale)})
    return ConnectType(type, NAMES_OF_LOGICAL.get(avro.logical or "", ""))
