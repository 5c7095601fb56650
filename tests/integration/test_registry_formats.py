"""Formats with schemas, as pipelines: a real registry, real topics, and what becomes of each record."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.fix_pipeline import Scenario, session_spark
from tests.into_postgres import dead, sink, totals

from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.errors import ConfigError, RegistryUnavailable, UnknownSubject
from avow.formats import decoder
from avow.formats.avro.encode import encode
from avow.formats.avro.schema import parse
from avow.formats.registry.frame import framed
from avow.local.cluster import PortPicker
from avow.local.registry import Registry
from avow.plan import plan
from avow.retry import poll_until
from avow.schema_registry import UNKNOWN_KEPT_S, RegistrySettings, SchemaRegistry

pytestmark = pytest.mark.cluster
ON_SPARK = pytest.param("spark", marks=pytest.mark.xdist_group("spark"))  # on the session of its group

AMOUNT = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
AT = {"type": "long", "logicalType": "timestamp-millis"}
Writer = Callable[[int], bytes]


def payment(*more: Any, ids: str = "long") -> dict[str, Any]:
    fields = [{"name": "id", "type": ids}, {"name": "amount", "type": AMOUNT}, {"name": "at", "type": AT}, *more]
    return {"type": "record", "name": "Payment", "fields": fields}


NOTE = {"name": "note", "type": ["null", "string"], "default": None}


class Topic:
    """The subjects of a scenario's topic."""

    def __init__(self, s: Scenario, url: str) -> None:
        self.s, self.url = s, url
        self.registry = SchemaRegistry(RegistrySettings(url=url))

    def writer(self, schema: Any, *, key: bool = False) -> Callable[[Any], bytes]:
        """Registers a schema, and writes values by it."""
        text = json.dumps(schema)
        number = self.registry.register(f"{self.s.topic}-{'key' if key else 'value'}", "AVRO", text)
        type = parse(text)
        return lambda value: framed(number, encode(type, value))

    def file(self, *lines: str, guarantee: str = "exactly-once", **sections: str) -> Path:
        own = ['format = "avro"', 'schema = "registry"', *lines]
        decode = "\n".join([*own, "[decode.registry]", f'url = "{self.url}"', 'timeout = "2s"'])
        return self.s.file(guarantee, **{"decode": decode, **sections})


def value(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "amount": str(Decimal(number) / 100), "at": "2026-01-31T12:00:00Z", **more}


AT_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def held(s: Scenario, path: Path, engine: str = "consumer") -> bool:
    pipeline = s.load(path, engine)
    return audit(pipeline, lambda: session_spark(pipeline)).verdict is Verdict.HELD


@pytest.fixture
def topic(scenario: Callable[..., Scenario], schema_registry: str) -> Topic:
    return Topic(scenario(), schema_registry)


@pytest.mark.parametrize("engine", ["consumer", ON_SPARK])
def test_records_of_two_schemas_and_bad_ones(topic: Topic, engine: str) -> None:
    s = topic.s
    old, new = topic.writer(payment()), topic.writer(payment(NOTE))
    good = [old(value(n)) if n % 2 else new(value(n, note=f"n{n}")) for n in range(400)]
    bad = [
        (b"", "empty"),
        (b"\1" + good[0][1:], "bad-frame"),
        (b"\0\0\0", "bad-frame"),
        (b"\0" + (2**31 - 2).to_bytes(4, "big") + good[0][5:], "unknown-schema-id"),
        (good[0][:-1], "not-avro"),
        (good[0] + b"\0", "not-avro"),
        (new(value(1, note="a\0b")), "nul"),
        (new(value(1))[:-1] + b"\x04", "not-avro"),  # a branch of two
    ]
    for number, (record, _) in enumerate(bad):
        good.insert(number * 50, record)
    s.produce(good, partition=0)
    path = topic.file()
    s.drain(path, engine)
    rows = s.rows(f'SELECT id, amount, at, note FROM "{s.table}" ORDER BY id')
    assert rows == [(n, Decimal(n) / 100, AT_NOON, None if n % 2 else f"n{n}") for n in range(400)]
    assert [reason for _, _, reason in dead(s)] == [reason for _, reason in bad]
    assert totals(s) == (408, 400, 8, 0)
    assert held(s, path, engine)


def test_keys_say_what_is_deleted_and_may_have_columns_of_their_own(topic: Topic) -> None:
    s = topic.s
    write = topic.writer({"type": "record", "name": "V", "fields": [{"name": "note", "type": "string"}]})
    write_key = topic.writer(
        {
            "type": "record",
            "name": "K",
            "fields": [{"name": "region", "type": "string"}, {"name": "id", "type": "int"}],
        },
        key=True,
    )
    keys = [write_key({"region": "eu", "id": n}) for n in range(10)]
    records: list[tuple[bytes, bytes | None]] = [(key, write({"note": f"v{n}"})) for n, key in enumerate(keys)]
    records += [
        (keys[3], None),
        (keys[4], write({"note": "newer"})),
        (keys[5] + b"\0", None),
        (b"17", write({"note": ""})),
    ]
    s.produce([record for _, record in records], keys=[key for key, _ in records], partition=0)
    path = topic.file('[decode.key]\nschema = "registry"', sink=sink(s, 'mode = "upsert"', 'key = ["region", "id"]'))
    s.drain(path)
    found = s.rows(f'SELECT region, id, note FROM "{s.table}" ORDER BY id')
    assert found == [("eu", n, "newer" if n == 4 else f"v{n}") for n in range(10) if n != 3]
    assert [reason for _, _, reason in dead(s)] == ["tombstone-key", "bad-frame"]
    assert held(s, path)


def test_a_schema_that_cannot_be_read_stops_by_name_before_anything_is_lost(topic: Topic) -> None:
    s = topic.s
    topic.writer(payment())
    path = topic.file()
    s.load(path)
    s.produce([framed_by_other(topic, payment(ids="string"), value(1) | {"id": "x"})], partition=0)
    with pytest.raises(ConfigError, match=r"cannot be read as subject .*: id: the writer has string where"):
        s.drain(path)
    assert s.positions() == {0: 0, 1: 0}
    s.drain(topic.file('incompatible = "dead-letter"'))
    assert [reason for _, _, reason in dead(s)] == ["incompatible-schema"]
    text = '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}'
    number = topic.registry.register(f"{s.topic}-json", "JSON", text)
    s.produce([framed(number, b"{}")], partition=0)
    with pytest.raises(ConfigError, match="it is a schema of another language, JSON"):
        s.drain(topic.file())
    assert s.positions() == {0: 1, 1: 0}
    s.drain(topic.file('incompatible = "dead-letter"'))
    assert [reason for _, _, reason in dead(s)] == ["incompatible-schema"] * 2


def framed_by_other(topic: Topic, schema: Any, document: Any) -> bytes:
    """A record of a schema that another subject has."""
    text = json.dumps(schema)
    number = topic.registry.register(f"{topic.s.topic}-other", "AVRO", text)
    return framed(number, encode(parse(text), document))


def test_the_plan_says_which_schema_it_is_and_a_version_can_be_pinned(topic: Topic) -> None:
    topic.writer(payment())
    topic.writer(payment(NOTE))
    text = plan(topic.s.load(topic.file())).text(400)
    assert f"The columns are those of subject {topic.s.topic}-value, version 2 (id " in text
    assert "amount decimal(12,2) not null, at timestamp not null, note string." in text
    pinned = topic.s.load(topic.file("version = 1")).decode
    assert [column.name for column in pinned.columns] == ["id", "amount", "at"]


def test_what_is_wrong_with_a_subject_is_said_at_the_start(topic: Topic, make_topic: Callable[..., str]) -> None:
    s = topic.s
    with pytest.raises(UnknownSubject, match=f"has no subject {s.topic}-value"):
        s.load(topic.file())
    topic.registry.register(
        f"{s.topic}-value", "JSON", '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}'
    )
    with pytest.raises(ConfigError, match=r"is JSON, and decode.format is avro"):
        s.load(topic.file())
    topics = [make_topic(), make_topic()]
    for name, schema in zip(topics, (payment(), payment(NOTE)), strict=True):
        topic.registry.register(f"{name}-value", "AVRO", json.dumps(schema))
    source = f'brokers = "{s.cluster.bootstrap}"\ntopics = {json.dumps(topics)}'
    with pytest.raises(ConfigError, match="have different schemas, and the pipeline has one set of columns"):
        s.load(topic.file(source=source))
    pattern = f'brokers = "{s.cluster.bootstrap}"\ntopics_pattern = "t.*"'
    with pytest.raises(ConfigError, match=r"source.topics_pattern says no topic"):
        s.load(topic.file(source=pattern))


@pytest.mark.parametrize("engine", ["consumer", pytest.param("spark", marks=pytest.mark.long)])
def test_a_table_follows_its_subject_while_running(topic: Topic, engine: str) -> None:
    s = topic.s
    first = topic.writer(payment())
    path = topic.file(sink=sink(s, 'evolve = "add"'))
    s.produce([first(value(n)) for n in range(100)])
    running = s.start(path, "--engine", engine)
    s.wait_for_rows(100)
    second = topic.writer(payment(NOTE, {"name": "kind", "type": "string", "default": "?"}))
    s.produce([second(value(n, note=f"n{n}", kind="k")) for n in range(100, 200)])
    s.produce([first(value(n)) for n in range(200, 250)])  # a producer that is not up to date
    s.wait_for_rows(250)
    log = s.kill(running)
    assert "has other columns than" in log
    assert f"; columns of subject {s.topic}-value, version 2 (id " in log
    rows = s.rows(f'SELECT id, note, kind FROM "{s.table}" ORDER BY id')
    assert rows[:100] == [(n, None, None) for n in range(100)], "of before: they had none"
    assert rows[100:200] == [(n, f"n{n}", "k") for n in range(100, 200)]
    assert rows[200:] == [(n, None, "?") for n in range(200, 250)], "as the newer schema reads them"
    assert held(s, path)


@pytest.fixture
def own_registry(tmp_path: Path) -> Iterator[Registry]:
    """One that may die."""
    registry = Registry(tmp_path / "registry", PortPicker().free())
    registry.prepare()
    registry.start()
    try:
        registry.await_ready()
        yield registry
    finally:
        registry.stop()


def test_a_registry_that_dies_costs_time_and_no_record(
    scenario: Callable[..., Scenario], own_registry: Registry
) -> None:
    topic = Topic(scenario(), own_registry.url)
    s = topic.s
    old = topic.writer(payment())
    new = topic.writer(payment(NOTE))
    path = topic.file('incompatible = "dead-letter"', "version = 1")
    s.produce([old(value(n)) for n in range(100)])
    running = s.start(path, "--engine", "consumer")
    s.wait_for_rows(100)
    own_registry.kill()
    with pytest.raises(RegistryUnavailable, match="cannot be asked"):
        s.load(path)
    s.produce([old(value(n)) for n in range(100, 150)])  # of a schema that is known: it needs no registry
    s.wait_for_rows(150)
    s.produce([new(value(n, note="x")) for n in range(150, 200)])
    assert running.stderr is not None
    _await_line(running, "schema registry at")
    assert s.rows(f'SELECT count(*) FROM "{s.table}"') == [(150,)]
    own_registry.start()
    own_registry.await_ready()
    s.wait_for_rows(200)
    assert sorted(s.ids()) == list(range(200))
    assert dead(s) == []


def _await_line(child: subprocess.Popen[str], text: str) -> None:
    """Until the child has said this on stderr. It is killed with the test's time."""
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return
    raise AssertionError(f"the run ended without a word of {text!r}")


def test_an_id_that_is_registered_later_is_known_then(
    scenario: Callable[..., Scenario], own_registry: Registry
) -> None:
    """A decoder that lives on does not remember for ever that an id was unknown."""
    topic = Topic(scenario(), own_registry.url)
    first = topic.writer(payment())
    (number,) = {topic.registry.latest(subject).id for subject in topic.registry.subjects()}
    opened = decoder(topic.s.load(topic.file()), refuse_nul=True)
    record = framed(number + 1, first(value(5))[5:])
    batch = pa.RecordBatch.from_pydict({"key": pa.nulls(1, pa.binary()), "value": pa.array([record], pa.binary())})
    assert [refused.reason for refused in opened.decode(batch).refused] == ["unknown-schema-id"]
    text = json.dumps(payment() | {"doc": "another text is another schema"})
    assert topic.registry.register(f"{topic.s.topic}-other", "AVRO", text) == number + 1
    assert poll_until(lambda: opened.decode(batch).refused == (), 2 * UNKNOWN_KEPT_S)
    assert opened.decode(batch).rows.to_pylist()[0]["id"] == 5
