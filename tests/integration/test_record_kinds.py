"""Every kind of record that a producer can make, through every sink: each ends written exactly, or dead by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from tests import into_kafka, into_lake, into_postgres
from tests.fix_pipeline import Scenario, session_spark
from tests.kafka_stage import read

from avow import sinks
from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.cli import main
from avow.formats.envelope import LAST_MS
from avow.kafka.browse import Browser
from avow.kafka.headers import NOT_UTF8
from avow.prove import raw_producer
from avow.prove.raw_producer import RawRecord
from avow.sinks.base import DeadLetter, Selection

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]
SCHEMA = "id long not null, text string, amount decimal(12,2), nested array<struct<d: decimal(12,2), f: float>>"
# Topics that take records of any time and large ones, and keep them.
ANY = {"message_timestamp_after_max_ms": str(2**63 - 1), "retention_ms": "-1", "max_message_bytes": "4000000"}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONTROLS = "".join(map(chr, [*range(1, 32), 127, *range(128, 160), 0x2028, 0xFEFF, 0xFFFE, 0x1F600]))


@dataclass(frozen=True)
class Kind:
    record: RawRecord
    reason: str = ""  # of its dead letter; empty: it is written
    only: str = ""  # the sink that refuses it


def kinds() -> list[Kind]:
    """The number of a record is its id."""
    made: list[Kind] = []

    def add(reason: str = "", only: str = "", *, value: bytes | None = b"-", **record: Any) -> None:
        good = json.dumps({"id": len(made)}).encode()
        made.append(Kind(RawRecord(good if value == b"-" else value, **record), reason, only))

    def field(reason: str = "", only: str = "", **fields: str) -> None:
        parts = ",".join(f'"{name}":{text}' for name, text in {"id": str(len(made)), **fields}.items())
        add(reason, only, value=f"{{{parts}}}".encode())

    for stamp in (-1, 1, 2**31, LAST_MS):
        add(timestamp_ms=stamp)
    for stamp in (LAST_MS + 1, 2**53, 1_700_000_000_000_000_000, 2**63 - 1):
        add("timestamp-out-of-range", timestamp_ms=stamp)
    for name in (b"", b" ", "é\U0001f600".encode(), b"n" * 5_000, *(bytes([n]) for n in range(1, 32)), b"\x7f"):
        add(headers=((name, b"v"), (name, None), (name, b"")))
    for name in (b"\xff", b"ok\xc3", b"\xed\xa0\x80", b"\xc0\x80"):
        add("header-not-utf8", headers=((b"a", b"1"), (name, b"\x00\xff"), (b"b", None), (name, None)))
    add(headers=((b"v", bytes(range(256))), (b"avow-origin", b"x/0/0")))
    add("corrupted", headers=((b"avow-crc32c", b"00000000"),))
    for key in (b"", b"\x00\xff", CONTROLS.encode(), b"k" * 900_000):
        add(key=key)
    field(text=json.dumps(CONTROLS))
    field(text=json.dumps(CONTROLS, ensure_ascii=False))
    add("not-json", value=json.dumps({"id": 0, "text": "\x01"}).replace("\\u0001", "\x01").encode())
    field("nul", "postgres", text='"a\\u0000b"')
    for number in ("1e-10000000", '"1e-10000000"', "1e-41", "1e10000000"):
        field("out-of-range", amount=number)
        field("out-of-range", nested=f'[{{"d":{number}}}]')
    field(nested='[{"d":1.5,"f":0.1},{"d":"2e0","f":-1.5}]')
    add("empty", value=b"")
    add("tombstone", "postgres delta iceberg", value=None, key=b"gone")
    add("not-utf8", value=b'{"id":"\xff"}')
    return made


def written(s: Scenario, kind: str) -> dict[int, dict[str, Any]]:
    """By offset: text and timestamp."""
    if kind == "postgres":
        rows = s.rows(f'SELECT _kafka_offset, text, _kafka_timestamp, id FROM "{s.table}"')
    else:
        columns = ("_kafka_offset", "text", "_kafka_timestamp", "id")
        rows = into_lake.frame(s, kind).select(columns).rows()
    assert len({row[0] for row in rows}) == len(rows), "no offset twice"
    return {offset: {"text": text, "ms": (at - EPOCH) // timedelta(milliseconds=1)} for offset, text, at, _ in rows}


def check_dead(found: dict[int, DeadLetter], made: list[Kind], kind: str) -> None:
    for offset, letter in found.items():
        record = made[offset].record
        assert (letter.timestamp_ms, letter.key, letter.value) == (record.timestamp_ms, record.key, record.value)
        names = [(NOT_UTF8 if _text(name) is None else _text(name), value) for name, value in record.headers]
        assert letter.headers == names, (kind, offset)


def _text(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "consumer") for kind in ("postgres", "kafka", "delta", "iceberg")), ("postgres", "spark")],
)
def test_every_kind_of_record(scenario: Make, make_topic: Callable[..., str], kind: str, engine: str) -> None:
    s = scenario(partitions=1, **ANY)
    made = kinds()
    raw_producer.produce(s.cluster.bootstrap, s.topic, [one.record for one in made])
    target = make_topic(1, **ANY)
    lines = {"postgres": into_postgres.sink(s), "kafka": into_kafka.sink(target)}
    path = s.file(
        sink=lines.get(kind) or into_lake.sink(s, kind),
        decode=f'format = "json"\nschema = "{SCHEMA}"',
        dead_letters="max_share = 1.0",
    )
    s.drain(path, engine)
    s.drain(path, engine)  # the last record's fingerprint is found again
    with sinks.dead_letters(s.load(path, engine)) as dead:
        found = {letter.offset: letter for letter in dead.select(Selection(), 1_000)}
    check_dead(found, made, kind)
    due = {n: one.reason for n, one in enumerate(made) if one.reason and (not one.only or kind in one.only.split())}
    reasons = {offset: letter.reason for offset, letter in found.items()}
    assert reasons == due
    if kind == "kafka":
        # One of the records has such a header already: ours is the last.
        there = {int((one.headers[-1][1] or b"").split(b"/")[2]): one for one in read(s.cluster.bootstrap, target)}
        assert sorted(there) == [n for n in range(len(made)) if n not in reasons]
        for offset, one in there.items():
            record = made[offset].record
            assert (one.key, one.value) == (record.key, record.value)
            assert one.headers[:-1] == [(name.decode(), value) for name, value in record.headers]
            assert one.timestamp_ms == record.timestamp_ms or record.timestamp_ms == -1
        return
    rows = written(s, kind)
    assert sorted(rows) == [n for n in range(len(made)) if n not in reasons]
    for offset, row in rows.items():
        record = made[offset].record
        assert row == {"text": json.loads(record.value or b"{}").get("text"), "ms": record.timestamp_ms}
    far = next(n for n, one in enumerate(made) if one.record.timestamp_ms == 2**63 - 1)
    asked = ["dead-letters", "show", str(path), s.topic, "0", str(far)]
    shown = CliRunner().invoke(main, asked, env={"DATABASE_URL": s.url, "COLUMNS": "200"})
    assert f"timestamp {2**63 - 1} ms" in shown.output
    if engine == "spark":
        pipeline = s.load(path, engine)
        report = audit(pipeline, lambda: session_spark(pipeline))
        assert report.verdict is Verdict.HELD, report


def test_they_can_be_looked_at(scenario: Make) -> None:
    s = scenario(partitions=1, **ANY)
    records = [RawRecord(b"v", b"k", ((b"\xff", b"1"), (b"a", None)), 2**63 - 1), RawRecord(b"w", None, (), -1)]
    raw_producer.produce(s.cluster.bootstrap, s.topic, records)
    with Browser(s.load(s.file()).source) as browser:
        seen = sorted(browser.forwards(s.topic, {0: 0}, 10).seen, key=lambda one: one.offset)
    assert [(one.timestamp_ms, one.headers) for one in seen] == [(2**63 - 1, ((NOT_UTF8, b"1"), ("a", None))), (-1, ())]
