"""Many JSON records at once, by column: Arrow's own reader, and checks where it is laxer than we are.

What is returned is right, and everything doubtful is named instead: ``document`` and ``values`` decide, one
record at a time, and this module only ever agrees with them. Where Arrow's reader is lax, as tried with pyarrow 26:

- NaN, Infinity and numbers too large for float32 come out as such, numbers too small for a float as zero, whole
  numbers that a float does not hold as another
- an absent field is null; a number may have any length; a decimal too large for its type may come out as another
- a decimal with an exponent far below its scale comes out as zero, or ends the process: the exponent indexes a table
- UTF-8 is not checked; a NUL byte ends the input
- two objects in one value are two rows, and ``null`` as the first record ends the process

It refuses lone surrogates, duplicate fields, values of another kind and integers out of range. It is set to refuse
unknown fields whatever the pipeline says, because in what it passes over it checks next to nothing.

Owns: the checks. Must not know: why a record is refused. Its neighbour is ``arrow_columns``, which calls it.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from avow.arrow import arrow_fields, arrow_type, binaries, indices
from avow.formats.json.document import NUMBER_DIGITS_MAX
from avow.formats.json.values import WHOLE_UNTIL, base64_decode, is_day
from avow.schema import MAX_PRECISION, Array, Decimal, Field, Map, Scalar, Schema, Struct, Type

_DAY = r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_DAY}T{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?"
# The common spellings; the others are left to ``values``, which knows them all.
_SPELLING = {
    Scalar.DATE: rf"{_DAY}\z",
    Scalar.TIMESTAMP: rf"{_TIME}(?:Z|[+-]{_CLOCK})\z",
    Scalar.TIMESTAMP_NTZ: rf"{_TIME}\z",
}
# Near the ends of the calendar a zone can lead out of it: ``values`` decides there. Days or microseconds from 1970 on.
_FIRST_DAY, _LAST_DAY = ((day - date(1970, 1, 1)).days for day in (date(1, 1, 2), date(9999, 12, 30)))
_DAY_MICROS = 86_400_000_000
_FLOATS = (Scalar.FLOAT, Scalar.DOUBLE)
_TINY = r"[eE]-|0{30}"  # in every number that is not zero and becomes a zero
# What may spell a decimal of so many digits after the point that Arrow's table of powers, of 38, ends before them: a
# long fraction, a negative exponent of two digits, or anything of it behind an escape.
_FAR_DECIMAL = r'\.[0-9]{29}|["\[:,\s][+-]?[0-9.]+[eE]-[0-9]{2}|\\u00[2-6]'
# A number too long, after every character that a number can have was made a 0 and every other one a space.
_NUMERIC = bytes(ord("0") if chr(byte) in "0123456789.eE+-" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (NUMBER_DIGITS_MAX + 1)
# What Arrow's messages say beside the fact. Only the search for bad records is quicker for it.
_ROW = re.compile(r" in row ([0-9]+)$")
_CLUE = re.compile(
    r"couldn't parse:(\S+)$|: (\S+) requires (?:precision|scale) |^The string '(.+)' is not a valid decimal"
)


_LINE_END = list(binaries(b"\n", b""))  # joined to each value, with nothing between


class Unreadable(Exception):
    """Arrow's reader failed on these values."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        row, clue = _ROW.search(message), _CLUE.search(message)
        self.row = int(row[1]) if row else None  # where, if it said so
        self.clue = clue[clue.lastindex or 0] if clue else None  # the number it could not convert, if it was one


@dataclass(slots=True)
class _Doubts:
    """Rows of one array that Arrow alone cannot vouch for."""

    rows: set[int] = field(default_factory=set)
    zeros: set[int] = field(default_factory=set)  # rows with a float zero: doubtful if a number looks tiny

    def add(self, other: _Doubts) -> None:
        self.rows |= other.rows
        self.zeros |= other.zeros

    def of_parents(self, parents: pa.Array) -> _Doubts:
        """The same doubts, about the lists that hold these elements."""
        return _Doubts(_taken(parents, self.rows), _taken(parents, self.zeros))


class Columns:
    """Reads values into the columns of one schema."""

    def __init__(self, schema: Schema, *, refuse_nul: bool) -> None:
        self._fields = schema.fields
        self._refuse_nul = refuse_nul
        self.schema = pa.schema(arrow_fields(schema.fields))
        self._names = _count_names(schema.fields)
        self._has_decimal = any(_holds(field.type, Decimal) for field in schema)
        self._parse_options = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema([(f.name, _as_read(f.type)) for f in schema]),
            unexpected_field_behavior="error",
        )

    @staticmethod
    def can_read(schema: Schema) -> bool:
        """Whether Arrow's reader knows all these types. It has no maps."""
        return not any(_holds(field.type, Map) for field in schema)

    def unsafe(self, values: pa.Array) -> set[int]:
        """The rows that ``parse`` must not be given."""
        enclosed = pc.and_(pc.starts_with(values, b"{"), pc.ends_with(values, b"}"))
        rows = _where(pc.invert(enclosed))
        if self._has_decimal:
            rows |= _where(pc.match_substring_regex(values, _FAR_DECIMAL))
        # One look at all the bytes; only if that finds something, at each value.
        data = _all_bytes(values)
        long = pc.max(pc.binary_length(values)).as_py() > NUMBER_DIGITS_MAX and _may_hold_long_number(data)
        if long or not (self._is_clean(data) and _are_utf8(values)):
            rows |= {row for row, value in enumerate(values.to_pylist()) if not self._is_safe(value)}
        return rows

    def _is_safe(self, value: bytes) -> bool:
        return self._is_clean(value) and not _may_hold_long_number(value) and _is_utf8(value)

    def _is_clean(self, data: bytes) -> bool:
        # Looking for the backslash first is quicker than looking for what may follow it.
        escaped_nul = self._refuse_nul and b"\\" in data and b"\\u0000" in data
        return b"\0" not in data and not escaped_nul

    def parse(self, values: pa.Array) -> pa.Table:
        """A row for each value, as far as Arrow's reader goes, or ``Unreadable``.

        Each value starts with { and ends with }, so that no value can complete another one: joined by newlines, they
        are at least one object each, and as many rows as values means exactly one each.
        """
        text = pc.binary_join_element_wise(values, *_LINE_END).buffers()[2]
        # One block for all: a value may hold newlines, and where blocks end Arrow takes them for the end of a record.
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        try:
            # Half the fixed cost of read_json, which counts where a few bad records are searched for.
            with pyarrow.json.open_json(pa.BufferReader(text), options, self._parse_options) as reader:
                table = reader.read_all()
        except pa.ArrowInvalid as error:
            raise Unreadable(str(error)) from None
        if table.num_rows != len(values):
            raise Unreadable
        return table

    def suspects(self, values: pa.Array, failure: Unreadable) -> set[int]:
        """The rows that may have made ``parse`` fail. A guess: they are worth a look of their own."""
        if failure.clue:
            return _where(pc.match_substring(values, failure.clue))
        return _where(pc.greater(pc.count_substring(values, '":'), self._names))  # a field that is not declared

    def convert(self, table: pa.Table, values: pa.Array) -> tuple[pa.RecordBatch, set[int]]:
        """What was parsed, in the declared types, and the rows that are in doubt: what stands there does not count."""
        doubts = _Doubts()
        arrays = [
            _converted_field(table.column(number).combine_chunks(), declared, doubts)
            for number, declared in enumerate(self._fields)
        ]
        if doubts.zeros:
            zeros = indices(sorted(doubts.zeros))
            doubts.rows |= _taken(zeros, _where(pc.match_substring_regex(values.take(zeros), _TINY)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema), doubts.rows


def _as_read(type: Type) -> pa.DataType:
    """What Arrow's reader is asked for: text where it would be laxer than we are."""
    if type in _SPELLING or type is Scalar.BINARY:
        return pa.string()
    if isinstance(type, Decimal) and type.precision + type.scale > MAX_PRECISION:
        # Arrow scales a number up before it checks its size: 7 as decimal128(38,38) overflows and comes out as 0.19...
        return pa.decimal256(type.precision, type.scale)
    if isinstance(type, Array):
        return pa.list_(_as_read(type.element))
    if isinstance(type, Struct):
        return pa.struct([(field.name, _as_read(field.type)) for field in type.fields])
    return arrow_type(type)


def _count_names(fields: tuple[Field, ...]) -> int:
    return sum(1 + (_count_names(f.type.fields) if isinstance(f.type, Struct) else 0) for f in fields)


def _holds(type: Type, kind: builtins.type[Decimal | Map]) -> bool:
    """Whether a type is of this kind, or has one inside."""
    if isinstance(type, Array):
        return _holds(type.element, kind)
    if isinstance(type, Struct):
        return any(_holds(field.type, kind) for field in type.fields)
    return isinstance(type, kind)


def _converted_field(array: pa.Array, declared: Field, doubts: _Doubts, parents: pa.Array | None = None) -> pa.Array:
    """A column as its declared type. Rows in doubt are added to ``doubts``; what stands there does not matter."""
    if declared.required and array.null_count:
        absent = array.is_null()
        doubts.rows |= _where(absent if parents is None else pc.and_(absent, parents.is_valid()))
    return _converted(array, declared.type, doubts)


def _converted(array: pa.Array, type: Type, doubts: _Doubts) -> pa.Array:
    if isinstance(type, Array):
        return _converted_list(array, type, doubts)
    if isinstance(type, Struct):
        children = [_converted_field(array.field(n), child, doubts, array) for n, child in enumerate(type.fields)]
        return pa.StructArray.from_arrays(children, fields=arrow_fields(type.fields), mask=array.is_null())
    if isinstance(type, Decimal):
        return _converted_decimal(array, type, doubts)
    if type in _FLOATS:
        doubts.rows |= _where(pc.invert(pc.is_finite(array)))
        doubts.zeros |= _where(pc.invert(array.cast(pa.bool_())))
        doubts.rows |= _large(array, WHOLE_UNTIL[type])
    elif type in _SPELLING:
        return _converted_time(array, type, doubts)
    elif type is Scalar.BINARY:
        return _converted_binary(array, doubts)
    return array


def _converted_list(array: pa.Array, type: Array, doubts: _Doubts) -> pa.Array:
    inner = _Doubts()
    elements = _converted(array.values, type.element, inner)
    if inner.rows or inner.zeros:
        doubts.add(inner.of_parents(pc.list_parent_indices(array)))
    return pa.ListArray.from_arrays(array.offsets, elements, mask=array.is_null())


def _converted_time(array: pa.Array, type: Scalar, doubts: _Doubts) -> pa.Array:
    target = arrow_type(type)
    spelled = pc.match_substring_regex(array, _SPELLING[type])
    if not pc.all(spelled).as_py():
        doubts.rows |= _where(pc.invert(spelled))
        array = pc.if_else(spelled, array, None)
    try:
        times = array.cast(target)
    except pa.ArrowInvalid:  # a day that its month does not have
        wrong = [text is not None and not is_day(text[:10]) for text in array.to_pylist()]
        doubts.rows |= _where(pa.array(wrong))
        times = pc.if_else(pa.array(wrong), None, array).cast(target)
    doubts.rows |= _near_the_ends(times.cast(pa.int32() if type is Scalar.DATE else pa.int64()))
    return times


def _near_the_ends(times: pa.Array) -> set[int]:
    unit = 1 if times.type == pa.int32() else _DAY_MICROS
    first, last = _FIRST_DAY * unit, _LAST_DAY * unit
    extremes = pc.min_max(times).as_py()
    if extremes["min"] is None or first <= extremes["min"] <= extremes["max"] <= last:
        return set()
    return _where(pc.or_(pc.less(times, first), pc.greater(times, last)))


def _large(array: pa.Array, limit: float) -> set[int]:
    """The floats that may stand for a whole number that they are not."""
    extremes = pc.min_max(array).as_py()
    if extremes["min"] is None or (-limit < extremes["min"] and extremes["max"] < limit):
        return set()
    return _where(pc.greater_equal(pc.abs(array), pa.scalar(limit, array.type)))


def _converted_binary(array: pa.Array, doubts: _Doubts) -> pa.Array:
    texts = array.to_pylist()
    decoded = [None if text is None else base64_decode(text) for text in texts]
    doubts.rows |= {row for row, text in enumerate(texts) if text is not None and decoded[row] is None}
    return pa.array(decoded, pa.binary())


def _converted_decimal(array: pa.Array, type: Decimal, doubts: _Doubts) -> pa.Array:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:  # a number with more digits than the type has
        whole_digits = type.precision - type.scale
        over = [bool(number) and number.adjusted() >= whole_digits for number in array.to_pylist()]
        doubts.rows |= _where(pa.array(over))
        array = pc.if_else(pa.array(over), None, array)
    return array.cast(arrow_type(type))


def _may_hold_long_number(data: bytes) -> bool:
    """Whether there is a run of characters that long. It may as well be text, or several values: then another looks."""
    return len(data) > NUMBER_DIGITS_MAX and _LONG_NUMBER in data.translate(_NUMERIC)


def _are_utf8(values: pa.Array) -> bool:
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _all_bytes(values: pa.Array) -> bytes:
    """The values without gap, as they stand in their buffer."""
    _, offsets, data = values.buffers()
    starts = memoryview(offsets).cast("i")
    return bytes(data[starts[values.offset] : starts[values.offset + len(values)]])


def _where(mask: pa.Array) -> set[int]:
    return set(pc.indices_nonzero(mask).to_pylist()) if pc.any(mask).as_py() else set()


def _taken(array: pa.Array, rows: Iterable[int]) -> set[int]:
    return set(array.take(indices(sorted(rows))).to_pylist())
