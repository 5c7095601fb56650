"""The pipeline file: what it means, and a bad one of each kind with its message."""

# ruff: noqa: E501 -- the table of bad files reads best with one case a line

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from avow import settings
from avow.errors import ConfigError
from avow.formats import FORMATS
from avow.formats.json.plugin import JsonConfig
from avow.formats.protobuf.plugin import ProtobufKey
from avow.guarantee import Guarantee
from avow.schema import parse
from avow.schema_registry import RegistrySettings
from avow.settings import PipelineConfig, load, unwrap_secrets
from avow.sinks import SINKS
from avow.sinks.postgres.config import PostgresConfig, Table

ROOT = Path(__file__).parents[2]
ENV = {"DATABASE_URL": "postgresql://me@db/shop"}
GOOD = """\
name = "payments"
guarantee = "exactly-once"

[source]
brokers = "localhost:9092"
topics = ["payments"]

[decode]
format = "json"
schema = "id long not null, note string"

[sink]
kind = "postgres"
url = "${env:DATABASE_URL}"
table = "payments"
"""
NAME, GUARANTEE, SOURCE, BROKERS, TOPICS, FORMAT, SCHEMA, SINK, KIND, URL, TABLE = 1, 2, 4, 5, 6, 9, 10, 12, 13, 14, 15


def edited(*edits: tuple[int, str]) -> str:
    """The good file with some of its lines replaced."""
    lines = GOOD.splitlines()
    for number, line in edits:
        lines[number - 1] = line
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the file to write; relative, so that messages are short."""
    monkeypatch.chdir(tmp_path)
    return Path("p.toml")


def loaded(path: Path, *edits: tuple[int, str]) -> PipelineConfig:
    path.write_text(edited(*edits))
    return load(path, ENV)


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, ENV)
    assert error.value.advice
    return str(error.value)


# --- what is accepted -----------------------------------------------------------------------------------


def test_the_good_file_and_its_defaults(write: Path) -> None:
    pipeline = loaded(write)
    assert pipeline.name == "payments"
    assert pipeline.guarantee is Guarantee.EXACTLY_ONCE
    assert pipeline.engine == "spark"
    assert pipeline.source.brokers == "localhost:9092"
    assert pipeline.source.topics == ("payments",)
    assert pipeline.source.topics_pattern is None
    assert pipeline.source.start == "earliest"
    assert pipeline.source.on_data_loss == "stop"
    assert pipeline.source.kafka == {}
    assert pipeline.decode.columns == parse("id long not null, note string")
    assert isinstance(pipeline.decode, JsonConfig)
    assert pipeline.decode.unknown_fields == "reject"
    assert pipeline.tombstones == "dead-letter"
    assert pipeline.transform is None
    assert isinstance(pipeline.sink, PostgresConfig)
    assert pipeline.sink.url.get_secret_value() == ENV["DATABASE_URL"]
    assert pipeline.sink.table == Table("payments")
    assert pipeline.sink.mode == "append"
    assert pipeline.sink.key == ()
    assert pipeline.sink.lineage == ("_kafka_topic", "_kafka_partition", "_kafka_offset", "_kafka_timestamp")
    assert pipeline.dead_letters.max_share == 0.01
    assert pipeline.interval == timedelta(seconds=1)
    assert pipeline.batch.max_records == 500_000
    assert pipeline.spark == {}


def test_the_example_is_loadable() -> None:
    pipeline = load(ROOT / "examples/payments.toml", ENV)
    assert pipeline.transform is not None
    assert pipeline.transform.sql == "SELECT *, amount * 100 AS cents FROM records WHERE amount > 0"


def test_the_cluster_example_is_loadable() -> None:
    pipeline = load(ROOT / "examples/cluster/payments.toml", ENV | {"SPARK_MASTER": "spark://host:7077"})
    assert str(pipeline.spark["spark.master"]) != "spark://host:7077", "what comes from the environment is not shown"
    assert unwrap_secrets(pipeline.spark)["spark.master"] == "spark://host:7077"
    assert pipeline.transform is not None
    assert pipeline.transform.python == "rules:in_cents"


def test_the_tree_is_frozen_and_can_be_sent_to_executors(write: Path) -> None:
    pipeline = loaded(write)
    with pytest.raises(ValidationError, match="frozen"):
        pipeline.name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        pipeline.sink.mode = "upsert"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"earliest"', "earliest"),
        ('"latest"', "latest"),
        ('"2026-01-31T12:00:00Z"', datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ('"2026-01-31t13:00:00.5+01:00"', datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC)),
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),  # TOML's own times
        ('{ payments = { "0" = 17, 1 = 0 } }', {"payments": {0: 17, 1: 0}}),
    ],
)
def test_starts(write: Path, written: str, meant: object) -> None:
    assert loaded(write, (TOPICS, f'topics = ["payments"]\nstart = {written}')).source.start == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("2m", timedelta(minutes=2)),
        ("1h", timedelta(hours=1)),
        ("0s", timedelta(0)),
    ],
)
def test_durations(write: Path, written: str, meant: timedelta) -> None:
    assert loaded(write, (TABLE, f'table = "t"\n[batch]\ninterval = "{written}"')).batch.interval == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"payments"', Table("payments")),
        ('"shop.payments"', Table("payments", "shop")),
        ('["shop", "we.ird"]', Table("we.ird", "shop")),
        ('["we.ird"]', Table("we.ird")),
        ("'\"; DROP TABLE x; --'", Table('"; DROP TABLE x; --')),
        ('"select"', Table("select")),
        ('"a b$c"', Table("a b$c")),
        (f'"{"é" * 31}a"', Table("é" * 31 + "a")),  # 63 bytes
    ],
)
def test_hostile_but_legal_tables(write: Path, written: str, meant: Table) -> None:
    sink = loaded(write, (TABLE, f"table = {written}")).sink
    assert isinstance(sink, PostgresConfig)
    assert sink.table == meant


def test_hostile_but_legal_columns(write: Path) -> None:
    schema = "schema = '`select` long not null, `a\"; DROP TABLE x; --` int, `$1` int, `ü b` int'"
    names = [field.name for field in loaded(write, (SCHEMA, schema)).decode.columns]
    assert names == ["select", 'a"; DROP TABLE x; --', "$1", "ü b"]


def test_raw_and_string_have_the_records_own_columns(write: Path) -> None:
    raw = loaded(write, (FORMAT, 'format = "raw"'), (SCHEMA, ""))
    text = loaded(write, (FORMAT, 'format = "string"\ntombstones = "keep"'), (SCHEMA, ""))
    assert raw.decode.columns == parse("key binary, value binary")
    assert text.decode.columns == parse("key string, value string")
    assert text.tombstones == "keep"


def test_client_settings_in_either_spelling(write: Path) -> None:
    pipeline = loaded(
        write,
        (
            TABLE,
            'table = "t"\n[source.kafka]\nsecurity.protocol = "SSL"\n"session.timeout.ms" = 9000\ncheck.crcs = true',
        ),
        (SINK, '[spark]\nmaster = "local[2]"\nsql.shuffle.partitions = 4\n"speculation" = false\n[sink]'),
    )
    assert unwrap_secrets(pipeline.source.kafka) == {
        "security.protocol": "SSL",
        "session.timeout.ms": "9000",
        "check.crcs": "true",
    }
    assert unwrap_secrets(pipeline.spark) == {
        "spark.master": "local[2]",
        "spark.sql.shuffle.partitions": "4",
        "spark.speculation": "false",
    }


def test_keys_may_be_columns_or_lineage(write: Path) -> None:
    key = '["id", "_kafka_topic", "_kafka_partition", "_kafka_offset"]'
    pipeline = loaded(write, (TABLE, f'table = "t"\nmode = "dedupe"\nkey = {key}'))
    assert pipeline.sink.key == ("id", "_kafka_topic", "_kafka_partition", "_kafka_offset")


def test_upsert_deletes_on_null(write: Path) -> None:
    assert loaded(write, (TABLE, 'table = "t"\nmode = "upsert"\nkey = ["id"]')).tombstones == "delete"


def test_a_transform_decides_the_sinks_columns(write: Path) -> None:
    """So the declared ones may be longer than the sink's names, and a key may be one that it makes."""
    pipeline = loaded(
        write,
        (SCHEMA, f'schema = "{"x" * 64} long, xmin int"'),
        (SINK, '[transform]\npython = "shop.rules:clean"\n[sink]'),
        (TABLE, 'table = "t"\nmode = "upsert"\nkey = ["made"]'),
    )
    assert pipeline.sink.key == ("made",)


def test_the_environment_fills_in_parts_of_any_string(write: Path) -> None:
    write.write_text(edited((TOPICS, 'topics = ["${env:A}-${env:B}", "x"]')))
    assert load(write, ENV | {"A": "pay", "B": "ments"}).source.topics == ("pay-ments", "x")


def test_a_byte_order_mark_and_windows_line_ends(write: Path) -> None:
    write.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(write, ENV).name == "payments"


@pytest.mark.parametrize("pattern", [r"payments\..*", "^(?!_)[a-z0-9-]+$", "(a|b){2,3}", r"[^.]+\.v\d?"])
def test_topic_patterns(write: Path, pattern: str) -> None:
    assert loaded(write, (TOPICS, f"topics_pattern = '{pattern}'")).source.topics_pattern == pattern


# --- what is refused ------------------------------------------------------------------------------------

LONG = "x" * 63
BAD: dict[str, tuple[tuple[int, str], str]] = {
    # keys
    "unknown key": ((GUARANTEE, 'guarantee = "exactly-once"\nengin = "spark"'), "p.toml:3: engin: is not a known key, did you mean engine?; known keys: name, guarantee, engine"),
    "unknown section": ((SINK, "[sinks]"), "p.toml:12: sinks: is not a known key, did you mean sink?; known keys"),
    "unknown key in a section": ((TOPICS, 'topics = ["payments"]\ntopic = "x"'), "p.toml:7: source.topic: is not a known key, did you mean topics?; known keys: brokers, topics"),
    "unknown nested table": ((SINK, "[sink.options]\nx = 1\n[sink]"), "p.toml:12: sink.options: is not a known key; known keys: kind, mode, key"),
    "missing key": ((GUARANTEE, ""), 'p.toml: guarantee: is missing; "at-most-once", "at-least-once", "exactly-once"'),
    "missing key in a section": ((BROKERS, ""), "p.toml:4: source.brokers: is missing; host:port"),
    "batch that is no table": ((GUARANTEE, 'guarantee = "exactly-once"\nbatch = 5'), "p.toml:3: batch: should be a table; a table [batch]"),
    # names and words
    "guarantee": ((GUARANTEE, 'guarantee = "exactly-onse"'), "p.toml:2: guarantee: 'exactly-onse' is not known, did you mean exactly-once?; \"at-most-once\""),
    "guarantee of no kind": ((GUARANTEE, "guarantee = 1"), "p.toml:2: guarantee: should be"),
    "engine": ((GUARANTEE, 'guarantee = "exactly-once"\nengine = "flink"'), "p.toml:3: engine: 'flink' is not known; \"spark\" or \"consumer\""),
    "pipeline name": ((NAME, 'name = "pay ments"'), "p.toml:1: name: 'pay ments' is not a pipeline name; 1 to 200 letters"),
    "pipeline name too long": ((NAME, f'name = "{"x" * 201}"'), "is not a pipeline name; 1 to 200 letters"),
    "pipeline name that is a path": ((NAME, 'name = ".."'), "p.toml:1: name: '..' is not a pipeline name"),
    "pipeline name with escapes": ((NAME, r'name = "\u001b[31m"'), r"p.toml:1: name: '\x1b[31m' is not"),
    # source
    "brokers without port": ((BROKERS, 'brokers = "a:1,b"'), "p.toml:5: source.brokers: entry 2 is not host:port; host:port, several"),
    "brokers with a port of no kind": ((BROKERS, 'brokers = "a:70000"'), "p.toml:5: source.brokers: entry 1 is not host:port"),
    "brokers with a scheme": ((BROKERS, 'brokers = "SSL://a:1"'), "p.toml:5: source.brokers: entry 1 is not host:port"),
    "topic": ((TOPICS, 'topics = ["ok", "no good"]'), "p.toml:6: source.topics[1]: 'no good' is not a topic name; 1 to 249 letters"),
    "topic of dots": ((TOPICS, 'topics = [".."]'), "p.toml:6: source.topics[0]: '..' is not a topic name"),
    "topic too long": ((TOPICS, f'topics = ["{"x" * 250}"]'), "is not a topic name; 1 to 249"),
    "topic outside ASCII": ((TOPICS, 'topics = ["größe"]'), "'größe' is not a topic name"),
    "topics as a string": ((TOPICS, 'topics = "payments"'), "p.toml:6: source.topics: should be a valid tuple; a list of topic names"),
    "topic twice": ((TOPICS, 'topics = ["a", "b", "a"]'), "p.toml:6: source.topics: 'a' is listed 2 times; each topic once"),
    "no topic": ((TOPICS, "topics = []"), "p.toml:6: source.topics: names no topic; either topics"),
    "topics and pattern": ((TOPICS, 'topics = ["a"]\ntopics_pattern = "b"'), "p.toml:7: source.topics_pattern: is set together with topics; either topics"),
    "pattern that does not compile": ((TOPICS, 'topics_pattern = "(a"'), "p.toml:6: source.topics_pattern: '(a' does not compile: missing )"),
    "pattern only Python has": ((TOPICS, 'topics_pattern = "(?P<x>a)"'), "source.topics_pattern: '(?P<x>a)' is not a supported regular expression; letters"),
    "pattern only Java has": ((TOPICS, 'topics_pattern = "[a-z&&[^b]]"'), "is not a supported regular expression"),
    "pattern read in two ways": ((TOPICS, 'topics_pattern = "[a--]"'), "is not a supported regular expression"),
    "empty pattern": ((TOPICS, 'topics_pattern = ""'), "p.toml:6: source.topics_pattern: '' is not a supported"),
    "start": ((TOPICS, 'topics = ["a"]\nstart = "begin"'), "p.toml:7: source.start: 'begin' is not a start; \"earliest\", \"latest\""),
    "start without zone": ((TOPICS, 'topics = ["a"]\nstart = 2026-01-31T12:00:00'), "p.toml:7: source.start: 2026-01-31 12:00:00 has no time zone"),
    "start without zone, as text": ((TOPICS, 'topics = ["a"]\nstart = "2026-01-31T12:00:00"'), "p.toml:7: source.start: '2026-01-31T12:00:00' is not a start"),
    "start at no time": ((TOPICS, 'topics = ["a"]\nstart = "2026-02-30T12:00:00Z"'), "is not a valid date and time"),
    "start before Kafka": ((TOPICS, 'topics = ["a"]\nstart = "1969-12-31T23:59:59Z"'), "is before 1970"),
    "start at an offset of no topic": ((TOPICS, 'topics = ["a"]\nstart = { b = { "0" = 1 } }'), "p.toml:7: source.start.b: is not among source.topics"),
    "start at an offset below zero": ((TOPICS, 'topics = ["a"]\n[source.start]\na = { "0" = -1 }'), "p.toml:8: source.start.a.0: is not an offset"),
    "start at an offset of no kind": ((TOPICS, 'topics = ["a"]\nstart = { a = { "0" = true } }'), "source.start.a.0: is not an offset"),
    "start in a partition of no kind": ((TOPICS, 'topics = ["a"]\nstart = { a = { "x" = 1 } }'), "source.start.a.x: is not a partition number"),
    "start in a partition twice": ((TOPICS, 'topics = ["a"]\nstart = { a = { 0 = 1, 00 = 1 } }'), "source.start.a: names a partition twice"),
    "start in an unquoted topic": ((TOPICS, 'topics = ["a.b"]\nstart = { a.b = 1 }'), "source.start.a.b: is not a partition number"),
    "on_data_loss": ((TOPICS, 'topics = ["a"]\non_data_loss = "skipp"'), "p.toml:7: source.on_data_loss: 'skipp' is not known, did you mean skip?; \"stop\" or \"skip\""),
    "kafka: ours": ((SINK, '[source.kafka]\ngroup.id = "x"\n[sink]'), "p.toml:13: source.kafka.group.id: cannot be set: the pipeline's name is the group id; any other client setting"),
    "kafka: auto commit": ((SINK, '[source.kafka]\n"enable.auto.commit" = true\n[sink]'), "p.toml:13: source.kafka.enable.auto.commit: cannot be set: offsets are committed"),
    "kafka: reset": ((SINK, '[source.kafka]\nauto.offset.reset = "latest"\n[sink]'), "cannot be set: a run always starts from the ledger's position"),
    "kafka: isolation": ((SINK, '[source.kafka]\nisolation.level = "read_uncommitted"\n[sink]'), "cannot be set: only committed records are read"),
    "kafka: Spark's spelling": ((SINK, '[source.kafka]\nkafka.security.protocol = "SSL"\n[sink]'), "p.toml:13: source.kafka.kafka.security.protocol: begins with kafka.; client settings without it: security.protocol"),
    "kafka: a list": ((SINK, "[source.kafka]\nx = [1]\n[sink]"), "p.toml:13: source.kafka.x: is not a string, number or boolean"),
    "kafka: twice": ((SINK, '[source.kafka]\na.b = 1\n"a.b" = 2\n[sink]'), "source.kafka.a.b: is set twice"),
    "kafka: a path with ..": ((SINK, '[source.kafka]\nssl.ca.location = "../ca.pem"\n[sink]'), "p.toml:13: source.kafka.ssl.ca.location: contains a path with ..; paths without .."),
    # decode
    "format": ((FORMAT, 'format = "jsonn"'), "p.toml:9: decode.format: 'jsonn' is not known, did you mean json?; known formats: "),
    "json without schema": ((SCHEMA, ""), "p.toml:8: decode.schema: is missing; columns in Spark's spelling: \"id long"),
    "raw with schema": ((FORMAT, 'format = "raw"'), "p.toml:10: decode.schema: is for formats whose columns are declared; raw and string have the columns key"),
    "string with unknown_fields": ((FORMAT, 'format = "string"\nunknown_fields = "keep"\n[x]'), "decode.unknown_fields: is for formats whose columns are declared"),
    "schema": ((SCHEMA, 'schema = "id lng"'), "p.toml:10: decode.schema: column 1: 'lng' is not a type (did you mean long?); Types: boolean, byte"),
    "schema of no kind": ((SCHEMA, "schema = 5"), "p.toml:10: decode.schema: should be a string; columns in Spark's spelling"),
    "unknown_fields": ((SCHEMA, 'schema = "id long"\nunknown_fields = "drop"'), "p.toml:11: decode.unknown_fields: 'drop' is not known; \"reject\", \"ignore\" or \"keep\""),
    "tombstones": ((SCHEMA, 'schema = "id long"\ntombstones = "delete"'), "p.toml:11: decode.tombstones: 'delete' is not known, did you mean dead-letter?; \"dead-letter\", \"skip\" or \"keep\""),
    "tombstones kept in required columns": ((SCHEMA, 'schema = "id long not null"\ntombstones = "keep"'), "p.toml:11: decode.tombstones: a null value becomes a row of nulls"),
    "column named like lineage": ((SCHEMA, 'schema = "id long, _Kafka_Offset long"'), "p.toml:10: decode.schema: column 2, '_Kafka_Offset', has the name of a column that avow adds; another name, or another sink.lineage_prefix"),
    "column named like the rest": ((SCHEMA, 'schema = "_rest string"'), "p.toml:10: decode.schema: column 1, '_rest', has the name of a column that avow adds"),
    "column named like PostgreSQL's": ((SCHEMA, 'schema = "xmin long"'), "column 1, 'xmin', has a name that the sink reserves"),
    "column over 63 bytes": ((SCHEMA, f'schema = "{LONG}y long"'), "', is 64 bytes long and would be truncated at 63; a shorter name"),
    "columns equal after 63 bytes": ((SCHEMA, f'schema = "{LONG} long, {LONG}y long"'), "', is 64 bytes long and would be truncated at 63, and then equals another column's name;"),
    "too many columns": ((SCHEMA, f'schema = "{", ".join(f"c{n} int" for n in range(1596))}"'), "decode.schema: has too many columns; at most 1595"),
    # transform
    "transform with both": ((SINK, '[transform]\nsql = "SELECT 1"\npython = "a:b"\n[sink]'), "p.toml:12: transform: sql and python are both set; either sql or python"),
    "transform with neither": ((SINK, "[transform]\n[sink]"), "p.toml:12: transform: is empty; either sql or python"),
    "transform with a blank sql": ((SINK, '[transform]\nsql = " "\n[sink]'), "p.toml:13: transform.sql: "),
    "transform with no function": ((SINK, '[transform]\npython = "../x.py"\n[sink]'), "p.toml:13: transform.python: '../x.py' is not a function's name; \"module:function\""),
    "sql without Spark": ((GUARANTEE, 'guarantee = "exactly-once"\nengine = "consumer"\ntransform.sql = "SELECT 1"'), "p.toml:3: engine: the consumer engine cannot run transform.sql; transform.python, or engine = \"spark\""),
    # sink
    "kind that is not built": ((KIND, 'kind = "mysql"\npath = "/x"'), "p.toml:13: sink.kind: 'mysql' is not known; known kinds: postgres, delta, iceberg"),
    "no kind": ((KIND, ""), "p.toml:12: sink.kind: is missing; known kinds: postgres"),
    "kind of no kind": ((KIND, "kind = [1]"), "p.toml:13: sink.kind: [1] is not known"),
    "mode": ((TABLE, 'table = "t"\nmode = "insert"'), "p.toml:16: sink.mode: 'insert' is not known, did you mean upsert?; \"append\", \"dedupe\" or \"upsert\""),
    "url of another database": ((URL, 'url = "mysql://h/d"'), "p.toml:14: sink.url: is not a PostgreSQL URL; postgresql://user@host:port/database"),
    "url with a space": ((URL, 'url = "postgresql://h/d b"'), "p.toml:14: sink.url: contains a space or a control character"),
    "url with an @ in the password": ((URL, 'url = "postgresql://me:hunter@2@h/d"'), "p.toml:14: sink.url: has more than one @, or an @ after a /: the password is not escaped; in a password: @ as %40"),
    "url with a / in the password": ((URL, 'url = "postgresql://me:hunter/2@h/d"'), "p.toml:14: sink.url: has more than one @, or an @ after a /: the password is not escaped; in a password: @ as %40"),
    "url with a ? in the password": ((URL, 'url = "postgresql://me:hunter?2@h/d"'), "p.toml:14: sink.url: has a port that is not a number, or a password that is not escaped; in a password: @ as %40"),
    "url with a % in the password": ((URL, 'url = "postgresql://me:hunter%2@h/d"'), "p.toml:14: sink.url: has a % without two hexadecimal digits: the password is not escaped; in a password: @ as %40"),
    "url with a path with ..": ((URL, 'url = "postgresql://h/d?sslrootcert=../x"'), "p.toml:14: sink.url: contains a path with ..; paths without .."),
    "table of three parts": ((TABLE, 'table = "a.b.c"'), 'p.toml:15: sink.table: is not a table name; "table" or "schema.table"; a name that contains a dot: ["schema", "we.ird"]'),
    "table that is a path": ((TABLE, 'table = "../x"'), "p.toml:15: sink.table: is not a table name"),
    "empty table": ((TABLE, 'table = ""'), "p.toml:15: sink.table: is not a table name"),
    "empty schema": ((TABLE, 'table = ".x"'), "p.toml:15: sink.table: is not a table name"),
    "table over 63 bytes": ((TABLE, f'table = "{"é" * 32}"'), "is 64 bytes long and would be truncated at 63; names of at most 63 bytes"),
    "schema over 63 bytes": ((TABLE, f'table = "{"s" * 64}.t"'), "is 64 bytes long and would be truncated at 63"),
    "table with NUL": ((TABLE, r'table = "a\u0000b"'), r"p.toml:15: sink.table: 'a\x00b' contains a control character"),
    "table among avow's own": ((TABLE, 'table = "avow.ledger"'), "p.toml:15: sink.table: the schema 'avow' is reserved; any other schema"),
    "table among PostgreSQL's own": ((TABLE, 'table = "pg_catalog.x"'), "the schema 'pg_catalog' is reserved"),
    "append with key": ((TABLE, 'table = "t"\nkey = ["id"]'), 'p.toml:16: sink.key: is set, but append has no key; mode = "dedupe" or "upsert"'),
    "upsert without key": ((TABLE, 'table = "t"\nmode = "upsert"'), "p.toml:12: sink.key: is missing: upsert needs one; the columns that identify a row"),
    "dedupe without key": ((TABLE, 'table = "t"\nmode = "dedupe"\nkey = []'), "p.toml:17: sink.key: is missing: dedupe needs one"),
    "key twice": ((TABLE, 'table = "t"\nmode = "dedupe"\nkey = ["id", "id"]'), "p.toml:17: sink.key: names a column twice"),
    "key that is no column": ((TABLE, 'table = "t"\nmode = "dedupe"\nkey = ["id", "Id"]'), "p.toml:17: sink.key[1]: 'Id' is not a column; columns of decode.schema, in the same case"),
    "key that may be null": ((TABLE, 'table = "t"\nmode = "upsert"\nkey = ["note"]'), "p.toml:17: sink.key[0]: 'note' is nullable; columns that decode.schema declares as not null"),
    "key with a long name": ((TABLE, f'table = "t"\nmode = "upsert"\nkey = ["{LONG}y"]'), "is 64 bytes long and would be truncated at 63"),
    "lineage prefix too long": ((TABLE, f'table = "t"\nlineage_prefix = "{"p" * 55}"'), "p.toml:16: sink.lineage_prefix: "),
    "lineage prefix with a newline": ((TABLE, r"""table = "t"
lineage_prefix = "a\n" """), r"'a\ntopic' contains a control character; a short prefix"),
    # the rest
    "share above one": ((TABLE, 'table = "t"\n[dead_letters]\nmax_share = 1.5'), "p.toml:17: dead_letters.max_share: should be less than or equal to 1; a share from 0 to 1"),
    "share below zero": ((TABLE, 'table = "t"\n[dead_letters]\nmax_share = -0.1'), "p.toml:17: dead_letters.max_share: should be greater than or equal to 0"),
    "share of no kind": ((TABLE, 'table = "t"\n[dead_letters]\nmax_share = nan'), "p.toml:17: dead_letters.max_share: should be"),
    "share as a boolean": ((TABLE, 'table = "t"\n[dead_letters]\nmax_share = true'), "p.toml:17: dead_letters.max_share: should be"),
    "interval as a number": ((TABLE, 'table = "t"\n[batch]\ninterval = 1'), "p.toml:17: batch.interval: 1 is not a duration; a number and ms, s, m or h"),
    "interval of no unit": ((TABLE, 'table = "t"\n[batch]\ninterval = "1 day"'), "p.toml:17: batch.interval: '1 day' is not a duration"),
    "interval too long": ((TABLE, 'table = "t"\n[batch]\ninterval = "61m"'), "p.toml:17: batch.interval: '61m' is out of range"),
    "no records": ((TABLE, 'table = "t"\n[batch]\nmax_records = 0'), "p.toml:17: batch.max_records: should be greater than or equal to 1; a number from 1"),
    "records as text": ((TABLE, 'table = "t"\n[batch]\nmax_records = "5"'), "p.toml:17: batch.max_records: should be a valid integer"),
    "spark: speculation": ((SINK, "[spark]\nspeculation = true\n[sink]"), "p.toml:13: spark.speculation: would run two attempts of a task at once; false"),
    "spark: the name twice": ((SINK, '[spark]\n"spark.master" = "local"\n[sink]'), "p.toml:13: spark.spark.master: begins with spark.; in this table without it: master"),
    "spark: a path with ..": ((SINK, '[spark]\nlocal.dir = "/a/../b"\n[sink]'), "p.toml:13: spark.local.dir: contains a path with .."),
    "spark: no table": ((GUARANTEE, 'guarantee = "exactly-once"\nspark = "local"'), "p.toml:3: spark: should be a table; name = value"),
    # the environment
    "variable that is not set": ((URL, 'url = "${env:NOPE}"'), "p.toml:14: sink.url: the environment variable NOPE is not set; export NOPE=..."),
    "variable without a name": ((URL, 'url = "${env:}"'), "p.toml:14: sink.url: contains a ${env:...} without a variable name; ${env:NAME}"),
    "variable never closed": ((URL, 'url = "${env:DATABASE_URL"'), "p.toml:14: sink.url: contains a ${env:...} without a variable name"),
    # TOML
    "not TOML": ((BROKERS, "brokers localhost"), "p.toml:5: not TOML: Expected '=' after a key"),
    "key twice in TOML": ((BROKERS, "brokers = 'a:1'\nbrokers = 'b:1'"), "p.toml:6: not TOML: Cannot overwrite a value"),
    "cut short": ((TABLE, 'table = ["a",'), "p.toml:15: not TOML: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_of_each_kind(case: str, write: Path) -> None:
    edit, expected = BAD[case]
    message = refused(write, edited(edit))
    assert expected in message
    if case not in (
        "unknown section",
        "string with unknown_fields",
        "columns equal after 63 bytes",
    ):
        assert len(message.splitlines()) == 1, message


WEIRD = ["1", "-1", "1.5", "nan", "true", '""', '"\\u0000"', '"x"', "[]", "[[]]", '["x", 1]', "{}", "{ x = { y = 1 } }", "2026-01-31",
         "12:00:00", "[{ x = 1 }]", f"{10**30}", '"${env:DATABASE_URL}"', '["${env:DATABASE_URL}"]', '{ x = "${env:DATABASE_URL}" }']  # fmt: skip
KEYS = ["name", "guarantee", "engine", "source", "decode", "transform", "sink", "dead_letters", "batch", "spark", "source.brokers",
        "source.topics", "source.topics_pattern", "source.start", "source.on_data_loss", "source.kafka", "source.kafka.x", "decode.format",
        "decode.schema", "decode.unknown_fields", "decode.tombstones", "transform.sql", "transform.python", "sink.kind", "sink.url", "sink.table",
        "sink.mode", "sink.key", "sink.lineage_prefix", "dead_letters.max_share", "batch.interval", "batch.max_records", "spark.x"]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_any_value_anywhere_is_taken_or_refused_by_name(key: str, write: Path) -> None:
    """And never ends in another error, or in a complaint about another key."""
    *section, name = key.split(".")
    kept = [line for line in GOOD.splitlines() if not line.startswith(f"{name} =")]
    for value in WEIRD:
        lines = list(kept)
        if section:
            header = f"[{'.'.join(section)}]"
            lines = [*lines, header] if header not in lines else lines
            lines.insert(lines.index(header) + 1, f"{name} = {value}")
        else:
            lines = [f"{name} = {value}", *_without_section(lines, name)]
        write.write_text("\n".join(lines))
        problems: list[str] = []
        try:
            load(write, ENV)
        except ConfigError as error:
            problems = str(error).splitlines()
        assert [problem for problem in problems if f": {key}" not in problem] == []


def _without_section(lines: list[str], name: str) -> list[str]:
    inside = False
    kept = []
    for line in lines:
        inside = line == f"[{name}]" if line.startswith("[") else inside
        if not inside:
            kept.append(line)
    return kept


def test_upsert_has_its_own_tombstones(write: Path) -> None:
    text = edited(
        (SCHEMA, 'schema = "id long not null"\ntombstones = "skip"'), (TABLE, 'table="t"\nmode="upsert"\nkey=["id"]')
    )
    assert "p.toml:11: decode.tombstones: cannot be set with upsert, where a null value deletes the row" in refused(
        write, text
    )


def test_a_lineage_column_may_not_meet_a_declared_one(write: Path) -> None:
    text = edited((SCHEMA, 'schema = "k_offset long"'), (TABLE, 'table = "t"\nlineage_prefix = "k_"'))
    assert "p.toml:10: decode.schema: column 1, 'k_offset', has the name of a column that avow adds" in refused(
        write, text
    )
    transformed = text.replace("[sink]", '[transform]\npython = "a:b"\n[sink]')
    assert "has the name of a column that avow adds" in refused(write, transformed)


def test_problems_are_reported_together_in_the_order_of_the_file(write: Path) -> None:
    text = edited(
        (NAME, 'name = "a b"'),
        (BROKERS, 'brokers = "x"'),
        (TOPICS, 'topics = ["ok", "a b", "c d"]'),
        (SCHEMA, 'schema = "id lng"'),
        (URL, 'url = "${env:NOPE}"'),
        (TABLE, 'tabel = "t"\n[batch]\nmax_records = 0'),
    )
    keys = [line.split(": ")[:2] for line in refused(write, text).splitlines()]
    assert keys == [
        ["p.toml:1", "name"],
        ["p.toml:5", "source.brokers"],
        ["p.toml:6", "source.topics[1]"],
        ["p.toml:6", "source.topics[2]"],
        ["p.toml:10", "decode.schema"],
        ["p.toml:12", "sink.table"],
        ["p.toml:14", "sink.url"],
        ["p.toml:15", "sink.tabel"],
        ["p.toml:17", "batch.max_records"],
    ]


def test_lines_are_found_in_spite_of_strings_of_several_lines(write: Path) -> None:
    text = edited((SINK, '[transform]\nsql = """\n[sink]\nmode = 1\n"""\n[sink]'), (TABLE, 'table = "t"\nmode = "x"'))
    assert "p.toml:21: sink.mode: 'x' is not known" in refused(write, text)


def test_a_check_from_outside_is_reported_with_its_line(write: Path) -> None:
    write.write_text(GOOD)
    problem = settings.Problem(("sink", "table"), "is wrong", "something else")
    with pytest.raises(ConfigError, match=r"^p\.toml:15: sink\.table: is wrong; something else$"):
        load(write, ENV, check=lambda _: [problem])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    (tmp_path / "deep.toml").write_text("x = " + "[" * 100_000)
    for name, expected in [
        ("none.toml", "none.toml: no such file"),
        ("", "cannot be read: Is a directory"),
        ("latin.toml", "latin.toml: byte 8 is not UTF-8"),
        ("deep.toml", "deep.toml: not TOML: nested too deeply"),
    ]:
        with pytest.raises(ConfigError) as error:
            load(tmp_path / name, ENV)
        assert expected in str(error.value)
        assert error.value.exit_code == 2


def test_an_empty_file_names_what_is_missing(write: Path) -> None:
    missing = [line.split(": ")[1:3] for line in refused(write, "").splitlines()]
    assert missing == [[key, "is missing; " + rest] for key, rest in [
        ("name", "1 to 200 letters, digits, . _ and -"),
        ("guarantee", '"at-most-once", "at-least-once", "exactly-once"'),
        ("source", "a table [source]"),
        ("sink", "a table [sink]"),
        ("decode", "a table [decode]"),
    ]]  # fmt: skip


# --- lakes ----------------------------------------------------------------------------------------------

LAKE = {
    "path that climbs": (
        'kind = "delta"\npath = "../x"',
        "sink.path: contains .., % or a backslash; a folder, or s3://bucket/folder",
    ),
    "path of another store": ('kind = "delta"\npath = "hdfs://x/y"', "sink.path: is not a supported location"),
    "path with NUL": ('kind = "delta"\npath = "a\\u0000b"', "sink.path: is not a supported location"),
    "empty path": ('kind = "delta"\npath = ""', "sink.path: is not a supported location"),
    "no path": ('kind = "delta"', "sink.path: is missing; a folder, or s3://bucket/folder"),
    "option that one client alone would know": (
        'kind = "delta"\npath = "s3://b/t"\noptions = { aws_s3_allow_unsafe_rename = true }',
        "sink.options.aws_s3_allow_unsafe_rename: is not a supported option; access_key_id, ",
    ),
    "warehouse in another store": (
        'kind = "iceberg"\ntable = "n.t"\ncatalog = { type = "rest", uri = "http://x", warehouse = "gs://b/w" }',
        "sink.catalog.warehouse: gs is not a supported storage scheme; a folder, file:// or s3:// or s3a://",
    ),
    "a table of PostgreSQL's": ('kind = "delta"\npath = "x"\ntable = "t"', "sink.table: is not a known key"),
    "partition by no column": (
        'kind = "delta"\npath = "x"\npartition_by = "nope"',
        "sink.partition_by: 'nope' is not a column",
    ),
    "day of no timestamp": (
        'kind = "delta"\npath = "x"\npartition_by = "day(id)"',
        "sink.partition_by: 'id' is not a timestamp",
    ),
    "by a time of the lineage": (
        'kind = "iceberg"\ntable = "n.t"\ncatalog = { warehouse = "w" }\npartition_by = "_kafka_timestamp"',
        "sink.partition_by: '_kafka_timestamp' has too many values",
    ),
    "day of a number of the lineage": (
        'kind = "delta"\npath = "x"\npartition_by = "day(_kafka_partition)"',
        "sink.partition_by: '_kafka_partition' is not a timestamp",
    ),
    "files of no size": (
        'kind = "delta"\npath = "x"\nfile_mb = 0',
        "sink.file_mb: should be greater than or equal to 1",
    ),
    "policy that is not known": (
        'kind = "delta"\npath = "x"\nevolve = "ad"',
        "sink.evolve: 'ad' is not known, did you mean add?",
    ),
    "policy of a sink without columns": (
        'kind = "kafka"\ntopic = "t"\nevolve = "add"',
        "sink.evolve: is not a known key",
    ),
    "iceberg without a namespace": (
        'kind = "iceberg"\ntable = "t"\ncatalog = { warehouse = "w" }',
        'is not a table name; "namespace.table"',
    ),
    "iceberg without a catalog": ('kind = "iceberg"\ntable = "n.t"', "sink.catalog: is missing"),
    "catalog of nothing": (
        'kind = "iceberg"\ntable = "n.t"\ncatalog = { x = 1 }',
        "sink.catalog: has neither warehouse nor uri",
    ),
    "prefix that files cannot have": (
        'kind = "delta"\npath = "x"\nlineage_prefix = "a b"',
        "sink.lineage_prefix: 'a btopic' contains ' ', which Parquet readers do not support",
    ),
}


@pytest.mark.parametrize("case", LAKE)
def test_a_bad_lake_of_each_kind(case: str, write: Path) -> None:
    lines, expected = LAKE[case]
    message = refused(write, edited((KIND, lines), (URL, ""), (TABLE, "")))
    assert expected in message
    assert len(message.splitlines()) == 1, message


def test_a_column_that_has_the_name_of_a_day(write: Path) -> None:
    text = edited(
        (KIND, 'kind = "delta"\npath = "x"\npartition_by = "day(at)"'),
        (URL, ""),
        (TABLE, ""),
        (SCHEMA, 'schema = "at timestamp, at_day string"'),
    )
    assert "sink.partition_by: adds a column at_day, and a column of that name is declared" in refused(write, text)


def test_a_lakes_secrets_are_not_shown(write: Path) -> None:
    text = edited(
        (KIND, 'kind = "delta"\npath = "s3://b/t"'),
        (URL, ""),
        (TABLE, '[sink.options]\nAWS_SECRET_ACCESS_KEY = "hunter2"'),
    )
    write.write_text(text)
    pipeline = load(write, ENV)
    assert "hunter2" not in repr(pipeline) + str(pipeline.model_dump())
    assert pipeline.secrets_in_file == ("sink.options.AWS_SECRET_ACCESS_KEY",)


# --- the reference --------------------------------------------------------------------------------------


def keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of the tree, as the file spells it."""
    nested: dict[str, type[BaseModel]] = {
        "source": settings.Source,
        "decode": JsonConfig,
        "transform": settings.Transform,
        "sink": PostgresConfig,
        "decode.registry": RegistrySettings,
        "decode.key": ProtobufKey,  # which has all the keys of others
        "dead_letters": settings.DeadLetters,
        "batch": settings.BatchSettings,
    }
    for name, field in model.model_fields.items():
        key = above + (field.alias or name)
        if key in nested:
            yield from keys(nested[key], f"{key}.")
        else:
            yield key


def test_the_reference_names_every_key_and_no_other() -> None:
    text = (ROOT / "docs/PIPELINE.md").read_text()
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    sinks = {key for kind in SINKS.values() for key in keys(kind.Config, "sink.")}
    formats = {key for format in FORMATS.values() for key in keys(format.Config, "decode.")}
    assert rows == set(keys(PipelineConfig)) | sinks | formats


# --- a table for each topic -----------------------------------------------------------------------------


PATTERN = (TOPICS, 'topics_pattern = "shop.*"')
ICEBERG = (URL, 'catalog = { warehouse = "/lake" }')


def into(kind: str, table: str) -> tuple[tuple[int, str], ...]:
    """The lines of the sink."""
    if kind == "postgres":
        return ((TABLE, f"table = {table}"),)
    if kind == "delta":
        return ((KIND, 'kind = "delta"'), (URL, ""), (TABLE, f"path = {table}"))
    return ((KIND, 'kind = "iceberg"'), ICEBERG, (TABLE, f"table = {table}"))


@pytest.mark.parametrize(
    ("kind", "table", "target"),
    [
        ("postgres", '"raw.{topic}"', "table raw.shop_eu_1"),
        ("postgres", '["raw", "{topic}"]', "table raw.shop_eu_1"),
        ("postgres", '"{topic}.rows"', "table shop_eu_1.rows"),
        ("postgres", '["{topic}-x"]', 'table "shop_eu_1-x"'),
        ("delta", '"/lake/{topic}"', "table /lake/shop_eu_1"),
        ("delta", '"s3://raw/{topic}/rows"', "table s3://raw/shop_eu_1/rows"),
        ("iceberg", '"raw.{topic}"', "table raw.shop_eu_1"),
        ("iceberg", '"raw.all_{topic}"', "table raw.all_shop_eu_1"),
    ],
)
def test_a_table_for_each_topic(write: Path, kind: str, table: str, target: str) -> None:
    pipeline = loaded(write, PATTERN, *into(kind, table))
    assert pipeline.sink.by_topic
    assert not loaded(write, PATTERN).sink.by_topic
    part = pickle.loads(pickle.dumps(pipeline.for_topic("shop.eu-1")))
    assert (part.sink.target, part.sink.by_topic, part.topic, pipeline.topic) == (target, False, "shop.eu-1", None)
    assert (part.source.topics, part.source.topics_pattern) == (("shop.eu-1",), None)
    assert (part.name, part.decode) == (pipeline.name, pipeline.decode)


@pytest.mark.parametrize(
    ("kind", "table", "topics", "why"),
    [
        (
            "postgres",
            '"raw.{topics}"',
            "",
            "sink.table: {topics} is not known; {topic}, the name of the record's topic",
        ),
        ("delta", '"/lake/{}"', "", "sink.path: {} is not known"),
        ("iceberg", '"raw.{Topic}"', "", "sink.table: 'raw.{Topic}' is not a table name"),
        (
            "postgres",
            '"raw.t"\non_topic_failure = "stop-all"',
            "",
            "sink.on_topic_failure: is set, but all topics go into one table",
        ),
        ("postgres", '"raw.{topic}"\non_topic_failure = "skip"', "", "sink.on_topic_failure: 'skip' is not known"),
        (
            "postgres",
            '"raw.{topic}"',
            "a.b, a-b, c",
            "source.topics[0]: 'a.b': its table raw.a_b would be that of 'a-b' too",
        ),
        ("postgres", '"raw.{topic}"', "A, a", "source.topics[1]: 'a': its table raw.a would be that of 'A' too"),
        (
            "delta",
            '"/lake/{topic}"',
            "x, x-dead-letters",
            "source.topics[1]: 'x-dead-letters': its table /lake/x_dead_letters would be that of 'x' too",
        ),
        ("postgres", '"raw.{topic}"', "t" * 64, "would be truncated at 63"),
        (
            "postgres",
            '"{topic}.t"',
            "avow",
            "source.topics[0]: 'avow' cannot have a table: the schema 'avow' is reserved",
        ),
        ("iceberg", '"raw.{topic}"', "t" * 243, " is 243 bytes long; names of at most 242 bytes"),
    ],
)
def test_a_table_that_cannot_be_each_topics(write: Path, kind: str, table: str, topics: str, why: str) -> None:
    listed = (
        (TOPICS, "topics = [" + ", ".join(f'"{topic}"' for topic in topics.split(", ")) + "]") if topics else PATTERN
    )
    assert why in refused(write, edited(listed, *into(kind, table)))
