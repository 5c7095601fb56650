"""Pipelines from a real topic through real Spark into a real PostgreSQL: modes, transforms, bad records, stops."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic
from tests.fix_cluster import positions_of
from tests.fix_pipeline import SCHEMA, Scenario, payment, session_spark
from tests.into_postgres import dead, sink, totals

from avow import sinks
from avow.engines.columns import sink_columns
from avow.engines.driver import RunDriver
from avow.engines.progress import SILENT
from avow.engines.spark import work_frame
from avow.engines.task import BatchWork
from avow.errors import (
    ConfigError,
    LogTruncated,
    RetentionLoss,
    SinkError,
    SourceError,
    TooManyDeadLetters,
    TopicRecreated,
)
from avow.kafka import metadata
from avow.ledger import OffsetRange
from avow.local import spark
from avow.plan import load_checked
from avow.sinks.postgres.driver import MIGRATIONS

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("spark-postgres")]

Make = Callable[..., Scenario]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_append(scenario: Make, guarantee: str) -> None:
    s = scenario(partitions=3)
    values = [payment(n) for n in range(5_000)]
    values[10] = b'{"id": "ten", "account": "a"}'
    values[11] = b""
    s.produce(values)
    path = s.file(guarantee, decode=f'format = "json"\nschema = "{SCHEMA}"\n')
    s.drain(path, "spark")
    assert s.ids() == dict.fromkeys([n for n in range(5_000) if n not in (10, 11)], 1)
    assert dead(s) == [(1, 3, "wrong-type"), (2, 3, "empty")]
    assert totals(s) == (5_000, 4_998, 2, 0)
    row = s.rows(f'SELECT * FROM "{s.table}" WHERE id = 7')[0]
    assert row[:4] == (7, "acc-7", 1.75, "x" * 20)
    assert row[4:7] == (s.topic, 1, 2)
    # A second run has nothing to do, and more records go on where it ended.
    s.drain(path, "spark")
    s.produce([payment(n) for n in range(5_000, 5_100)])
    s.drain(path, "spark")
    assert s.ids() == dict.fromkeys([n for n in range(5_100) if n not in (10, 11)], 1)


def test_small_ranges_share_a_transaction_and_large_records_do_not(scenario: Make) -> None:
    s = scenario(partitions=5)
    s.produce([payment(n) for n in range(1_000)])
    path = s.file(decode=f'format = "json"\nschema = "{SCHEMA}"\n')
    s.drain(path, "spark")
    assert s.ids() == dict.fromkeys(range(1_000), 1)
    assert s.rows(f'SELECT count(DISTINCT xmin::text) FROM "{s.table}"') == [(1,)]
    # As few offsets, and more than is kept in memory of all of them together.
    note = "x" * 900_000
    large = [b'{"id": %d, "account": "a", "amount": 1, "note": "%s"}' % (n, note.encode()) for n in range(1_000, 1_040)]
    s.produce(large)
    s.drain(path, "spark")
    assert s.ids() == dict.fromkeys(range(1_040), 1)
    assert s.rows(f'SELECT count(DISTINCT xmin::text) > 1 FROM "{s.table}" WHERE id >= 1000') == [(True,)]


def test_the_group_is_told_the_positions(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(100))
    s.drain(s.file(), "spark")
    assert positions_of(s.cluster, s.name) == {0: 50, 1: 50}


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_dedupe_first_wins(scenario: Make, guarantee: str) -> None:
    s = scenario(partitions=1)
    records = [json.dumps({"id": n % 50, "account": f"try-{n // 50}"}).encode() for n in range(200)]
    s.produce(records)
    path = s.file(guarantee, sink=sink(s, 'mode = "dedupe"', 'key = ["id"]'), batch="max_records = 70")
    s.drain(path)
    assert s.rows(f'SELECT count(*), count(DISTINCT id), min(account), max(account) FROM "{s.table}"') == [
        (50, 50, "try-0", "try-0")
    ]
    assert totals(s) == (200, 50, 0, 150)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_upsert_last_wins_and_a_null_value_deletes(scenario: Make, guarantee: str) -> None:
    s = scenario(partitions=1)
    values: list[bytes | None] = [json.dumps({"id": n % 50, "account": f"try-{n // 50}"}).encode() for n in range(200)]
    keys = [str(n % 50).encode() for n in range(200)]
    values += [None, None, json.dumps({"id": 8, "account": "back"}).encode()]
    keys += [b"7", b"8", b"8"]
    s.produce(values, keys=keys)
    path = s.file(guarantee, sink=sink(s, 'mode = "upsert"', 'key = ["id"]'), batch="max_records = 70")
    s.drain(path)
    found = dict(s.rows(f'SELECT id, account FROM "{s.table}"'))
    assert found == {n: "try-3" for n in range(50) if n != 7} | {8: "back"}
    assert totals(s) == (203, 203, 0, 0)


def test_upsert_replayed_changes_nothing(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce([json.dumps({"id": n % 5, "account": f"v{n}"}).encode() for n in range(50)])
    path = s.file("at-least-once", sink=sink(s, 'mode = "upsert"', 'key = ["id"]'))
    s.drain(path)
    before = s.rows(f'SELECT *, xmin::text FROM "{s.table}" ORDER BY id')
    # As if the last claim had never been made: the records come again.
    s.rows("UPDATE avow.ledger SET position = 20 WHERE pipeline = %s RETURNING 1", s.name)
    s.rows("DELETE FROM avow.claims WHERE pipeline = %s RETURNING 1", s.name)
    s.drain(path)
    assert s.rows(f'SELECT *, xmin::text FROM "{s.table}" ORDER BY id') == before, "not one row was touched"


def test_rows_that_only_postgres_refuses_become_dead_letters(scenario: Make) -> None:
    s = scenario(partitions=1)
    with psycopg.connect(s.url, autocommit=True) as connection:
        connection.execute(
            f'CREATE TABLE "{s.table}" (id bigint CHECK (id <> 13), account varchar(6), amount float8, note text,'
            " _kafka_topic text, _kafka_partition int, _kafka_offset bigint UNIQUE, _kafka_timestamp timestamptz)"
        )
    values = [payment(n) for n in range(100)]
    values[20] = json.dumps({"id": 20, "account": "much too long"}).encode()
    s.produce(values)
    s.drain(s.file())
    assert s.ids() == dict.fromkeys([n for n in range(100) if n not in (13, 20)], 1)
    assert dead(s) == [(0, 13, "refused-by-sink-23514"), (0, 20, "refused-by-sink-22001")]
    detail = s.rows('SELECT value, detail FROM avow.dead_letters WHERE pipeline = %s AND "offset" = 20', s.name)[0]
    assert bytes(detail[0]) == values[20]
    assert "value too long" in detail[1]
    assert "22001" in detail[1]


def test_upsert_rows_that_the_table_refuses_become_dead_letters(scenario: Make) -> None:
    s = scenario(partitions=1)
    with psycopg.connect(s.url, autocommit=True) as connection:
        connection.execute(
            f'CREATE TABLE "{s.table}" (id bigint PRIMARY KEY CHECK (id <> 13), account text, amount float8, note text,'
            " _kafka_topic text, _kafka_partition int, _kafka_offset bigint, _kafka_timestamp timestamptz)"
        )
    s.produce(payment(n) for n in range(100))
    s.drain(s.file(sink=sink(s, 'mode = "upsert"', 'key = ["id"]')))
    assert s.ids() == dict.fromkeys([n for n in range(100) if n != 13], 1)
    assert dead(s) == [(0, 13, "refused-by-sink-23514")]
    assert totals(s) == (100, 99, 1, 0)


def test_every_type_arrives_as_it_was_sent(scenario: Make) -> None:
    s = scenario(partitions=1)
    schema = (
        "b boolean, i8 byte, i16 short, i32 int, i64 long, f32 float, f64 double, d decimal(20,4), s string, "
        "bin binary, day date, at timestamp, wall timestamp_ntz, tags array<string>, m map<string,long>, "
        "o struct<x: int, y: array<double>>"
    )
    sent = {
        "b": True, "i8": -128, "i16": 32767, "i32": -(2**31), "i64": 2**63 - 1, "f32": 0.5, "f64": 1e-300,
        "d": 1234567890123456.789, "s": "tab\t \\N \\. \u00e9 \U0001f600", "bin": "AAEC", "day": "0001-01-01",
        "at": "9999-12-31T23:59:59.999999Z", "wall": "2026-11-15T10:00:00", "tags": ["a", None], "m": {"k": 1},
        "o": {"x": 1, "y": [0.25]},
    }  # fmt: skip
    text = json.dumps(sent).replace("1234567890123456.8", "1234567890123456.7891")
    s.produce([text.encode(), b"{}"])
    s.drain(s.file(decode=f'format = "json"\nschema = "{schema}"'))
    assert dead(s) == []
    row = s.rows(
        f"SELECT b, i8, i16, i32, i64, f32, f64, d::text, s, bin, day::text, at::text, wall::text, tags, m, o"
        f' FROM "{s.table}" ORDER BY _kafka_offset LIMIT 1'
    )[0]
    assert row[:7] == (True, -128, 32767, -(2**31), 2**63 - 1, 0.5, 1e-300)
    assert row[7] == "1234567890123456.7891"
    assert row[8] == sent["s"]
    assert bytes(row[9]) == b"\x00\x01\x02"
    assert row[10:13] == ("0001-01-01", "9999-12-31 23:59:59.999999+00", "2026-11-15 10:00:00")
    assert row[13:] == (["a", None], {"k": 1}, {"x": 1, "y": [0.25]})


def test_hostile_names_are_quoted(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.table = 'select "x"; DROP TABLE y; --'
    schema = '`order id` long not null, `a"b` string, `select` string, `$1` string'
    s.produce([json.dumps({"order id": 1, 'a"b': "q", "select": "s", "$1": "d"}).encode()])
    path = s.file(
        decode=f"format = \"json\"\nschema = '{schema}'",
        sink=f"kind = \"postgres\"\nurl = \"${{env:DATABASE_URL}}\"\ntable = ['public', '{s.table}']",
    )
    s.drain(path, "spark")
    quoted = s.table.replace('"', '""')
    assert s.rows(f'SELECT "order id", "a""b", "select", "$1" FROM "{quoted}"') == [(1, "q", "s", "d")]


def test_aborted_transactions_and_ranges_of_markers_only(scenario: Make) -> None:
    s = scenario(partitions=1)
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap, "transactional.id": s.name}, logger=metadata.QUIET)
    producer.init_transactions(30)
    for number in range(30):
        producer.begin_transaction()
        producer.produce(s.topic, payment(number))
        producer.flush(30)  # so that an aborted record is in the log too
        (producer.abort_transaction if number % 3 == 0 else producer.commit_transaction)(30)
    s.drain(s.file(batch="max_records = 2"), "spark")
    assert s.ids() == dict.fromkeys([n for n in range(30) if n % 3], 1)
    assert s.positions() == {0: 60}, "markers and aborted records are passed too"
    assert totals(s) == (20, 20, 0, 0)


def test_sql_transform_filters_computes_and_counts(scenario: Make) -> None:
    s = scenario(partitions=2)
    values = [payment(n) for n in range(1_000)]
    values[4] = b"nonsense"
    s.produce(values)
    path = s.file(transform='sql = "SELECT *, CAST(amount * 100 AS LONG) AS cents FROM records WHERE id % 2 = 0"')
    s.drain(path)
    assert s.ids() == dict.fromkeys([n for n in range(1_000) if n % 2 == 0 and n != 4], 1)
    assert s.rows(f'SELECT cents FROM "{s.table}" WHERE id = 10') == [(250,)]
    assert dead(s) == [(0, 2, "not-json")]
    assert totals(s) == (1_000, 499, 1, 500)


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("_kafka_partition", "1 - _kafka_partition"),
        ("_kafka_topic", "concat(_kafka_topic, 'x')"),
        ("_kafka_offset", "1 - _kafka_offset"),
    ],
)
def test_sql_that_changes_whose_rows_these_are_is_refused(scenario: Make, column: str, expression: str) -> None:
    """Else a task would claim another partition's range."""
    s = scenario(partitions=2)
    s.produce(payment(n) for n in range(4))
    s.produce([payment(4)], partition=0)
    names = ["_kafka_topic", "_kafka_partition", "_kafka_offset", "_kafka_timestamp"]
    listed = ", ".join(f"{expression} AS {name}" if name == column else name for name in names)
    with pytest.raises(ConfigError, match=f"{column} was changed"):
        s.drain(s.file(transform=f'sql = "SELECT id, {listed} FROM records"'))
    assert s.positions() == {0: 0, 1: 0}
    assert s.ids() == {}


def test_sql_transform_that_leaves_everything_out_still_keeps_dead_letters(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce([payment(1), b"nonsense", payment(2)])
    s.drain(s.file(transform='sql = "SELECT * FROM records WHERE id > 1000000"'))
    assert s.ids() == {}
    assert dead(s) == [(0, 1, "not-json")]
    assert totals(s) == (3, 0, 1, 2)


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("SELECT account, count(*) FROM records GROUP BY account", "Aggregate"),
        ("SELECT * FROM records ORDER BY id", "Sort"),
        ("SELECT * FROM records LIMIT 5", "Limit"),
        ("SELECT r.* FROM records r JOIN records q ON r.id = q.id", "Join"),
        ("SELECT DISTINCT * FROM records", "Distinct"),
        ("SELECT * FROM records WHERE id IN (SELECT id FROM records)", "Subquery"),
        ("SELECT id, account FROM records", "lost _kafka_topic"),
        ("SELECT nothing FROM records", "nothing"),
        ("SELECT * FROM records WHERE 1 = 2", "leaves every record out"),
    ],
)
def test_a_wide_or_broken_transform_is_refused_with_the_reason(scenario: Make, query: str, what: str) -> None:
    s = scenario(partitions=1)
    with pytest.raises(ConfigError, match=what):
        s.drain(s.file(transform=f'sql = "{query}"'))


def test_python_transform(scenario: Make) -> None:
    s = scenario(partitions=2)  # odd ids are in one of them: nothing of it is left
    s.produce(payment(n) for n in range(100))
    s.drain(s.file(transform='python = "tests.transforms:even_with_cents"'), "spark")
    assert s.ids() == dict.fromkeys(range(0, 100, 2), 1)
    assert s.rows(f'SELECT cents FROM "{s.table}" WHERE id = 10') == [(250,)]
    assert totals(s) == (100, 50, 0, 50)


def test_several_topics_and_a_pattern(scenario: Make) -> None:
    first, second = scenario(), scenario(partitions=1)
    first.produce(payment(n) for n in range(10))
    second.produce(payment(n) for n in range(10, 15))
    brokers = f'brokers = "{first.cluster.bootstrap}"\n'
    first.drain(first.file(source=f'{brokers}topics = ["{first.topic}", "{second.topic}"]'), "spark")
    assert first.ids() == dict.fromkeys(range(15), 1)
    first.name, first.table = f"{first.name}-p", f"{first.table}_p"
    first.drain(first.file(source=f'{brokers}topics_pattern = "{first.topic}|{second.topic[:-2]}.*"'), "spark")
    assert first.ids() == dict.fromkeys(range(15), 1)


@pytest.mark.parametrize("transform", ["", "SELECT * FROM records"])
@pytest.mark.parametrize("guarantee", ["at-most-once", "exactly-once"])
def test_too_many_dead_letters_stop_the_run_and_nothing_is_claimed(
    scenario: Make, guarantee: str, transform: str
) -> None:
    s = scenario(partitions=1)
    s.produce([payment(0), *[b"bad"] * 2_000])
    more = {"transform": f'sql = "{transform}"'} if transform else {}
    path = s.file(guarantee, dead_letters="max_share = 0.1", batch="max_records = 5000", **more)
    with pytest.raises(TooManyDeadLetters, match=r"2000 of 2001 records of .* are bad \(not-json 2000\)"):
        s.drain(path)
    assert s.positions() == {0: 0}
    assert dead(s) == []
    s.drain(s.file(dead_letters="max_share = 1.0", batch="max_records = 5000"))
    assert totals(s) == (2_001, 1, 2_000, 0)


@pytest.mark.parametrize("partitions", [1, 3])
def test_records_of_a_topic_made_again_are_not_written(scenario: Make, partitions: int) -> None:
    """Its id is another one than when ranges were planned. A task has a single one of these, or all three."""
    s = scenario(partitions=partitions)
    s.produce([payment(n) for n in range(3)])
    pipeline = s.load(s.file(), "spark")
    with closing(RunDriver(pipeline, SILENT)) as driver:
        driver.sink.prepare()
        driver.prepare(sink_columns(pipeline))
        driver.begin()
        ranges = {tp: OffsetRange(tp.topic, tp.partition, 0, 3 // partitions) for tp in driver.positions}
        work = BatchWork(pipeline, driver.run, 0, ranges, driver.sink.task_context(), {s.topic: "another id"})
        reports = work_frame(session_spark(pipeline), work).collect()
    assert [report.stop for report in reports] == ["TopicRecreated"] * partitions
    assert s.ids() == {}
    assert set(s.positions().values()) == {0}


def test_a_topic_made_again_stops_by_name(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(10))
    path = s.file()
    s.drain(path, "spark")
    client = metadata.admin(s.cluster.bootstrap)
    client.delete_topics([s.topic], operation_timeout=30)[s.topic].result()
    for _ in range(50):
        try:
            client.create_topics([NewTopic(s.topic, 1, 1)], operation_timeout=30)[s.topic].result()
            break
        except KafkaException:  # the deletion is still under way
            time.sleep(0.2)
    s.produce(payment(n) for n in range(100))  # and outgrown
    with pytest.raises(TopicRecreated, match="topic-recreated"):
        s.drain(path, "spark")
    assert s.ids() == dict.fromkeys(range(10), 1)


def test_a_log_that_was_cut_and_grew_again_stops_by_name(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(10))
    path = s.file()
    s.drain(path)
    # Kafka cannot be made to cut its log here; the ledger is made to remember another record instead.
    s.rows("UPDATE avow.ledger SET last_crc32 = last_crc32 + 1 WHERE pipeline = %s RETURNING 1", s.name)
    with pytest.raises(LogTruncated, match="at offset 9 is not the one"):
        s.drain(path)


def test_retention_that_passed_the_position_stops_or_is_skipped_as_declared(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(10))
    path = s.file()
    s.drain(path)
    s.produce(payment(n) for n in range(10, 30))
    client = metadata.admin(s.cluster.bootstrap)
    for future in client.delete_records([TopicPartition(s.topic, 0, 15)]).values():
        future.result()
    with pytest.raises(RetentionLoss, match=r"\[10, 15\) was deleted by retention before it was claimed \(5 offsets\)"):
        s.drain(path)
    brokers = f'brokers = "{s.cluster.bootstrap}"\ntopics = ["{s.topic}"]\n'
    s.drain(s.file(source=f'{brokers}on_data_loss = "skip"'))
    assert s.ids() == dict.fromkeys([*range(10), *range(15, 30)], 1)
    assert totals(s) == (30, 25, 0, 5)


def test_a_table_that_does_not_fit_is_refused_with_every_difference(scenario: Make) -> None:
    s = scenario(partitions=1)
    with psycopg.connect(s.url, autocommit=True) as connection:
        connection.execute(
            f'CREATE TABLE "{s.table}" (id int, account text, amount float8, extra int NOT NULL,'
            " _kafka_topic text, _kafka_partition int, _kafka_offset bigint, _kafka_timestamp timestamptz)"
        )
    with pytest.raises(ConfigError) as caught:
        s.drain(s.file())
    text = str(caught.value)
    assert "column 'id' has type integer instead of bigint" in text
    assert "column 'note' (text) is missing" in text
    assert "column 'extra' is NOT NULL without a default" in text


def test_a_wrong_password_or_a_missing_topic_is_told_before_spark_starts(scenario: Make, tmp_path: Path) -> None:
    s = scenario(partitions=1)
    path = s.file(sink=sink(s).replace("${env:DATABASE_URL}", "postgresql://me:hunter2@127.0.0.1:9/db"))
    done = s.run(path)
    assert done.returncode == 5
    assert "could not connect to PostgreSQL" in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    brokers = f'brokers = "{s.cluster.bootstrap}"\n'
    with pytest.raises(SourceError, match="no-such-topic"):
        s.drain(s.file(source=f'{brokers}topics = ["no-such-topic"]'))
    assert tmp_path.exists()


def test_the_ledger_schema_of_a_newer_avow_is_refused(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.drain(s.file())
    with psycopg.connect(s.url, autocommit=True) as connection:
        connection.execute("UPDATE avow.version SET version = version + 1")
    try:
        with pytest.raises(SinkError, match=f"schema avow has version {len(MIGRATIONS) + 1}, but"):
            s.drain(s.file())
    finally:
        with psycopg.connect(s.url, autocommit=True) as connection:
            connection.execute("UPDATE avow.version SET version = version - 1")


def test_the_guarantee_can_change_and_the_position_carries_over(scenario: Make) -> None:
    s = scenario(partitions=1)
    for number, guarantee in enumerate(GUARANTEES):
        s.produce(payment(n) for n in range(number * 10, number * 10 + 10))
        s.drain(s.file(guarantee))
    assert s.ids() == dict.fromkeys(range(30), 1)
    told = s.rows("SELECT guarantee FROM avow.runs WHERE pipeline = %s ORDER BY run", s.name)
    assert [row[0] for row in told] == GUARANTEES


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):  # a worker that has just ended
        return process.cmdline()
    return []


def _is_driver(command: list[str]) -> bool:
    return "org.apache.spark.deploy.SparkSubmit" in command


def test_the_class_archive_is_really_used(scenario: Make) -> None:
    """An archive that does not fit is left aside by Java without a word, so the JVM that ran is asked."""
    assert spark.archive() is not None, "`make setup` makes it"
    s = scenario()
    s.produce([payment(1)])
    s.drain(s.file(), "spark")
    command = next(filter(_is_driver, map(_command, psutil.Process().children(recursive=True))))
    main = command.index("org.apache.spark.deploy.SparkSubmit")
    again = [*command[:main], "-Xlog:class+load", command[main], "--version"]
    told = subprocess.run(again, capture_output=True, text=True, check=True).stdout
    from_archive = told.count("source: shared objects file (top)")
    assert from_archive > 100, f"{from_archive} classes came from {spark.archive()}"


def test_a_value_of_20_mb(scenario: Make) -> None:
    """Between small ones, on a topic that lets it in: nothing is cut and nothing stands in line behind it."""
    s = scenario(partitions=1, max_message_bytes=str(32 << 20))
    note = "0123456789abcdef" * (20 << 16)
    big = json.dumps({"id": 1, "account": "a", "amount": 1.0, "note": note}).encode()
    assert len(big) > 20 << 20
    producer = Producer(
        {"bootstrap.servers": s.cluster.bootstrap, "message.max.bytes": 64 << 20}, logger=metadata.QUIET
    )
    for value in (payment(0), big, payment(2)):
        producer.produce(s.topic, value, partition=0)
    assert producer.flush(60) == 0
    s.drain(s.file(), "spark")
    assert s.ids() == {0: 1, 1: 1, 2: 1}
    assert s.rows(f'SELECT length(note), md5(note) FROM "{s.table}" WHERE id = 1') == [
        (len(note), hashlib.md5(note.encode()).hexdigest())
    ]


def test_a_deadlock_with_somebody_else_is_retried(scenario: Make) -> None:
    """Somebody holds row 2 and wants row 1, the task holds row 1 and wants row 2: PostgreSQL ends the task's side."""
    s = scenario(partitions=1)
    path = s.file(sink=sink(s, 'mode = "upsert"', 'key = ["id"]'))
    s.produce([payment(1), payment(2)])
    s.drain(path)
    before = s.rows("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0]
    s.produce([json.dumps({"id": n, "account": "later", "amount": 1.0, "note": ""}).encode() for n in (1, 2)])
    # Who has waited for so long looks for a deadlock, once: it has to be the task, also where this test is slow.
    database = s.rows("SELECT current_database()")[0][0]
    s.execute(f"ALTER DATABASE {database} SET deadlock_timeout = '5s'")
    with psycopg.connect(s.url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("SET deadlock_timeout = '2min'")
        other.execute(f'UPDATE "{s.table}" SET note = %s WHERE id = 2', ["theirs"])
        draining = pool.submit(s.drain, path)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        deadline = time.monotonic() + 60
        while not s.rows(waiting, f"%{s.table}%")[0][0]:
            assert time.monotonic() < deadline, "the task never waited"
            time.sleep(0.02)
        other.execute(f'UPDATE "{s.table}" SET note = %s WHERE id = 1', ["theirs"])
        other.commit()
        draining.result(120)
    s.execute(f"ALTER DATABASE {database} RESET deadlock_timeout")
    assert s.rows(f'SELECT id, account FROM "{s.table}" ORDER BY id') == [(1, "later"), (2, "later")]
    deadline = time.monotonic() + 30
    while s.rows("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0] == before:
        assert time.monotonic() < deadline, "there was no deadlock: the test proves nothing"
        time.sleep(0.2)


def test_a_server_that_takes_no_writes_is_not_a_question_of_rights(scenario: Make) -> None:
    s = scenario()
    pipeline = load_checked(s.file(), {"DATABASE_URL": f"{s.url}?options=-c%20default_transaction_read_only%3Don"})
    with sinks.driver_sink(s.load(s.file())) as store:
        store.prepare()
    with sinks.driver_sink(pipeline) as store, pytest.raises(SinkError, match="read-only") as refused:
        store.open_run()
    assert "primary" in refused.value.advice
    assert "rights" not in refused.value.advice
