"""avow's C library against the strict reader of Protobuf, on messages of random schemas, most of them damaged.

    python -m tests.fuzz_protobuf --records 10000000            # --seed N plays it again
    python -m tests.fuzz_protobuf --sanitize --records 1000000  # compiled with gcc's sanitizers

A child process does the work: what ends it is a finding too, and the schema and the records that did are in the file
that it wrote before it read them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from avow import native
from avow.arrow import arrow_fields
from avow.formats.base import DecodeError
from avow.formats.protobuf.frame import place_bytes
from avow.formats.protobuf.layout import columns, layout
from avow.formats.protobuf.native_columns import NativeColumns
from avow.formats.protobuf.reader import Rules, StrictReader
from tests import protobuf_messages as messages
from tests.fuzz_decode import sanitized

ROOT = Path(__file__).parents[1]
BATCH = 1_000


def play(seed: int, records: int, case: Path) -> dict[str, int]:
    """In the child. ``case``: where the records are written that are read next."""
    counts = {"records": 0, "good": 0, "taken": 0}
    while counts["records"] < records:
        _batch(random.Random(seed), case, counts)
        seed += 1
    return counts


def _batch(chance: random.Random, case: Path, counts: dict[str, int]) -> None:
    schema = messages.case(messages.schema_text(chance))
    record = layout(schema.schema, "t.M0")
    rules = Rules(refuse_nul=chance.random() < 0.5, refuse_unknown_fields=chance.random() < 0.3)
    skip, prefix = chance.choice([(0, b""), (5, place_bytes((0,))), (5, place_bytes((1, 2)))])
    values = []
    for _ in range(BATCH):
        message = schema.type()
        messages.fill(chance, message)
        value = bytes(skip) + prefix + message.SerializePartialToString()
        values.append(messages.damaged(chance, value) if chance.random() < 0.7 else value)
    case.write_text(json.dumps([schema.text, repr(rules), [value.hex() for value in values]]))

    strict, fast = StrictReader(record, rules), NativeColumns(record, rules)
    array = pa.array([b"", *values], pa.binary()).slice(1)
    batch, doubtful = fast.read(array, skip, prefix)
    batch.validate(full=True)
    doubted = {*doubtful.to_pylist()}
    rows, good = [], 0
    for index, value in enumerate(values):
        begins = value[skip:].startswith(prefix) and len(value) >= skip
        try:
            row = strict.row(value[skip + len(prefix) :]) if begins else None
        except DecodeError:
            row = None
        good += row is not None
        if index not in doubted:
            assert row is not None, f"read by column, and refused by the strict reader: {value!r}"
            rows.append(row)
    expected = pa.RecordBatch.from_pylist(rows, pa.schema(arrow_fields(columns(record))))
    if not batch.equals(expected):  # which is never so where there is a NaN
        for found, wanted in zip(_named(batch), _named(expected), strict=True):
            assert found == wanted, f"read by column {found}, and by the strict reader {wanted}"
    counts["records"] += len(values)
    counts["good"] += good
    counts["taken"] += len(rows)


def _named(batch: pa.RecordBatch) -> list[Any]:
    return [_without_nan(row) for row in batch.to_pylist()]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return "NaN" if value != value else value


def run(seed: int, records: int, *, sanitize: bool = False) -> dict[str, int]:
    """In the parent: the counts, or what is wrong, and with which records."""
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder, "case.json")
        command = [sys.executable, "-m", "tests.fuzz_protobuf", "--child", str(case), "--seed", str(seed)]
        command += ["--records", str(records)]
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
        counts: dict[str, int] = json.loads(done.stdout)
        return counts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=random.randrange(10**9))
    options.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan; needs gcc")
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.library:
        library = ctypes.CDLL(str(given.library))
        native.library = lambda: library
    if given.child:
        print(json.dumps(play(given.seed, given.records, given.child)))
    else:
        print(f"seed {given.seed}", run(given.seed, given.records, sanitize=given.sanitize))


if __name__ == "__main__":
    main()
