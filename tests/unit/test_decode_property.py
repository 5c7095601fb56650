"""Nothing is ever coerced: every record against a slow, strict reading of the same bytes that shares no code with avow.

The reading here is written from RFC 8259 and RFC 3339 by hand: its own grammar, its own arithmetic. For any records,
the decoder must accept exactly what it accepts, with exactly equal values, whichever way it reads them.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.json_readers import READERS, reading_by

from avow.formats import decoder
from avow.formats.base import Decoded
from avow.formats.json import arrow_columns as reading
from avow.settings import PipelineConfig

# ---- the slow reading: syntax --------------------------------------------------------------------------------------


class No(Exception):
    """The record is refused."""


@dataclass(frozen=True)
class Num:
    token: str


WS = " \t\n\r"
NUM = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
SIMPLE = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Slow:
    """RFC 8259, one character after the other."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def document(self) -> Any:
        value = self.value(0)
        self.space()
        if self.at != len(self.text):
            raise No("more after the end")
        return value

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        while self.peek() and self.peek() in WS:
            self.at += 1

    def expect(self, word: str) -> None:
        if not self.text.startswith(word, self.at):
            raise No(f"{word} is due at {self.at}")
        self.at += len(word)

    def value(self, depth: int) -> Any:
        self.space()
        first = self.peek()
        if first in ("{", "["):
            if depth == 1000:
                raise No("too deep")
            return self.object(depth + 1) if first == "{" else self.array(depth + 1)
        if first == '"':
            return self.string()
        for word, value in (("true", True), ("false", False), ("null", None)):
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return value
        number = NUM.match(self.text, self.at)
        if not number:
            raise No(f"no value at {self.at}")
        self.at = number.end()
        if sum(c in "0123456789" for c in number[0]) > 1000:
            raise No("long number")
        return Num(number[0])

    def object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.expect("{")
        self.space()
        if self.peek() == "}":
            self.at += 1
            return found
        while True:
            self.space()
            name = self.string()
            self.space()
            self.expect(":")
            value = self.value(depth)
            if name in found:
                raise No("twice")
            found[name] = value
            self.space()
            if self.peek() == "}":
                self.at += 1
                return found
            self.expect(",")

    def array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.expect("[")
        self.space()
        if self.peek() == "]":
            self.at += 1
            return found
        while True:
            found.append(self.value(depth))
            self.space()
            if self.peek() == "]":
                self.at += 1
                return found
            self.expect(",")

    def string(self) -> str:
        self.expect('"')
        units: list[str] = []
        while True:
            char = self.peek()
            self.at += 1
            if char == '"':
                break
            if not char or char < " ":
                raise No("in a string")
            units.append(self.escape() if char == "\\" else char)
        # Pairs of escaped surrogates become one character; a lone one cannot be encoded.
        try:
            return "".join(units).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            raise No("lone surrogate") from None

    def escape(self) -> str:
        char = self.peek()
        self.at += 1
        if char in SIMPLE and char:
            return SIMPLE[char]
        digits = self.text[self.at : self.at + 4]
        if char != "u" or not re.fullmatch("[0-9a-fA-F]{4}", digits):
            raise No("escape")
        self.at += 4
        return chr(int(digits, 16))


# ---- the slow reading: values --------------------------------------------------------------------------------------

# A type as a plain tuple, so that nothing of avow's own schema is used: ("long",), ("array", T), ("decimal", 5, 2),
# ("struct", [(name, T, required), ...]), ("map", T).
T = tuple[Any, ...]
BITS = {"byte": 8, "short": 16, "int": 32, "long": 64}
DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
MOMENT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:([Zz])|([+-])(\d\d):(\d\d))?", re.ASCII
)
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def exact(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    power = int(exponent or 0)
    if abs(power) > 5000:
        raise No("far out of range") if mantissa.strip("+-0.") else OverflowError
    whole, _, part = mantissa.partition(".")
    return Fraction(int((whole + part) or "0")) * Fraction(10) ** (power - len(part))


def nearest(token: str, code: str) -> float:
    """The nearest float of 32 or 64 bits, ties to even, by exact arithmetic."""
    digits, least, largest = {"f": (24, -149, 128), "d": (53, -1074, 1024)}[code]
    sign = -1.0 if token.startswith("-") else 1.0
    try:
        value = abs(exact(token))
    except OverflowError:
        return sign * 0.0
    if value == 0:
        return sign * 0.0
    power = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** power > value:
        power -= 1
    unit = max(power - digits + 1, least)
    scaled = value / Fraction(2) ** unit
    count = round(scaled)  # ties to even
    if count == 0 or Fraction(count) * Fraction(2) ** unit >= Fraction(2) ** largest:
        raise No("too small or too large")
    return sign * float(count) * 2.0**unit  # both exact, and so is their product


def whole_or_nearest(token: str, code: str) -> float:
    found = nearest(token, code)
    if re.fullmatch("-?[0-9]+", token) and exact(token) != Fraction(found):
        raise No("a whole number that is not held")
    return found


def day_number(year: str, month: str, day: str) -> date:
    y, m, d = int(year), int(month), int(day)
    leap = y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)
    if y < 1 or not 1 <= m <= 12 or not 1 <= d <= MONTH_DAYS[m - 1] + (leap and m == 2):
        raise No("calendar")
    return date(y, m, d)


def moment(text: Any, zoned: bool) -> datetime:
    match = MOMENT.fullmatch(text) if isinstance(text, str) else None
    if not match or bool(match[8] or match[9]) != zoned:
        raise No("timestamp")
    day = day_number(match[1], match[2], match[3])
    hour, minute, second = (int(match[part]) for part in (4, 5, 6))
    fraction = (match[7] or "") + "000000"
    if hour > 23 or minute > 59 or second > 59 or fraction[6:].strip("0"):
        raise No("clock")
    zone = 0
    if match[9]:
        if int(match[10]) > 23 or int(match[11]) > 59:
            raise No("zone")
        zone = (int(match[10]) * 60 + int(match[11])) * (-1 if match[9] == "-" else 1)
    micros = ((day.toordinal() * 24 + hour) * 60 + minute - zone) * 60_000_000 + second * 1_000_000 + int(fraction[:6])
    first, last = 86_400_000_000, (date(9999, 12, 31).toordinal() + 1) * 86_400_000_000
    if not first <= micros < last:
        raise No("years")
    return datetime(1, 1, 1, tzinfo=UTC if zoned else None) + timedelta(microseconds=micros - first)


def number(value: Any) -> str:
    if not isinstance(value, Num):
        raise No("not a number")
    return value.token


def slow_value(value: Any, type: T, policy: str, no_nul: bool) -> Any:
    if value is None:
        return None
    match type:
        case ("boolean",):
            if value is not True and value is not False:
                raise No("boolean")
            return value
        case ("byte" | "short" | "int" | "long",):
            token = number(value)
            if not re.fullmatch("-?[0-9]+", token) or len(token) > 25:
                raise No("integer")
            if not -(2 ** (BITS[type[0]] - 1)) <= int(token) < 2 ** (BITS[type[0]] - 1):
                raise No("range")
            return int(token)
        case ("float",):
            return whole_or_nearest(number(value), "f")
        case ("double",):
            return whole_or_nearest(number(value), "d")
        case ("decimal", precision, scale):
            return slow_decimal(value.token if isinstance(value, Num) else value, precision, scale)
        case ("string",):
            if not isinstance(value, str) or (no_nul and "\0" in value):
                raise No("string")
            return value
        case ("binary",):
            if not isinstance(value, str) or not re.fullmatch("[A-Za-z0-9+/]*=*", value):
                raise No("base64")
            bits = "".join(
                f"{'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'.index(c):06b}"
                for c in value.rstrip("=")
            )
            found = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits) - 7, 8))
            if base64.standard_b64encode(found).decode() != value:
                raise No("base64")
            return found
        case ("date",):
            match_ = DATE.fullmatch(value) if isinstance(value, str) else None
            if not match_:
                raise No("date")
            return day_number(match_[1], match_[2], match_[3])
        case ("timestamp",):
            return moment(value, zoned=True)
        case ("timestamp_ntz",):
            return moment(value, zoned=False)
        case ("array", element):
            if not isinstance(value, list):
                raise No("array")
            return [slow_value(inner, element, policy, no_nul) for inner in value]
        case ("map", element):
            if not isinstance(value, dict) or (no_nul and any("\0" in name for name in value)):
                raise No("map")
            return [(name, slow_value(inner, element, policy, no_nul)) for name, inner in value.items()]
        case ("struct", fields):
            if not isinstance(value, dict):
                raise No("struct")
            if policy != "ignore" and value.keys() - {name for name, _, _ in fields}:
                raise No("unknown")
            return slow_fields(value, fields, policy, no_nul)
    raise AssertionError(type)


def slow_decimal(text: Any, precision: int, scale: int) -> Decimal:
    if not isinstance(text, str) or not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise No("decimal")
    try:
        scaled = exact(text) * 10**scale
    except OverflowError:
        scaled = Fraction(0)
    if scaled.denominator != 1 or abs(scaled.numerator) >= 10**precision:
        raise No("decimal")
    return Decimal(f"{scaled.numerator}e-{scale}")


def slow_fields(value: dict[str, Any], fields: Any, policy: str, no_nul: bool) -> dict[str, Any]:
    row = {}
    for name, type, required in fields:
        row[name] = slow_value(value.get(name), type, policy, no_nul)
        if required and row[name] is None:
            raise No("required")
    return row


def has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any("\0" in name or has_nul(inner) for name, inner in value.items())
    return any(map(has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def slow_row(value: bytes, fields: Any, policy: str, no_nul: bool) -> dict[str, Any]:
    """The row a record must give, or ``No``. The fields that are kept stay a tree, to compare with the text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise No("UTF-8") from None
    document = Slow(text.removeprefix("\ufeff")).document()
    if not isinstance(document, dict):
        raise No("object")
    known = {name for name, _, _ in fields}
    rest = {name: inner for name, inner in document.items() if name not in known}
    if rest and policy == "reject":
        raise No("unknown")
    row = slow_fields(document, fields, policy, no_nul)
    if policy == "keep":
        if no_nul and has_nul(rest):
            raise No("NUL")
        row["_rest"] = rest or None
    return row


# ---- records: good, strange and hostile ----------------------------------------------------------------------------

SCALARS = ("boolean", "byte", "short", "int", "long", "float", "double", "string", "binary", "date")
SCHEMAS: dict[str, list[tuple[str, T, bool]]] = {
    "flat": [
        ("id", ("long",), True),
        ("account", ("string",), True),
        ("amount", ("double",), False),
        ("at", ("timestamp",), False),
        ("note", ("string",), False),
    ],
    "scalars": [*[(name[0:2], (name,), False) for name in SCALARS], ("ntz", ("timestamp_ntz",), True)],
    "decimals": [("a", ("decimal", 5, 2), True), ("b", ("decimal", 38, 38), False), ("c", ("decimal", 38, 0), False)],
    "nested": [
        ("s", ("struct", [("x", ("int",), True), ("t", ("array", ("timestamp",)), False)]), False),
        ("l", ("array", ("struct", [("d", ("decimal", 4, 1), False), ("f", ("float",), True)])), True),
        ("ll", ("array", ("array", ("binary",))), False),
    ],
    "maps": [("m", ("map", ("struct", [("day", ("date",), True)])), False), ("id", ("int",), True)],
}


def ddl(type: T) -> str:
    match type:
        case ("decimal", precision, scale):
            return f"decimal({precision},{scale})"
        case ("array", element):
            return f"array<{ddl(element)}>"
        case ("map", element):
            return f"map<string,{ddl(element)}>"
        case ("struct", fields):
            return f"struct<{', '.join(f'{n}: {ddl(t)}' + ' not null' * r for n, t, r in fields)}>"
    return str(type[0])


def pipeline(fields: list[tuple[str, T, bool]], policy: str) -> PipelineConfig:
    schema = ", ".join(f"`{name}` {ddl(type)}" + " not null" * required for name, type, required in fields)
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["t"]},
            "decode": {"format": "json", "schema": schema, "unknown_fields": policy},
            "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t"},
        }
    )


ODD_NUMBERS = """0 -0 -0.0 0e10 0.0e-999 1e999 -1e999 1e-999 1e39 3.4028235e38 3.4028236e38 1e-46 7e-46 5e-324 2e-324
    1.0 1e2 127 128 -128 -129 32768 2147483648 9223372036854775807 9223372036854775808 -9223372036854775809 999.99 1000
    1.230 1.005 99999 0.00 01 +1 1. .5 - 1e NaN Infinity -Infinity Inf nan 0x1 1_0 00 16777217 9007199254740993
    1.00000017881393432617187499 1.00000017881393432617187501 1.000000178813934326171875
    1e99999999999999999999 0e99999999999999999999 1e-41 1e-39 1e-10000000 0e-10000000 1e-99999999999999999999"""
ODD_CHARS = r"""\n \" \\ \/ \b \u0000 \\u0000 \u0041 \ud83d\ude00 \ud83d \ude00 \\ud83d \uD800x \x \u12 \u00e9 \. \N
    N NaN }{ e- ' <b>"""
NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,45})(\.[0-9]{1,45})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(ODD_NUMBERS.split()),
    st.sampled_from([46, 299, 320, 999, 1000, 1001]).map(lambda digits: "0." + "0" * (digits - 2) + "1"),
)
CHARS = st.characters(exclude_categories=["Cs"]).map(lambda c: c if c >= " " and c not in '"\\' else f"\\u{ord(c):04x}")
TAME = st.one_of(
    CHARS.filter(lambda c: c != "\\u0000"), st.sampled_from([r"\n", r"\"", r"\\", r"\ud83d\ude00", "0" * 40])
)
ODD = st.one_of(CHARS, st.sampled_from([*ODD_CHARS.split(), "\n", "\t", "\0", "\x7f", "\u2028", "\x1b[31m", " "]))
STRINGS = st.lists(ODD, max_size=6).map(lambda chars: '"' + "".join(chars) + '"')
TIMES = st.one_of(
    st.from_regex(r"(0000|0001|1970|2024|9999)-(01|02|04|12|13)-(00|01|29|30|31|32)", fullmatch=True),
    st.from_regex(
        r"(0000|0001|1969|2023|2024|9999)-(01|02|12)-(01|28|29|31)[Tt ](00|23|24):(00|59|60)(:(00|59|60))?"
        r"([.,](0|5|999999|123456|1234560|1234567|0000000000))?",
        fullmatch=True,
    ),
)
ZONES = st.sampled_from(["", "Z", "Z", "z", "+00:00", "-00:00", "+14:00", "-23:59", "+24:00", "+01:60", "+01", "+0100"])
STAMPS = st.builds(lambda time, zone: f'"{time}{zone}"', TIMES, ZONES)
BASE64 = st.sampled_from(['"QR=="', '"QQ="', '"QQ"', '"QQ==="', '"-_=="', '"Q Q="', '"QQ==QQ=="', '"="', '"é"', '""'])
DECIMALS = st.sampled_from(['"+1.5"', '".5"', '"5."', '"007"', '" 1"', '"1e1"', '"."', '"NaN"', '"1,5"', '"٣"'])
WORDS = st.sampled_from(["null", "true", "false", "{}", "[]", "[[{}]]", "tru", "", '""', '{"a":1,"a":2}'])
STRANGE = st.one_of(NUMBERS, NUMBERS.map(lambda n: f'"{n}"'), STRINGS, STAMPS, BASE64, DECIMALS, WORDS)
SPACE = st.sampled_from(["", "", "", " ", "\n", "\r\n\t "])


def good(type: T) -> st.SearchStrategy[str]:
    """JSON that a type accepts, but for what may be strange inside of it."""
    match type:
        case ("byte" | "short" | "int" | "long" as name,):
            return st.integers(-(2 ** (BITS[name] - 1)), 2 ** (BITS[name] - 1) - 1).map(str)
        case ("float" | "double" as name,):
            floats = st.floats(allow_nan=False, allow_infinity=False, width=32 if name == "float" else 64)
            return floats.map(repr) | st.integers(-999, 999).map(str)
        case ("decimal", precision, scale):
            numbers = st.integers(1 - 10**precision, 10**precision - 1).map(lambda n: f"{n}e-{scale}")
            small = st.integers(0, min(10 ** (precision - scale), 10**9) - 1).map(str)
            return numbers | small | numbers.map(lambda text: f'"{text}"') | small.map(lambda text: f"{text}.0")
        case ("string",):
            return st.lists(TAME, max_size=6).map(lambda chars: '"' + "".join(chars) + '"')
        case ("binary",):
            return st.binary(max_size=8).map(lambda found: f'"{base64.b64encode(found).decode()}"')
        case ("date",):
            return st.dates().map(lambda day: f'"{day}"')
        case ("timestamp",):
            times = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(datetime.isoformat)
            return st.builds(
                lambda time, zone: f'"{time}{zone}"', times, st.sampled_from(["Z", "z", "-23:59", "+05:30"])
            )
        case ("timestamp_ntz",):
            return st.datetimes().map(lambda time: f'"{time.isoformat()}"')
        case ("array", element):
            return st.lists(spelled(element), max_size=3).map(lambda found: f"[{','.join(found)}]")
        case ("map", element):
            return objects(st.lists(st.tuples(good(("string",)), spelled(element)), max_size=3))
        case ("struct", fields):
            return records(fields)
    return st.sampled_from(["true", "false"])


def spelled(type: T) -> st.SearchStrategy[str]:
    return st.integers(0, 24).flatmap(lambda chance: good(type) if chance else STRANGE)


def objects(pairs: st.SearchStrategy[list[tuple[str, str]]]) -> st.SearchStrategy[str]:
    def text(pairs: list[tuple[str, str]], space: str) -> str:
        return "{" + space + ",".join(f"{name}{space}:{value}{space}" for name, value in pairs) + "}"

    return st.builds(text, pairs, SPACE)


@st.composite
def records(draw: st.DrawFn, fields: list[tuple[str, T, bool]]) -> str:
    pairs = []
    for name, type, required in fields:
        if draw(st.integers(0, 30 if required else 4)):
            names = [f'"{name}"'] * 9 + [f'"\\u{ord(name[0]):04x}{name[1:]}"']
            pairs.append((draw(st.sampled_from(names)), draw(spelled(type))))
    if draw(st.integers(0, 9)) == 0:
        stranger = st.sampled_from(['"x"', '"ID"', '""', '"_rest"', f'"{fields[0][0]}"']) | STRINGS
        pairs.append((draw(stranger), draw(STRANGE | st.just('{"a":[1.50,{"b":null}]}'))))
    return draw(objects(st.just(draw(st.permutations(pairs)))))


@st.composite
def values(draw: st.DrawFn, fields: list[tuple[str, T, bool]]) -> bytes:
    value = draw(records(fields)).encode()
    at = draw(st.integers(0, max(0, len(value) - 1)))
    match draw(st.integers(0, 39)):
        case 0:
            return value[:at]
        case 1:
            return value[:at] + draw(st.binary(max_size=2)) + value[at:]
        case 2:
            return value[:at] + value[at + 1 :]
        case 3:
            byte = draw(st.sampled_from(b'"{}[],:\\\n\r\0 0eN\xff\xc3'))
            return value[:at] + bytes([byte]) + value[at + 1 :]
        case 4:
            return draw(st.sampled_from([b"\xef\xbb\xbf", b" \n", b"x", b"\xef\xbb\xbf\xef\xbb\xbf", b"\f"])) + value
        case 5:
            ends = [b" ", b"\n", b"{}", b"\n{}", b"null", b"null{}", b" x", b",", b"\0", b"}"]
            return value + draw(st.sampled_from(ends))
        case 6:
            whole = [b"", b"null", b"1", b'"{}"', b"[{}]", b"{}", b"{}{}", b"\xff", b"{}null{}", b"{", b'{"\0":1}']
            return draw(st.sampled_from(whole))
    return value


# ---- the comparison ------------------------------------------------------------------------------------------------


def batch(found: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.nulls(len(found), pa.binary()), pa.array(found, pa.binary())], ["key", "value"]
    )


def outcome(decoded: Decoded) -> dict[int, Any]:
    """For each record, what became of it; floats by their bits, so that -0.0 is not 0.0."""
    assert decoded.rows_at.to_pylist() == sorted(decoded.rows_at.to_pylist())
    decoded.rows.validate(full=True)
    rows = dict(zip(decoded.rows_at.to_pylist(), map(comparable, decoded.rows.to_pylist()), strict=True))
    dead = {letter.index: None for letter in decoded.refused}
    assert not rows.keys() & dead.keys()
    for letter in decoded.refused:
        assert letter.detail
        assert len(letter.detail) <= 500
        assert letter.detail.isprintable()
    return rows | dead


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(inner) for inner in value]
    return struct.pack("d", value) if isinstance(value, float) else value


def expected(found: list[bytes], fields: Any, policy: str, no_nul: bool) -> Iterator[tuple[int, Any]]:
    for index, value in enumerate(found):
        try:
            yield index, comparable(slow_row(value, fields, policy, no_nul))
        except No:
            yield index, None


def with_rest_read(outcomes: dict[int, Any]) -> dict[int, Any]:
    """The kept text as the tree it spells: equal trees, equal digits."""
    for row in outcomes.values():
        if row and row.get("_rest") is not None:
            row["_rest"] = comparable(Slow(row["_rest"]).document())
    return outcomes


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, bool, list[bytes]]:
    name = draw(st.sampled_from(sorted(SCHEMAS)))
    policy = draw(st.sampled_from(["reject", "ignore", "keep"]))
    return name, policy, draw(st.booleans()), draw(st.lists(values(SCHEMAS[name]), min_size=1, max_size=8))


@pytest.fixture
def by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read few records as if they were many, by column wherever that is possible."""
    monkeypatch.setattr(reading, "_PIECE_ROWS_MIN", 1)
    monkeypatch.setattr(reading, "_PIECE_ROWS_AFTER_FAILURE", 4)
    monkeypatch.setattr(reading, "_ROWS_PER_FAILURE", 0.01)


@pytest.mark.usefixtures("by_column")
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(case=cases())
@example(case=("flat", "reject", True, [b'{"id":5,"account":"}', b'{"}']))
@example(case=("flat", "ignore", True, [b'{"id":1,"account":"a"}null{"id":2,"account":"b"}']))
def test_the_decoder_agrees_with_the_slow_reading(case: tuple[str, str, bool, list[bytes]]) -> None:
    name, policy, no_nul, found = case
    due = dict(expected(found, SCHEMAS[name], policy, no_nul))
    for reader in READERS:
        with reading_by(reader):
            decode = decoder(pipeline(SCHEMAS[name], policy), refuse_nul=no_nul).decode
        together = with_rest_read(outcome(decode(batch(found))))
        assert together == due, reader
        singly = [with_rest_read(outcome(decode(batch([value]))))[0] for value in found]
        assert singly == list(due.values()), reader


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_one_by_one_agrees_with_the_slow_reading(case: tuple[str, str, bool, list[bytes]]) -> None:
    name, policy, no_nul, found = case
    with reading_by("arrow"):  # so few records are too few for it
        decode = decoder(pipeline(SCHEMAS[name], policy), refuse_nul=no_nul).decode
    assert with_rest_read(outcome(decode(batch(found)))) == dict(expected(found, SCHEMAS[name], policy, no_nul))
