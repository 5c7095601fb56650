"""The contract of every sink: what a run may rely on, whatever kind it is. No engine: see ``fix_sinks``."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from tests.fix_sinks import Bench, batch, record

from avow.engines import task
from avow.engines.hooks import Hooks
from avow.engines.redrive import Redriven, redrive
from avow.engines.task import REFUSED
from avow.errors import PositionBehind, PositionMoved, Superseded, TooManyDeadLetters
from avow.guarantee import Act
from avow.ledger import Counts, OffsetRange
from avow.settings import Mode, PipelineConfig
from avow.settings.tree import DeadLetters
from avow.sinks import SINKS, dead_letters, task_sink
from avow.sinks.base import GLIMPSE_BYTES, CommittingSink, Selection, StagingSink

GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
Make = Callable[..., Bench]


def kinds(mode: Mode) -> list[ParameterSet]:
    """Every kind of sink that offers it."""
    there = [kind for kind in SINKS if mode in SINKS[kind].offers]
    return [pytest.param(kind, marks=[pytest.mark.cluster] if kind == "kafka" else []) for kind in there]


JOINED = "postgres, joined"


@pytest.fixture(params=[*kinds("append"), JOINED])
def b(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return bench("postgres", joined=True) if request.param == JOINED else bench(request.param)


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


def test_dead_letters_are_listed_by_the_beginning_of_their_values(b: Bench) -> None:
    pipeline = b.pipeline("exactly-once")
    large = b"{" + b"x" * 100_000
    with b.run(pipeline) as run:
        run.deliver({0: [record(0), large, b""], 1: [b"\xff", record(1)]})
    with dead_letters(pipeline) as letters:
        listed = letters.glimpses(Selection(), 10)
        assert [(one.partition, one.offset, one.size) for one in listed] == [(0, 1, 100_001), (0, 2, 0), (1, 0, 1)]
        assert [one.head for one in listed] == [large[:GLIMPSE_BYTES], b"", b"\xff"]
        whole = letters.select(Selection(), 10)
        assert [(one.reason, one.detail) for one in listed] == [(one.reason, one.detail) for one in whole]
        assert whole[0].value == large
        (one,) = letters.glimpses(Selection(partition=1), 1)
        assert (one.topic, one.timestamp_ms) == ("records", whole[2].timestamp_ms)
        assert letters.glimpses(Selection(reason="other"), 10) == []
        assert sum(count for _, count, _ in letters.by_reason(Selection(partition=0))) == 2


class CrashAfterWrite(Hooks):
    def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
        if point == "after-write":
            raise KeyboardInterrupt


def test_a_redrive_between_a_write_and_its_claim(b: Bench) -> None:
    """Under at-least-once a crash there leaves dead letters of records that are read again: a redrive leaves them."""
    strict = b.pipeline("at-least-once")
    lenient = strict.model_copy(update={"decode": strict.decode.model_copy(update={"unknown_fields": "ignore"})})
    records = {0: [record(0), record(1, extra=1)]}

    with b.run(strict) as run:
        run.hooks = CrashAfterWrite()
        with pytest.raises(KeyboardInterrupt):
            run.deliver(records)
    assert b.letters() == [(0, 1, "unknown-field")]
    assert redrive(lenient, Selection(), pytest.fail) == Redriven()
    with b.run(strict) as run:
        run.deliver(records)
        assert run.counts() == Counts(2, 1, 1)
    assert redrive(lenient, Selection(), pytest.fail) == Redriven(written=1)
    with b.run(strict) as run:
        assert run.counts() == Counts(2, 2)
    assert b.ids() == [0, 0, 1]
    with dead_letters(strict) as letters:
        assert letters.select(Selection(), 10) == []


def test_nested_floats_in_jsonb_are_exact_or_refused(bench: Make) -> None:
    b = bench("postgres")
    schema = "id long not null, n array<struct<f: float, d: double>>"
    pipeline = b.pipeline("exactly-once", schema=schema)
    texts = ['[{"f":0.1,"d":1e22}]', '[{"d":-0.0}]', '[{"f":1},{"f":-0}]', '[{"f":3.4028235e38,"d":5e-324}]', "null"]
    with b.run(pipeline) as run:
        run.deliver({0: [f'{{"id":{n},"n":{text}}}'.encode() for n, text in enumerate(texts)]})
        assert run.counts() == Counts(5, 3, 2, 0)
    assert b.letters() == [(0, 1, f"{REFUSED}-22P02"), (0, 2, f"{REFUSED}-22P02")], "jsonb has no -0"
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
    assert (b.ids(), b.letters()) == ([0, 2], [(0, 1, f"{REFUSED}-22P02"), (0, 3, f"{REFUSED}-22P02")])


@pytest.mark.parametrize("kind", ["postgres", pytest.param("kafka", marks=pytest.mark.cluster)])
def test_a_dead_letter_that_nobody_has_counted_is_redriven(bench: Make, kind: str) -> None:
    """Under at-least-once a superseded run may still write what another one has claimed, and redriven."""
    b = bench(kind)
    strict = b.pipeline("at-least-once")
    lenient = strict.model_copy(update={"decode": strict.decode.model_copy(update={"unknown_fields": "ignore"})})
    with b.run(strict) as run:
        run.deliver({0: [record(0), record(1, extra=1)]})
        with dead_letters(strict) as letters:
            (letter,) = letters.select(Selection(), 10)
        assert redrive(lenient, Selection(), pytest.fail) == Redriven(written=1)
        zombie = task_sink(strict, run.number, run.store.task_context())
        assert not isinstance(zombie, StagingSink)
        with zombie.act():
            zombie.bury([letter])
    assert redrive(lenient, Selection(), pytest.fail) == Redriven(written=1)
    with b.run(strict) as run:
        assert run.counts() == Counts(3, 3)
    assert b.ids() == [0, 1, 1]


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
        with pytest.raises(PositionBehind, match="would pass over 1 offsets"):
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
        with pytest.raises(PositionBehind):
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


def strict(pipeline: PipelineConfig) -> PipelineConfig:
    """The pipeline, with a share of bad records that stops it."""
    return pipeline.model_copy(update={"dead_letters": DeadLetters(max_share=0.001)})


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_nothing_is_claimed_when_too_many_records_are_bad(b: Bench, guarantee: str) -> None:
    """Also not in the healthy partition, where both are in the same acts; and not under at-most-once."""
    with b.run(strict(b.pipeline(guarantee))) as run:
        with pytest.raises(TooManyDeadLetters, match="2 of 3 records") as stopped:
            run.deliver({0: [b"{", record(1), b"{"]})
        assert "Nothing of this range was claimed" in stopped.value.advice
        assert (run.position(), run.counts()) == (0, Counts())
        with pytest.raises(TooManyDeadLetters):
            run.deliver({1: [record(10)], 0: [b"{", record(1), b"{"]}, starts={0: 0, 1: 0})
        healthy = run.counts().written
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [b"{", record(1), b"{"], 1: [record(10)]}, starts={0: 0, 1: 0})
        assert run.counts() == Counts(4, 2, 2, 0)
    assert healthy in (0, 1)
    assert set(b.ids()) == {1, 10}
    assert len(b.ids()) == 2 or (b.kind, guarantee) == ("kafka", "at-least-once")


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("kind", kinds("append"))
def test_nothing_is_claimed_when_the_transform_fails(bench: Make, kind: str, guarantee: str) -> None:
    b = bench(kind)
    transform = '[transform]\npython = "tests.transforms:%s"'
    with b.run(b.pipeline(guarantee, more=transform % "raising")) as run:
        with pytest.raises(ZeroDivisionError):
            run.deliver({0: [record(1), record(2)]})
        assert (run.position(), run.counts()) == (0, Counts())
    with b.run(b.pipeline(guarantee, more=transform % "unchanged")) as run:
        run.deliver({0: [record(1), record(2)]})
    assert b.ids() == [1, 2]


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("kind", kinds("append"))
def test_a_record_on_which_the_transform_fails_is_a_dead_letter(bench: Make, kind: str, guarantee: str) -> None:
    b = bench(kind)
    with b.run(b.pipeline(guarantee, more='[transform]\npython = "tests.transforms:fails_on_13"')) as run:
        run.deliver({0: [record(n) for n in range(10, 30)]})
        assert run.counts() == Counts(20, 19, 1, 0)
    assert b.ids() == [n for n in range(10, 30) if n != 13]
    assert b.letters() == [(0, 3, task.UNPROCESSABLE)]


@pytest.mark.parametrize("joined", [False, True])
def test_too_many_that_only_the_sink_refuses_under_at_most_once(bench: Make, joined: bool) -> None:
    """The claim was made before the sink could say so. Nothing is lost for it, and what is said is true."""
    b = bench("postgres", joined=joined)
    with b.run(strict(b.pipeline("at-most-once"))) as run:
        b.refuse("id < 0")
        with pytest.raises(TooManyDeadLetters, match="2 of 3 records") as stopped:
            run.deliver({0: [record(1), record(-1), record(-2)], 1: [record(10)]})
        assert "This range was claimed" in stopped.value.advice
        assert run.position() == 3
        run.deliver({1: [record(10)]}, starts={1: 0})
        assert run.counts() == Counts(4, 2, 2, 0)
    assert b.ids() == [1, 10]
    assert [(partition, offset) for partition, offset, _ in b.letters()] == [(0, 1), (0, 2)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_dead_letters_go_to_the_sink_in_pieces(b: Bench, guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LETTER_BYTES", 100)
    with b.run(b.pipeline(guarantee)) as run:
        run.deliver({0: [*[b"{" + b"x" * 60] * 9, record(1)]})
        assert run.counts() == Counts(10, 1, 9, 0)
    assert b.ids() == [1]
    assert [offset for _, offset, _ in b.letters()] == [*range(9)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_range_of_bad_records_is_not_read_to_its_end(bench: Make, guarantee: str) -> None:
    b = bench("postgres")
    pipeline = strict(b.pipeline(guarantee))
    planned = OffsetRange("records", 0, 0, 1_000_000)
    taken = 0

    def read(_: OffsetRange) -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for start in range(0, len(planned), 500):
            taken += 1
            yield batch([b"{"] * 500, 0, start, [None] * 500)

    with b.run(pipeline) as run:
        work = task.Work(pipeline, run.number, 0, {})
        with pytest.raises(TooManyDeadLetters, match="1500 of 1500 records"):  # of a million, 1,000 may be
            task.deliver(task.decoded(read, pipeline), planned, work, task_sink(pipeline, run.number, b""))
        assert run.position() == 0
    assert taken < 10
    assert b.letters() == []


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
        found.append((entries, rows, there.letters()))
    assert found[0] == found[1]
    entries, rows, letters = found[1]
    assert len(rows) == sum(entry.counts.written for entry in entries.values()) > 0
    assert len(letters) == sum(entry.counts.dead for entry in entries.values())
    reasons = {"not-json", f"{REFUSED}-23514"} | (set() if seed % 2 else {"tombstone"})
    assert {reason for *_, reason in letters} == reasons
    assert bool(sum(entry.counts.skipped for entry in entries.values())) == bool(seed % 2)


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
def test_by_key_a_batch_of_nothing_but_dead_letters(upserting: Bench, mode: str) -> None:
    b = upserting
    with b.run(b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["id"]'), 1) as run:
        for records in ([b"bad"], [record(1)], [b"bad", b"bad"]):
            run.deliver({0: records})
        assert (run.position(), run.counts()) == (4, Counts(4, 1, 3))
    assert (b.ids(), len(b.letters())) == ([1], 3)


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
def test_a_key_may_have_any_name(upserting: Bench, mode: str) -> None:
    b = upserting
    pipeline = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["number"]', schema="number long not null, x long")
    with b.run(pipeline, 1) as run:
        for start in (0, 4):
            run.deliver({0: [json.dumps({"number": n % 3, "x": n}).encode() for n in range(start, start + 4)]})
    wanted = {0: 0, 1: 1, 2: 2} if mode == "dedupe" else {0: 6, 1: 7, 2: 5}
    assert {row["number"]: row["x"] for row in b.rows()} == wanted


# Two keys of each type; the first in two spellings where one value has them.
KEYS: dict[str, tuple[object, object, object]] = {
    "boolean": (True, True, False),
    "float": (0.0, -0.0, 0.5),
    "double": (-0.0, 0.0, 1e300),
    "decimal(38,8)": ("123456789012345678901234567890.12345678", "123456789012345678901234567890.12345678", "0.5"),
    "string": ("it's \\ \u00e9" * 20, "it's \\ \u00e9" * 20, ""),
    "binary": ("AP8=", "AP8=", ""),
    "date": ("0001-01-01", "0001-01-01", "9999-12-31"),
    "timestamp": ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z", "2026-01-01T00:00:00Z"),
    "timestamp_ntz": ("9999-12-31T23:59:59.999999", "9999-12-31T23:59:59.999999", "2026-01-01T00:00:00"),
}


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
@pytest.mark.parametrize("type_", KEYS)
def test_a_key_may_have_any_type(upserting: Bench, type_: str, mode: str) -> None:
    """It is found again in the table: in a file of its own, and beside another."""
    b, (first, again, other) = upserting, KEYS[type_]
    pipeline = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["k"]', schema=f"k {type_} not null, x long")

    def values(start: int, *keys: object) -> list[bytes]:
        return [json.dumps({"k": key, "x": start + n}).encode() for n, key in enumerate(keys)]

    with b.run(pipeline, 1) as run:
        run.deliver({0: values(0, first)})
        run.deliver({0: values(1, again)})
        run.deliver({0: values(2, first, other, again)})
        run.deliver({0: values(5, other, again)})
        assert run.counts() == (Counts(7, 2, 0, 5) if mode == "dedupe" else Counts(7, 7)), b.letters()
    assert sorted(row["x"] for row in b.rows()) == ([0, 3] if mode == "dedupe" else [5, 6])


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
