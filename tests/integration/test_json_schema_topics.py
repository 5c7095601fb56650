"""JSON with JSON Schema as pipelines: a real registry, real topics, and what becomes of each record."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.fix_pipeline import Scenario, session_spark
from tests.into_postgres import dead, sink, totals

from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.errors import ConfigError
from avow.formats.registry.frame import framed
from avow.plan import plan
from avow.schema_registry import Reference, RegistrySettings, SchemaRegistry

pytestmark = pytest.mark.cluster
ON_SPARK = pytest.param("spark", marks=pytest.mark.xdist_group("spark"))  # on the session of its group

DRAFT_7 = "http://json-schema.org/draft-07/schema#"  # Apicurio answers 422 to a schema that does not say its draft
AMOUNT = {
    "title": "org.apache.kafka.connect.data.Decimal",
    "type": "number",
    "connect.type": "bytes",
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "12"},
}
AT = {"type": "string", "format": "date-time"}
NOTE = {"type": ["string", "null"], "maxLength": 8}
AT_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def payment(ids: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "$schema": DRAFT_7,
        "type": "object",
        "additionalProperties": False,
        "required": ["id", "amount"],
        "properties": {"id": ids or {"type": "integer", "minimum": 0}, "amount": AMOUNT, "at": AT, **more},
    }


def value(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "amount": number / 100, "at": "2026-01-31T12:00:00Z", **more}


class Topic:
    """The subjects of a scenario's topic."""

    def __init__(self, s: Scenario, url: str) -> None:
        self.s, self.url = s, url
        self.registry = SchemaRegistry(RegistrySettings(url=url))

    def writer(self, schema: Any, what: str = "value", *references: Reference) -> Callable[[Any], bytes]:
        """Registers a schema, and writes values by it."""
        number = self.registry.register(f"{self.s.topic}-{what}", "JSON", json.dumps(schema), references)
        return lambda document: framed(number, json.dumps(document, separators=(",", ":")).encode())

    def file(self, *lines: str, **sections: str) -> Path:
        own = ['format = "json-schema"', 'schema = "registry"', *lines]
        decode = "\n".join([*own, "[decode.registry]", f'url = "{self.url}"', 'timeout = "2s"'])
        return self.s.file("exactly-once", **{"decode": decode, **sections})

    def held(self, engine: str) -> bool:
        pipeline = self.s.load(self.file(), engine)
        return audit(pipeline, lambda: session_spark(pipeline)).verdict is Verdict.HELD


@pytest.fixture
def topic(scenario: Callable[..., Scenario], schema_registry: str) -> Topic:
    return Topic(scenario(), schema_registry)


@pytest.mark.parametrize("engine", ["consumer", ON_SPARK])
def test_records_of_two_schemas_and_bad_ones(topic: Topic, engine: str) -> None:
    s = topic.s
    old, new = topic.writer(payment()), topic.writer(payment(note=NOTE))
    records = [old(value(n)) if n % 2 else new(value(n, note=f"n{n}")) for n in range(400)]
    bad = [
        (b"", "empty"),
        (records[0][5:], "bad-frame"),
        (records[0][:5], "empty"),
        (b"\0" + (2**31 - 2).to_bytes(4, "big") + records[0][5:], "unknown-schema-id"),
        (records[0][:-1], "not-json"),
        (old(value(-1)), "schema-violation"),
        (old(value(1, note="x")), "schema-violation"),  # the older schema has no note, and allows no more fields
        (new(value(1, note="much too long")), "schema-violation"),
        (new(value(1, at=None)), "schema-violation"),
        (new(value(1, amount="1.00")), "schema-violation"),
        (new(value(1, amount=0.005)), "out-of-range"),
        (new({"id": 1}), "missing-field"),
        (new(value(1, note="a\0b")), "nul"),
    ]
    for number, (record, _) in enumerate(bad):
        records.insert(number * 30, record)
    s.produce(records, partition=0)
    s.drain(topic.file(), engine)
    rows = s.rows(f'SELECT id, amount, at, note FROM "{s.table}" ORDER BY id')
    assert rows == [(n, Decimal(n) / 100, AT_NOON, None if n % 2 else f"n{n}") for n in range(400)]
    assert [reason for _, _, reason in dead(s)] == [reason for _, reason in bad]
    assert totals(s) == (413, 400, 13, 0)
    assert topic.held(engine)


def test_keys_say_what_is_deleted(topic: Topic) -> None:
    s = topic.s
    write = topic.writer(payment())
    write_key = topic.writer({"$schema": DRAFT_7, "type": "string", "pattern": "^acc-"}, "key")
    keys = [write_key(f"acc-{n}") for n in range(10)]
    records: list[tuple[bytes, bytes | None]] = [(key, write(value(n))) for n, key in enumerate(keys)]
    records += [(keys[3], None), (keys[4], write(value(44))), (write_key("5"), None), (b"acc-6", None)]
    s.produce([record for _, record in records], keys=[key for key, _ in records], partition=0)
    keyed = '[decode.key]\nschema = "registry"\ncolumn = "account"'
    s.drain(topic.file(keyed, sink=sink(s, 'mode = "upsert"', 'key = ["account"]')), "consumer")
    rows = s.rows(f'SELECT account, id FROM "{s.table}" ORDER BY account')
    assert rows == [(f"acc-{n}", 44 if n == 4 else n) for n in range(10) if n != 3]
    assert [reason for _, _, reason in dead(s)] == ["tombstone-key", "tombstone-key"]


def test_a_schema_that_cannot_be_read_stops_by_name_before_anything_is_lost(topic: Topic) -> None:
    s = topic.s
    topic.writer(payment())
    other = topic.writer(payment({"type": "string"}), "other")
    s.produce([other(value(1) | {"id": "x"})], partition=0)
    with pytest.raises(
        ConfigError, match=r"cannot be read as subject .*: id: no value of the writer's schema is a long"
    ):
        s.drain(topic.file(), "consumer")
    assert s.positions() == {0: 0, 1: 0}
    s.drain(topic.file('incompatible = "dead-letter"'), "consumer")
    assert [reason for _, _, reason in dead(s)] == ["incompatible-schema"]


def test_references_of_the_registry_are_followed(topic: Topic) -> None:
    s = topic.s
    place = {"$schema": DRAFT_7, "type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    topic.writer(place, "place")
    reference = Reference("place.json", f"{s.topic}-place", 1)
    write = topic.writer(payment(place={"$ref": "place.json"}), "value", reference)
    s.produce([write(value(1, place={"x": 7})), write(value(2)), write(value(3, place={"x": "7"}))], partition=0)
    path = topic.file()
    text = plan(s.load(path)).text(400)
    assert f"The columns are those of subject {s.topic}-value, version 1 (id " in text
    assert "amount decimal(12,2) not null, at timestamp, place struct<x: long not null>." in text
    s.drain(path, "consumer")
    assert s.rows(f'SELECT id, place FROM "{s.table}" ORDER BY id') == [(1, {"x": 7}), (2, None)]
    assert [reason for _, _, reason in dead(s)] == ["wrong-type"]
