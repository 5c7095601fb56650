"""The audit on real topics and real tables: each anomaly is planted by hand, and must be named exactly, alone.

Records are delivered by the engine's own tasks on the Spark session that all tests here share; starting one for each
run would take most of the time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession
from tests.fix_pipeline import Scenario, session_spark

from avow.audit import auditor
from avow.audit.archive import files, read
from avow.audit.auditor import audit
from avow.audit.judge import ALL_SEEN, Verdict
from avow.audit.report import AuditReport
from avow.engines.spark import sink_fields, work_frame
from avow.engines.task import BatchWork
from avow.errors import SourceError
from avow.findings import Kind, permits
from avow.kafka import metadata
from avow.kafka.headers import CHECKSUM, checksum
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry, OffsetRange
from avow.local.cluster import Cluster
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.postgres.driver import PostgresDriver

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("spark-postgres")]

SCHEMA = "id long not null, account string, amount decimal(12,2), tags array<string>"
Found = dict[tuple[Kind, int], list[tuple[int, int]]]  # kind and partition -> ranges


def value(number: int, account: str = "acc") -> bytes:
    row = {"id": number, "account": f"{account}-{number}", "amount": number / 4, "tags": ["a", str(number)]}
    return json.dumps(row).encode()


def comparable(report: AuditReport) -> AuditReport:
    """Without what may differ: the time it took, and how a failure of the sink is put that ended it."""
    if not report.partitions:
        report = replace(report, sentence="", advice="", reservation=ALL_SEEN)
    return replace(report, seconds=0, findings=tuple(sorted(report.findings, key=str)))


@dataclass
class World:
    """One pipeline with its topic and table, and the moment that plants are undone to."""

    cluster: Cluster
    spark: SparkSession
    folder: Path
    topic: str
    name: str
    sections: dict[str, str]

    def pipeline(self, guarantee: str = "exactly-once", **more: str) -> PipelineConfig:
        lines = {
            "source": f'brokers = "{self.cluster.bootstrap}"\ntopics = ["{self.topic}"]',
            "decode": f'format = "json"\nschema = "{SCHEMA}"',
            "sink": f'kind = "postgres"\nurl = "${{env:DATABASE_URL}}"\ntable = "{self.name}"',
            "dead_letters": "max_share = 1.0",
        }
        for section, body in {**self.sections, **more}.items():
            lines[section] = f"{lines[section]}\n{body}" if section in lines else body
        text = f'name = "{self.name}"\nguarantee = "{guarantee}"\n'
        path = self.folder / "pipeline.toml"
        path.write_text(text + "".join(f"[{section}]\n{body}\n" for section, body in lines.items()))
        assert self.cluster.postgres_url
        return load_checked(path, {"DATABASE_URL": self.cluster.postgres_url})

    def produce(self, values: Iterable[tuple[bytes | None, bytes | None]], partition: int = 0) -> None:
        """Keys and values, committed and not in a transaction."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap}, logger=metadata.QUIET)
        for key, one in values:
            producer.produce(self.topic, one, key=key, partition=partition)
        assert producer.flush(30) == 0

    def deliver(self, *cuts: int) -> None:
        """Bring everything into the table as a run does, in batches that end at these offsets of each partition."""
        pipeline = self.pipeline()
        with PostgresDriver(pipeline) as store, Log(pipeline.source, pipeline.name) as log:
            store.prepare()
            fields, rest = sink_fields(self.spark, pipeline)
            store.prepare_table(fields, rest=rest)
            run = store.open_run()
            known, ends = log.partitions(), log.stable_ends(log.partitions())
            store.adopt({where: Entry(0, topic_id, run) for where, topic_id in known.items()})
            positions = {where: entry.position for where, entry in store.entries().items()}
            batches = pairwise([0, *cuts, max(ends.values())])
            for batch, (first, last) in enumerate(batches):
                ranges = {
                    where: OffsetRange(where.topic, where.partition, max(first, positions[where]), min(last, end))
                    for where, end in ends.items()
                    if max(first, positions[where]) < min(last, end)
                }
                self._deliver(ranges, run, batch)

    def _deliver(self, ranges: dict[TopicPartition, OffsetRange], run: int, batch: int) -> None:
        if not ranges:
            return
        pipeline = self.pipeline()
        reports = work_frame(self.spark, BatchWork(pipeline, run, batch, ranges)).collect()
        assert [report.message for report in reports if report.stop] == []

    def sql(self, statement: str, *values: Any) -> list[Any]:
        assert self.cluster.postgres_url
        with psycopg.connect(self.cluster.postgres_url, autocommit=True) as connection:
            done = connection.execute(statement.replace("TABLE_", f'"{self.name}"'), values)
            return done.fetchall() if done.description else []

    def audit(self, guarantee: str = "exactly-once", **sections: str) -> AuditReport:
        """On Spark; and in this process it finds the same."""
        pipeline = self.pipeline(guarantee, **sections)
        report = audit(pipeline, lambda: self.spark)
        if not pipeline.by_sql:
            alone = audit(pipeline.model_copy(update={"engine": "consumer"}), lambda: pytest.fail("Spark was started"))
            assert comparable(alone) == comparable(report)
        return report

    def found(self, guarantee: str = "exactly-once") -> Found:
        """What an audit finds, and that its verdict follows from it."""
        report = self.audit(guarantee)
        forbidden = [f for f in report.findings if not permits(report.guarantee, f.kind)]
        assert report.verdict is (Verdict.BROKEN if forbidden else Verdict.HELD), report
        return {(f.kind, f.partition): [(s.start, s.until) for s in f.spans] for f in report.findings}

    def timestamp(self, offset: int) -> Any:
        """Of a record of partition 0."""
        with Log(self.pipeline().source, self.name) as log:
            (record,) = log.records(TopicPartition(self.topic, 0), [offset])
        return self.sql("SELECT to_timestamp(%s / 1000.0)", record.timestamp_ms)[0][0]

    # Plants are undone, so that one delivery serves many of them.

    def remember(self) -> None:
        self.sql(f'CREATE TABLE "{self.name} kept" AS TABLE TABLE_')
        for table in ("ledger", "claims", "dead_letters"):
            self.sql(f'CREATE TABLE "{self.name} {table}" AS SELECT * FROM avow.{table} WHERE pipeline = %s', self.name)

    def undo(self) -> None:
        self.sql("DELETE FROM TABLE_")
        self.sql(f'INSERT INTO TABLE_ SELECT * FROM "{self.name} kept"')
        for table in ("ledger", "claims", "dead_letters"):
            self.sql(f"DELETE FROM avow.{table} WHERE pipeline = %s", self.name)
            self.sql(f'INSERT INTO avow.{table} SELECT * FROM "{self.name} {table}"')


@pytest.fixture(scope="module")
def make(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    def world(partitions: int = 2, topic_config: dict[str, str] | None = None, **sections: str) -> World:
        topic, name = f"t-{uuid4().hex[:12]}", f"p_{uuid4().hex[:10]}"
        client = metadata.admin(cluster.bootstrap)
        new = NewTopic(topic, partitions, 1, config=topic_config or {})
        client.create_topics([new], operation_timeout=30)[topic].result()
        made = World(cluster, None, tmp_path_factory.mktemp(name), topic, name, sections)  # type: ignore[arg-type]
        made.spark = session_spark(made.pipeline())
        return made

    return world


# Append: offsets 0 to 24 of partition 0 are
#   0-9 committed (3 is bad), 10 a marker, 11-15 aborted, 16 a marker, 17-23 committed, 24 a marker
# and partition 1 holds 0-4 aborted and 5 a marker: no record at all.


@pytest.fixture(scope="module")
def append(make: Callable[..., World]) -> World:
    world = make()
    settings = {"bootstrap.servers": world.cluster.bootstrap, "transactional.id": world.name}
    producer = Producer(settings, logger=metadata.QUIET)
    producer.init_transactions(30)
    for partition, first, count, commit in ((0, 0, 10, True), (0, 11, 5, False), (0, 17, 7, True), (1, 0, 5, False)):
        producer.begin_transaction()
        for number in range(first, first + count):
            producer.produce(world.topic, b"{bad" if number == 3 else value(number), partition=partition)
        producer.flush()
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    world.deliver(8, 14)
    world.remember()
    return world


@pytest.fixture
def planted(append: World) -> Iterator[World]:
    yield append
    append.undo()


INSERT = (
    "INSERT INTO TABLE_ SELECT {id}, account, amount, tags, _kafka_topic, {partition}, {offset}, _kafka_timestamp"
    " FROM TABLE_ WHERE _kafka_offset = 0"
)


class TestAppend:
    def test_nothing_planted(self, append: World) -> None:
        report = append.audit()
        assert (report.verdict, report.findings, report.notes) == (Verdict.HELD, (), ())
        first, second = report.partitions
        assert (first.start, first.until, second.start, second.until) == (0, 25, 0, 6)
        assert (first.tally.read, first.tally.written, first.tally.dead, first.tally.skipped) == (17, 16, 1, 0)
        assert (first.counts.read, first.counts.written, first.counts.dead) == (17, 16, 1)
        assert second.tally.read == 0

    def test_deleted_doubled_and_altered(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_ WHERE _kafka_offset = 5")
        planted.sql(INSERT.format(id="id", partition=0, offset=0))
        planted.sql("UPDATE TABLE_ SET amount = amount + 1, tags = '[1]' WHERE _kafka_offset = 19")
        report = planted.audit()
        found = {(f.kind, f.spans[0].start, f.spans[0].until, f.columns) for f in report.findings}
        assert found == {
            (Kind.LOST, 5, 6, ()),
            (Kind.DUPLICATED, 0, 1, ()),
            (Kind.CORRUPTED, 19, 20, ("amount", "tags")),
        }
        assert report.verdict is Verdict.BROKEN
        assert (report.tally.lost, report.tally.written) == (1, 15)

    def test_a_lost_stretch_spans_markers_and_aborted_records(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_ WHERE _kafka_offset BETWEEN 8 AND 18")
        assert planted.found() == {(Kind.LOST, 0): [(8, 19)]}

    def test_all_lost(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_")
        planted.sql("DELETE FROM avow.dead_letters WHERE pipeline = %s", planted.name)
        assert planted.found() == {(Kind.LOST, 0): [(0, 24)]}

    def test_coerced(self, planted: World) -> None:
        planted.sql("UPDATE TABLE_ SET account = left(account, 2) WHERE _kafka_offset = 4")
        planted.sql("UPDATE TABLE_ SET amount = NULL WHERE _kafka_offset = 6")
        assert planted.found() == {(Kind.COERCED, 0): [(4, 5), (6, 7)]}

    def test_lineage_is_compared_too(self, planted: World) -> None:
        planted.sql("UPDATE TABLE_ SET _kafka_timestamp = _kafka_timestamp + interval '1 hour' WHERE _kafka_offset = 4")
        (finding,) = planted.audit().findings
        assert (finding.kind, finding.columns) == (Kind.CORRUPTED, ("_kafka_timestamp",))

    def test_phantoms_at_a_marker_and_beyond_the_end(self, planted: World) -> None:
        for offset in (10, 24, 99):
            planted.sql(INSERT.format(id=100, partition=0, offset=offset))
        planted.sql(INSERT.format(id=100, partition=7, offset=3))
        expected = {(Kind.PHANTOM, 0): [(10, 11), (24, 25), (99, 100)], (Kind.PHANTOM, 7): [(3, 4)]}
        assert planted.found() == expected

    def test_aborted_read(self, planted: World) -> None:
        for offset in (11, 12, 15):
            planted.sql(INSERT.format(id=100, partition=0, offset=offset))
        planted.sql(INSERT.format(id=100, partition=1, offset=2))  # no record of this partition is visible
        planted.sql(INSERT.format(id=100, partition=0, offset=16))  # a marker, after it
        assert planted.found() == {
            (Kind.ABORTED_READ, 0): [(11, 13), (15, 16)],
            (Kind.ABORTED_READ, 1): [(2, 3)],
            (Kind.PHANTOM, 0): [(16, 17)],
        }

    def test_dead_letter_also_in_the_table(self, planted: World) -> None:
        planted.sql(INSERT.format(id=3, partition=0, offset=3))
        assert planted.found() == {(Kind.DOUBLE_COUNTED, 0): [(3, 4)]}

    def test_row_also_among_the_dead_letters(self, planted: World) -> None:
        planted.sql('UPDATE avow.dead_letters SET "offset" = 4 WHERE pipeline = %s', planted.name)
        assert planted.found() == {(Kind.DOUBLE_COUNTED, 0): [(4, 5)], (Kind.LOST, 0): [(3, 4)]}

    def test_dead_letter_deleted(self, planted: World) -> None:
        planted.sql("DELETE FROM avow.dead_letters WHERE pipeline = %s", planted.name)
        assert planted.found() == {(Kind.LOST, 0): [(3, 4)]}

    def test_claims_with_a_gap_and_an_overlap(self, planted: World) -> None:
        planted.sql("DELETE FROM avow.claims WHERE pipeline = %s AND from_offset = 8", planted.name)
        assert planted.found() == {(Kind.SKIPPED_RANGE, 0): [(8, 14)]}
        planted.undo()
        planted.sql("UPDATE avow.claims SET until_offset = 10 WHERE pipeline = %s AND from_offset = 0", planted.name)
        assert planted.found()[Kind.OVERLAPPING_RANGE, 0] == [(8, 10)]

    def test_position_moved_ahead(self, planted: World) -> None:
        planted.sql("UPDATE avow.ledger SET position = 30 WHERE pipeline = %s AND partition = 0", planted.name)
        assert planted.found() == {(Kind.LEDGER_AHEAD, 0): [(25, 30)]}

    def test_position_moved_back(self, planted: World) -> None:
        planted.sql("UPDATE avow.ledger SET position = 20 WHERE pipeline = %s AND partition = 0", planted.name)
        assert planted.found() == {(Kind.LEDGER_BEHIND, 0): [(20, 25)]}
        assert planted.audit("at-least-once").verdict is Verdict.HELD

    def test_position_gone(self, planted: World) -> None:
        planted.sql("DELETE FROM avow.ledger WHERE pipeline = %s AND partition = 0", planted.name)
        report = planted.audit()
        assert [(f.kind, f.partition, f.count) for f in report.findings] == [(Kind.LEDGER_BEHIND, 0, 17)]

    def test_counts_edited(self, planted: World) -> None:
        planted.sql(
            "UPDATE avow.ledger SET read = read + 2, written = written + 2 WHERE pipeline = %s AND partition = 0",
            planted.name,
        )
        (finding,) = planted.audit().findings
        assert (finding.kind, finding.count) == (Kind.MISCOUNTED, 2)

    def test_topic_made_again(self, planted: World) -> None:
        planted.sql("UPDATE avow.ledger SET topic_id = 'other' WHERE pipeline = %s AND partition = 0", planted.name)
        assert planted.found() == {(Kind.TOPIC_RECREATED, 0): [(0, 25)]}

    def test_log_cut(self, planted: World) -> None:
        planted.sql("UPDATE avow.ledger SET last_crc32 = 1 WHERE pipeline = %s AND partition = 0", planted.name)
        assert planted.found() == {(Kind.LOG_TRUNCATED, 0): [(23, 25)]}

    def test_what_each_word_permits(self, planted: World) -> None:
        planted.sql(INSERT.format(id="id", partition=0, offset=0))
        assert planted.audit("at-least-once").verdict is Verdict.HELD
        assert planted.audit("at-most-once").verdict is Verdict.BROKEN

    def test_at_most_once_cannot_explain_a_row_that_was_counted(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_ WHERE _kafka_offset = 5")
        assert planted.found("at-most-once") == {(Kind.LOST, 0): [(5, 6)], (Kind.MISCOUNTED, 0): [(0, 25)]}

    def test_rows_of_other_topics_are_not_ours(self, planted: World) -> None:
        planted.sql(INSERT.format(id=1, partition=0, offset=4).replace("_kafka_topic,", "'elsewhere',", 1))
        report = planted.audit()
        assert (report.verdict, report.findings) == (Verdict.HELD, ())
        assert "1 rows were not audited: they come from topics that this pipeline does not read" in report.notes[0]


def test_lost_between_claim_and_write(make: Callable[..., World]) -> None:
    """As at-most-once loses: claimed, never written, never counted."""
    world = make(1)
    world.produce((None, value(number)) for number in range(20))
    pipeline = world.pipeline("at-most-once")
    world.deliver(10)
    world.sql("DELETE FROM TABLE_ WHERE _kafka_offset >= 10")
    world.sql("UPDATE avow.ledger SET read = 10, written = 10 WHERE pipeline = %s", pipeline.name)
    assert world.found("at-most-once") == {(Kind.LOST, 0): [(10, 20)]}
    assert world.found("exactly-once") == {(Kind.LOST, 0): [(10, 20)], (Kind.MISCOUNTED, 0): [(0, 20)]}


def test_a_value_that_does_not_fit_its_checksum_is_a_dead_letter_for_run_and_audit(make: Callable[..., World]) -> None:
    world = make(1)
    producer = Producer({"bootstrap.servers": world.cluster.bootstrap}, logger=metadata.QUIET)
    for number, said in enumerate((checksum(value(0)), checksum(b"another"), None)):
        headers = [("other", b"x"), *([(CHECKSUM, said)] if said else ())]
        producer.produce(world.topic, value(number), partition=0, headers=headers)
    assert producer.flush(30) == 0
    world.deliver()
    letters = world.sql('SELECT "offset", reason FROM avow.dead_letters WHERE pipeline = %s', world.name)
    assert letters == [(1, "corrupted")]
    assert world.found() == {}
    # As if nobody had looked at the checksum.
    world.sql("DELETE FROM avow.dead_letters WHERE pipeline = %s", world.name)
    row = INSERT.format(id=1, partition=0, offset=1).replace("account, amount, tags", "'acc-1', 0.25, '[\"a\", \"1\"]'")
    world.sql(row)
    world.sql("UPDATE TABLE_ SET _kafka_timestamp = %s WHERE _kafka_offset = 1", world.timestamp(1))
    world.sql("UPDATE avow.ledger SET written = 3, dead = 0 WHERE pipeline = %s", world.name)
    assert world.found() == {(Kind.CORRUPTED, 0): [(1, 2)]}


def test_lag_and_rows_beyond_the_position(make: Callable[..., World]) -> None:
    world = make(1)
    world.produce((None, value(number)) for number in range(10))
    world.deliver()
    world.produce((None, value(number)) for number in range(10, 20))
    assert world.found() == {}
    for offset in (12, 13):
        world.sql(INSERT.format(id=offset, partition=0, offset=offset))
    assert world.found() == {(Kind.LEDGER_BEHIND, 0): [(12, 14)]}
    assert world.found("at-least-once") == {(Kind.LEDGER_BEHIND, 0): [(12, 14)]}


def test_an_open_transaction_is_a_note(make: Callable[..., World]) -> None:
    world = make(1)
    world.produce((None, value(number)) for number in range(10))
    producer = Producer(
        {"bootstrap.servers": world.cluster.bootstrap, "transactional.id": world.name}, logger=metadata.QUIET
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(world.topic, value(10), partition=0)
    producer.flush()
    world.deliver()
    report = world.audit()
    assert (report.verdict, report.findings) == (Verdict.HELD, ())
    assert "a transaction is open at offset 10" in report.notes[0]
    producer.abort_transaction(30)


def test_retention(make: Callable[..., World]) -> None:
    world = make(1)
    world.produce((None, value(number)) for number in range(20))
    world.deliver(10)

    def delete_below(offset: int) -> None:
        client = metadata.admin(world.cluster.bootstrap)
        partition = KafkaPartition(world.topic, 0, offset)
        client.delete_records([partition])[partition].result()

    delete_below(5)
    report = world.audit()
    assert (report.verdict, report.findings, report.tally.read, report.tally.unchecked) == (Verdict.HELD, (), 15, 5)
    world.sql("DELETE FROM TABLE_ WHERE _kafka_offset IN (3, 12)")  # nobody can tell that 3 was there
    assert world.found() == {(Kind.LOST, 0): [(12, 13)]}
    world.produce((None, value(number)) for number in range(20, 30))
    delete_below(25)
    report = world.audit()
    assert [(f.kind, f.spans[0].start, f.spans[0].until) for f in report.findings] == [(Kind.RETENTION_LOSS, 20, 25)]
    assert world.audit(source='on_data_loss = "skip"').verdict is Verdict.UNKNOWN  # nothing left to compare


def test_compacted_records_are_not_phantoms(make: Callable[..., World]) -> None:
    """Delivered, and then compacted away."""
    loose = {"cleanup.policy": "compact", "segment.ms": "500", "min.cleanable.dirty.ratio": "0.01"}
    world = make(1, loose)
    world.produce((b"k", value(number)) for number in range(10))
    world.deliver()
    world.produce([(b"l", value(10))])
    deadline = time.monotonic() + 90
    with Log(world.pipeline().source, world.name) as log:
        while _has_record(log, world, 5):
            assert time.monotonic() < deadline, "not compacted in time"
            time.sleep(1)
            world.produce([(b"l", value(11))])  # a segment is only closed by the next record
    report = world.audit()
    assert (report.verdict, report.findings) == (Verdict.HELD, ())
    assert report.tally.unchecked == 10 - report.tally.read > 0
    world.sql(INSERT.format(id=50, partition=0, offset=5_000).replace("= 0", "= 9"))
    assert world.found() == {(Kind.PHANTOM, 0): [(5_000, 5_001)]}  # no compaction explains that


def _has_record(log: Log, world: World, offset: int) -> bool:
    try:
        return bool(log.records(TopicPartition(world.topic, 0), [offset]))
    except SourceError:
        return False


# With a key


def keyed(number: int, amount: int) -> tuple[bytes, bytes]:
    row = {"id": number, "account": "x", "amount": amount, "tags": None}
    return str(number).encode(), json.dumps(row).encode()


@pytest.fixture(scope="module")
def upsert(make: Callable[..., World]) -> World:
    world = make(2, sink='mode = "upsert"\nkey = ["id"]')
    # partition 0: 0-9 are made, 10-14 change 0-4, 15 deletes 9, 16 deletes 8, 17 makes 8 again
    made = [keyed(n, 1) for n in range(10)] + [keyed(n, 2) for n in range(5)]
    world.produce([*made, (b"9", None), (b"8", None), keyed(8, 3)])
    # partition 1: 0-4 are keys 20-24, 5 is key 0, which partition 0 has too
    world.produce([*(keyed(n, 1) for n in range(20, 25)), keyed(0, 7)], partition=1)
    world.deliver(12)
    world.remember()
    return world


class TestUpsert:
    @pytest.fixture
    def planted(self, upsert: World) -> Iterator[World]:
        yield upsert
        upsert.undo()

    def test_nothing_planted(self, upsert: World) -> None:
        report = upsert.audit()
        assert (report.verdict, report.findings, report.shared_keys) == (Verdict.HELD, (), 1)
        assert (report.tally.read, report.tally.written, report.tally.lost) == (24, 24, 0)
        assert "[0]" in report.notes[0]

    def test_a_row_is_gone(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_ WHERE id IN (3, 7, 22)")
        assert planted.found() == {(Kind.LOST, 0): [(7, 8), (13, 14)], (Kind.LOST, 1): [(2, 3)]}
        assert planted.audit("at-most-once").verdict is Verdict.BROKEN  # counted as written, and not there
        assert planted.audit().tally.lost == 3

    def test_a_row_is_as_it_was_before(self, planted: World) -> None:
        planted.sql(
            "UPDATE TABLE_ SET amount = 1, _kafka_offset = 2, _kafka_timestamp = %s WHERE id = 2",
            planted.timestamp(2),
        )
        assert planted.found() == {(Kind.LOST, 0): [(12, 13)]}

    def test_a_row_is_altered(self, planted: World) -> None:
        planted.sql("UPDATE TABLE_ SET amount = 5 WHERE id = 6")
        assert planted.found() == {(Kind.CORRUPTED, 0): [(6, 7)]}

    def test_a_deleted_row_is_back(self, planted: World) -> None:
        planted.sql(
            "INSERT INTO TABLE_ SELECT 9, account, 1, tags, _kafka_topic, 0, 9, %s FROM TABLE_ WHERE id = 6",
            planted.timestamp(9),
        )
        assert planted.found() == {(Kind.LOST, 0): [(15, 16)]}
        assert planted.found("at-least-once") == {(Kind.DUPLICATED, 0): [(15, 16)]}

    def test_a_row_of_no_record(self, planted: World) -> None:
        planted.sql(
            "INSERT INTO TABLE_ SELECT 77, account, 1, tags, _kafka_topic, 1, 44, now() FROM TABLE_ WHERE id = 6"
        )
        assert planted.found() == {(Kind.PHANTOM, 1): [(44, 45)]}

    def test_a_key_in_two_partitions_may_be_either_of_them(self, planted: World) -> None:
        found = planted.sql("SELECT _kafka_partition, _kafka_offset FROM TABLE_ WHERE id = 0")
        assert found in ([(0, 10)], [(1, 5)])
        planted.sql(
            "UPDATE TABLE_ SET amount = 2, _kafka_partition = 0, _kafka_offset = 10,"
            " _kafka_timestamp = %s WHERE id = 0",
            planted.timestamp(10),
        )
        assert planted.found() == {}


@pytest.fixture(scope="module")
def dedupe(make: Callable[..., World]) -> World:
    world = make(1, sink='mode = "dedupe"\nkey = ["id"]')
    world.produce([keyed(n % 10, n) for n in range(30)])
    world.deliver(12)
    world.remember()
    return world


class TestDedupe:
    @pytest.fixture
    def planted(self, dedupe: World) -> Iterator[World]:
        yield dedupe
        dedupe.undo()

    def test_nothing_planted(self, dedupe: World) -> None:
        report = dedupe.audit()
        assert (report.verdict, report.findings) == (Verdict.HELD, ())
        assert (report.tally.read, report.tally.written, report.tally.skipped) == (30, 10, 20)
        assert (report.counts.written, report.counts.skipped) == (10, 20)

    def test_a_row_is_gone(self, planted: World) -> None:
        planted.sql("DELETE FROM TABLE_ WHERE id = 4")
        assert planted.found() == {(Kind.LOST, 0): [(4, 5)]}

    def test_a_later_record_stands_in_its_place(self, planted: World) -> None:
        planted.sql(
            "UPDATE TABLE_ SET amount = 14, _kafka_offset = 14, _kafka_timestamp = %s WHERE id = 4",
            planted.timestamp(14),
        )
        assert planted.found() == {(Kind.LOST, 0): [(4, 5)]}


# Behind a query


def test_several_rows_of_one_record(make: Callable[..., World]) -> None:
    query = "SELECT * EXCEPT (tags), explode(tags) AS tag FROM records WHERE id % 5 <> 4"
    world = make(1, transform=f'sql = "{query}"')
    world.produce((None, value(number)) for number in range(30))
    world.produce([(None, b"bad")])
    world.deliver(11)
    report = world.audit()
    assert (report.verdict, report.findings) == (Verdict.HELD, ())
    tally = report.tally
    assert (tally.read, tally.written, tally.dead, tally.skipped) == (31, 24, 1, 6)
    world.sql("DELETE FROM TABLE_ WHERE _kafka_offset = 7 AND tag = 'a'")  # one of its two rows
    world.sql("UPDATE TABLE_ SET tag = 'z' WHERE _kafka_offset = 12 AND tag = '12'")
    world.sql("UPDATE TABLE_ SET _kafka_offset = 14 WHERE _kafka_offset = 15")  # 14 gives no row
    assert world.found() == {
        (Kind.LOST, 0): [(7, 8), (15, 16)],
        (Kind.CORRUPTED, 0): [(12, 13), (14, 15)],
    }


# Unknown


def test_never_run(make: Callable[..., World]) -> None:
    report = make(1).audit()
    assert report.verdict is Verdict.UNKNOWN
    assert "has never run" in report.sentence


def test_zero_records(make: Callable[..., World]) -> None:
    world = make(1)
    world.produce([(None, value(1))])
    world.deliver()
    world.sql("DELETE FROM TABLE_")
    world.sql(
        "UPDATE avow.ledger SET position = 0, read = 0, written = 0, last_offset = NULL WHERE pipeline = %s", world.name
    )
    world.sql("DELETE FROM avow.claims WHERE pipeline = %s", world.name)
    report = world.audit()
    assert (report.verdict, report.findings) == (Verdict.UNKNOWN, ())


def test_unreachable(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "Log", partial(Log, timeout_s=3))
    world = make(1)
    world.produce([(None, value(1))])
    world.deliver()
    gone = world.pipeline().model_copy(
        update={"source": world.pipeline().source.model_copy(update={"brokers": "127.0.0.1:1"})}
    )
    report = audit(gone, lambda: world.spark)
    assert report.verdict is Verdict.UNKNOWN
    assert report.advice
    world.sql("ALTER TABLE TABLE_ DROP COLUMN account")
    report = world.audit()
    assert report.verdict is Verdict.UNKNOWN
    assert 'cannot read the sink: column "account" does not exist' in report.sentence
    world.sql("DROP TABLE TABLE_")
    report = world.audit()
    assert report.verdict is Verdict.UNKNOWN
    assert "does not exist" in report.sentence


def avow_audit(one: Scenario, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "avow", "audit", str(path), *options]
    env = {**os.environ, "DATABASE_URL": one.url, "COLUMNS": "100"}
    where = one.folder  # the report is kept there
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=env, cwd=where, check=False)


def test_the_command(scenario: Callable[..., Scenario]) -> None:
    """As a person has it: run, look, change three rows by hand, look again."""
    one = scenario(2)
    one.produce(json.dumps({"id": n, "account": "a", "amount": 1, "note": None}).encode() for n in range(200))
    path = one.file()
    one.drain(path)
    held = avow_audit(one, path, "--json")
    assert held.returncode == 0, held.stderr
    told = json.loads(held.stdout)
    assert (told["verdict"], told["findings"], told["tally"]["written"]) == ("held", [], 200)
    table = f'"{one.table}"'
    with psycopg.connect(one.url, autocommit=True) as connection:
        connection.execute(f"DELETE FROM {table} WHERE _kafka_partition = 0 AND _kafka_offset = 17")
        connection.execute(
            f"INSERT INTO {table} SELECT * FROM {table} WHERE _kafka_partition = 0 AND _kafka_offset = 40"
        )
        connection.execute(f"UPDATE {table} SET amount = 9 WHERE _kafka_partition = 1 AND _kafka_offset = 60")
    broken = avow_audit(one, path)
    assert broken.returncode == 1, broken.stderr
    for kind, partition, offset in (("lost", 0, 17), ("duplicated", 0, 40), ("corrupted", 1, 60)):
        assert re.search(rf"{kind} +{one.topic}/{partition} +1 +{offset}\s", broken.stdout), broken.stdout
    assert max(map(len, broken.stdout.splitlines())) <= 100
    kept = [found.report["verdict"] for path in files(one.folder / ".avow") if (found := read(path))]
    assert sorted(kept) == ["broken", "held"], "where the dashboard finds them"
