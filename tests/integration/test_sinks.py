"""Our own sinks keep the contract of every sink (``avow.testing``), and what is PostgreSQL's own beside it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from tests.fix_sinks import Bench

from avow.engines import task
from avow.engines.task import REFUSED
from avow.errors import TooManyDeadLetters
from avow.ledger import Counts, OffsetRange
from avow.sinks import SINKS, SinkPlugin, task_sink
from avow.testing.sinks import (
    GUARANTEES,
    ActingSinkContract,
    KeyedSinkContract,
    SinkContract,
    batch,
    record,
    with_max_share,
)

Make = Callable[..., Bench]
JOINED = "postgres, joined"


def kinds(which: Callable[[SinkPlugin], bool] = lambda _: True) -> list[ParameterSet]:
    there = [kind for kind, plugin in SINKS.items() if which(plugin)]
    return [pytest.param(kind, marks=[pytest.mark.cluster] if kind == "kafka" else []) for kind in there]


def made(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench("postgres", joined=True) if request.param == JOINED else bench(request.param)


class TestEverySink(SinkContract):
    b = pytest.fixture(params=[*kinds(), JOINED])(staticmethod(made))


class TestSinksWhoseTasksAct(ActingSinkContract):
    b = pytest.fixture(params=[*kinds(lambda plugin: not plugin.commits_per_batch), JOINED])(staticmethod(made))


class TestSinksWithAKey(KeyedSinkContract):
    b = pytest.fixture(params=kinds(lambda plugin: "upsert" in plugin.offers))(staticmethod(made))


def test_nested_floats_in_jsonb_are_exact_or_refused(bench: Make) -> None:
    b = bench("postgres")
    schema = "id long not null, n array<struct<f: float, d: double>>"
    pipeline = b.pipeline("exactly-once", schema=schema)
    texts = ['[{"f":0.1,"d":1e22}]', '[{"d":-0.0}]', '[{"f":1},{"f":-0}]', '[{"f":3.4028235e38,"d":5e-324}]', "null"]
    with b.run(pipeline) as run:
        run.deliver({0: [f'{{"id":{n},"n":{text}}}'.encode() for n, text in enumerate(texts)]})
        assert run.counts() == Counts(5, 3, 2, 0)
    assert b.dead_letters() == [(0, 1, f"{REFUSED}-22P02"), (0, 2, f"{REFUSED}-22P02")], "jsonb has no -0"
    # By PostgreSQL's own text: what numeric holds is exact.
    first, last, none = (row["n"] for row in b._query(f'SELECT n::text FROM "{b.table}" ORDER BY id'))
    assert first == '[{"d": 10000000000000000000000, "f": 0.1}]'
    assert json.loads(last, parse_int=float) == [{"d": 5e-324, "f": 3.4028235e38}]
    assert none is None


def test_nested_nan_that_a_transform_makes_is_a_dead_letter(bench: Make) -> None:
    b = bench("postgres")
    schema = "id long not null, n array<double>"
    pipeline = b.pipeline("exactly-once", schema=schema, more='[transform]\npython = "tests.transforms:with_nan"')
    with b.run(pipeline) as run:
        run.deliver({0: [f'{{"id":{n},"n":[0.5]}}'.encode() for n in range(4)]})
    assert (b.ids(), b.dead_letters()) == ([0, 2], [(0, 1, f"{REFUSED}-22P02"), (0, 3, f"{REFUSED}-22P02")])


@pytest.mark.parametrize("joined", [False, True])
def test_too_many_that_only_the_sink_refuses_under_at_most_once(bench: Make, joined: bool) -> None:
    """The claim was made before the sink could say so. Nothing is lost for it, and what is said is true."""
    b = bench("postgres", joined=joined)
    with b.run(with_max_share(b.pipeline("at-most-once"))) as run:
        b.refuse("id < 0")
        with pytest.raises(TooManyDeadLetters, match="2 of 3 records") as stopped:
            run.deliver({0: [record(1), record(-1), record(-2)], 1: [record(10)]})
        assert "This range was claimed" in stopped.value.advice
        assert run.position() == 3
        run.deliver({1: [record(10)]}, starts={1: 0})
        assert run.counts() == Counts(4, 2, 2, 0)
    assert b.ids() == [1, 10]
    assert [(partition, offset) for partition, offset, _ in b.dead_letters()] == [(0, 1), (0, 2)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_range_of_bad_records_is_not_read_to_its_end(bench: Make, guarantee: str) -> None:
    b = bench("postgres")
    pipeline = with_max_share(b.pipeline(guarantee))
    planned = OffsetRange("records", 0, 0, 1_000_000)
    taken = 0

    def read(_: OffsetRange) -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for start in range(0, len(planned), 500):
            taken += 1
            yield batch([b"{"] * 500, 0, start, [None] * 500)

    with b.run(pipeline) as run:
        work = task.BatchWork(pipeline, run.number, 0, {})
        with pytest.raises(TooManyDeadLetters, match="1500 of 1500 records"):  # of a million, 1,000 may be
            task.deliver(task.decoded(read, pipeline), planned, work, task_sink(pipeline, run.number, b""))
        assert run.position() == 0
    assert taken < 10
    assert b.dead_letters() == []


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("seed", range(5))
def test_joined_ranges_come_to_the_same_as_one_after_the_other(bench: Make, guarantee: str, seed: int) -> None:
    """Good, bad and null records, some that only the table refuses, replays in part and as a whole, empty ranges."""
    chance = random.Random(f"{guarantee} {seed}")
    makes = (record, lambda _: b"{", lambda _: None, lambda n: record(-n - 1))
    numbers = itertools.count()
    log: dict[int, list[bytes | None]] = {p: [] for p in range(4)}
    plans = []
    for _ in range(8):
        starts, records = {}, {}
        for partition, kept in chance.sample(sorted(log.items()), chance.randint(1, 4)):
            starts[partition] = max(0, len(kept) - chance.choice([0, 0, 3, 10]))
            kept += [
                make(next(numbers)) for make in chance.choices(makes, [9, 1, 1, 1], k=chance.choice([0, 1, 5, 90]))
            ]
            records[partition] = kept[starts[partition] :]
        plans.append((starts, records))
    found = []
    for joined in (False, True):
        there = bench("postgres", joined=joined)
        pipeline = there.pipeline(guarantee)
        decode = pipeline.decode.model_copy(update={"tombstones": "skip" if seed % 2 else "dead-letter"})
        with there.run(pipeline.model_copy(update={"decode": decode}), partitions=4) as run:
            there.refuse("id < 0")
            for starts, records in plans:
                run.deliver(records, starts=starts)
            entries = {where: replace(entry, run=0) for where, entry in run.entries().items()}
        rows = sorted((row["id"], row["_kafka_partition"], row["_kafka_offset"]) for row in there.rows())
        found.append((entries, rows, there.dead_letters()))
    assert found[0] == found[1]
    entries, rows, letters = found[1]
    assert len(rows) == sum(entry.counts.written for entry in entries.values()) > 0
    assert len(letters) == sum(entry.counts.dead for entry in entries.values())
    reasons = {"not-json", f"{REFUSED}-23514"} | (set() if seed % 2 else {"tombstone"})
    assert {reason for *_, reason in letters} == reasons
    assert bool(sum(entry.counts.skipped for entry in entries.values())) == bool(seed % 2)
