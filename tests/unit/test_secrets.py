"""No secret in any repr, dump, log, plan or error, wherever it stands and whether the file is good or bad."""

from __future__ import annotations

import json
import logging
import traceback
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from rich.console import Console
from rich.pretty import pretty_repr

from avow.cli import main
from avow.errors import ConfigError
from avow.kafka.connect import redact
from avow.plan import load_checked, plan
from avow.settings import PipelineConfig, Section, load, unwrap_secrets
from avow.sinks.postgres.config import PostgresConfig

NEEDLE = "hunter2"  # in every secret below, and nowhere else

GOOD = """\
name = "payments"
guarantee = "at-least-once"
engine = "spark"
[source]
brokers = "localhost:9092"
topics = ["payments"]
start = "earliest"
on_data_loss = "stop"
[source.kafka]
client.id = "x"
[decode]
format = "json"
schema = "id long not null, k_id long not null"
unknown_fields = "reject"
tombstones = "skip"
[transform]
sql = "SELECT * FROM records"
[sink]
kind = "postgres"
url = "postgresql://me@db/shop"
table = "payments"
mode = "dedupe"
key = ["id"]
lineage_prefix = "_kafka_"
[batch]
interval = "1s"
[spark]
app.name = "x"
"""

# Where a value from the environment may stand, and one that is good there.
GOOD_FROM_ENV = [
    ('name = "payments"', 'name = "${env:SECRET}"', "hunter2"),
    ('brokers = "localhost:9092"', 'brokers = "${env:SECRET}"', "hunter2:9092"),
    ('topics = ["payments"]', 'topics = ["payments", "a-${env:SECRET}"]', "hunter2"),
    ('client.id = "x"', 'sasl.jaas.config = "${env:SECRET}"', "password=hunter2;"),
    ('schema = "id long not null, k_id long not null"', 'schema = "${env:SECRET}"', "id long, hunter2 long not null"),
    ('sql = "SELECT * FROM records"', "sql = \"SELECT '${env:SECRET}' FROM records\"", "hunter2"),
    ('url = "postgresql://me@db/shop"', 'url = "${env:SECRET}"', "postgresql://me:hunter2@db/shop"),
    ('table = "payments"', 'table = ["s", "${env:SECRET}"]', "hunter2"),
    ('key = ["id"]', 'key = ["${env:SECRET}", "id"]', "hunter2"),
    ('lineage_prefix = "_kafka_"', 'lineage_prefix = "${env:SECRET}"', "hunter2"),
    ('app.name = "x"', 'hadoop.fs.s3a.secret.key = "${env:SECRET}"', "hunter2"),
]

# The same places and more, with a value from the environment that is refused there.
BAD_FROM_ENV = [
    ('name = "payments"', 'name = "${env:SECRET}"', "hunter2 !"),
    ('guarantee = "at-least-once"', 'guarantee = "${env:SECRET}"', "hunter2"),
    ('engine = "spark"', 'engine = "${env:SECRET}"', "hunter2"),
    ('brokers = "localhost:9092"', 'brokers = "${env:SECRET}"', "hunter2"),
    ('topics = ["payments"]', 'topics = ["payments", "${env:SECRET}", "b"]', "hunter2 !"),
    ('topics = ["payments"]', 'topics = ["${env:SECRET}", "${env:SECRET}"]', "hunter2"),
    ('topics = ["payments"]', 'topics = "${env:SECRET}"', "hunter2"),
    ('topics = ["payments"]', 'topics_pattern = "${env:SECRET}"', "(hunter2"),
    ('start = "earliest"', 'start = "${env:SECRET}"', "hunter2"),
    ('start = "earliest"', 'start = { payments = { 0 = "${env:SECRET}" } }', "hunter2"),
    ('start = "earliest"', 'start = ["${env:SECRET}"]', "hunter2"),
    ('on_data_loss = "stop"', 'on_data_loss = "${env:SECRET}"', "hunter2"),
    ('client.id = "x"', 'group.id = "${env:SECRET}"', "hunter2"),
    ('client.id = "x"', 'ssl.ca.location = "${env:SECRET}"', "../hunter2"),
    ('client.id = "x"', 'sasl.password = ["${env:SECRET}"]', "hunter2"),
    ('format = "json"', 'format = "${env:SECRET}"', "hunter2"),
    ('schema = "id long not null, k_id long not null"', 'schema = "${env:SECRET}"', "id hunter2"),
    ('schema = "id long not null, k_id long not null"', 'schema = "${env:SECRET}"', "hunter2 long, hunter2 long"),
    ('schema = "id long not null, k_id long not null"', 'schema = "id long, ${env:SECRET}"', "`hunter2"),
    ('unknown_fields = "reject"', 'unknown_fields = "${env:SECRET}"', "hunter2"),
    ('tombstones = "skip"', 'tombstones = "${env:SECRET}"', "hunter2"),
    ('sql = "SELECT * FROM records"', 'python = "${env:SECRET}"', "hunter2"),
    ('kind = "postgres"', 'kind = "${env:SECRET}"', "hunter2"),
    ('url = "postgresql://me@db/shop"', 'url = "${env:SECRET}"', "mysql://me:hunter2@db/shop"),
    ('url = "postgresql://me@db/shop"', 'url = "${env:SECRET}"', "postgresql://me:hunter2@[db/shop"),
    ('url = "postgresql://me@db/shop"', 'url = "${env:SECRET}"', "postgresql://me:hunter2@db/shop?x= y"),
    ('url = "postgresql://me@db/shop"', 'url = ["${env:SECRET}"]', "hunter2"),
    ('table = "payments"', 'table = "${env:SECRET}"', "hunter2" * 10),
    ('table = "payments"', 'table = "${env:SECRET}"', "pg_hunter2.x"),
    ('mode = "dedupe"', 'mode = "${env:SECRET}"', "hunter2"),
    ('key = ["id"]', 'key = ["id", "${env:SECRET}"]', "hunter2" * 10),
    ('key = ["id"]', 'key = "${env:SECRET}"', "hunter2"),
    ('lineage_prefix = "_kafka_"', 'lineage_prefix = "${env:SECRET}"', "hunter2" * 10),
    ('interval = "1s"', 'interval = "${env:SECRET}"', "hunter2"),
    ('app.name = "x"', 'speculation = "${env:SECRET}"', "hunter2"),
]

# Secrets in the file itself: taken, or refused for another reason.
IN_FILE = {
    "url": ('url = "postgresql://me@db/shop"', 'url = "postgresql://me:hunter2@db/shop"'),
    "url parameter": ('url = "postgresql://me@db/shop"', 'url = "postgresql://db/shop?password=hunter2"'),
    "bad url": ('url = "postgresql://me@db/shop"', 'url = "mysql://me:hunter2@db/shop"'),
    "half of a url": ('url = "postgresql://me@db/shop"', 'url = "postgresql://me:hunter2@${env:SECRET}/shop"'),
    "kafka password": ('client.id = "x"', 'sasl.password = "hunter2"'),
    "kafka token": ('client.id = "x"', 'sasl.oauthbearer.config = "secret=hunter2"'),
    "kafka: ours": ('client.id = "x"', 'group.id = "hunter2"'),
    "kafka: no string": ('client.id = "x"', 'sasl.password = ["hunter2"]'),
    "spark key": ('app.name = "x"', 'hadoop.fs.s3a.secret.key = "hunter2"'),
    "brokers": ('brokers = "localhost:9092"', 'brokers = "me:hunter2@localhost:9092"'),
    "unknown key": ('mode = "dedupe"', 'mode = "dedupe"\npassword = "hunter2"'),
    "not TOML": ('url = "postgresql://me@db/shop"', 'url = "postgresql://me:hunter2@db/shop'),
    "not TOML either": ('url = "postgresql://me@db/shop"', "url = postgresql://me:hunter2@db/shop"),
}


def file(tmp_path: Path, old: str, new: str) -> Path:
    assert old in GOOD
    path = tmp_path / "p.toml"
    path.write_text(GOOD.replace(old, new))
    return path


def everything_shown(pipeline: PipelineConfig) -> str:
    """All that a program could show of a tree without reaching for a value on purpose."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.emit(logging.LogRecord("avow", 20, "", 0, "%s %r", (pipeline, pipeline), None))
    Console(file=stream, width=80).print(pipeline)
    parts: list[object] = [
        pipeline,
        pipeline.source,
        pipeline.decode,
        pipeline.transform,
        pipeline.sink,
        pipeline.batch,
    ]
    for part in parts:
        assert isinstance(part, Section)
        stream.write(f"{part} {part!r} {part!s} {pretty_repr(part)} {part.model_dump()} {part.model_dump_json()}")
        stream.write(f"{part.model_dump(mode='json')} {part.model_copy()}")
    made = plan(pipeline)
    stream.write(f"{made} {made.as_json()}")
    return stream.getvalue()


def everything_told(error: ConfigError) -> str:
    assert error.__context__ is None
    assert error.__cause__ is None
    return "".join([repr(error), str(error), error.advice, repr(error.args), *traceback.format_exception(error)])


def cli(path: Path, secret: str, *options: str) -> str:
    result = CliRunner().invoke(main, ["plan", str(path), *options], env={"SECRET": secret})
    assert result.exit_code in (0, 2), result.output
    return result.output + repr(result.exception)


@pytest.mark.parametrize(("old", "new", "secret"), GOOD_FROM_ENV)
def test_a_good_value_from_the_environment_is_never_shown(old: str, new: str, secret: str, tmp_path: Path) -> None:
    path = file(tmp_path, old, new)
    pipeline = load_checked(path, {"SECRET": secret})
    assert NEEDLE not in everything_shown(pipeline)
    assert NEEDLE not in cli(path, secret)
    assert NEEDLE not in cli(path, secret, "--json")


def test_what_is_shown_instead_is_what_the_file_says(tmp_path: Path) -> None:
    path = file(tmp_path, 'topics = ["payments"]', 'topics = ["a-${env:SECRET}", "b"]')
    pipeline = load_checked(path, {"SECRET": "hunter2"})
    assert pipeline.source.topics == ("a-hunter2", "b")
    assert "topics=['a-${env:SECRET}', 'b']" in repr(pipeline)
    assert pipeline.model_dump()["source"]["topics"] == ["a-${env:SECRET}", "b"]
    assert json.loads(pipeline.model_dump_json())["source"]["topics"] == ["a-${env:SECRET}", "b"]
    assert "Read topics a-${env:SECRET}, b from Kafka" in plan(pipeline).hops[0].does


@pytest.mark.parametrize(("old", "new", "secret"), BAD_FROM_ENV)
def test_a_bad_value_from_the_environment_is_not_quoted(old: str, new: str, secret: str, tmp_path: Path) -> None:
    path = file(tmp_path, old, new)
    with pytest.raises(ConfigError) as refused:
        load_checked(path, {"SECRET": secret})
    assert NEEDLE not in everything_told(refused.value)
    assert NEEDLE not in cli(path, secret)


def test_a_key_of_the_environment_that_is_no_column_is_not_quoted(tmp_path: Path) -> None:
    path = file(tmp_path, '[transform]\nsql = "SELECT * FROM records"\n', "")
    path.write_text(path.read_text().replace('key = ["id"]', 'key = ["${env:SECRET}"]'))
    env = {"SECRET": "hunter2"}
    with pytest.raises(
        ConfigError, match=r"sink\.key\[0\]: the value of SECRET is not valid; columns of decode"
    ) as refused:
        load(path, env)
    assert NEEDLE not in everything_told(refused.value)


def test_a_column_from_the_environment_that_meets_ours_is_not_quoted(tmp_path: Path) -> None:
    path = file(tmp_path, 'schema = "id long not null, k_id long not null"', 'schema = "${env:SECRET}"')
    path.write_text(path.read_text().replace("_kafka_", "hunter2").replace('"hunter2"', '"${env:PREFIX}"'))
    env = {"SECRET": "hunter2topic long", "PREFIX": "hunter2"}
    with pytest.raises(ConfigError, match=r"decode\.schema: the value of SECRET is not valid; another name") as refused:
        load(path, env)
    assert NEEDLE not in everything_told(refused.value)


@pytest.mark.parametrize("case", IN_FILE)
def test_a_secret_in_the_file_is_not_shown(case: str, tmp_path: Path) -> None:
    path = file(tmp_path, *IN_FILE[case])
    try:
        shown = everything_shown(load_checked(path, {"SECRET": "db"}))
    except ConfigError as error:
        shown = everything_told(error)
    assert NEEDLE not in shown
    assert NEEDLE not in cli(path, "db")
    assert NEEDLE not in cli(path, "db", "--json")


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("url", "sink.url"),
        ("url parameter", "sink.url"),
        ("half of a url", "sink.url"),
        ("kafka password", "source.kafka.sasl.password"),
        ("kafka token", "source.kafka.sasl.oauthbearer.config"),
        ("spark key", "spark.hadoop.fs.s3a.secret.key"),
    ],
)
def test_a_secret_in_the_file_is_warned_of(case: str, key: str, tmp_path: Path) -> None:
    pipeline = load_checked(file(tmp_path, *IN_FILE[case]), {"SECRET": "db"})
    assert pipeline.secrets_in_file == (key,)
    assert any(warning.startswith(f"{key} contains a secret in the file") for warning in plan(pipeline).warnings)


@pytest.mark.parametrize(
    "url",
    [
        "${env:SECRET}",
        "postgresql://me:${env:SECRET}@db/shop",
        "postgresql://${env:SECRET}@db/shop",
        "postgresql://[${env:SECRET}]:5432/shop",
        "postgresql://me@db:5432/shop?user=a:b@c",
        "postgresql:///shop?host=/run/postgresql",
    ],
)
def test_a_url_without_a_secret_of_its_own_is_not_warned_of(url: str, tmp_path: Path) -> None:
    path = file(tmp_path, 'url = "postgresql://me@db/shop"', f'url = "{url}"')
    secret = "postgresql://a:b@c/d" if url == "${env:SECRET}" else "::1"
    assert load(path, {"SECRET": secret}).secrets_in_file == ()


def test_the_secrets_are_there_for_who_needs_them(tmp_path: Path) -> None:
    path = file(tmp_path, 'client.id = "x"', 'sasl.password = "${env:SECRET}"')
    pipeline = load(path, {"SECRET": "hunter2"})
    assert unwrap_secrets(pipeline.source.kafka) == {"sasl.password": "hunter2"}


def test_pydantics_own_error_does_not_echo_its_input() -> None:
    with pytest.raises(ValidationError) as refused:
        PostgresConfig.model_validate(
            {"kind": "postgres", "url": "mysql://me:hunter2@db", "table": 5, "pass": "hunter2"}
        )
    assert NEEDLE not in str(refused.value)
    assert NEEDLE not in repr(refused.value)


def test_only_what_may_be_a_secret_is_struck_out() -> None:
    text = "SASL authentication error: SSL handshake of SASL_SSL failed for hunter2 (after 5000ms)"
    struck = redact(["SASL_SSL", "PLAIN", "hunter2", "me"], text)
    assert struck == text.replace("hunter2", "***")
