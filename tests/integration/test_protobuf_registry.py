"""Protobuf as a pipeline: a real registry, schemas that import others, real topics, and what becomes of each record."""

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
from avow.formats.protobuf.encode import encode, place_of
from avow.formats.protobuf.plugin import ProtobufConfig
from avow.formats.registry.config import Text
from avow.formats.registry.frame import framed
from avow.plan import plan
from avow.schema_registry import Reference, RegistrySettings, SchemaRegistry

pytestmark = pytest.mark.cluster
ON_SPARK = pytest.param("spark", marks=pytest.mark.xdist_group("spark"))  # on the session of its group

MONEY = 'syntax = "proto3"; package money; message Money { uint64 units = 1; string currency = 2; }'
PAYMENT = """\
syntax = "proto3";
package shop;
import "money.proto";
import "google/protobuf/timestamp.proto";
message Refund {{ int64 id = 1; }}
message Payment {{
  {id} id = 1;
  money.Money price = 2;
  google.protobuf.Timestamp at = 3;
  {more}
}}
"""
AT_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOTE = "optional string note = 4; enum Way { IN = 0; OUT = 1; } Way way = 5;"


class Topic:
    """The subjects of a scenario's topic."""

    def __init__(self, s: Scenario, url: str) -> None:
        self.s, self.url = s, url
        self.registry = SchemaRegistry(RegistrySettings(url=url))
        self.registry.register(f"{s.topic}-money", "PROTOBUF", MONEY)

    def payments(self, more: str = "", *, id: str = "int64", subject: str = "") -> Callable[..., bytes]:
        """Registers a version of the schema, and writes values by it."""
        text = PAYMENT.format(id=id, more=more)
        references = [Reference("money.proto", f"{self.s.topic}-money", 1)]
        number = self.registry.register(subject or f"{self.s.topic}-value", "PROTOBUF", text, references)
        return self._writer(number, text, {"money.proto": MONEY})

    def keys(self, text: str) -> Callable[..., bytes]:
        number = self.registry.register(f"{self.s.topic}-key", "PROTOBUF", text)
        return self._writer(number, text, {}, "shop.Key")

    def _writer(
        self, number: int, text: str, imports: dict[str, str], first: str = "shop.Payment"
    ) -> Callable[..., bytes]:
        config = ProtobufConfig.model_validate({"format": "protobuf", "schema": MONEY})

        def write(value: Any, message: str = first) -> bytes:
            schema = config.model_copy(update={"message": message}).compile(Text(text, "", imports))
            return framed(number, place_of(schema) + encode(schema, value))  # type: ignore[arg-type]

        return write

    def file(
        self, *lines: str, message: str = "shop.Payment", guarantee: str = "exactly-once", **sections: str
    ) -> Path:
        own = ['format = "protobuf"', 'schema = "registry"', f'message = "{message}"', *lines]
        decode = "\n".join([*own, "[decode.registry]", f'url = "{self.url}"', 'timeout = "2s"'])
        return self.s.file(guarantee, **{"decode": decode, **sections})


def value(number: int, **more: Any) -> dict[str, Any]:
    price = {"units": 2**64 - 1 - number, "currency": "EUR"}
    return {"id": number, "price": price, "at": "2026-01-31T12:00:00Z", **more}


def held(s: Scenario, path: Path, engine: str = "consumer") -> bool:
    pipeline = s.load(path, engine)
    return audit(pipeline, lambda: session_spark(pipeline)).verdict is Verdict.HELD


@pytest.fixture
def topic(scenario: Callable[..., Scenario], schema_registry: str) -> Topic:
    return Topic(scenario(), schema_registry)


@pytest.mark.parametrize("engine", ["consumer", ON_SPARK])
def test_records_of_two_schemas_and_bad_ones(topic: Topic, engine: str) -> None:
    s = topic.s
    old, new = topic.payments(), topic.payments(NOTE)
    good = [old(value(n)) if n % 2 else new(value(n, note=f"n{n}", way="OUT")) for n in range(60)]
    bad = [
        (b"", "empty"),
        (b"\1" + good[0][1:], "bad-frame"),
        (good[0][:5], "bad-frame"),  # an id, and no message
        (b"\0" + (2**31 - 2).to_bytes(4, "big") + good[0][5:], "unknown-schema-id"),
        (new({"id": 1}, "shop.Refund"), "other-message"),
        (good[0][:5] + b"\x02\x0e" + good[0][7:], "other-message"),  # a place that the schema has not
        (good[0][:-1], "not-protobuf"),
        (good[0] + b"\0", "not-protobuf"),
        (new(value(1, note="a\0b")), "nul"),
        (good[0] + b"\x28\x07", "unknown-enum"),
        (good[0] + b"\x0d\0\0\0\0", "wrong-type"),
    ]
    records = list(good)
    for number, (record, _) in enumerate(bad):
        records.insert(number * 5, record)
    s.produce(records, partition=0)
    path = topic.file()
    s.drain(path, engine)
    rows = s.rows(f'SELECT id, price, at, note, way FROM "{s.table}" ORDER BY id')
    assert [(id, at, note, way) for id, _, at, note, way in rows] == [
        (n, AT_NOON, None if n % 2 else f"n{n}", "IN" if n % 2 else "OUT") for n in range(60)
    ]
    prices = [price if isinstance(price, dict) else json.loads(price) for _, price, *_ in rows]
    assert [(Decimal(price["units"]), price["currency"]) for price in prices] == [
        (Decimal(2**64 - 1 - n), "EUR") for n in range(60)
    ]
    assert [reason for _, _, reason in dead(s)] == [reason for _, reason in bad]
    assert totals(s) == (60 + len(bad), 60, len(bad), 0)
    assert held(s, path, engine)


def test_keys_say_what_is_deleted(topic: Topic) -> None:
    s = topic.s
    write = topic.payments()
    write_key = topic.keys('syntax = "proto3"; package shop; message Key { int64 id = 1; }')
    keys = [write_key({"id": n}) for n in range(10)]
    records: list[tuple[bytes, bytes | None]] = [(key, write(value(n))) for n, key in enumerate(keys)]
    records += [(keys[3], None), (keys[0], None), (keys[5] + b"\0", None), (b"17", None)]
    s.produce([record for _, record in records], keys=[key for key, _ in records], partition=0)
    path = topic.file('[decode.key]\nschema = "registry"', sink=sink(s, 'mode = "upsert"', 'key = ["id"]'))
    s.drain(path)
    assert sorted(s.ids()) == [1, 2, 4, 5, 6, 7, 8, 9]
    assert [reason for _, _, reason in dead(s)] == ["tombstone-key", "tombstone-key"]
    assert held(s, path)


def test_a_schema_that_cannot_be_read_stops_by_name_before_anything_is_lost(topic: Topic) -> None:
    s = topic.s
    topic.payments()
    path = topic.file()
    other = topic.payments(id="uint64", subject=f"{s.topic}-other")
    s.produce([other(value(1))], partition=0)
    with pytest.raises(ConfigError, match=r"cannot be read as subject .*: id: uint64 cannot be read as int64"):
        s.drain(path)
    assert s.positions() == {0: 0, 1: 0}
    s.drain(topic.file('incompatible = "dead-letter"'))
    assert [reason for _, _, reason in dead(s)] == ["incompatible-schema"]


def test_a_table_follows_its_subject_while_running(topic: Topic) -> None:
    s = topic.s
    first = topic.payments()
    path = topic.file(sink=sink(s, 'evolve = "add"'))
    s.produce([first(value(n)) for n in range(50)])
    running = s.start(path, "--engine", "consumer")
    s.wait_for_rows(50)
    second = topic.payments(NOTE)
    s.produce([second(value(n, note=f"n{n}", way="OUT")) for n in range(50, 100)])
    s.produce([first(value(n)) for n in range(100, 130)])  # a producer that is not up to date
    s.wait_for_rows(130)
    assert "has other columns than" in s.kill(running)
    rows = s.rows(f'SELECT id, note, way FROM "{s.table}" ORDER BY id')
    assert rows[:50] == [(n, None, None) for n in range(50)], "of before: they had none"
    assert rows[50:100] == [(n, f"n{n}", "OUT") for n in range(50, 100)]
    assert rows[100:] == [(n, None, "IN") for n in range(100, 130)], "as the newer schema reads them"
    assert held(s, path)


def test_the_plan_says_which_schema_and_which_columns(topic: Topic) -> None:
    topic.payments()
    text = plan(topic.s.load(topic.file())).text(400)
    assert f"The columns are those of subject {topic.s.topic}-value, version 1 (id " in text
    columns = "id long, price struct<units: decimal(20,0), currency: string>, at timestamp."
    assert columns in text
    with pytest.raises(ConfigError, match=r"there is no message shop\.Nope; there are: shop\.Refund, shop\.Payment"):
        topic.s.load(topic.file(message="shop.Nope"))
