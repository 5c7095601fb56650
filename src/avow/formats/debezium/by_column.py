"""Many changes at once, by column: JSON events as Debezium's converter writes them, read by avow's C library.

An event is cut where its parts begin, ``{"before":B,"after":A,"source":...``, and each part is read with those of the
other events. That is sound: if B and A are JSON values and the rest is the rest of an object, the whole is one, and no
text in it can hold these marks, whose quotes it would escape. What looks otherwise, or is in doubt anywhere, is left to
the strict way (``decoder``), which has the last word; both agree on every record.

Only inserts, updates and snapshots of tables whose columns have no parts are read here.

Owns: what is read together, and the encodings on whole columns. Must not know: why a record is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import arrow_type, binaries, indices
from avow.formats.debezium.connect import ConnectType
from avow.formats.debezium.json_payload import JsonPayload
from avow.formats.debezium.names import envelope_path, instant_unit, is_envelope
from avow.formats.debezium.values import (
    DAYS,
    DECIMAL,
    FIRST_DAY,
    LAST_DAY,
    MICROS_MAX,
    MICROS_MIN,
    MODE_UNITS,
    UNITS,
    Encoding,
)
from avow.formats.json.native_columns import NativeColumns
from avow.schema import Decimal, Field, Scalar, Schema, Struct

Record = tuple[bytes | None, bytes | None]  # key and value
Mask = npt.NDArray[np.bool_]
# A column as it was read, as it is declared, and which of its values are in doubt (None: none).
Convert = Callable[[pa.Array], tuple[pa.Array, Mask | None]]

_BEFORE, _AFTER, _SOURCE = b'{"before":', b',"after":{', b',"source":{'
_DECIMAL_BYTES = 16
_PLANS_MAX = 256
_ROWS_MIN = 16  # fewer of a kind are read one by one


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a part: what the library is asked for, and what is made of it."""

    read_as: Field
    convert: Convert


@dataclass(slots=True)
class _Group:
    """Events of one schema, in their parts."""

    at: list[int] = field(default_factory=list)
    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    rest: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class ChangeColumns:
    """Reads events into the columns of one pipeline. ``key``: the columns that each record's key must have, if any."""

    def __init__(self, fields: Sequence[Field], key: Sequence[Field] | None, how: Encoding) -> None:
        assert isinstance(how.payload, JsonPayload)
        self._payload = how.payload
        self._fields = fields
        self._table = [column for column in fields if not is_envelope(column.name)]
        self._key = key
        self._how = how
        self._envelope = _Envelope([column for column in fields if is_envelope(column.name)], how)
        # Nothing of it is wanted but that it is an object; a library that reads no column reads nothing.
        self._any = self._reader([Field(_NO_NAME, Scalar.STRING)], ignore_unknown=True)
        self._plans: dict[tuple[ConnectType | None, bool], _Part | None] = {}

    @staticmethod
    def can_read(fields: Sequence[Field]) -> bool:
        """Whether the library is there and can be of use."""
        table = [column for column in fields if not is_envelope(column.name)]
        plain = all(isinstance(column.type, Scalar | Decimal) for column in table)
        return bool(table) and plain and NativeColumns.can_read(Schema(tuple(table)))

    def read(self, records: Sequence[Record]) -> list[tuple[pa.RecordBatch, pa.Int64Array]]:
        """Rows that are beyond doubt, and where their records are."""
        found = []
        for (type, key_type), group in self._cut(records).items():
            if len(group.at) < _ROWS_MIN:
                continue
            row = self._part(type and type.fields.get("after"), of_key=False)
            key = self._part(key_type, of_key=True) if self._key is not None else None
            if row is None or (key is None and self._key is not None):
                continue
            if (read := self._read(group, row, key)) is not None:
                found.append(read)
        return found

    def _cut(self, records: Sequence[Record]) -> dict[tuple[ConnectType | None, ConnectType | None], _Group]:
        groups: dict[tuple[ConnectType | None, ConnectType | None], _Group] = {}
        key_type, key = None, b""
        for index, (raw, value) in enumerate(records):
            if value is None or (split := self._payload.split(value)) is None:
                continue
            type, body = split
            after = body.find(_AFTER)
            source = body.find(_SOURCE, after)
            if after < 0 or source < 0 or not body.startswith(_BEFORE):
                continue
            rest = b"{" + body[source + 1 :]
            # A name that stands twice in the event, in whatever spelling.
            if b'after"' in rest or b'before"' in rest or b"\\u" in rest:
                continue
            if self._key is not None:
                if raw is None or (split := self._payload.split(raw)) is None:
                    continue
                key_type, key = split
            group = groups.get((type, key_type))
            if group is None:
                group = groups[type, key_type] = _Group()
            before = body[len(_BEFORE) : after]
            group.at.append(index)
            group.before.append(b"{}" if before == b"null" else before)
            group.after.append(body[after + len(_AFTER) - 1 : source])
            group.rest.append(rest)
            group.keys.append(key)
        return groups

    def _read(self, group: _Group, row: _Part, key: _Part | None) -> tuple[pa.RecordBatch, pa.Int64Array] | None:
        good = np.ones(len(group.at), np.bool_)
        if any(before != b"{}" for before in group.before):
            _, doubtful = self._any.read(binaries(*group.before))
            good[_numbers(doubtful)] = False
        if key is not None:
            _, doubtful = key.reader.read(binaries(*group.keys))
            good[_numbers(doubtful)] = False
        columns = row.read(group.after, good) | self._envelope.read(group.rest, good)
        if not good.any():
            return None
        kept = indices(np.flatnonzero(good).tolist())
        arrays = [columns[column.name].take(kept) for column in self._fields]
        rows = pa.RecordBatch.from_arrays(arrays, names=[column.name for column in self._fields])
        return rows, indices(group.at).take(kept)

    def _part(self, type: ConnectType | None, *, of_key: bool) -> _Part | None:
        plan = (type, of_key)
        if plan not in self._plans:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            self._plans[plan] = self._plan(type, of_key=of_key)
        return self._plans[plan]

    def _plan(self, type: ConnectType | None, *, of_key: bool) -> _Part | None:
        columns = []
        for declared in (self._key or ()) if of_key else self._table:
            inner = type.fields.get(declared.name) if type else None
            if type is not None and inner is None:
                return None  # the table has no such column
            column = _column(declared, inner, self._how)
            if column is None:
                return None
            columns.append(column)
        # A key has these columns and no other.
        ignore_unknown = self._how.ignore_unknown and not of_key
        read_as = [replace(column.read_as, required=True) if of_key else column.read_as for column in columns]
        return _Part(columns, self._reader(read_as, ignore_unknown=ignore_unknown)) if columns else None

    def _reader(self, fields: Sequence[Field], *, ignore_unknown: bool) -> NativeColumns:
        schema = Schema(tuple(fields))
        return NativeColumns(schema, refuse_nul=self._how.refuse_nul, ignore_unknown=ignore_unknown)


_NO_NAME = " "


@dataclass(frozen=True, slots=True)
class _Part:
    """How one part of events is read."""

    columns: Sequence[_Column]
    reader: NativeColumns

    def read(self, parts: Sequence[bytes], good: Mask) -> dict[str, pa.Array]:
        """The declared columns, as long as there are parts; what is in doubt is no longer good, and null here."""
        read, doubtful = self.reader.read(binaries(*parts))
        good[_numbers(doubtful)] = False
        whole = _spread(read, _numbers(doubtful), len(parts))
        columns = {}
        for column in self.columns:
            array, doubts = column.convert(whole[column.read_as.name])
            if doubts is not None:
                good &= ~doubts
            columns[column.read_as.name] = array
        return columns


class _Envelope:
    """The columns that come from an event's envelope, and its ``op``."""

    def __init__(self, fields: Sequence[Field], how: Encoding) -> None:
        top: dict[str, Field] = {"op": Field("op", Scalar.STRING, required=True)}
        inner: dict[str, list[Field]] = {}
        self._columns: list[tuple[Field, tuple[str, ...], Convert]] = []
        for declared in fields:
            unit = instant_unit(declared.name) if declared.type is Scalar.TIMESTAMP else None
            read_as = Scalar.LONG if unit else declared.type
            *outer, name = envelope_path(declared.name)
            if outer:
                inner.setdefault(outer[0], []).append(Field(name, read_as))
            else:
                top.setdefault(name, Field(name, read_as))
            convert = _moments(unit, pa.timestamp("us", "UTC")) if unit else _as_read
            self._columns.append((declared, envelope_path(declared.name), convert))
        wanted = [*top.values(), *(Field(name, Struct(tuple(fields))) for name, fields in inner.items())]
        self._reader = NativeColumns(Schema(tuple(wanted)), refuse_nul=how.refuse_nul, ignore_unknown=True)

    def read(self, parts: Sequence[bytes], good: Mask) -> dict[str, pa.Array]:
        read, doubtful = self._reader.read(binaries(*parts))
        good[_numbers(doubtful)] = False
        whole = _spread(read, _numbers(doubtful), len(parts))
        good &= _true(pc.is_in(whole["op"], value_set=_ROW_OPS))
        columns = {}
        for declared, path, convert in self._columns:
            array = whole[path[0]]
            for name in path[1:]:
                array = pc.struct_field(array, name)
            array, doubts = convert(array)
            if doubts is not None:
                good &= ~doubts
            if declared.required:
                good &= _valid(array)
            columns[declared.name] = array
        return columns


_ROW_OPS = binaries(b"c", b"r", b"u").cast(pa.string())


def _spread(read: pa.RecordBatch, doubtful: npt.NDArray[np.int64], size: int) -> dict[str, pa.Array]:
    """Columns as long as there are records, null where one is in doubt."""
    columns = dict(zip(read.schema.names, read.columns, strict=True))
    if not len(doubtful):
        return columns
    good = np.ones(size, np.bool_)
    good[doubtful] = False
    places = np.cumsum(good) - 1
    at = pa.Array.from_buffers(pa.int64(), size, [_bits(good), pa.py_buffer(places.astype(np.int64))])
    return {name: column.take(at) for name, column in columns.items()}


# Arrow's own ways between masks and numpy look for pandas, see ``avow.arrow``.


def _bits(mask: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _unpacked(buffer: pa.Buffer, array: pa.Array) -> Mask:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def _valid(array: pa.Array) -> Mask:
    buffer = array.buffers()[0]
    return np.ones(len(array), np.bool_) if buffer is None else _unpacked(buffer, array)


def _true(array: pa.BooleanArray) -> Mask:
    """Where it is true, and not null."""
    return _unpacked(array.buffers()[1], array) & _valid(array) if len(array) else np.zeros(0, np.bool_)


def _numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    """Of null, zero."""
    if not len(array):
        return np.zeros(0, np.int64)
    found = np.frombuffer(array.buffers()[1], np.int64, len(array), 8 * array.offset)
    return np.where(_valid(array), found, 0) if array.null_count else found


# ---- encodings, as in ``values`` -------------------------------------------------------------------------------------


def _as_read(array: pa.Array) -> tuple[pa.Array, None]:
    return array, None


def _column(declared: Field, connect: ConnectType | None, how: Encoding) -> _Column | None:
    """How ``values`` reads this column, on many values; None if it is not done here."""
    kind = connect.type if connect else ""
    name = connect.name if connect else ""
    plain = _Column(declared, _as_read)
    match declared.type:
        case Decimal():
            return _decimal_column(declared, declared.type, connect, how)
        case Scalar.STRING if kind in ("", "string"):
            return replace(plain, convert=_unless(how.unavailable))
        case Scalar.BINARY if (kind == "bytes" and name != DECIMAL) or (not kind and how.binary_mode in _BASE64):
            return replace(plain, convert=_unless(how.unavailable))
        case Scalar.DATE if not kind or (kind == "int32" and name in DAYS):
            return _Column(replace(declared, type=Scalar.LONG), _days)
        case Scalar.TIMESTAMP_NTZ:
            unit = UNITS.get(name) if kind == "int64" else None if kind else _unit_of(declared, how)
            long = replace(declared, type=Scalar.LONG)
            return _Column(long, _moments(unit, pa.timestamp("us"))) if unit else None
        case Scalar.TIMESTAMP if not kind or name == "io.debezium.time.ZonedTimestamp":
            return plain
        case Scalar.BOOLEAN if kind in ("", "boolean"):
            return plain
        case Scalar.DOUBLE if kind in ("", "float", "double", "int8", "int16", "int32", "int64"):
            return plain
        case Scalar.FLOAT if kind in ("", "float"):
            return plain
        case Scalar.BYTE | Scalar.SHORT | Scalar.INT | Scalar.LONG if kind in ("", "int8", "int16", "int32", "int64"):
            return plain
    return None


_BASE64 = ("bytes", "base64")


def _unit_of(declared: Field, how: Encoding) -> int | None:
    """Of a timestamp without a schema."""
    mode = "connect" if declared.name in how.millisecond_columns else how.time_mode
    return None if mode in (None, "isostring") else MODE_UNITS.get(mode, 1_000_000)


def _decimal_column(declared: Field, type: Decimal, connect: ConnectType | None, how: Encoding) -> _Column | None:
    if connect is None:
        if how.decimal_mode is None:
            return None
        if how.decimal_mode != "precise":
            return _Column(declared, _as_read)
        return _Column(replace(declared, type=Scalar.BINARY), _unscaled(type, 0))
    if connect.name == DECIMAL and connect.type == "bytes":
        scale = connect.parameters.get("scale", "")
        if not scale.isdecimal() or not 0 <= (up := type.scale - int(scale)) <= type.precision:
            return None
        return _Column(replace(declared, type=Scalar.BINARY), _unscaled(type, up))
    return _Column(declared, _as_read) if connect.type == "string" and not connect.name else None


def _unless(placeholder: str) -> Convert:
    """What a column must not hold is left to the strict way."""
    forbidden = binaries(placeholder.encode())

    def convert(array: pa.Array) -> tuple[pa.Array, Mask]:
        return array, _true(pc.equal(array, forbidden.cast(array.type)[0]))

    return convert


def _days(array: pa.Array) -> tuple[pa.Array, Mask]:
    days = _numbers(array)
    doubts = (days < FIRST_DAY) | (days > LAST_DAY)
    return _fixed(pa.date32(), np.where(doubts, 0, days).astype(np.int32), array), doubts


def _moments(per_second: int, type: pa.DataType) -> Convert:
    """Numbers of units as moments of microseconds."""
    up, down = max(1_000_000 // per_second, 1), max(per_second // 1_000_000, 1)

    def convert(array: pa.Array) -> tuple[pa.Array, Mask]:
        given = _numbers(array)
        if down > 1:
            micros, rest = np.divmod(given, down)
            doubts = rest != 0
        else:
            doubts = (given < MICROS_MIN // up) | (given > MICROS_MAX // up)
            micros = np.where(doubts, 0, given) * up
        return _fixed(type, micros, array), doubts

    return convert


def _fixed(type: pa.DataType, values: npt.NDArray[np.int32] | npt.NDArray[np.int64], like: pa.Array) -> pa.Array:
    """An array of these values, null where the other one is."""
    valid = _bits(_valid(like)) if like.null_count else None
    return pa.Array.from_buffers(type, len(like), [valid, pa.py_buffer(np.ascontiguousarray(values))])


def _unscaled(type: Decimal, up: int) -> Convert:
    """Bytes as decimals, of a scale that is larger by ``up`` digits."""
    limit, factor = 10**type.precision, 10**up

    def convert(array: pa.Array) -> tuple[pa.Array, Mask]:
        doubts = np.zeros(len(array), np.bool_)
        words = []
        for row, data in enumerate(array.to_pylist()):
            number = int.from_bytes(data or b"", "big", signed=True) * factor
            if data is not None and not (0 < len(data) <= _DECIMAL_BYTES and -limit < number < limit):
                doubts[row], number = True, 0
            words.append(number.to_bytes(_DECIMAL_BYTES, "little", signed=True))
        valid = _bits(_valid(array)) if array.null_count else None
        return pa.Array.from_buffers(arrow_type(type), len(array), [valid, pa.py_buffer(b"".join(words))]), doubts

    return convert
