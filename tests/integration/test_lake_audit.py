"""A lake under audit, and what a Spark task reports of one: the functions that Spark's tasks run, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import polars as pl
import pyarrow as pa
import pytest
from tests.fix_sinks import Bench, iceberg_table, overwrite_lake

from avow.audit.compare import Compared
from avow.audit.partition import ComparisonJob, Scope, compare_partition
from avow.engines.spark import _REPORT, _reported
from avow.engines.task import BatchWork, commit_task_outputs, decoded
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks import audit_reader
from avow.sinks.base import CommittingSink
from avow.sinks.iceberg.table import PROPERTIES
from avow.testing.sinks import EVERY, TOPIC, batch, every, record

WHERE = TopicPartition(TOPIC, 0)
Make = Callable[[str], Bench]
Values = list[bytes | None]


@pytest.fixture(params=["delta", "iceberg"])
def b(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


def compared(pipeline: PipelineConfig, values: Values) -> Compared:
    """What an audit's task finds, given the records of partition 0."""
    planned = OffsetRange(TOPIC, 0, 0, len(values))
    with audit_reader(pipeline) as reading:
        snapshot, json_columns = reading.snapshot, reading.json_columns(pipeline.decode.columns.fields)
    job = ComparisonJob(
        work=BatchWork(pipeline, -1, 0, {WHERE: planned}),
        snapshot=snapshot,
        scopes={WHERE: Scope(0, 0, len(values), len(values), len(values), False)},
        columns=(*(field.name for field in pipeline.decode.columns), *pipeline.sink.lineage),
        json_columns=json_columns,
        key_types={},
        by="append",
    )
    made = batch(values, 0, 0, [None] * len(values))
    with audit_reader(pipeline, snapshot) as reading:
        (found,) = compare_partition(job, WHERE, decoded(lambda _: iter([made]), pipeline)(planned), reading)
    assert isinstance(found, Compared)
    return found


def test_every_type_is_the_same_to_the_audit(b: Bench) -> None:
    values: Values = [*(every(n) for n in range(5)), b"{}", b"bad", b'{"n": []}', b'{"n": null, "h": "\\u0000"}']
    pipeline = b.pipeline(schema=EVERY)
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: values[:3]})
        run.deliver({0: values[3:]})
    found = compared(pipeline, values)
    assert found.findings == ()
    assert (found.tally.read, found.tally.written, found.tally.dead) == (9, 8, 1)


def test_the_ledger_and_the_counts_that_an_audit_reads(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPERTIES, "write.metadata.previous-versions-max", "2")  # a few commits for a hundred
    pipeline = b.pipeline()
    with audit_reader(pipeline) as reading:
        assert reading.known() == {}
    with b.run(pipeline, partitions=2) as run:
        run.deliver({0: [record(0), b"bad", record(2)], 1: [record(100)]})
        run.deliver({0: [record(3), b"bad"]})
        with audit_reader(pipeline) as reading:
            for number in range(5, 5 + 2 * 4, 2):  # later than the moment that is read
                run.deliver({0: [record(number), b"bad"]})
            with audit_reader(pipeline, reading.snapshot) as joined:
                for one in (reading, joined):
                    assert one.known()[WHERE].entry.position == 5
                    assert one.known()[WHERE].entry.counts == Counts(5, 3, 2)
                    assert one.dead_letters(WHERE).tolist() == [1, 4]
                    assert one.row_counts() == {WHERE: 3, TopicPartition(TOPIC, 1): 1}
                    assert one.rows_below(WHERE, 3) == 2
                    offsets = [part.column(0).to_pylist() for part in one.rows(WHERE, ["_kafka_offset"], 1)]
                    assert [offset for part in offsets for offset in part] == [2, 3]


def test_planted_anomalies_are_found(b: Bench) -> None:
    pipeline = b.pipeline()
    values: Values = [record(n, tags=["a"] if n % 2 else None) for n in range(100)]
    with b.run(pipeline, partitions=1) as run:
        run.deliver({0: values})
    there = b.frame()
    assert compared(pipeline, values).findings == ()
    planted = there.filter(~pl.col("id").is_in([7, 8])).with_columns(
        pl.when(pl.col("id") == 50).then(0.5).otherwise(pl.col("amount")).alias("amount")
    )
    overwrite_lake(b.kind, b.folder, b.table, pl.concat([planted, there.filter(pl.col("id") == 20)]))
    found = {
        str(one.kind): [(span.start, span.until) for span in one.spans] for one in compared(pipeline, values).findings
    }
    assert found == {"lost": [(7, 9)], "duplicated": [(20, 21)], "corrupted": [(50, 51)]}


def test_a_renamed_column_is_not_corrupted(bench: Make) -> None:
    b = bench("iceberg")
    with b.run(b.pipeline(schema="id long not null, mine array<string>"), partitions=1) as run:
        run.deliver({0: [b'{"id": 0, "mine": ["a", null]}', b'{"id": 1, "mine": null}', b'{"id": 2, "mine": []}']})
    with iceberg_table(b.folder, b.table).update_schema() as update:
        update.rename_column("mine", "ours")
    values: Values = [b'{"id": 0, "ours": ["a", null]}', b'{"id": 1, "ours": null}', b'{"id": 2, "ours": []}']
    pipeline = b.pipeline(schema="id long not null, ours array<string>")
    assert compared(pipeline, values).findings == ()
    assert [str(one.kind) for one in compared(pipeline, [b'{"id": 0}', *values[1:]]).findings] == ["corrupted"]


def test_what_a_spark_task_reports_is_what_the_driver_commits(b: Bench) -> None:
    pipeline = b.pipeline()
    with b.run(pipeline, partitions=1) as run:
        planned = OffsetRange(TOPIC, 0, 0, 3)
        work = BatchWork(pipeline, run.number, 0, {WHERE: planned}, run.store.task_context())
        made = batch([record(0), b"bad", record(2)], 0, 0, [None] * 3)
        report = _reported(WHERE, work, decoded(lambda _: iter([made]), pipeline))
        assert report.schema == _REPORT
        told = pa.Table.from_batches([report]).to_pylist()[0]
        assert (told["topic"], told["partition"], told["stop"]) == (TOPIC, 0, None)
        assert isinstance(run.store, CommittingSink)
        commit_task_outputs([pickle.loads(told["task_output"])], work, run.store)
        assert run.counts() == Counts(3, 2, 1)
    assert b.ids() == [0, 2]
