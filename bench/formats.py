"""How fast each format is decoded, on one core: ``python -m bench.formats [RECORDS]``.

The same seven columns in every format, as a whole decode: from a batch of values as they come from Kafka to a batch of
checked rows. Formats take turns, several times, and the best turn of each counts. Behind a frame, the schema is in a
real registry, which is started for it. A library that others use stands beside them: it reads into Python objects, as
its users do.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa

from avow import native
from avow.formats import decoder
from avow.formats.avro.encode import encode
from avow.formats.avro.schema import parse
from avow.formats.protobuf.encode import encode as encode_message
from avow.formats.protobuf.plugin import ProtobufConfig
from avow.formats.registry.frame import framed
from avow.local.cluster import PortPicker
from avow.local.registry import Registry
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.settings import PipelineConfig

TURNS = 5
ROWS = 50_000
COLUMNS = (
    "id long not null, account string not null, amount double not null, price decimal(12,2) not null, "
    "at timestamp not null, ok boolean not null, note string"
)
AVRO = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "account", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "ok", "type": "boolean"},
        {"name": "note", "type": ["null", "string"]},
    ],
}


PROTOBUF = """\
syntax = "proto3";
package bench;
import "google/protobuf/timestamp.proto";
message Payment {
  int64 id = 1;
  string account = 2;
  double amount = 3;
  string price = 4;  // Protobuf has no decimal of its own
  google.protobuf.Timestamp at = 5;
  bool ok = 6;
  optional string note = 7;
}
"""


PROPERTIES = {
    "id": {"type": "integer"},
    "account": {"type": "string"},
    "amount": {"type": "number"},
    "price": {"type": "string"},  # nor has JSON Schema
    "at": {"type": "string", "format": "date-time"},
    "ok": {"type": "boolean"},
    "note": {"type": ["null", "string"]},
}
JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "required": ["id", "account", "amount", "price", "at", "ok"],
    "properties": PROPERTIES,
}
CHECKED = {**JSON_SCHEMA, "properties": {**PROPERTIES, "id": {"type": "integer", "minimum": 0}}}


@dataclass(frozen=True)
class Contender:
    name: str
    values: list[bytes]
    turn: Callable[[], int]  # how many rows it gave


def document(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "account": f"acc-{number % 10_000:06}",
        "amount": number % 999 + 0.5,
        "price": f"{number % 100_000 / 100:.2f}",
        "at": f"2026-01-01T00:00:{number % 60:02}.{number % 1_000_000:06}Z",
        "ok": number % 2 == 0,
        "note": None if number % 3 == 0 else "a note of some bytes",
    }


def pipeline(**decode: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "bench",
            "guarantee": "exactly-once",
            "source": {"brokers": "localhost:9092", "topics": ["bench"]},
            "decode": decode,
            "sink": {"kind": "postgres", "url": "postgresql://localhost/bench", "table": "bench"},
        }
    )


def ours(name: str, values: list[bytes], **decode: Any) -> Contender:
    batch = pa.RecordBatch.from_arrays(
        [pa.nulls(len(values), pa.binary()), pa.array(values, pa.binary())], ["key", "value"]
    )
    reader = decoder(pipeline(**decode), refuse_nul=True)
    return Contender(name, values, lambda: len(reader.decode(batch).rows))


def library(values: list[bytes]) -> Contender:
    """fastavro, record by record into dicts, and those into Arrow."""
    schema = fastavro.parse_schema(AVRO)

    def turn() -> int:
        rows = [fastavro.schemaless_reader(io.BytesIO(value), schema, None) for value in values]
        return len(pa.RecordBatch.from_pylist(rows))

    return Contender("avro by fastavro and from_pylist", values, turn)


def contenders(registry: SchemaRegistry, url: str) -> Iterator[Contender]:
    documents = [document(number) for number in range(ROWS)]
    text = [json.dumps(d, separators=(",", ":")).encode() for d in documents]
    yield ours("json", text, format="json", schema=COLUMNS)
    type = parse(json.dumps(AVRO))
    avro = [encode(type, d) for d in documents]
    yield ours("avro", avro, format="avro", schema=json.dumps(AVRO))
    number = registry.register("bench-value", "AVRO", json.dumps(AVRO))
    yield ours(
        "avro behind a frame",
        [framed(number, value) for value in avro],
        format="avro",
        schema="registry",
        registry={"url": url},
    )
    config = ProtobufConfig.model_validate({"format": "protobuf", "schema": PROTOBUF})
    protobuf = [encode_message(config.protobuf_schema, without_nulls(d)) for d in documents]
    yield ours("protobuf", protobuf, format="protobuf", schema=PROTOBUF)
    yield ours("json-schema", text, format="json-schema", schema=json.dumps(JSON_SCHEMA))
    yield ours("json-schema that wants a minimum", text, format="json-schema", schema=json.dumps(CHECKED))
    yield library(avro)
    native.allow(False)
    yield ours("avro in Python", avro, format="avro", schema=json.dumps(AVRO))
    yield ours("protobuf in Python", protobuf, format="protobuf", schema=PROTOBUF)
    native.allow(True)


def without_nulls(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}


@contextmanager
def local_registry() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="avow-bench-") as folder:
        registry = Registry(Path(folder, "registry"), PortPicker().free())
        registry.prepare()
        registry.start()
        try:
            registry.await_ready()
            yield registry.url
        finally:
            registry.stop()


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"{ROWS:,} rows a batch, {records:,} a turn, the best of {TURNS} turns, one core; {native.why_not() or ''}")
    with local_registry() as url:
        every = list(contenders(SchemaRegistry(RegistrySettings(url=url)), url))
        best: dict[str, float] = {}
        for _ in range(TURNS):
            for contender in every:
                slow = " by " in contender.name or "Python" in contender.name or "minimum" in contender.name
                seconds = measured(contender, 1 if slow else max(records // ROWS, 1))
                best[contender.name] = min(best.get(contender.name, seconds), seconds)
    for contender in every:
        size = sum(map(len, contender.values)) / len(contender.values)
        rate = ROWS / best[contender.name]
        ratio = best["json"] / best[contender.name]
        print(f"{contender.name:34} {size:6.1f} bytes {rate / 1e3:>9,.0f} k rows/CPU-s {ratio:6.2f} x json")


def measured(contender: Contender, rounds: int) -> float:
    """CPU seconds of one batch."""
    begun = time.process_time()
    for _ in range(rounds):
        assert contender.turn() == ROWS
    return (time.process_time() - begun) / rounds


if __name__ == "__main__":
    main()
