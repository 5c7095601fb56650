"""The fast decoders against the strict one, on records made at random: every type, nested too, numbers of every size.

    python -m tests.fuzz_decode --seconds 600                         # as long as you like; --seed N plays it again
    python -m tests.fuzz_decode --native --records 10000000           # avow's C library, on damaged records too
    python -m tests.fuzz_decode --native --sanitize --records 1000000 # the same, compiled with gcc's sanitizers

A child process does the work: what ends it is a finding too, and the records that did are in the file that it wrote
before it read them. It compares what ``arrow_columns`` or ``native_columns`` of ``avow.formats.json`` made of records
with what ``values`` makes of each.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from avow import native
from avow.formats import decoder
from avow.formats.base import Decoded, DecodeError
from avow.formats.json import arrow_columns as reading
from avow.formats.json.decoder import StrictReader
from avow.formats.json.native_columns import NativeColumns
from avow.formats.json.plugin import JsonConfig
from avow.settings import PipelineConfig

ROOT = Path(__file__).parents[1]
SCALARS = ["boolean", "byte", "short", "int", "long", "float", "double", "string", "binary", "date"]
SCALARS += ["timestamp", "timestamp_ntz"]
BITS = {"byte": 7, "short": 15, "int": 31, "long": 63}
EXPONENTS = [1, 2, 9, 28, 29, 37, 38, 39, 40, 41, 76, 77, 78, 115, 307, 308, 309, 323, 324, 400, 999, 4_999, 10**7]
EXPONENTS += [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**63 - 1, 2**63, 10**20]
EDGES = [2**7, 2**15, 2**24, 2**31, 2**53, 2**63, 2**64, 10**37, 10**38, 10**39, 2**127, 2**128, 10**76, 2**255]
FLOATS = ["1.7976931348623157e308", "1.7976931348623159e308", "3.4028235e38", "3.4028236e38", "5e-324", "2e-324"]
FLOATS += ["1e-45", "7e-46", "16777217", "9007199254740993", "1.00000017881393432617187499", "-0", "-0.0", "0e-400"]
FLOATS += ["3402823669209384634e20", "3402823567797336616e20", "3402823567797336617e20", "9007199254740993.0"]
ODD = [
    "null",
    "true",
    "false",
    "{}",
    "[]",
    '""',
    "NaN",
    "-Infinity",
    "01",
    "+1",
    "1.",
    ".5",
    "-",
    "1e",
    '"1"',
    '{"d":1}',
]
TIMES = ["0000-01-01", "0001-01-01", "1969-12-31", "2024-02-29", "2023-02-29", "9999-12-31", "2024-13-01"]
CLOCKS = ["T00:00:00", "t23:59:59", "T24:00:00", "T23:59:60", "T12:30:00.5", "T12:30:00.123456", "T12:30:00.1234560"]
CLOCKS += ["T12:30:00.1234567", " 12:30:00", "T12:30", ""]
DAMAGE = [*b'"{}[],:\\/ \n\r\t\0\x1f019.-+eEuntfZT=', 0x7F, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xFF]
PIECES = [
    rb"\u0000",
    rb"\ud83d\ude00",
    rb"\ud800",
    rb"\udc00",
    rb"\u00e9",
    rb"\/",
    rb"\"",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
]
PIECES += [b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b",]", b",}", b", ]"]
PIECES += [
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82\xac",
    b"null",
    b"true",
    b'"a":1,',
    b"{}",
    b"[[",
    b"0" * 1001,
    b"1" * 20,
]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
ZONES = ["Z", "z", "+00:00", "-23:59", "+14:00", "+24:00", "", "+01"]


BASE64 = ['"QR=="', '"QQ="', '"QQ=="', '"QQ==QQ=="', '"QUI="', '"QUJ="', '"-_=="', '"QQ=A"', '"Q==="', '"===="']


@dataclass
class Counts:
    batches: int = 0
    records: int = 0
    taken: int = 0
    refused: int = 0
    doubtful: int = 0  # of those taken or refused: which the library did not vouch for
    types: dict[str, int] = field(default_factory=dict)


class Maker:
    """Schemas and records."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def type(self, depth: int = 0) -> str:
        kind = self.r.randrange(10 if depth < 3 else 7)
        if kind < 5:
            return self.r.choice(SCALARS)
        if kind < 7:
            precision = self.r.choice([1, 4, 12, 18, 19, 37, 38])
            return f"decimal({precision},{self.r.choice([0, 1, precision // 2, precision])})"
        if kind == 7:
            return f"array<{self.type(depth + 1)}>"
        if kind == 8 and self.r.random() < 0.2:  # these are read one by one
            return f"map<string,{self.type(depth + 1)}>"
        fields = ", ".join(f"{name}: {self.type(depth + 1)}{self.required()}" for name in "xy"[: self.r.randint(1, 2)])
        return f"struct<{fields}>"

    def required(self) -> str:
        return " not null" if self.r.random() < 0.15 else ""

    def fields(self) -> list[tuple[str, str]]:
        names = [*"abc", "ab", "é", "a b"][: self.r.randint(1, 3) if self.r.random() < 0.8 else 6]
        return [(name, self.type() + self.required()) for name in names]

    def damaged(self, value: bytes) -> bytes:
        """With a few bytes changed, lost, doubled, cut off or put in."""
        r = self.r
        for _ in range(r.choice([1, 1, 1, 2, 4])):
            at, until = sorted((r.randint(0, len(value)), r.randint(0, len(value))))
            match r.randrange(8):
                case 0:
                    value = value[:at]
                case 1:
                    value = value[:at] + value[min(until, at + r.randint(1, 3)) :]
                case 2:
                    value = value[:until] + value[at:]
                case 3:
                    value = value[:at] + r.choice(PIECES) + value[at:]
                case 4:
                    value = value[:at] + bytes([r.randrange(256)]) + value[at + 1 :]
                case _:
                    value = value[:at] + bytes([r.choice(DAMAGE)]) + value[at + r.randint(0, 1) :]
        return value[:4000]

    def digits(self, most: int) -> str:
        return "".join(self.r.choices("0123456789", [4, *[1] * 9], k=self.r.randint(1, most)))

    def number(self) -> str:
        r = self.r
        match r.randrange(6):
            case 0:
                return str(r.choice([-1, 1]) * (r.choice(EDGES) + r.randint(-2, 2)))
            case 1:
                return r.choice(FLOATS)
            case 2:
                return str(r.randint(-999, 999))
        if r.random() < 0.5:
            return f"{r.uniform(-1e6, 1e6):.{r.randint(0, 9)}f}"
        whole = self.digits(r.choice([1, 3, 18, 40])).lstrip("0") or "0"
        part = r.choice(["", "", "." + self.digits(r.choice([2, 10, 30, 45])), "." + "0" * r.randint(1, 90) + "1"])
        exponent = r.choice(EXPONENTS) if r.random() < 0.5 else r.randint(0, 45)
        spelled = f"{r.choice('eE')}{r.choice(['', '+', '-', '-'])}{'0' * r.choice([0, 0, 3])}{exponent}"
        return r.choice(["", "-"]) + whole + part + r.choice(["", spelled, spelled])

    def quoted(self, text: str) -> str:
        """As a JSON string, some of its characters behind escapes."""
        if self.r.random() < 0.2:
            return '"' + "".join(f"\\u{ord(c):04x}" if self.r.random() < 0.3 else c for c in text) + '"'
        return json.dumps(text, ensure_ascii=self.r.random() < 0.5)

    def text(self) -> str:
        return "".join(self.r.choices(["a", "é", "\U0001f600", "0", "e-", " ", '"', "\\", "\n", "\x7f", "{", ","], k=4))

    def value(self, type_: str) -> str:
        r = self.r
        type_ = type_.removesuffix(" not null")
        if r.random() < 0.03:
            return r.choice([*ODD, self.number(), self.quoted(self.number())])
        if type_.startswith("array<"):
            return "[" + ",".join(self.value(type_[6:-1]) for _ in range(r.randint(0, 3))) + "]"
        if type_.startswith("map<"):
            return "{" + ",".join(f'"{k}":{self.value(type_[11:-1])}' for k in "pqr"[: r.randint(0, 3)]) + "}"
        if type_.startswith("struct<"):
            return self.object(members(type_[7:-1]))
        if type_.startswith("decimal"):
            number = self.number() if r.random() < 0.2 else self.near(type_)
            return self.quoted(number) if r.random() < 0.4 else number
        match type_:
            case "boolean":
                return r.choice(["true", "false"])
            case "byte" | "short" | "int" | "long":
                if r.random() < 0.2:
                    return str(r.choice([-1, 1]) * 2 ** BITS[type_] + r.randint(-1, 1))
                return self.number() if r.random() < 0.2 else str(r.randint(-128, 127))
            case "float" | "double":
                return self.number()
            case "binary":
                if r.random() < 0.1:
                    return r.choice(BASE64)
                return f'"{base64.b64encode(r.randbytes(r.randint(0, 5))).decode()}"'
            case "date":
                return f'"{r.choice(TIMES)}"' if r.random() < 0.1 else f'"20{r.randint(10, 99)}-0{r.randint(1, 9)}-28"'
            case "timestamp" | "timestamp_ntz":
                if r.random() < 0.8:
                    zone = "" if type_ == "timestamp_ntz" else r.choice(["Z", "+05:30", "-00:00"])
                    return (
                        f'"2026-0{r.randint(1, 9)}-28T{r.randint(10, 23)}:00:00{r.choice(["", ".5", ".123456"])}{zone}"'
                    )
                return f'"{r.choice(TIMES)}{r.choice(CLOCKS)}{r.choice(ZONES)}"'
        return self.quoted(self.text())

    def near(self, type_: str) -> str:
        """A decimal that fits, or hardly does not."""
        precision, scale = map(int, type_[8:-1].split(","))
        unscaled = self.r.randrange(10**precision)
        if self.r.random() < 0.1:
            unscaled = 10**precision + self.r.randint(-1, 1)
        more = self.r.choice([0, 0, 0, 1, 5, 40])
        return f"{unscaled * 10**more}e-{scale + more}" if self.r.random() < 0.7 else str(unscaled // 10**scale)

    def object(self, fields: list[tuple[str, str]]) -> str:
        r = self.r
        pairs = [(name, self.value(type_)) for name, type_ in fields if r.random() < 0.9]
        if r.random() < 0.1:
            r.shuffle(pairs)
        while r.random() < 0.1:  # unknown, or twice
            name, type_ = r.choice(
                [*fields, ("new", "string"), ("n", "double"), ("deep", "array<struct<x: long, y: int>>")]
            )
            pairs.insert(r.randint(0, len(pairs)), (name, self.value(type_)))
        space = r.choice(["", "", " ", "\n"])
        named = [(self.quoted(name) if r.random() < 0.05 else f'"{name}"', value) for name, value in pairs]
        return "{" + ",".join(f"{name}:{space}{value}{space}" for name, value in named) + "}"


def members(text: str) -> list[tuple[str, str]]:
    """``x: T, y: U`` with nested types, as pairs."""
    found, depth, start = [], 0, 0
    for at, char in enumerate(text + ","):
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            name, _, type_ = text[start:at].strip().partition(": ")
            found.append((name, type_))
            start = at + 1
    return found


def pipeline(fields: list[tuple[str, str]], unknown_fields: str = "reject") -> PipelineConfig:
    schema = ", ".join(f"`{name}` {type_}" for name, type_ in fields)
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["t"]},
            "decode": {"format": "json", "schema": schema, "unknown_fields": unknown_fields},
            "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t"},
        }
    )


def outcome(decoded: Decoded) -> dict[int, Any]:
    decoded.rows.validate(full=True)
    rows = dict(zip(decoded.rows_at.to_pylist(), map(comparable, decoded.rows.to_pylist()), strict=True))
    return rows | {dead.index: str(dead.reason) for dead in decoded.refused}


def comparable(value: Any) -> Any:
    """Floats by their bits."""
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(inner) for inner in value]
    return struct.pack("d", value) if isinstance(value, float) else value


def play(seed: int, batches: int, seconds: float, case: Path) -> Counts:
    """In the child: whole decoders. ``AssertionError`` where both readings differ."""
    reading._PIECE_ROWS_MIN = 1  # few records are read as many are
    native.allow(False)
    maker, counts = Maker(seed), Counts()
    until = time.monotonic() + seconds
    while counts.batches < batches and time.monotonic() < until:
        fields = maker.fields()
        decode = decoder(pipeline(fields), refuse_nul=True)
        strict = decoder(pipeline(fields), refuse_nul=True)
        strict._inner._columns = None  # type: ignore[attr-defined]
        for _ in range(20):
            values = [maker.object(fields).encode() for _ in range(maker.r.randint(1, 8))]
            case.write_text(json.dumps({"fields": fields, "values": [value.decode() for value in values]}))
            batch = pa.RecordBatch.from_arrays(
                [pa.nulls(len(values), pa.binary()), pa.array(values, pa.binary())], ["key", "value"]
            )
            due, found = outcome(strict.decode(batch)), outcome(decode.decode(batch))
            assert found == due, f"{found} by column, {due} one by one"
            counts.batches += 1
            counts.records += len(values)
            dead = sum(isinstance(one, str) for one in due.values())
            counts.refused += dead
            counts.taken += len(values) - dead
        for kind in re.findall(r"[a-z_]{3,}", str(pipeline(fields).decode.columns)):
            counts.types[kind] = counts.types.get(kind, 0) + 1
    return counts


def play_native(seed: int, records: int, seconds: float, case: Path) -> Counts:
    """In the child: the library alone. What it vouches for must be what the strict reader reads."""
    maker, counts = Maker(seed), Counts()
    until = time.monotonic() + seconds
    while counts.records < records and time.monotonic() < until:
        fields, policy, refuse_nul = (
            maker.fields(),
            maker.r.choice(["reject", "ignore", "keep"]),
            maker.r.random() < 0.5,
        )
        decode = pipeline(fields, policy).decode
        assert isinstance(decode, JsonConfig)
        assert NativeColumns.can_read(decode.columns), native.why_not()
        columns = NativeColumns(decode.columns, refuse_nul=refuse_nul, ignore_unknown=policy == "ignore")
        strict = StrictReader(decode.columns, decode.unknown_fields, refuse_nul=refuse_nul)
        for _ in range(5):
            good = [maker.object(fields).encode() for _ in range(20)]
            values = [*good, *(maker.damaged(value) for value in good for _ in range(2))]
            case.write_text(json.dumps({"fields": fields, "policy": policy, "values": [v.hex() for v in values]}))
            add_native(counts, columns, strict, values)
            counts.batches += 1
        for kind in re.findall(r"[a-z_]{3,}", str(decode.columns)):
            counts.types[kind] = counts.types.get(kind, 0) + 1
    return counts


def add_native(counts: Counts, columns: NativeColumns, strict: StrictReader, values: list[bytes]) -> None:
    batch, doubtful = columns.read(pa.array(values, pa.binary()))
    batch.validate(full=True)
    doubts = set(doubtful.to_pylist())
    assert len(batch) + len(doubts) == len(values)
    rows = iter(batch.to_pylist())
    counts.records += len(values)
    counts.doubtful += len(doubts)
    for index, value in enumerate(values):
        due: Any
        try:
            due = comparable(strict.row(value))
            counts.taken += 1
        except DecodeError as error:
            due = str(error.reason)
            counts.refused += 1
        if index not in doubts:
            found = comparable(next(rows))
            due.pop("_rest", None) if isinstance(due, dict) else None
            assert found == due, f"{value!r}: {found} natively, {due} strictly"


def sanitized(folder: Path) -> tuple[Path, dict[str, str]]:
    """The library with gcc's sanitizers, and the environment that it needs."""
    from avow_native.build import build

    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Python itself leaves memory behind at its end.
    environment = {
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return build(folder=folder, flags=SANITIZERS).path, environment


def run(
    seed: int, batches: int, seconds: float, *, records: int = 10**12, natively: bool = False, sanitize: bool = False
) -> dict[str, Any]:
    """In the parent: the counts, or what is wrong, and with which records."""
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder, "case.json")
        command = [sys.executable, "-m", "tests.fuzz_decode", "--child", str(case), "--seed", str(seed)]
        command += ["--batches", str(batches), "--seconds", str(seconds), "--records", str(records)]
        command += ["--native"] if natively else []
        environment: dict[str, str] = {}
        if sanitize:
            library, environment = sanitized(Path(folder))
            command += ["--library", str(library)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}
        )
        if done.returncode:
            last = case.read_text() if case.exists() else "none"
            raise SystemExit(f"seed {seed}: the child ended with {done.returncode}\n{done.stderr[-3000:]}\n{last}")
        counts: dict[str, Any] = json.loads(done.stdout)
        return counts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, help="60, unless a number of records is given")
    options.add_argument("--batches", type=int, default=10**12)
    options.add_argument("--records", type=int, default=10**12)
    options.add_argument("--seed", type=int, default=random.randrange(10**9))
    options.add_argument("--native", action="store_true", help="avow's C library instead of Arrow's reader")
    options.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan; needs gcc")
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    seconds = given.seconds or (60.0 if given.records == 10**12 else 1e9)
    if given.library:
        library = ctypes.CDLL(str(given.library))
        native.library = lambda: library
    if not given.child:
        counts = run(
            given.seed,
            given.batches,
            seconds,
            records=given.records,
            natively=given.native,
            sanitize=given.sanitize,
        )
        print(f"seed {given.seed}", counts)
    elif given.native:
        print(json.dumps(asdict(play_native(given.seed, given.records, seconds, given.child))))
    else:
        print(json.dumps(asdict(play(given.seed, given.batches, seconds, given.child))))


if __name__ == "__main__":
    main()
