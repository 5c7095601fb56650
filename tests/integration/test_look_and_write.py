"""Records with schemas for people: `avow produce`, `avow consume` and `avow topics` with a real registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result

from avow.cli import main
from avow.clients.producer import Producer
from avow.formats.registry.frame import framed
from avow.guarantee import Guarantee
from avow.kafka.admin import Admin
from avow.kafka.metadata import TopicPartition
from avow.local.cluster import Cluster
from avow.plan import load_checked, plan
from avow.schema_registry import RegistrySettings, SchemaRegistry

pytestmark = pytest.mark.cluster

AMOUNT = {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}
FIELDS = [
    {"name": "id", "type": "long"},
    {"name": "amount", "type": AMOUNT},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "raw", "type": ["null", "bytes"], "default": None},
    {"name": "note", "type": ["null", "string", "long"], "default": None},
]
SCHEMA = {"type": "record", "name": "Payment", "namespace": "shop", "fields": FIELDS}
LINE = '{"id": 1, "amount": 123456789012345678.91, "at": "2026-01-31T12:00:00Z", "raw": "AP8=", "note": "a\\u0007b"}'
SHOWN = {"id": 1, "amount": "123456789012345678.91", "at": "2026-01-31T12:00:00Z", "raw": "AP8=", "note": "a\ab"}


class Stage:
    def __init__(self, cluster: Cluster, admin: Admin, url: str, topic: str, folder: Path) -> None:
        self.cluster, self.admin, self.url, self.topic = cluster, admin, url, topic
        self.schema = folder / "payment.avsc"
        self.schema.write_text(json.dumps(SCHEMA))
        self.registry = SchemaRegistry(RegistrySettings(url=url))

    def run(self, *arguments: str | Path, text: str = "", registry: str | None = None) -> Result:
        options = ["--brokers", self.cluster.bootstrap, "--registry", registry or self.url]
        return CliRunner().invoke(main, [*map(str, arguments), *options], input=text)

    def produce(self, *options: str | Path, text: str = LINE) -> Result:
        return self.run("produce", self.topic, *options, text=text)

    def consumed(self, *options: str) -> list[dict[str, Any]]:
        done = self.run("consume", self.topic, "--once", "--group", f"g-{uuid4().hex[:8]}", *options)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    def send(self, *records: tuple[bytes | None, bytes | None]) -> None:
        with Producer(self.cluster.bootstrap, guarantee=Guarantee.AT_LEAST_ONCE) as producer:
            for key, value in records:
                producer.send(self.topic, value, key=key, partition=0)

    @property
    def size(self) -> int:
        tp = TopicPartition(self.topic, 0)
        return self.admin.end_offsets([tp])[tp]


@pytest.fixture
def stage(
    cluster: Cluster, admin: Admin, schema_registry: str, make_topic: Callable[..., str], tmp_path: Path
) -> Stage:
    return Stage(cluster, admin, schema_registry, make_topic(), tmp_path)


def test_lines_become_avro_and_are_shown_again(stage: Stage) -> None:
    missing = stage.produce("--format", "avro", "--schema", stage.schema)
    assert missing.exit_code == 2
    assert f"is not registered under the subject {stage.topic}-value" in missing.stderr
    assert stage.size == 0
    assert stage.produce("--format", "avro", "--schema", stage.schema, "--register").exit_code == 0
    number = stage.registry.latest(f"{stage.topic}-value").id
    for schema in (stage.schema, "registry"):
        assert stage.produce("--format", "avro", "--schema", schema).exit_code == 0
    lines = stage.consumed()
    assert [(line["value"], line["value_schema_id"], line["key"]) for line in lines] == [(SHOWN, number, None)] * 3
    # What was shown can be sent again, and is the same bytes.
    again = "\n".join(json.dumps(line["value"]) for line in lines[:1])
    assert stage.produce("--format", "avro", "--schema", "registry", text=again).exit_code == 0
    checks = {dict(line["headers"])["avow-crc32c"] for line in stage.consumed()}
    assert len(checks) == 1


def test_keys_have_a_schema_of_their_own(stage: Stage, tmp_path: Path) -> None:
    key_schema = tmp_path / "key.avsc"
    key_schema.write_text('"long"')
    both = ("--format", "avro", "--schema", stage.schema, "--register", "--key", "id")
    assert stage.produce(*both, "--key-schema", key_schema).exit_code == 0
    assert stage.produce(*both).exit_code == 0
    first, second = stage.consumed()
    assert (first["key"], first["key_schema_id"]) == (1, stage.registry.latest(f"{stage.topic}-key").id)
    assert second["key"] == "1"
    assert "key_schema_id" not in second
    listed = stage.run("topics", stage.topic)
    assert f"value: subject {stage.topic}-value, version 1, AVRO" in listed.stdout
    assert f"key: subject {stage.topic}-key, version 1, AVRO" in listed.stdout
    (described,) = json.loads(stage.run("topics", stage.topic, "--json").stdout)
    assert described["value_schema"]["subject"] == f"{stage.topic}-value"
    all_of_them = {topic["name"]: topic for topic in json.loads(stage.run("topics", "--json").stdout)}
    assert all_of_them[stage.topic]["key_schema"]["version"] == 1


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"id": 1, "amount": 1.234, "at": 0}', "stdin:2: amount: expected a decimal of 20 digits"),
        ('{"id": 1, "at": 0}', "stdin:2: amount: the field is missing"),
        ('{"id": 1.0, "amount": 1, "at": 0}', "stdin:2: id: expected a long, found 1.0"),
        ('{"id": 1, "amount": 1, "at": 0, "nope": 1}', "record shop.Payment has no field 'nope'"),
        ('{"id": 1, "amount": 1, "at": 0, "raw": "no base64"}', "stdin:2: raw: expected base64"),
        ('{"id": 1e999, "amount": 1, "at": 0}', "stdin:2: the number 1e999 is beyond what a double holds"),
        ('{"id": 1, "id": 1}', 'stdin:2: the field "id" appears twice'),
    ],
)
def test_a_line_that_does_not_fit_is_named_and_nothing_of_it_is_sent(stage: Stage, line: str, wrong: str) -> None:
    text = f"{LINE}\n{line}\n{LINE}"
    done = stage.produce("--format", "avro", "--schema", stage.schema, "--register", text=text)
    assert done.exit_code == 2
    assert wrong in done.stderr.replace("\n", " ")
    assert stage.size == 1
    skipped = stage.produce("--format", "avro", "--schema", "registry", "--skip-bad", text=text)
    assert skipped.exit_code == 0
    assert "1 bad lines skipped" in skipped.stdout
    assert stage.size == 3


def test_a_file_is_encoded_exactly_once(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "payments.jsonl"
    file.write_text("\n".join([LINE] * 50))
    options = ("--format", "avro", "--schema", stage.schema, "--register", "--guarantee", "exactly-once")
    for acknowledged in (50, 0):
        done = stage.run("produce", stage.topic, file, *options, "--json")
        assert json.loads(done.stdout)["acknowledged"] == acknowledged, done.output
    assert [line["value"] for line in stage.consumed()] == [SHOWN] * 50


def test_what_cannot_be_decoded_is_shown_as_it_is_with_the_reason(stage: Stage) -> None:
    stage.produce("--format", "avro", "--schema", stage.schema, "--register")
    number = stage.registry.latest(f"{stage.topic}-value").id
    unknown = 2**31 - 5
    stage.send(
        (b"plain", b'{"id": 1}'),
        (b"\0\0", None),
        (framed(unknown, b"x"), framed(number, b"\x02")),
        (None, framed(number, b"")),
        (None, b""),
    )
    plain, null, bad, short, empty = stage.consumed()[1:]
    assert (plain["key"], plain["value"]) == ("plain", '{"id": 1}')
    assert (null["key"], null["value"]) == ("\0\0", None)
    assert bad["key_schema_id"] == unknown
    assert bad["key_error"].startswith("unknown-schema-id: the schema registry at")
    assert bad["value_schema_id"] == number
    assert bad["value_error"] == "not-avro: amount: it ends where a number is due"
    assert bad["value"].encode() == framed(number, b"\x02")
    assert short["value_error"] == "not-avro: id: it ends where a number is due"
    assert empty["value"] == ""
    assert not any("error" in name for line in (plain, null, empty) for name in line)


PROTO = """\
syntax = "proto3"; package shop;
import "google/protobuf/timestamp.proto";
message Payment {
  int64 id = 1; google.protobuf.Timestamp at = 2; bytes raw = 3; double amount = 4; repeated Note notes = 5;
}
message Note { string text = 1; }
"""


def test_lines_become_protobuf_and_are_shown_again(stage: Stage, tmp_path: Path) -> None:
    schema = tmp_path / "payment.proto"
    schema.write_text(PROTO)
    line = {"id": "7", "at": "2026-01-31T12:00:00Z", "raw": "AP8=", "amount": 2.5, "notes": [{"text": "é"}]}
    both = ("--format", "protobuf", "--schema", schema, "--register")
    which = stage.produce(*both, text=json.dumps(line))
    assert which.exit_code == 2
    assert "message is not set, and there are 2: shop.Payment, shop.Note" in which.stderr
    for message, document in (("shop.Payment", line), ("shop.Note", {"text": "x"})):
        done = stage.produce(*both, "--message", message, text=json.dumps(document))
        assert done.exit_code == 0, done.output
    bad = stage.produce(*both, "--message", "shop.Note", text='{"nope": 1}')
    assert (bad.exit_code, stage.size) == (2, 2)
    assert 'stdin:1: Message type "shop.Note" has no field named "nope"' in bad.stderr
    unknown = stage.produce(*both, "--message", "shop.Nope", text="{}")
    assert unknown.exit_code == 2
    assert "shop.Nope" in unknown.stderr
    number = stage.registry.latest(f"{stage.topic}-value").id
    stage.send(
        (None, framed(number, b"\0\x0a\x01x")),  # a text where the schema has a number
        (None, framed(number, b"\x02\x08\x08\x01")),  # a message that is not there
        (None, framed(number, b"\0\x08")),
    )
    lines = stage.consumed()
    assert [one.get("value") for one in lines[:2]] == [line, {"text": "x"}]
    reasons = [one["value_error"].partition(":")[0] for one in lines[2:]]
    assert reasons == ["wrong-type", "bad-frame", "not-protobuf"]


JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Payment",
    "type": "object",
    "properties": {"id": {"type": "integer"}, "amount": {"type": "number", "minimum": 0}},
    "required": ["id"],
    "additionalProperties": False,
}


def test_lines_become_json_of_a_schema_and_are_shown_again(stage: Stage, tmp_path: Path) -> None:
    schema = tmp_path / "payment.json"
    schema.write_text(json.dumps(JSON_SCHEMA))
    both = ("--format", "json-schema", "--schema", schema, "--register")
    lines = ['{"id": 9007199254740993, "amount": 0.10}', '{"id": 1, "amount": 12345678901234567.89}']
    done = stage.produce(*both, text="\n".join(lines))
    assert done.exit_code == 0, done.output
    for line, wrong in (('{"id": 1, "amount": -1}', "amount: "), ('{"amount": 1}', "id"), ('{"id": 1, "x": 1}', "x")):
        bad = stage.produce(*both, text=line)
        assert bad.exit_code == 2
        assert "stdin:1: " in bad.stderr
        assert wrong in bad.stderr.partition("stdin:1: ")[2].partition("what to do")[0]
    number = stage.registry.latest(f"{stage.topic}-value").id
    stage.send((None, framed(number, b'{"id": "x"}')), (None, framed(number, b'{"id": 1')))
    first, second, violation, truncated = stage.consumed()
    assert first["value"] == {"id": 9007199254740993, "amount": 0.1}
    assert second["value"] == {"id": 1, "amount": "12345678901234567.89"}
    assert violation["value_error"].startswith("schema-violation: id: ")
    assert truncated["value_error"].startswith("not-json: ")


def test_a_registry_that_does_not_answer_is_an_error_and_no_record_is_passed_over(stage: Stage) -> None:
    stage.produce("--format", "avro", "--schema", stage.schema, "--register")
    group = f"g-{uuid4().hex[:8]}"
    options = ("consume", stage.topic, "--once", "--group", group, "--on-failure", "dead-letter")
    away = stage.run(*options, registry="http://127.0.0.1:1")
    assert away.exit_code == 4
    assert "the schema registry at http://127.0.0.1:1 cannot be asked" in away.stderr
    assert away.stdout == ""
    assert [json.loads(line)["value"] for line in stage.run(*options).stdout.splitlines()] == [SHOWN]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("--schema", "registry"), "--schema is given without --format"),
        (("--format", "avro"), "--schema is missing"),
        (("--format", "json", "--schema", "registry"), "format json has no schemas in a registry"),
        (("--format", "nope", "--schema", "registry"), "format nope is not known"),
        (("--format", "avro", "--schema", "/no/such"), "--schema /no/such cannot be read"),
        (("--format", "avro", "--schema", "registry"), "has no subject"),
        (("--format", "avro", "--schema", "registry", "--key-schema", "registry"), "--key-schema is given without"),
        (("--format", "avro", "--schema", "registry", "--registry-setting", "nope=1"), "is not a known key"),
        (("--format", "avro", "--schema", "registry", "--registry-setting", "password=x"), "is set without user"),
        (
            ("--format", "avro", "--schema", "registry", "--registry-setting", "token=${env:NO_SUCH_TOKEN}"),
            "the environment variable NO_SUCH_TOKEN is not set",
        ),
    ],
)
def test_wrong_options_are_one_clear_sentence(stage: Stage, arguments: tuple[str, ...], wrong: str) -> None:
    done = stage.produce(*arguments)
    assert done.exit_code == 2, done.output
    assert wrong in done.stderr
    assert "Traceback" not in done.output
    assert stage.size == 0


def test_a_reader_that_has_enough_ends_it_quietly(stage: Stage) -> None:
    stage.send(*[(None, b"x" * 60_000)] * 20)
    command = [sys.executable, "-m", "avow", "consume", stage.topic, "--once", "--brokers", stage.cluster.bootstrap]
    with subprocess.Popen(
        [*command, "--group", f"g-{uuid4().hex[:8]}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read().decode()
        assert child.wait(60) == 19
    assert "the handler failed" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("topic", ["payments", "orders"])
def test_the_examples_with_a_registry_are_accepted(schema_registry: str, tmp_path: Path, topic: str) -> None:
    """examples/avro.toml, and the first one of the page about Kafka Connect."""
    registry = SchemaRegistry(RegistrySettings(url=schema_registry))
    registry.register(f"{topic}-value", "AVRO", json.dumps(SCHEMA))
    registry.register(f"{topic}-key", "AVRO", json.dumps({**SCHEMA, "name": "Key", "fields": FIELDS[:1]}))
    root = Path(__file__).parents[2]
    file = root / "examples" / "avro.toml"
    if topic == "orders":
        file = tmp_path / "orders.toml"
        page = (root / "docs" / "KAFKA-CONNECT.md").read_text(encoding="utf-8")
        file.write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    env = {"DATABASE_URL": "postgresql://somewhere/else", "REGISTRY_URL": schema_registry}
    text = plan(load_checked(file, env)).text(400)
    assert f"The columns are those of subject {topic}-value, version 1 (id " in text
    assert "amount decimal(20,2) not null" in text
