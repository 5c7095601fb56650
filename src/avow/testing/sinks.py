"""The contract of every sink, as pytest classes: what a run may rely on, whatever kind it is.

A sink's test module says in a ``SinkBench`` how its ``[sink]`` section is written and how rows and dead letters are
read back without its own code, gives that as fixture ``b``, and subclasses the classes of tests that concern it:

* ``SinkContract``: every sink.
* ``ActingSinkContract``: a sink whose tasks act by themselves (``TaskSink``).
* ``KeyedSinkContract``: a sink that offers dedupe and upsert.

There is no engine and no Kafka: see ``bench``. ``examples/sqlite-sink`` shows how it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import pyarrow as pa
import pytest

from avow import sinks
from avow.audit.compare import Compared
from avow.audit.judge import examine
from avow.audit.partition import ComparisonJob, Scope, compare_partition
from avow.client_cache import close_clients
from avow.engines import task
from avow.engines.columns import sink_columns
from avow.engines.hooks import Hooks
from avow.engines.redrive import Redriven, redrive
from avow.errors import PositionBehind, PositionMoved, Superseded, TooManyDeadLetters, TopicRecreated
from avow.findings import Finding
from avow.guarantee import Act
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, LogView, OffsetRange
from avow.settings import PipelineConfig
from avow.settings.tree import DeadLetters
from avow.sinks import dead_letters, plugin_of
from avow.sinks.base import PREVIEW_BYTES, CommittingSink, Selection, StagingSink, TaskSink
from avow.testing.bench import EVERY, SCHEMA, TOPIC, Records, Runner, SinkBench, batch, every, record

__all__ = [
    "EVERY",
    "GUARANTEES",
    "SCHEMA",
    "TOPIC",
    "ActingSinkContract",
    "KeyedSinkContract",
    "Runner",
    "SinkBench",
    "SinkContract",
    "audit_findings",
    "batch",
    "every",
    "record",
    "with_max_share",
]

GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]


def with_max_share(pipeline: PipelineConfig, share: float = 0.001) -> PipelineConfig:
    """The pipeline, with a share of bad records that stops it."""
    return pipeline.model_copy(update={"dead_letters": DeadLetters(max_share=share)})


def lenient(pipeline: PipelineConfig) -> PipelineConfig:
    """The pipeline, taking what it refused for a field that is not declared."""
    return pipeline.model_copy(update={"decode": pipeline.decode.model_copy(update={"unknown_fields": "ignore"})})


def value(number: int, text: str) -> bytes:
    return json.dumps({"id": number, "account": text}).encode()


def audit_findings(pipeline: PipelineConfig, records: Records) -> list[Finding]:
    """What an audit of the sink finds, if these are all records of the topic. For pipelines without a key."""
    ends = {TopicPartition(TOPIC, partition): len(values) for partition, values in records.items()}
    fields, _ = sink_columns(pipeline)
    with sinks.audit_reader(pipeline) as reader, sinks.audit_reader(pipeline, reader.snapshot) as joined:
        known = reader.known()
        views = {tp: LogView(tp.topic, tp.partition, "id", 0, end, known[tp].entry.last) for tp, end in ends.items()}
        examined = {tp: examine(known[tp], views[tp], end, skip_lost=False) for tp, end in ends.items()}
        job = ComparisonJob(
            task.BatchWork(pipeline, -1, 0, {}),
            reader.snapshot,
            {
                tp: Scope(tp.partition, one.start, one.until, one.behind_from, one.readable_until, False)
                for tp, one in examined.items()
            },
            reader.columns([field.name for field in fields]),
            reader.json_columns(fields),
            {},
            "append",
        )
        found = [finding for one in examined.values() for finding in one.findings]
        for tp in ends:
            values = records[tp.partition]
            prepared = task.decode_batch(batch(values, tp.partition, 0, [None] * len(values)), pipeline)
            for result in compare_partition(job, tp, [prepared], joined):
                assert isinstance(result, Compared)
                found += result.findings
        return [*found, *reader.order_findings()]


class CrashAfterWrite(Hooks):
    def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
        if point == "after-write":
            raise KeyboardInterrupt


class SinkContract:
    """What every sink does. A subclass's module has a fixture ``b``: a ``SinkBench`` of its kind."""

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_append_and_dead_letters(self, b: SinkBench, guarantee: str) -> None:
        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [record(n) for n in range(10)], 1: [record(100), b"{", record(102)]})
            run.deliver({0: [record(10, tags=["a", None])], 1: [b"", b"x"]})
            assert (run.position(0), run.position(1)) == (11, 5)
            assert run.counts() == Counts(16, 13, 3, 0)
        assert b.ids() == [*range(11), 100, 102]
        assert b.dead_letters() == [(1, 1, "not-json"), (1, 3, "empty"), (1, 4, "not-json")]
        row = b.rows()[10]
        assert (row["account"], row["amount"], row["tags"]) == ("acc-3", 2.5, ["a", None])
        assert (row["_kafka_topic"], row["_kafka_partition"], row["_kafka_offset"]) == ("records", 0, 10)

    def test_dead_letters_are_listed_by_the_beginning_of_their_values(self, b: SinkBench) -> None:
        pipeline = b.pipeline("exactly-once")
        large = b"{" + b"x" * 100_000
        with b.run(pipeline) as run:
            run.deliver({0: [record(0), large, b""], 1: [b"\xff", record(1)]})
        with dead_letters(pipeline) as letters:
            listed = letters.previews(Selection(), 10)
            assert [(one.partition, one.offset, one.size) for one in listed] == [(0, 1, 100_001), (0, 2, 0), (1, 0, 1)]
            assert [one.head for one in listed] == [large[:PREVIEW_BYTES], b"", b"\xff"]
            whole = letters.select(Selection(), 10)
            assert [(one.reason, one.detail) for one in listed] == [(one.reason, one.detail) for one in whole]
            assert whole[0].value == large
            (one,) = letters.previews(Selection(partition=1), 1)
            assert (one.topic, one.timestamp_ms) == ("records", whole[2].timestamp_ms)
            assert letters.previews(Selection(reason="other"), 10) == []
            assert sum(count for _, count, _ in letters.by_reason(Selection(partition=0))) == 2

    def test_a_redrive_between_a_write_and_its_claim(self, b: SinkBench) -> None:
        """Under at-least-once a crash there leaves dead letters of records that are read again: those stay."""
        strict = b.pipeline("at-least-once")
        records = {0: [record(0), record(1, extra=1)]}

        with b.run(strict) as run:
            run.hooks = CrashAfterWrite()
            with pytest.raises(KeyboardInterrupt):
                run.deliver(records)
        assert b.dead_letters() == [(0, 1, "unknown-field")]
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven()
        with b.run(strict) as run:
            run.deliver(records)
            assert run.counts() == Counts(2, 1, 1)
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(written=1)
        with b.run(strict) as run:
            assert run.counts() == Counts(2, 2)
        assert b.ids() == [0, 0, 1]
        with dead_letters(strict) as letters:
            assert letters.select(Selection(), 10) == []

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_a_second_run_goes_on_where_the_first_ended(self, b: SinkBench, guarantee: str) -> None:
        pipeline = b.pipeline(guarantee)
        for number in range(3):
            with b.run(pipeline) as run:
                assert run.number == number + 1
                assert run.position() == number * 5
                run.deliver({0: [record(n) for n in range(number * 5, number * 5 + 5)]})
        assert b.ids() == [*range(15)]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_a_replay_is_nothing(self, b: SinkBench, guarantee: str) -> None:
        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [record(n) for n in range(5)]})
            run.deliver({0: [record(n) for n in range(5)]}, starts={0: 0})
            assert (run.position(), run.counts()) == (5, Counts(5, 5))
        assert b.ids() == [*range(5)]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_an_overlap_is_written_once(self, b: SinkBench, guarantee: str) -> None:
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
    def test_a_gap_is_refused(self, b: SinkBench, guarantee: str) -> None:
        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [record(0)]})
            with pytest.raises(PositionBehind, match="would skip 1 offsets"):
                run.deliver({0: [record(2)]}, starts={0: 2})
            assert run.position() == 1
        assert b.ids() == [0]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_an_older_run_is_fenced(self, b: SinkBench, guarantee: str) -> None:
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
        assert len(b.dead_letters()) == 1

    def test_a_range_that_no_task_claims(self, b: SinkBench) -> None:
        with b.run() as run:
            run.deliver({0: [record(0)]})
            run.store.claim(OffsetRange("records", 0, 1, 7), run.number, 1)
            run.store.claim(OffsetRange("records", 0, 1, 7), run.number, 1)  # again: nothing
            run.store.claim(OffsetRange("records", 0, 7, 9), run.number, 1, Counts(2, skipped=2))
            assert (run.position(), run.counts()) == (9, Counts(3, 1, 0, 2))
            with pytest.raises(PositionBehind):
                run.store.claim(OffsetRange("records", 0, 10, 11), run.number, 1)

    def test_the_guarantee_can_change(self, b: SinkBench) -> None:
        for number, guarantee in enumerate(GUARANTEES):
            with b.run(b.pipeline(guarantee)) as run:
                run.deliver({0: [record(number)]})
        assert b.ids() == [0, 1, 2]

    def test_the_fingerprint_of_the_last_record_is_kept(self, b: SinkBench) -> None:
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

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_nothing_is_claimed_when_too_many_records_are_bad(self, b: SinkBench, guarantee: str) -> None:
        """Also not in the healthy partition, where both are in the same acts; and not under at-most-once."""
        with b.run(with_max_share(b.pipeline(guarantee))) as run:
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
        atomic = plugin_of(run.pipeline).atomic_writes
        assert len(b.ids()) == 2 or (not atomic and guarantee == "at-least-once")

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_nothing_is_claimed_when_the_transform_fails(self, b: SinkBench, guarantee: str) -> None:
        transform = '[transform]\npython = "avow.testing.bench:%s"'
        with b.run(b.pipeline(guarantee, more=transform % "raising")) as run:
            with pytest.raises(ZeroDivisionError):
                run.deliver({0: [record(1), record(2)]})
            assert (run.position(), run.counts()) == (0, Counts())
        with b.run(b.pipeline(guarantee, more=transform % "unchanged")) as run:
            run.deliver({0: [record(1), record(2)]})
        assert b.ids() == [1, 2]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_a_record_on_which_the_transform_fails_is_a_dead_letter(self, b: SinkBench, guarantee: str) -> None:
        with b.run(b.pipeline(guarantee, more='[transform]\npython = "avow.testing.bench:fails_on_13"')) as run:
            run.deliver({0: [record(n) for n in range(10, 30)]})
            assert run.counts() == Counts(20, 19, 1, 0)
        assert b.ids() == [n for n in range(10, 30) if n != 13]
        assert b.dead_letters() == [(0, 3, task.UNPROCESSABLE)]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_dead_letters_go_to_the_sink_in_pieces(
        self, b: SinkBench, guarantee: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(task, "DEAD_LETTER_BYTES", 100)
        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [*[b"{" + b"x" * 60] * 9, record(1)]})
            assert run.counts() == Counts(10, 1, 9, 0)
        assert b.ids() == [1]
        assert [offset for _, offset, _ in b.dead_letters()] == [*range(9)]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_a_redrive_brings_dead_letters_in_once(self, b: SinkBench, guarantee: str) -> None:
        strict = b.pipeline(guarantee)
        with b.run(strict) as run:
            run.deliver({0: [record(0), record(1, extra=1), b"{"], 1: [record(2, extra=1), record(3)]})
        assert redrive(lenient(strict), Selection(partition=0), pytest.fail) == Redriven(written=1, still_dead=1)
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(written=1, still_dead=1)
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(still_dead=1)
        assert b.ids() == [0, 1, 2, 3]
        with dead_letters(strict) as letters:
            assert [(one.offset, one.value) for one in letters.select(Selection(), 10)] == [(2, b"{")]
            assert letters.partitions(Selection()) == [TopicPartition(TOPIC, 0)]
        with b.run(strict) as run:
            assert run.counts() == Counts(5, 4, 1)

    def test_a_redrive_leaves_what_still_fails(self, b: SinkBench) -> None:
        """One record on which the transform raises does not keep the others from being redriven."""
        strict = b.pipeline(more='[transform]\npython = "avow.testing.bench:fails_on_13"')
        with b.run(strict) as run:
            run.deliver({0: [record(12, extra=1), record(13), record(14, extra=1)], 1: [record(15, extra=1)]})
        assert [reason for *_, reason in b.dead_letters()].count(task.UNPROCESSABLE) == 1
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(written=3, still_dead=1)
        assert b.ids() == [12, 14, 15]
        with dead_letters(strict) as letters:
            assert [one.reason for one in letters.select(Selection(), 10)] == [task.UNPROCESSABLE]
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(still_dead=1), "and alone, too"

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_an_audit_finds_nothing_wrong(self, b: SinkBench, guarantee: str) -> None:
        """Rows, dead letters and claims as the audit reads them: also over several runs, with replays in between."""
        pipeline, log = b.pipeline(guarantee), {0: [record(0), b"{", record(2)], 1: [record(3)]}
        for more in range(10, 13):
            with b.run(pipeline) as run:
                run.deliver(log, starts={0: 0, 1: 0}) if more == 10 else run.deliver({0: [record(more)]})
                entries = run.entries()
            log[0] += [record(more)] if more > 10 else []
        b_first, b_second = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
        assert audit_findings(pipeline, log) == []
        with sinks.audit_reader(pipeline) as reader:
            known = reader.known()
            assert {tp: one.entry for tp, one in known.items()} == entries
            assert {one.start for one in known.values()} == {0}
            assert reader.row_counts() == {b_first: 4, b_second: 1}
            assert (reader.rows_below(b_first, 2), reader.rows_below(b_first, 3)) == (1, 2)
            assert reader.dead_letters(b_first).tolist() == [1]
            starts, untils = (array.tolist() for array in (known[b_first].claim_starts, known[b_first].claim_untils))
            # A consumer group holds one offset for each partition: the last claim. A lake may keep no claims.
            claims = ([4], [5]) if plugin_of(pipeline).ledger_in_group else ([0, 3, 4], [3, 4, 5])
            assert not starts or (starts, untils) == claims, "each claim begins where the last one ended"

    def test_an_audit_finds_what_is_wrong(self, b: SinkBench) -> None:
        """With another log than the one that was delivered: nobody can take the sink's rows for these."""
        pipeline = b.pipeline()
        with b.run(pipeline) as run:
            run.deliver({0: [record(0), record(1)], 1: [b"{"]})
        changed = {0: [record(0), record(1, amount=0.5)], 1: [b"{"]}
        assert [str(one.kind) for one in audit_findings(pipeline, changed)] == ["corrupted"]

    def test_values_of_every_type_are_stored_exactly(self, b: SinkBench) -> None:
        pipeline = b.pipeline(schema=EVERY)
        values = [every(n) for n in range(3)] + [b"{}"]
        if plugin_of(pipeline).refuses_nul:
            values = [one.replace(rb"\u0000", b"") for one in values]
        with b.run(pipeline) as run:
            run.deliver({0: values})
            assert run.counts() == Counts(4, 4), b.dead_letters()
        assert audit_findings(pipeline, {0: values}) == []

    def test_whoever_only_looks_makes_nothing(self, b: SinkBench) -> None:
        pipeline = b.pipeline()
        before = {path for path in b.folder.rglob("*") if path.is_file()}
        with sinks.driver_sink(pipeline) as store:
            assert (store.ledger_snapshot(), store.claims(1) or []) == ({}, [])
        with dead_letters(pipeline) as letters:
            assert (letters.by_reason(Selection()), letters.partitions(Selection())) == ([], [])
        assert {path for path in b.folder.rglob("*") if path.is_file()} == before


class ActingSinkContract:
    """What a sink does beside ``SinkContract`` whose tasks act by themselves."""

    def test_a_dead_letter_that_nobody_has_counted_is_redriven(self, b: SinkBench) -> None:
        """Under at-least-once a superseded run may still write what another one has claimed, and redriven."""
        strict = b.pipeline("at-least-once")
        with b.run(strict) as run:
            run.deliver({0: [record(0), record(1, extra=1)]})
            with dead_letters(strict) as letters:
                (letter,) = letters.select(Selection(), 10)
            assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(written=1)
            zombie = _task(run)
            with zombie.act():
                zombie.add_dead_letters([letter])
        assert redrive(lenient(strict), Selection(), pytest.fail) == Redriven(written=1)
        with b.run(strict) as run:
            assert run.counts() == Counts(3, 3)
        assert b.ids() == [0, 1, 1]

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_an_act_that_fails_has_done_nothing(self, b: SinkBench, guarantee: str) -> None:
        """Killed in mid-write, whatever was done before in the same act is not there. Outside of a transaction some
        sinks have written by then."""

        class Killed(Hooks):
            def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
                if point == "mid-write":
                    raise KeyboardInterrupt

        pipeline = b.pipeline(guarantee)
        with b.run(pipeline) as run:
            run.deliver({0: [record(0)]})
            run.hooks = Killed()
            with pytest.raises(KeyboardInterrupt):
                run.deliver({0: [record(1), b"{", record(2)]})
            claimed = 4 if guarantee == "at-most-once" else 1
            assert (run.position(), run.counts()) == (claimed, Counts(1, 1))
        if plugin_of(pipeline).atomic_writes or guarantee == "exactly-once":
            assert (b.ids(), b.dead_letters()) == ([0], [])

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_what_is_not_confirmed_is_not_done(self, b: SinkBench, guarantee: str) -> None:
        """The topic was made again while these records were read: none of them may be written, nor claimed."""

        def refuse() -> None:
            raise TopicRecreated("another topic")

        with b.run(b.pipeline(guarantee)) as run:
            run.deliver({0: [record(0)]})
            run.confirm = refuse
            with pytest.raises(TopicRecreated):
                run.deliver({0: [record(1), b"{", record(2)]})
            assert (run.position(), run.counts()) == (1, Counts(1, 1))
        assert (b.ids(), b.dead_letters()) == ([0], [])

    def test_what_a_run_has_claimed_it_writes_also_if_a_newer_one_has_begun(self, b: SinkBench) -> None:
        """Under at-most-once nobody else ever would."""
        pipeline = b.pipeline("at-most-once")
        newer: list[Runner] = []

        class Fencing(Hooks):
            def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
                if point == "after-claim" and not newer:
                    with ThreadPoolExecutor() as pool:  # connections are a thread's own
                        newer.append(pool.submit(b.run, pipeline).result())
                        pool.submit(newer[0].close_now).result()

        with b.run(pipeline, hooks=Fencing()) as older:
            older.deliver({0: [record(0), b"{", record(2)]})
            with pytest.raises(Superseded):
                older.deliver({0: [record(3)]})
        with b.run(pipeline) as run:
            assert (run.position(), run.counts()) == (3, Counts(3, 2, 1))
        assert b.ids() == [0, 2]
        assert b.dead_letters() == [(0, 1, "not-json")]

    def test_what_was_claimed_first_and_is_counted_last_does_not_set_the_last_record_back(self, b: SinkBench) -> None:
        """A log that is cut behind it would go unnoticed, and dead letters behind it could not be redriven."""
        pipeline = b.pipeline("at-most-once")
        newer: list[Runner] = []

        def deliver_more() -> None:
            newer.append(b.run(pipeline))
            newer[0].deliver({0: [record(3), b"{"]})
            newer[0].close_now()
            close_clients()

        class Overtaking(Hooks):
            def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
                if point == "after-claim" and not newer:
                    with ThreadPoolExecutor() as pool:  # connections are a thread's own
                        pool.submit(deliver_more).result()

        with b.run(pipeline, hooks=Overtaking()) as older:
            older.deliver({0: [record(0), b"{", record(2)]})
        with b.run(pipeline) as run:
            last = run.entries()[TopicPartition(TOPIC, 0)].last
            assert (run.position(), run.counts()) == (5, Counts(5, 3, 2))
        assert last is not None
        assert last.offset == 4

    def test_two_tasks_with_the_same_range(self, b: SinkBench) -> None:
        """One of them waits for the other, or finds that it was second: the records are written once."""
        pipeline, planned = b.pipeline(), OffsetRange(TOPIC, 0, 0, 2)
        records = batch([record(0), record(1)], 0, 0, [None, None])
        reads, other_done = Event(), Event()

        def slowly(_: OffsetRange) -> Iterator[pa.RecordBatch]:
            reads.set()
            other_done.wait(1)
            yield records

        def deliver(read: task.RangeReader) -> None:
            with suppress(PositionMoved):
                task.deliver(task.decoded(read, pipeline, ahead=False), planned, work, _task(run))

        def other() -> None:
            reads.wait(10)
            try:
                deliver(lambda _: iter([records]))
            finally:
                other_done.set()
                close_clients()

        with b.run(pipeline) as run, ThreadPoolExecutor(1) as pool:
            work = task.BatchWork(pipeline, run.number, 0, {}, run.store.task_context())
            second = pool.submit(other)
            deliver(slowly)
            second.result()
            assert (run.position(), run.counts()) == (2, Counts(2, 2))
        assert b.ids() == [0, 1]


def _task(run: Runner) -> TaskSink:
    sink = sinks.task_sink(run.pipeline, run.number, run.store.task_context())
    assert not isinstance(sink, StagingSink)
    return sink


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


class KeyedSinkContract:
    """What a sink does beside ``SinkContract`` that offers dedupe and upsert."""

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_dedupe_first_wins(self, b: SinkBench, guarantee: str) -> None:
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

    @pytest.mark.parametrize("guarantee", GUARANTEES)
    def test_upsert_last_wins_and_a_null_value_deletes(self, b: SinkBench, guarantee: str) -> None:
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
    def test_by_key_a_batch_of_nothing_but_dead_letters(self, b: SinkBench, mode: str) -> None:
        with b.run(b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["id"]'), 1) as run:
            for records in ([b"bad"], [record(1)], [b"bad", b"bad"]):
                run.deliver({0: records})
            assert (run.position(), run.counts()) == (4, Counts(4, 1, 3))
        assert (b.ids(), len(b.dead_letters())) == ([1], 3)

    @pytest.mark.parametrize("mode", ["dedupe", "upsert"])
    def test_a_key_may_have_any_name(self, b: SinkBench, mode: str) -> None:
        pipeline = b.pipeline(
            "exactly-once", f'mode = "{mode}"', 'key = ["number"]', schema="number long not null, x long"
        )
        with b.run(pipeline, 1) as run:
            for start in (0, 4):
                run.deliver({0: [json.dumps({"number": n % 3, "x": n}).encode() for n in range(start, start + 4)]})
        wanted = {0: 0, 1: 1, 2: 2} if mode == "dedupe" else {0: 6, 1: 7, 2: 5}
        assert {row["number"]: row["x"] for row in b.rows()} == wanted

    @pytest.mark.parametrize("mode", ["dedupe", "upsert"])
    @pytest.mark.parametrize("type_", KEYS)
    def test_a_key_may_have_any_type(self, b: SinkBench, type_: str, mode: str) -> None:
        """It is found again in the table: in a file of its own, and beside another."""
        first, again, other = KEYS[type_]
        pipeline = b.pipeline("exactly-once", f'mode = "{mode}"', 'key = ["k"]', schema=f"k {type_} not null, x long")

        def values(start: int, *keys: object) -> list[bytes]:
            return [json.dumps({"k": key, "x": start + n}).encode() for n, key in enumerate(keys)]

        with b.run(pipeline, 1) as run:
            run.deliver({0: values(0, first)})
            run.deliver({0: values(1, again)})
            run.deliver({0: values(2, first, other, again)})
            run.deliver({0: values(5, other, again)})
            assert run.counts() == (Counts(7, 2, 0, 5) if mode == "dedupe" else Counts(7, 7)), b.dead_letters()
        assert sorted(row["x"] for row in b.rows()) == ([0, 3] if mode == "dedupe" else [5, 6])

    def test_upsert_again_changes_nothing(self, b: SinkBench) -> None:
        """Under at-least-once a crash after the write brings the same records again: no row changes by that."""
        pipeline = b.pipeline("at-least-once", 'mode = "upsert"', 'key = ["id"]')
        with b.run(pipeline, 1) as run:
            run.deliver({0: [value(n % 3, f"v{n}") for n in range(9)]})
            if isinstance(run.store, CommittingSink):
                _, staged = run.stage({0: [value(0, "old"), value(0, "new")]})
                for _ in range(3):
                    run.store.commit(
                        frozenset({Act.WRITE}), staged, run.number, 1, last=False, on_committed=lambda: None
                    )
            else:
                run.deliver({0: [value(0, "old"), value(0, "new")]})
        with b.run(pipeline, 1) as run:
            run.deliver({0: [value(0, "old"), value(0, "new")]}, starts={0: 9})
            run.deliver({0: [value(1, "last")]}, starts={0: 11})
        assert {row["id"]: row["account"] for row in b.rows()} == {0: "new", 1: "last", 2: "v8"}
        assert len(b.rows()) == 3
