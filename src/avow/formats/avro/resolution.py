"""How records of one schema are read as those of another: Avro's rules of schema resolution, and the columns.

The writer's schema says what the bytes are, the reader's what is wanted: fields are found by name or alias, in any
order; what the writer lacks has the reader's default; what the reader lacks is skipped; numbers are promoted; enums and
fixed are matched by name. The result is a tree of steps in the order of the bytes, made once for each pair of schemas.

Two readers follow the steps, ``reader`` (one record, strictly) and the native library (many, by column), and both put
exactly the same into the columns.

Owns: the rules, and which column a type is. Must not know: how bytes are read. Its neighbour is ``schema``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from avow import schema as ddl
from avow.formats.avro.encode import DoesNotFit, encode
from avow.formats.avro.schema import (
    NO_DEFAULT,
    Array,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    RecordField,
    Type,
    Union,
    builtin_name,
    placed,
    short,
)
from avow.schema import MAX_DEPTH, MAX_PRECISION, Scalar

_PROMOTIONS = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


class NoColumn(ValueError):
    """A type that no column can have."""


class Incompatible(ValueError):
    """Records of the writer's schema cannot be read as the reader's."""


# The columns


def columns_of(type: Type) -> ddl.Schema:
    """The columns of a reader schema, or ``NoColumn``. Fields that cannot be null and have no default are not null."""
    if not isinstance(type, Record):
        raise NoColumn(f"the schema is a {type} and not a record, which has columns")
    return ddl.Schema(tuple(_fields(type, ())))


def _fields(record: Record, above: tuple[Record, ...]) -> Iterator[ddl.Field]:
    if record in above:
        raise NoColumn(f"the {record} is inside itself: no column has an end like that")
    if not record.fields:
        raise NoColumn(f"the {record} has no fields")
    names: dict[str, str] = {}
    for field in record.fields:
        if other := names.get(field.name.lower()):
            raise NoColumn(f"the fields {other} and {field.name} of the {record} differ only by case")
        names[field.name.lower()] = field.name
        try:
            kind, nullable = _column(field.type, (*above, record))
        except NoColumn as error:
            raise NoColumn(
                f"{field.name}: {error}" if " " in str(error).partition(":")[0] else f"{field.name}.{error}"
            ) from None
        # One with a default may have been added, or be added, when a table is there: its rows have nothing in it.
        yield ddl.Field(field.name, kind, required=not nullable and field.default is NO_DEFAULT)


def column_of(type: Type) -> tuple[ddl.Type, bool]:
    """The column of a schema that is no record, and whether it may be null."""
    return _column(type, ())


def _column(type: Type, above: tuple[Record, ...]) -> tuple[ddl.Type, bool]:
    """A type's column, and whether it may be null."""
    if len(above) > MAX_DEPTH:
        raise NoColumn(f"nested more than {MAX_DEPTH} deep")
    if isinstance(type, Union):
        branches = _not_null(type)
        if not branches:
            raise NoColumn("it can only be null")
        nullable = len(branches) < len(type.branches)
        if len(branches) == 1:
            return _column(branches[0], above)[0], nullable
        members = (ddl.Field(f"member{n}", _column(branch, above)[0]) for n, branch in enumerate(branches))
        return ddl.Struct(tuple(members)), nullable
    if isinstance(type, Primitive) and type.name == "null":
        raise NoColumn("it can only be null")
    return _not_null_column(type, above), False


def _not_null_column(type: Type, above: tuple[Record, ...]) -> ddl.Type:
    match type:
        case Record():
            return ddl.Struct(tuple(_fields(type, above)))
        case Array(items):
            return ddl.Array(_column(items, above)[0])
        case Map(values):
            return ddl.Map(_column(values, above)[0])
        case Enum():
            return Scalar.STRING
        case Fixed(logical="duration"):
            raise NoColumn(
                "a duration of months, days and milliseconds has no column; read it as fixed, without logicalType"
            )
        case Primitive(logical="decimal") | Fixed(logical="decimal"):
            if type.precision > MAX_PRECISION:
                raise NoColumn(f"a decimal of {type.precision} digits; columns have at most {MAX_PRECISION}")
            return ddl.Decimal(type.precision, type.scale)
        case Fixed(logical="uuid"):
            return Scalar.STRING
        case Fixed():
            return Scalar.BINARY
        case Primitive(logical="date"):
            return Scalar.DATE
        case Primitive(logical=str(logical)) if logical.startswith("timestamp-"):
            return Scalar.TIMESTAMP
        case Primitive(logical=str(logical)) if logical.startswith("local-timestamp-"):
            return Scalar.TIMESTAMP_NTZ
    assert isinstance(type, Primitive)
    return Scalar("binary" if type.name == "bytes" else type.name)


def _not_null(union: Union) -> list[Type]:
    return [branch for branch in union.branches if not (isinstance(branch, Primitive) and branch.name == "null")]


# The steps


@dataclass(frozen=True, slots=True)
class Value:
    """A value without parts. ``wire``: the writer's type; ``form``: what its column gets.

    ``form`` is a type's name (boolean, int, long, float, double, string, bytes), a logical type's (of timestamps the
    writer's unit counts: millis, micros, nanos), or decimal.
    """

    wire: str  # a primitive's name, or fixed
    form: str
    size: int = 0  # of a fixed
    precision: int = 0  # of a decimal


@dataclass(frozen=True, slots=True)
class Symbols:
    """An enum. A symbol that the reader lacks, where it has no default, is None."""

    symbols: tuple[str | None, ...]
    names: tuple[str, ...]  # the writer's, for messages


@dataclass(frozen=True, slots=True)
class Items:
    item: Step


@dataclass(frozen=True, slots=True)
class Entries:
    value: Step


@dataclass(frozen=True, slots=True)
class ReadField:
    """One of the writer's fields. ``to``: which of the reader's it is; None: it is skipped."""

    name: str
    to: int | None
    step: Step


@dataclass(frozen=True, slots=True)
class Default:
    """A field of the reader's that the writer has not: its default, in the reader's encoding."""

    to: int
    data: bytes
    step: Step


@dataclass(frozen=True, slots=True)
class Fields:
    fields: tuple[ReadField, ...]
    defaults: tuple[Default, ...]
    names: tuple[str, ...]  # the reader's


@dataclass(frozen=True, slots=True)
class Branches:
    branches: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A value of a union that is a struct: one of its members has it, the others are null."""

    number: int
    count: int
    step: Step


@dataclass(frozen=True, slots=True)
class Null:
    pass


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A branch that the reader has no place for: a record that uses it cannot be read."""

    why: str


@dataclass(frozen=True, slots=True)
class Skip:
    """What the reader does not want."""

    type: Type


Step = Value | Symbols | Items | Entries | Fields | Branches | Member | Null | Mismatch | Skip


def resolve(writer: Type, reader: Type) -> Step:
    """How to read the writer's bytes, or ``Incompatible``."""
    if isinstance(writer, Union):
        if isinstance(reader, Union) and not any(_matches(branch, reader) for branch in writer.branches):
            raise Incompatible(f"no branch of the writer's {writer} is one of the reader's {reader}")
        return Branches(tuple(_branch(branch, reader) for branch in writer.branches))
    if isinstance(reader, Union):
        return _into_union(writer, reader)
    return _resolve(writer, reader)


def _branch(writer: Type, reader: Type) -> Step:
    try:
        return resolve(writer, reader)
    except Incompatible as error:
        return Mismatch(str(error))


def _matches(writer: Type, reader: Union) -> bool:
    return not isinstance(_branch(writer, reader), Mismatch)


def _into_union(writer: Type, reader: Union) -> Step:
    branches = _not_null(reader)
    if isinstance(writer, Primitive) and writer.name == "null":
        if len(branches) == len(reader.branches):
            raise Incompatible(f"the writer has null where the reader has {reader}")
        return Null()
    # The same type before one that it can be promoted to.
    for alike in (True, False):
        for number, branch in enumerate(branches):
            if _is_same(writer, branch) is alike:
                step = _branch(writer, branch)
                if not isinstance(step, Mismatch):
                    return step if len(branches) == 1 else Member(number, len(branches), step)
    raise Incompatible(f"the writer has {writer} where the reader has {reader}")


def _is_same(writer: Type, reader: Type) -> bool:
    if isinstance(writer, Primitive) and isinstance(reader, Primitive):
        return writer.name == reader.name
    if isinstance(writer, Record | Enum | Fixed) and isinstance(reader, Record | Enum | Fixed):
        return writer.fullname == reader.fullname
    return type(writer) is type(reader)


def _resolve(writer: Type, reader: Type) -> Step:
    match writer, reader:
        case Record(), Record():
            _match_names(writer, reader)
            return _fields_step(writer, reader)
        case Enum(), Enum():
            _match_names(writer, reader)
            known = set(reader.symbols)
            return Symbols(tuple(s if s in known else reader.default for s in writer.symbols), writer.symbols)
        case Fixed(), Fixed():
            _match_names(writer, reader)
            if writer.size != reader.size:
                raise Incompatible(f"{writer.fullname} has {writer.size} bytes, the reader's has {reader.size}")
            return _bytes_step(writer, reader, "fixed", writer.size)
        case Array(), Array():
            return Items(resolve(writer.items, reader.items))
        case Map(), Map():
            return Entries(resolve(writer.values, reader.values))
        case Primitive(), Primitive():
            return _primitive_step(writer, reader)
    raise Incompatible(f"the writer has {_kind(writer)} where the reader has {_kind(reader)}")


def _kind(type: Type) -> str:
    return builtin_name(type) if isinstance(type, Array | Map | Union) else str(type)


def _match_names(writer: Record | Enum | Fixed, reader: Record | Enum | Fixed) -> None:
    if short(writer.fullname) != short(reader.fullname) and short(writer.fullname) not in reader.aliases:
        raise Incompatible(f"the writer has {writer} where the reader has {reader}")


def _fields_step(writer: Record, reader: Record) -> Fields:
    mine = {field.name: number for number, field in enumerate(reader.fields)}
    mine |= {alias: n for n, f in enumerate(reader.fields) for alias in f.aliases if alias not in mine}
    todo = dict(enumerate(reader.fields))
    reads: list[ReadField] = []
    for field in writer.fields:
        to = mine.get(field.name)
        if to in todo:
            reads.append(ReadField(field.name, to, _inside(field.name, field.type, todo.pop(to).type)))
        else:
            reads.append(ReadField(field.name, None, Skip(field.type)))
    defaults = tuple(_default(number, field) for number, field in todo.items())
    return Fields(tuple(reads), defaults, tuple(field.name for field in reader.fields))


def _inside(name: str, writer: Type, reader: Type) -> Step:
    try:
        return resolve(writer, reader)
    except Incompatible as error:
        raise Incompatible(placed(name, error)) from None


def _default(to: int, field: RecordField) -> Default:
    if field.default is NO_DEFAULT:
        raise Incompatible(f"{field.name}: the writer has no such field, and the reader no default for it")
    try:
        data = encode(field.type, field.default, in_schema=True)
    except DoesNotFit as error:
        raise Incompatible(f"{field.name}: its default is not valid: {error}") from None
    return Default(to, data, resolve(field.type, field.type))


def _primitive_step(writer: Primitive, reader: Primitive) -> Step:
    if writer.name == "null" and reader.name == "null":
        return Null()
    if writer.name != reader.name and reader.name not in _PROMOTIONS.get(writer.name, ()):
        raise Incompatible(f"the writer has {writer} where the reader has {reader}")
    if writer.name in ("bytes", "string"):
        return _bytes_step(writer, reader, writer.name, 0)
    logical = reader.logical
    if logical is None:
        return Value(writer.name, reader.name)
    if logical.startswith(("timestamp-", "local-timestamp-")):
        if writer.logical and writer.logical.startswith("local-") is not logical.startswith("local-"):
            raise Incompatible(f"the writer has {writer} where the reader has {reader}")
        # The unit is the writer's: what it calls milliseconds is not read as microseconds.
        unit = (writer.logical or logical).rpartition("-")[2]
        if writer.logical and not writer.logical.startswith(("timestamp-", "local-timestamp-")):
            raise Incompatible(f"the writer has {writer} where the reader has {reader}")
        return Value(writer.name, unit)
    if writer.logical not in (None, logical):
        raise Incompatible(f"the writer has {writer} where the reader has {reader}")
    return Value(writer.name, logical)


def _bytes_step(writer: Primitive | Fixed, reader: Primitive | Fixed, wire: str, size: int) -> Value:
    if reader.logical == "decimal":
        if writer.logical not in (None, "decimal"):
            raise Incompatible(f"the writer has {writer} where the reader has {reader}")
        if writer.logical == "decimal" and (writer.scale != reader.scale or writer.precision > reader.precision):
            given, wanted = (f"decimal({t.precision},{t.scale})" for t in (writer, reader))
            raise Incompatible(f"the writer has {given} where the reader has {wanted}")
        return Value(wire, "decimal", size, reader.precision)
    if reader.logical == "uuid":
        return Value(wire, "uuid", size)
    return Value(wire, reader.name if isinstance(reader, Primitive) else "bytes", size)
