"""The fast decoder against the strict one, on records made at random: every type, nested too, numbers of every size.

    python -m tests.fuzz_decode --seconds 600          # as long as you like; --seed N plays the same again

A child process does the work: what ends it is a finding too, and the records that did are in the file that it wrote
before it read them. It compares what ``decode.columns`` made of records with what ``decode.values`` makes of each.
"""

from __future__ import annotations

import argparse
import base64
import json
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

from avow.decode import Decoded, decoder
from avow.decode import json as reading
from avow.settings import PipelineConfig

ROOT = Path(__file__).parents[1]
SCALARS = ["boolean", "byte", "short", "int", "long", "float", "double", "string", "binary", "date"]
SCALARS += ["timestamp", "timestamp_ntz"]
EXPONENTS = [1, 2, 9, 28, 29, 37, 38, 39, 40, 41, 76, 77, 78, 115, 307, 308, 309, 323, 324, 400, 999, 4_999, 10**7]
EXPONENTS += [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**63 - 1, 2**63, 10**20]
EDGES = [2**7, 2**15, 2**24, 2**31, 2**53, 2**63, 2**64, 10**37, 10**38, 10**39, 2**127, 2**128, 10**76, 2**255]
FLOATS = ["1.7976931348623157e308", "1.7976931348623159e308", "3.4028235e38", "3.4028236e38", "5e-324", "2e-324"]
FLOATS += ["1e-45", "7e-46", "16777217", "9007199254740993", "1.00000017881393432617187499", "-0", "-0.0", "0e-400"]
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
ZONES = ["Z", "z", "+00:00", "-23:59", "+14:00", "+24:00", "", "+01"]


@dataclass
class Counts:
    batches: int = 0
    records: int = 0
    taken: int = 0
    refused: int = 0
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
        fields = ", ".join(f"{name}: {self.type(depth + 1)}" for name in "xy"[: self.r.randint(1, 2)])
        return f"struct<{fields}>"

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
                return self.number() if r.random() < 0.2 else str(r.randint(-128, 127))
            case "float" | "double":
                return self.number()
            case "binary":
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
        pairs = [(name, self.value(type_)) for name, type_ in fields if self.r.random() < 0.9]
        space = self.r.choice(["", "", " ", "\n"])
        return "{" + ",".join(f'"{name}":{space}{value}{space}' for name, value in pairs) + "}"


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


def pipeline(fields: list[tuple[str, str]]) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["t"]},
            "decode": {"format": "json", "schema": ", ".join(f"{name} {type_}" for name, type_ in fields)},
            "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t"},
        }
    )


def outcome(decoded: Decoded) -> dict[int, Any]:
    decoded.rows.validate(full=True)
    rows = dict(zip(decoded.kept.to_pylist(), map(comparable, decoded.rows.to_pylist()), strict=True))
    return rows | {dead.index: str(dead.reason) for dead in decoded.dead}


def comparable(value: Any) -> Any:
    """Floats by their bits."""
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(inner) for inner in value]
    return struct.pack("d", value) if isinstance(value, float) else value


def play(seed: int, batches: int, seconds: float, case: Path) -> Counts:
    """In the child. ``AssertionError`` where both readings differ."""
    reading._PIECE_ROWS_MIN = 1  # few records are read as many are
    maker, counts = Maker(seed), Counts()
    until = time.monotonic() + seconds
    while counts.batches < batches and time.monotonic() < until:
        fields = [(name, maker.type()) for name in "abc"[: maker.r.randint(1, 3)]]
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


def run(seed: int, batches: int, seconds: float) -> dict[str, Any]:
    """In the parent: the counts, or what is wrong, and with which records."""
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder, "case.json")
        command = [sys.executable, "-m", "tests.fuzz_decode", "--child", str(case), "--seed", str(seed)]
        command += ["--batches", str(batches), "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            last = case.read_text() if case.exists() else "none"
            raise SystemExit(f"seed {seed}: the child ended with {done.returncode}\n{done.stderr[-3000:]}\n{last}")
        counts: dict[str, Any] = json.loads(done.stdout)
        return counts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--batches", type=int, default=10**12)
    options.add_argument("--seed", type=int, default=random.randrange(10**9))
    options.add_argument("--child", type=Path)
    given = options.parse_args()
    if given.child:
        print(json.dumps(asdict(play(given.seed, given.batches, given.seconds, given.child))))
    else:
        print(f"seed {given.seed}", run(given.seed, given.batches, given.seconds))


if __name__ == "__main__":
    main()
