"""The contract of every sink: what a run may rely on, whatever kind it is. No engine: see ``fix_sinks``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet
from tests.fix_sinks import Bench, record

from avow.errors import PositionMoved, ProtocolViolation, Superseded
from avow.guarantee import Act
from avow.ledger import Counts, OffsetRange
from avow.settings import Mode
from avow.sinks import SINKS
from avow.sinks.base import CommittingSink

GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
Make = Callable[[str], Bench]


def kinds(mode: Mode) -> list[ParameterSet]:
    """Every kind of sink that offers it."""
    there = [kind for kind in SINKS if mode in SINKS[kind].offers]
    return [pytest.param(kind, marks=[pytest.mark.cluster] if kind == "kafka" else []) for kind in there]


@pytest.fixture(params=kinds("append"))
def b(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_append_and_dead_letters(b: Bench, guarantee: str) -> None:
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [record(n) for n in range(10)], 1: [record(100), b"{", record(102)]})
        run.deliver({0: [record(10, tags=["a", None])], 1: [b"", b"x"]})
        assert (run.position(0), run.position(1)) == (11, 5)
        assert run.counts() == Counts(16, 13, 3, 0)
    assert b.ids() == [*range(11), 100, 102]
    assert b.letters() == [(1, 1, "not-json"), (1, 3, "empty"), (1, 4, "not-json")]
    row = b.rows()[10]
    assert (row["account"], row["amount"], row["tags"]) == ("acc-3", 2.5, ["a", None])
    assert (row["_kafka_topic"], row["_kafka_partition"], row["_kafka_offset"]) == ("records", 0, 10)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_second_run_goes_on_where_the_first_ended(b: Bench, guarantee: str) -> None:
    pipeline = b.pipeline(guarantee)
    for number in range(3):
        with b.run(pipeline) as run:
            assert run.number == number + 1
            assert run.position() == number * 5
            run.deliver({0: [record(n) for n in range(number * 5, number * 5 + 5)]})
    assert b.ids() == [*range(15)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_replay_is_nothing(b: Bench, guarantee: str) -> None:
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [record(n) for n in range(5)]})
        run.deliver({0: [record(n) for n in range(5)]}, starts={0: 0})
        assert (run.position(), run.counts()) == (5, Counts(5, 5))
    assert b.ids() == [*range(5)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_an_overlap_is_written_once(b: Bench, guarantee: str) -> None:
    """Where tasks act, the part below the position is left out; where the driver acts, the attempt starts again."""
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [record(n) for n in range(5)]})
        try:
            run.deliver({0: [record(n) for n in range(3, 8)]}, starts={0: 3})
        except PositionMoved:
            run.deliver({0: [record(n) for n in range(5, 8)]})
        assert (run.position(), run.counts()) == (8, Counts(8, 8))
    assert b.ids() == [*range(8)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_gap_is_refused(b: Bench, guarantee: str) -> None:
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [record(0)]})
        with pytest.raises(ProtocolViolation, match="would pass over 1 offsets"):
            run.deliver({0: [record(2)]}, starts={0: 2})
        assert run.position() == 1
    assert b.ids() == [0]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_an_older_run_is_fenced(b: Bench, guarantee: str) -> None:
    pipeline = b.pipeline(guarantee)
    with b.run(pipeline) as older:
        older.deliver({0: [record(0)]})
        with b.run(pipeline) as newer:
            with pytest.raises(Superseded, match="superseded by run 2"):
                older.deliver({0: [record(1)]})
            newer.deliver({0: [record(1), b"bad"]})
        with pytest.raises(Superseded):
            older.deliver({0: [record(1), b"bad"]}, starts={0: 1})
    assert b.ids() == [0, 1]
    assert len(b.letters()) == 1


def test_a_range_that_no_task_claims(b: Bench) -> None:
    with b.run() as run:
        run.deliver({0: [record(0)]})
        run.store.claim(OffsetRange("records", 0, 1, 7), run.number, 1)
        run.store.claim(OffsetRange("records", 0, 1, 7), run.number, 1)  # again: nothing
        run.store.claim(OffsetRange("records", 0, 7, 9), run.number, 1, Counts(2, skipped=2))
        assert (run.position(), run.counts()) == (9, Counts(3, 1, 0, 2))
        with pytest.raises(ProtocolViolation):
            run.store.claim(OffsetRange("records", 0, 10, 11), run.number, 1)


def test_the_guarantee_can_change(b: Bench) -> None:
    for number, guarantee in enumerate(GUARANTEES):
        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [record(number)]})
    assert b.ids() == [0, 1, 2]


def test_the_fingerprint_of_the_last_record_is_kept(b: Bench) -> None:
    with b.run() as run:
        run.deliver({0: [record(0), record(1)]})
        before = run.entries()
    with b.run() as run:
        after = run.entries()
    assert [entry.last for entry in after.values()] == [entry.last for entry in before.values()]
    first = next(iter(after.values()))
    assert first.last is not None
    assert first.last.offset == 1
    assert first.topic_id == "id"


# By key.


def value(number: int, text: str) -> bytes:
    return json.dumps({"id": number, "account": text}).encode()


@pytest.fixture(params=kinds("dedupe"))
def deduping(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_dedupe_first_wins(deduping: Bench, guarantee: str) -> None:
    b = deduping
    pipeline = b.pipeline(guarantee, 'mode = "dedupe"', 'key = ["id"]')
    with b.run(pipeline, 1) as run:
        run.deliver({0: [value(n % 4, f"try-{n}") for n in range(8)]})
        run.deliver({0: [value(n % 6, f"later-{n}") for n in range(8)]})
        assert run.counts() == Counts(16, 6, 0, 10)
    assert {row["id"]: row["account"] for row in b.rows()} == {
        **{n: f"try-{n}" for n in range(4)},
        4: "later-4",
        5: "later-5",
    }
    assert len(b.rows()) == 6


@pytest.fixture(params=kinds("upsert"))
def upserting(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench(request.param)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_upsert_last_wins_and_a_null_value_deletes(upserting: Bench, guarantee: str) -> None:
    b = upserting
    pipeline = b.pipeline(guarantee, 'mode = "upsert"', 'key = ["id"]')
    with b.run(pipeline, 1) as run:
        run.deliver(
            {0: [value(n % 4, f"try-{n}") for n in range(8)]}, keys={0: [str(n % 4).encode() for n in range(8)]}
        )
        run.deliver(
            {0: [None, value(2, "again"), None, value(9, "new"), value(3, "back")]},
            keys={0: [b"1", b"2", b"3", b"9", b"3"]},
        )
        run.deliver(
            {0: [None, None]}, keys={0: [b"77", b"78"]}
        )  # nobody is deleted, and the position moves all the same
        assert (run.position(), run.counts()) == (15, Counts(15, 15))
    assert {row["id"]: row["account"] for row in b.rows()} == {0: "try-4", 2: "again", 3: "back", 9: "new"}
    assert len(b.rows()) == 4


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
def test_a_key_may_have_any_name(upserting: Bench, mode: str) -> None:
    b = upserting
    pipeline = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["number"]', schema="number long not null, x long")
    with b.run(pipeline, 1) as run:
        for start in (0, 4):
            run.deliver({0: [json.dumps({"number": n % 3, "x": n}).encode() for n in range(start, start + 4)]})
    wanted = {0: 0, 1: 1, 2: 2} if mode == "dedupe" else {0: 6, 1: 7, 2: 5}
    assert {row["number"]: row["x"] for row in b.rows()} == wanted


def test_upsert_again_changes_nothing(upserting: Bench) -> None:
    """Under at-least-once a crash after the write brings the same records again: the offset guard leaves the rows."""
    b = upserting
    pipeline = b.pipeline("at-least-once", 'mode = "upsert"', 'key = ["id"]')
    with b.run(pipeline, 1) as run:
        run.deliver({0: [value(n % 3, f"v{n}") for n in range(9)]})
        if isinstance(run.store, CommittingSink):
            _, staged = run.stage({0: [value(0, "old"), value(0, "new")]})
            for _ in range(3):
                run.store.commit(frozenset({Act.WRITE}), staged, run.number, 1, last=False, answered=lambda: None)
        else:
            run.deliver({0: [value(0, "old"), value(0, "new")]})
    with b.run(pipeline, 1) as run:
        run.deliver({0: [value(0, "old"), value(0, "new")]}, starts={0: 9})
        run.deliver({0: [value(1, "last")]}, starts={0: 11})
    assert {row["id"]: row["account"] for row in b.rows()} == {0: "new", 1: "last", 2: "v8"}
    assert len(b.rows()) == 3
