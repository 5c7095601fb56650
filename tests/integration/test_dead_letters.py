"""``avow dead-letters``: what is kept can be found, shown safely, and brought in after all, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from tests import into_lake, into_postgres
from tests.fix_pipeline import Scenario, payment, session_spark

from avow.cli import main
from avow.engines import redrive as redriving
from avow.engines.redrive import Redriven, redrive
from avow.kafka import metadata
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.sinks.base import Selection
from avow.sinks.postgres.task import PostgresTask

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("spark-postgres")]

Make = Callable[..., Scenario]
OLD = 'format = "json"\nschema = "id long not null, account string not null, amount double"'
ALL = Selection()
NEW = OLD.replace("amount double", "amount double, note string")


def avow(s: Scenario, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["dead-letters", *arguments], env={"DATABASE_URL": s.url, "COLUMNS": "200"})


def totals(s: Scenario) -> tuple[object, ...]:
    return s.rows("SELECT read, written, dead, skipped FROM avow.ledger WHERE pipeline = %s", s.name)[0]


@pytest.fixture
def buried(scenario: Make) -> tuple[Scenario, Path]:
    """Ten good records, five with a field the schema does not have, one that is nonsense, in one partition."""
    s = scenario(partitions=1)
    old = [json.dumps({"id": n, "account": "a", "amount": 1.5}).encode() for n in range(10)]
    s.produce([*old, *(payment(n) for n in range(10, 15)), b"\x1b[31mred \xe2\x80\xae nonsense"])
    path = s.file(decode=OLD)
    s.drain(path)
    assert totals(s) == (16, 10, 6, 0)
    return s, path


def drive(s: Scenario, path: Path, selection: Selection = ALL) -> Redriven:
    pipeline = s.load(path)
    return redrive(pipeline, selection, lambda: session_spark(pipeline))


def test_list_and_show(buried: tuple[Scenario, Path]) -> None:
    s, path = buried
    shown = avow(s, "list", str(path))
    assert shown.exit_code == 0, shown.output
    assert "unknown-field" in shown.output
    assert "not-json" in shown.output
    assert "\x1b[31m" not in shown.output, "somebody's colour code is shown, not obeyed"
    assert "\\x1b[31mred \\u202e nonsense" in shown.output
    found = json.loads(avow(s, "list", str(path), "--json", "--reason", "unknown-field", "--from-offset", "12").stdout)
    assert [letter["offset"] for letter in found["letters"]] == [12, 13, 14]
    assert found["by_reason"][0]["count"] == 3
    assert avow(s, "list", str(path), "--until", "2020-01-01").output == "no dead letters\n"
    for text in ("$1", "$2", "$3", "' OR true --", "$1 OR reason <> $2"):
        for option in ("--reason", "--topic"):
            none = avow(s, "list", str(path), option, text)
            assert none.output == "no dead letters\n", f"what was typed is a text: {option} {text}"
    one = avow(s, "show", str(path), s.topic, "0", "12")
    assert one.exit_code == 0, one.output
    assert '"id": 12' in one.output
    assert payment(12)[:16].hex(" ") in one.output
    missing = avow(s, "show", str(path), s.topic, "0", "3")
    assert missing.exit_code == 2


def test_headers_are_kept(scenario: Make) -> None:
    s = scenario(partitions=1)
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    headers: list[tuple[str, str | bytes | None]] = [
        ("a", b"\x00\xff"),
        ("a", b"twice"),
        ("none", None),
        ("é<script>", b""),
    ]
    producer.produce(s.topic, b"bad", key=b"k", headers=headers)
    assert producer.flush(30) == 0
    s.drain(s.file())
    shown = json.loads(avow(s, "show", str(s.file()), s.topic, "0", "0", "--json").stdout)
    assert shown["headers"] == [["a", "00ff"], ["a", b"twice".hex()], ["none", None], ["é<script>", ""]]
    assert bytes.fromhex(shown["key"]) == b"k"


def test_redrive_after_a_schema_change_and_again(buried: tuple[Scenario, Path]) -> None:
    s, _ = buried
    s.execute(f'ALTER TABLE "{s.table}" ADD COLUMN note text')
    path = s.file(decode=NEW)
    assert json.loads(avow(s, "redrive", str(path), "--dry-run", "--json").stdout) == {"meant": 6}
    assert drive(s, path) == Redriven(written=5, still_dead=1)
    assert s.ids() == dict.fromkeys(range(15), 1)
    assert totals(s) == (16, 15, 1, 0)
    offsets = s.rows(f'SELECT id, _kafka_offset FROM "{s.table}" WHERE id >= 10 ORDER BY 1')
    assert offsets == [(n, n) for n in range(10, 15)], "under their own identity"
    assert drive(s, path) == Redriven(still_dead=1), "a second time there is nothing left to do"
    assert s.ids() == dict.fromkeys(range(15), 1)
    assert totals(s) == (16, 15, 1, 0)
    s.produce([payment(15)])
    s.drain(path)
    assert s.ids() == dict.fromkeys(range(16), 1), "the pipeline goes on where it was"


def test_an_interrupted_redrive_changes_nothing(buried: tuple[Scenario, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    s, _ = buried
    s.execute(f'ALTER TABLE "{s.table}" ADD COLUMN note text')
    path = s.file(decode=NEW)
    real = PostgresTask.remove_dead_letters

    def interrupted(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(PostgresTask, "remove_dead_letters", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(s, path)
    assert s.ids() == dict.fromkeys(range(10), 1)
    assert totals(s) == (16, 10, 6, 0)
    monkeypatch.undo()
    assert drive(s, path, Selection(from_offset=12)) == Redriven(written=3, still_dead=1)
    assert drive(s, path) == Redriven(written=2, still_dead=1)
    assert s.ids() == dict.fromkeys(range(15), 1)


def test_redrive_through_sql_and_upsert_keeps_newer_rows(scenario: Make) -> None:
    s = scenario(partitions=1)
    sink = f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{s.table}"\nmode = "upsert"\nkey = ["id"]'
    transform = 'sql = "SELECT *, upper(account) AS loud FROM records WHERE id <> 3"'
    bad = [json.dumps({"id": n, "account": "late", "note": "x"}).encode() for n in (1, 2, 3)]
    s.produce([*bad, json.dumps({"id": 1, "account": "newer"}).encode()])
    s.drain(s.file(decode=OLD, sink=sink, transform=transform))
    assert totals(s) == (4, 1, 3, 0)
    path = s.file(decode=NEW, sink=sink, transform=transform)
    s.execute(f'ALTER TABLE "{s.table}" ADD COLUMN note text')
    assert drive(s, path) == Redriven(written=2, skipped=1)
    assert dict(s.rows(f'SELECT id, loud FROM "{s.table}"')) == {1: "NEWER", 2: "LATE"}
    assert totals(s) == (4, 3, 0, 1)


def test_a_redrive_leaves_what_the_query_fails_on(scenario: Make) -> None:
    s = scenario(partitions=1)
    sql = 'sql = "SELECT *, 100 DIV (id - 2) AS share FROM records"'
    s.produce(json.dumps({"id": n, "account": "a", "note": "x"}).encode() for n in range(5))
    s.drain(s.file(decode=OLD, transform=sql))
    assert totals(s) == (5, 0, 5, 0)
    path = s.file(decode=f'{OLD}\nunknown_fields = "ignore"', transform=sql)
    assert drive(s, path) == Redriven(written=4, still_dead=1)
    assert drive(s, path) == Redriven(still_dead=1), "and alone, too"
    assert s.ids() == dict.fromkeys([0, 1, 3, 4], 1)
    assert totals(s) == (5, 4, 1, 0)


@pytest.mark.parametrize("kind", ["postgres", "delta", "iceberg"])
def test_redrive_does_not_bring_back_what_was_deleted_later(scenario: Make, kind: str) -> None:
    """A null value after the dead letter deletes its key; one before it does not, and a later row stays."""
    s = scenario(partitions=1)
    lines = ('mode = "upsert"', 'key = ["id"]')
    sink = into_postgres.sink(s, *lines) if kind == "postgres" else into_lake.sink(s, kind, *lines)

    def value(number: int, **more: str) -> bytes:
        return json.dumps({"id": number, "account": "a", **more}).encode()

    dead = {n: value(n, note="not declared") for n in range(1, 5)}
    s.produce([dead[1], None, dead[2], dead[3], value(3, account="later")], keys=[b"1", b"1", b"2", b"3", b"3"])
    s.produce([value(4), None, dead[4]], keys=[b"4", b"4", b"4"])
    s.drain(s.file(sink=sink, decode=OLD), "consumer")
    path = s.file(sink=sink, decode=f'{OLD}\nunknown_fields = "ignore"')
    assert drive(s, path) == Redriven(written=3, skipped=1)
    rows = (
        s.rows(f'SELECT id, account FROM "{s.table}"')
        if kind == "postgres"
        else into_lake.frame(s, kind).select("id", "account").rows()
    )
    assert dict(rows) == {2: "a", 3: "later", 4: "a"}


def test_a_run_can_claim_while_a_redrive_reads_the_topic(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For later null values, which can take minutes: the partition's entry is not locked meanwhile."""
    s = scenario(partitions=1)
    sink = into_postgres.sink(s, 'mode = "upsert"', 'key = ["id"]')
    s.produce([payment(1), None], keys=[b"1", b"1"])
    s.drain(s.file(sink=sink, decode=OLD), "consumer")
    read = []

    class Watched(Reader):
        def read(self, wanted: OffsetRange) -> Generator[pa.RecordBatch]:
            s.execute(f"SELECT 1 FROM avow.ledger WHERE pipeline = '{s.name}' FOR UPDATE NOWAIT")
            read.append(wanted)
            return super().read(wanted)

    monkeypatch.setattr(redriving, "Reader", Watched)
    assert drive(s, s.file(sink=sink, decode=f'{OLD}\nunknown_fields = "ignore"')) == Redriven(skipped=1)
    assert read == [OffsetRange(s.topic, 0, 1, 2)]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_record_of_several_rows_goes_in_whole_or_not_at_all(scenario: Make, mode: str) -> None:
    """Else a redrive would bring the rows a second time that had gone in beside the one that was refused."""
    s = scenario(partitions=1)
    key = 'mode = "upsert"\nkey = ["id", "i"]' if mode == "upsert" else ""
    query = (
        "SELECT id, i, IF(id = 1 AND i = 2, 'too long', 'fits') AS word, _kafka_topic, _kafka_partition, _kafka_offset,"
        " _kafka_timestamp FROM records LATERAL VIEW explode(sequence(1, 3)) AS i"
    )
    path = s.file(
        sink=f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{s.table}"\n{key}',
        transform=f'sql = "{query}"',
    )
    s.produce([payment(0)])
    s.drain(path)  # makes the table
    s.execute(f'ALTER TABLE "{s.table}" ALTER COLUMN word TYPE varchar(4)')
    s.produce([payment(n) for n in range(1, 4)])
    s.drain(path)
    rows = f'SELECT id, i FROM "{s.table}" ORDER BY 1, 2'
    assert s.rows(rows) == [(n, i) for n in (0, 2, 3) for i in (1, 2, 3)]
    s.execute(f'ALTER TABLE "{s.table}" ALTER COLUMN word TYPE text')
    assert drive(s, path) == Redriven(written=1)
    assert s.rows(rows) == [(n, i) for n in range(4) for i in (1, 2, 3)]
