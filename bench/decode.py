"""How fast JSON is decoded, on one core: ``python bench/decode.py [RECORDS] [ROWS_PER_BATCH]``.

Prints rows per second for clean batches and for batches with bad records in them: with avow's C library, if it is
there, and with Arrow's reader.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pyarrow as pa

from avow import native
from avow.formats import decoder
from avow.kafka.batches import headers_column
from avow.kafka.headers import CHECKSUM, checksum
from avow.settings import PipelineConfig

SCHEMA = "id long not null, account string not null, amount double, at timestamp, note string"


def pipeline(unknown_fields: str = "reject", schema: str = SCHEMA) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "bench",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["bench"]},
            "decode": {"format": "json", "schema": schema, "unknown_fields": unknown_fields},
            "sink": {"kind": "postgres", "url": "postgresql://localhost/bench", "table": "bench"},
        }
    )


def record(number: int) -> bytes:
    return (
        f'{{"id":{number},"account":"acc-{number % 10_000:06}","amount":{number % 999}.5,'
        f'"at":"2026-01-01T00:00:{number % 60:02}.{number % 1_000_000:06}Z","note":"a note of some bytes"}}'
    ).encode()


def extra(number: int) -> bytes:
    return record(number)[:-1] + b',"new":1}'


def batch(rows: int, bad: Callable[[int], bytes] | None = None, every: int = 1_000) -> pa.RecordBatch:
    values = [bad(n) if bad and n % every == every // 2 else record(n) for n in range(rows)]
    return pa.RecordBatch.from_arrays([pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())], ["key", "value"])


def with_headers(plain: pa.RecordBatch, *, checked: bool) -> pa.RecordBatch:
    """Each record with two headers of its own, and with its checksum."""
    own = [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"), ("kind", b"payment")]
    values = plain.column("value").to_pylist()
    headers = headers_column([[*own, *([(CHECKSUM, checksum(value))] if checked else [])] for value in values])
    return plain.append_column("headers", headers)


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 50_000
    cases: list[tuple[str, pa.RecordBatch, str]] = [
        ("clean", batch(rows), "reject"),
        ("all with other headers", with_headers(batch(rows), checked=False), "reject"),
        ("all with a checksum", with_headers(batch(rows), checked=True), "reject"),
        ("1 in 1,000 truncated", batch(rows, lambda n: record(n)[:-9]), "reject"),
        ("1 in 1,000 malformed", batch(rows, lambda n: record(n).replace(b":", b" ", 1)), "reject"),
        ("1 in 1,000 of a wrong type", batch(rows, lambda n: record(n).replace(b'"acc', b'17,"acc')), "reject"),
        ("1 in 1,000 out of range", batch(rows, lambda n: record(n).replace(b'"id":', b'"id":9e9')), "reject"),
        ("1 in 1,000 with a fraction", batch(rows, lambda n: record(n).replace(b',"acc', b'.5,"acc')), "reject"),
        ("1 in 1,000 with a bad time", batch(rows, lambda n: record(n).replace(b"T", b" ")), "reject"),
        ("1 in 1,000 with a bad day", batch(rows, lambda n: record(n).replace(b"-01T", b"-32T")), "reject"),
        ("1 in 1,000 with a new field", batch(rows, extra), "reject"),
        ("all with a new field", batch(rows, extra, 1), "reject"),
        ("all with a new field", batch(rows, extra, 1), "ignore"),
        ("all with a new field", batch(rows, extra, 1), "keep"),
        ("all malformed", batch(rows, lambda n: record(n).replace(b":", b" ", 1), 1), "reject"),
        ("all out of range", batch(rows, lambda n: record(n).replace(b'"id":', b'"id":9e9'), 1), "reject"),
    ]
    size = len(record(12_345))
    print(f"{records:,} records of about {size} bytes, {rows:,} a batch, one core")
    if native.library() is None:
        print(f"without the native reader: {native.why_not()}")
    clean = 0.0
    for name, input, policy in cases:
        rounds = max(1, records // rows if name == "clean" else records // rows // 10)
        for reader in ["arrow", "native"] if native.library() else ["arrow"]:
            cpu, wall = measured(input, policy, rounds, natively=reader == "native")
            clean = clean or cpu
            print(
                f"{name:30} {policy:7} {reader:7} {rows / wall:>11,.0f} rows/s {rows / cpu:>11,.0f} rows/cpu-s"
                f" {cpu / clean:6.2f} x clean by Arrow"
            )


def measured(input: pa.RecordBatch, policy: str, rounds: int, *, natively: bool) -> tuple[float, float]:
    """Seconds a batch: of the processor, and of the clock."""
    native.allow(natively)
    decode = decoder(pipeline(policy), refuse_nul=True).decode
    native.allow(True)
    decode(input)  # warm
    before = time.process_time(), time.perf_counter()
    for _ in range(rounds):
        decode(input)
    return (time.process_time() - before[0]) / rounds, (time.perf_counter() - before[1]) / rounds


if __name__ == "__main__":
    main()
