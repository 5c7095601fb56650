"""The work on an offset range: judge, decode, write, claim, in the order the guarantee names.

This is the one function that every engine runs. It is handed records as Arrow batches and a sink; it asks the sink for
acts in the order of ``Guarantee.steps``, and ``ledger`` for every decision. What it gives back is a ``RangeReport``.

Owns: the order of things inside a task. Must not know: Spark, or how a sink does what it is asked.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from queue import Empty, Queue
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow import ledger
from avow.arrow import no_rows
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import AvowError, ConfigError, ProtocolViolation, TooManyDeadLetters, TopicRecreated, first_line
from avow.formats import decoder
from avow.formats.base import Decoder
from avow.guarantee import Act
from avow.kafka.batches import COLUMNS
from avow.kafka.log import Log, TopicPartition, fingerprint
from avow.kafka.reader import BATCH_BYTES, BATCH_RECORDS
from avow.ledger import Counts, Fingerprint, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks import plugin_of
from avow.sinks.base import (
    CommittingSink,
    DeadLetter,
    LedgerUpdate,
    Refusal,
    RowChanges,
    StagingSink,
    TaskSink,
    Writer,
    Written,
)

# Below this many records a share says little: a handful of bad records in a short range must not stop a run.
SHARE_COUNTS_FROM = 1_000

# The reason of a record that was decoded and that only the sink refused.
REFUSED = "refused-by-sink"

# Of a record that made the decoder, the transform or more than that fail.
UNPROCESSABLE = "unprocessable"

# What says nothing about a record: a stop by name, a connection or a disk, memory.
NOT_OF_A_RECORD = (AvowError, OSError, MemoryError)
HOPELESS = 1_000  # records that fail one after the other, with none that passes

# Dead letters are handed to the sink when so many bytes of them wait, and not all at the end of a range.
DEAD_LETTER_BYTES = 16 * 1024 * 1024

Transform = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class TopicWork:
    """What is one topic's own in a batch, where each has a table of its own."""

    pipeline: PipelineConfig  # its part
    run: int
    task_context: object


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a batch's tasks have in common. It is pickled into each."""

    pipeline: PipelineConfig
    run: int
    batch: int
    ranges: Mapping[TopicPartition, OffsetRange]
    task_context: object = None  # the ``task_context`` of the sink's driver side
    topic_ids: Mapping[str, str] = field(default_factory=dict)  # that the ledger knows, of the ranges' topics
    set_aside: str = ""  # why the records are to be dead letters as they are, without being decoded
    hooks: Hooks = NO_HOOKS
    topics: Mapping[str, TopicWork] = field(default_factory=dict)  # where each has a table of its own

    def for_topic(self, topic: str) -> BatchWork:
        """What of it is one topic's, where each has a table of its own; else all of it."""
        own = self.topics.get(topic)
        if own is None:
            return self
        return replace(
            self,
            pipeline=own.pipeline,
            run=own.run,
            task_context=own.task_context,
            ranges={tp: range_ for tp, range_ in self.ranges.items() if tp.topic == topic},
            topic_ids={name: topic_id for name, topic_id in self.topic_ids.items() if name == topic},
            topics={},
        )


@dataclass(frozen=True, slots=True)
class RangeReport:
    """What became of one range."""

    done: OffsetRange  # empty for a replay
    counts: Counts
    seconds: float
    task_output: object = None  # the sink's ``task_output``, for the driver's commit, where the acts are the driver's


@dataclass(frozen=True, slots=True)
class Prepared:
    """Records that were decoded, on their way into the sink. All rows of a record are in one of these."""

    rows: RowChanges
    offsets: np.ndarray  # of every visible record these came from, ascending
    dead_letters: list[DeadLetter] = field(default_factory=list)
    skipped: int = 0  # tombstones that the pipeline skips
    last: Fingerprint | None = None  # of the last record
    source: pa.RecordBatch | None = None  # the records themselves, where they are still at hand


@dataclass(slots=True)
class DeadLetterCounts:
    """The dead letters of a range, as far as its share needs them: how many, why, and which was the first."""

    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: DeadLetter | None = None

    def add(self, dead_letters: Sequence[DeadLetter]) -> None:
        self.count += len(dead_letters)
        self.reasons.update(dead_letter.reason for dead_letter in dead_letters)
        self.first = self.first or next(iter(dead_letters), None)

    def check(self, todo: OffsetRange, read: int, share: float, *, ended: bool, advice: str = "") -> None:
        """Stop if more records of the range are bad than the share allows. Before the range has ended, only if the
        rest of it cannot change that: it has no more records than offsets."""
        if self.count <= share * max(read if ended else len(todo), SHARE_COUNTS_FROM):
            return
        assert self.first is not None
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common(3))
        raise TooManyDeadLetters(
            f"dead-letters: {self.count} of {read} records of {todo} are bad ({reasons}), more than "
            f"dead_letters.max_share = {share:g} allows. The first, at offset {self.first.offset}: "
            f"{self.first.reason}: {self.first.detail}",
            advice=advice
            or "Nothing of this range was claimed. Fix decode.schema or the producer, or raise dead_letters.max_share, "
            "and start again.",
        )


@dataclass(slots=True)
class _Outcome:
    """What a write has come to so far."""

    read: int = 0
    written: int = 0
    skipped: int = 0
    last: Fingerprint | None = None
    dead: DeadLetterCounts = field(default_factory=DeadLetterCounts)

    @property
    def counts(self) -> Counts:
        return Counts(self.read, self.written, self.dead.count, self.skipped)


# The visible records of a range, as Arrow batches.
RangeReader = Callable[[OffsetRange], Iterator[pa.RecordBatch]]

# Records of a range, decoded.
RangePreparer = Callable[[OffsetRange], Iterator[Prepared]]


Confirm = Callable[[], None]  # raises what forbids to go on


def confirmed() -> None:
    pass


def deliver(
    prepare: RangePreparer,
    planned: OffsetRange,
    work: BatchWork,
    sink: TaskSink | StagingSink,
    confirm: Confirm = confirmed,
) -> RangeReport:
    """Bring one range into the sink, under the pipeline's guarantee; or have it ready for ``commit_task_outputs``.
    ``confirm`` is called before anything is written or claimed, and not where the acts are the driver's."""
    started = time.monotonic()
    if isinstance(sink, StagingSink):
        outcome = _write(prepare(planned), planned, work, sink)
        staged = sink.task_output(planned, outcome.counts, outcome.last)
        return RangeReport(planned, outcome.counts, time.monotonic() - started, staged)
    acting = sink

    def ready(todo: Sequence[OffsetRange], *, claim_first: bool) -> WriteRanges:
        (range_,) = todo
        parts = _prepared_before_claim(prepare(range_), range_, work.pipeline) if claim_first else prepare(range_)
        return lambda: [_write(parts, range_, work, acting, claimed=claim_first)]

    ((done, outcome),) = _acts([planned], ready, work, acting, confirm)
    return RangeReport(done, outcome.counts, time.monotonic() - started)


def _prepared_before_claim(
    prepared: Iterator[Prepared], todo: OffsetRange, pipeline: PipelineConfig
) -> Iterator[Prepared]:
    """All of a range, read, decoded and transformed, with its share of dead letters judged: whatever of this fails, and
    whatever stops the run, does so before the claim."""
    dead, parts, read = DeadLetterCounts(), [], 0
    for part in prepared:
        parts.append(part)
        read += len(part.offsets)
        dead.add(part.dead_letters)
        dead.check(todo, read, pipeline.dead_letters.max_share, ended=False)
    dead.check(todo, read, pipeline.dead_letters.max_share, ended=True)
    return iter(parts)


def can_join(pipeline: PipelineConfig) -> bool:
    """Whether ``deliver_joined`` can be used: rows are appended as they were decoded, by acts that span partitions."""
    return plugin_of(pipeline).spans_partitions and pipeline.sink.mode == "append" and pipeline.transform is None


def deliver_joined(
    batches: Mapping[OffsetRange, pa.RecordBatch | None],
    work: BatchWork,
    sink: TaskSink,
    confirm: Confirm = confirmed,
) -> dict[OffsetRange, Counts]:
    """Bring small ranges of several partitions into the sink, in the same acts: what an act costs is then paid once.
    ``batches``: the visible records of each, if there are any. ``confirm`` is called before anything is written
    or claimed. What became of each range."""
    planned = list(batches)

    def ready(todo: Sequence[OffsetRange], *, claim_first: bool) -> WriteRanges:
        rests = [_rest(batches[whole], range_) for whole, range_ in zip(planned, todo, strict=True)]
        joined = _JoinedRanges(rests, todo, work)
        return lambda: joined.write(sink, claimed=claim_first)

    done = _acts(planned, ready, work, sink, confirm)
    return {range_: outcome.counts for range_, (_, outcome) in zip(planned, done, strict=True)}


def _rest(batch: pa.RecordBatch | None, todo: OffsetRange) -> pa.RecordBatch:
    if batch is None or not todo:
        return no_rows(COLUMNS)
    return batch.slice(int(np.searchsorted(numbers(batch.column("offset")), todo.start)))


# Writes what is ready of some ranges, and says what became of each.
WriteRanges = Callable[[], list[_Outcome]]


class _ReadyRanges(Protocol):
    def __call__(self, todo: Sequence[OffsetRange], *, claim_first: bool) -> WriteRanges:
        """Make these ranges ready to be written. With ``claim_first`` nothing may be left that can fail but the sink:
        what is claimed and then not written is lost."""


def _acts(
    planned: Sequence[OffsetRange], ready: _ReadyRanges, work: BatchWork, sink: TaskSink, confirm: Confirm
) -> list[tuple[OffsetRange, _Outcome]]:
    """The guarantee's acts over these ranges. What of each was left to do, and what became of that."""
    todo: list[OffsetRange] | None = None
    write: WriteRanges | None = None
    claimed = False
    outcomes = [_Outcome() for _ in planned]
    partitions = [TopicPartition(range_.topic, range_.partition) for range_ in planned]
    for step in work.hooks.order(work.pipeline.guarantee.steps):
        with sink.act():
            entries = sink.entries(partitions, lock=Act.CLAIM in step)
            # Nobody else will write what we have claimed. By key it could bring back what was deleted since.
            if not claimed or work.pipeline.sink.mode == "upsert":
                for entry in entries:
                    ledger.check_fence(entry, work.run)
            if todo is None:
                todo = [ledger.judge(entry.position, range_) for entry, range_ in zip(entries, planned, strict=True)]
                if not any(todo):
                    break  # a replay: the act is empty, and there is nothing to write
                write = ready(todo, claim_first=Act.WRITE not in step)
                confirm()
            if Act.WRITE in step:
                assert write is not None
                outcomes = write()
            if Act.CLAIM in step:
                sink.claim(
                    [
                        LedgerUpdate(entry, ledger.claim(entry, range_, work.run, outcome.counts, outcome.last), range_)
                        for entry, range_, outcome in zip(entries, todo, outcomes, strict=True)
                        if range_
                    ],
                    work.batch,
                )
                claimed = True
            elif claimed:
                for range_, outcome in zip(todo, outcomes, strict=True):
                    if range_:
                        sink.add_counts(range_, outcome.counts, outcome.last)
        work.hooks.reached(f"after-{'-'.join(sorted(step))}", work.batch)
    assert todo is not None
    if claimed and not work.pipeline.guarantee.atomic:
        # Only the sink can have refused so many after the claim. To roll them back would have lost them.
        for range_, outcome in zip(todo, outcomes, strict=True):
            share = work.pipeline.dead_letters.max_share
            outcome.dead.check(range_, outcome.read, share, ended=True, advice=_CLAIMED)
    return list(zip(todo, outcomes, strict=True))


_CLAIMED = (
    "This range was claimed, and its good records are written. The bad ones are dead letters: fix the table or the "
    "schema, then run avow dead-letters redrive. Or raise dead_letters.max_share. Then start again."
)


def check_topics(work: BatchWork, log: Log) -> None:
    """Refuse records whose topic was deleted and made again since the run began. To be asked after records were read,
    before anything is done with them: if the topic still has the id, they were its own."""
    for recreated in recreated_topics(work, log).values():
        raise recreated


def recreated_topics(work: BatchWork, log: Log) -> dict[str, TopicRecreated]:
    """The same as what there is to raise, by topic."""
    now = {tp.topic: topic_id for tp, topic_id in log.partitions_of(work.topic_ids).items()}
    recreated = {}
    for topic, topic_id in work.topic_ids.items():
        try:
            ledger.check_topic(f"{topic} is read", topic_id, now[topic])
        except TopicRecreated as error:
            recreated[topic] = error
    return recreated


def of_these_topics(read: RangeReader, work: BatchWork, log: Log) -> RangeReader:
    """The same records, each batch after ``check_topics``."""

    def reading(todo: OffsetRange) -> Iterator[pa.RecordBatch]:
        batch = None
        for batch in read(todo):
            check_topics(work, log)
            yield batch
        if batch is None or batch.column("offset")[-1].as_py() + 1 < todo.until:  # what follows is claimed, too
            check_topics(work, log)

    return reading


def commit_task_outputs(parts: Sequence[object], work: BatchWork, sink: CommittingSink) -> None:
    """In the driver: the acts of one batch, in the guarantee's order, over what its tasks have staged."""
    work.hooks.reached("staged", work.batch)
    steps = work.hooks.order(work.pipeline.guarantee.steps)
    for step in steps:
        sink.commit(
            step,
            parts,
            work.run,
            work.batch,
            last=step is steps[-1],
            on_committed=lambda: work.hooks.reached("commit-unknown", work.batch),
        )
        work.hooks.reached(f"after-{'-'.join(sorted(step))}", work.batch)


def _write(
    prepared: Iterator[Prepared], todo: OffsetRange, work: BatchWork, sink: Writer, *, claimed: bool = False
) -> _Outcome:
    """Write every record of ``todo``; what cannot be taken is a dead letter. ``claimed``: it is no longer possible to
    stop before the claim."""
    pipeline = work.pipeline
    offset_column = pipeline.sink.lineage.offset
    outcome = _Outcome()
    waiting: list[DeadLetter] = []
    bytes_waiting = 0

    def add_dead_letters(dead_letters: list[DeadLetter], *, ended: bool) -> None:
        nonlocal waiting, bytes_waiting
        outcome.dead.add(dead_letters)
        if not claimed:
            outcome.dead.check(todo, outcome.read, pipeline.dead_letters.max_share, ended=ended)
        waiting += dead_letters
        bytes_waiting += sum(
            len(dead_letter.value or b"") + len(dead_letter.key or b"") for dead_letter in dead_letters
        )
        if ended or bytes_waiting >= DEAD_LETTER_BYTES:
            sink.add_dead_letters(waiting)
            waiting, bytes_waiting = [], 0

    for part in prepared:
        rows, deletes = part.rows.rows, part.rows.deletes
        any_rows = rows.num_rows or deletes.num_rows
        changes = RowChanges(work.hooks.rows(rows, offset_column), deletes)
        refused = sink.write(changes).refused if any_rows else {}
        offsets = rows.column(offset_column)
        bad = {offsets[row].as_py(): why for row, why in refused.items()}
        outcome.read += len(part.offsets)
        records = len(offsets) if pipeline.transform is None else pc.count_distinct(offsets).as_py()
        outcome.written += records - len(bad) + deletes.num_rows
        outcome.skipped += part.skipped
        outcome.last = part.last or outcome.last
        add_dead_letters(part.dead_letters + _refused_dead_letters(bad, part.source, todo, pipeline), ended=False)
        work.hooks.reached("mid-write", work.batch)
    applied = sink.finish(todo)
    late = _refused_dead_letters(applied.refused, None, todo, pipeline)
    outcome.written -= applied.skipped + len(late)
    outcome.skipped += applied.skipped
    add_dead_letters(late, ended=True)
    if pipeline.transform is not None:
        outcome.skipped = outcome.read - outcome.dead.count - outcome.written  # what the transform left out
    return outcome


class _JoinedRanges:
    """The records of several ranges, decoded as one, with the share of each judged; then put into the sink as one."""

    def __init__(self, batches: Sequence[pa.RecordBatch], todo: Sequence[OffsetRange], work: BatchWork) -> None:
        self._batches, self._todo, self._work = batches, todo, work
        for batch, range_ in zip(batches, todo, strict=True):
            if batch.num_rows:
                check_batch(batch, range_, range_.start)
        self._whole = pa.concat_batches(batches)
        self._lasts = [last_fingerprint(batch) if batch.num_rows else None for batch in batches]
        pipeline = work.pipeline
        self._found = decoder(pipeline, refuse_nul=plugin_of(pipeline).refuses_nul).decode(self._whole)
        self._letters = {d.index: _dead_letter(self._whole, d.index, d.reason, d.detail) for d in self._found.refused}
        self._outcomes({}, judged=True)

    def write(self, sink: Writer, *, claimed: bool) -> list[_Outcome]:
        pipeline, whole, decoded = self._work.pipeline, self._whole, self._found
        rows = _with_lineage(decoded.rows, whole, decoded.rows_at, pipeline)
        deletes = _with_lineage(decoded.deletes, whole, decoded.deletes_at, pipeline)
        changes = RowChanges(self._work.hooks.rows(rows, pipeline.sink.lineage.offset), deletes)
        refused = sink.write(changes).refused if whole.num_rows else {}
        for range_ in self._todo:
            if sink.finish(range_) != Written():  # it would have to be counted
                raise ProtocolViolation(f"{range_}: a sink whose acts span partitions refuses appended rows in write")
        places = {decoded.rows_at[row].as_py(): why for row, why in refused.items()}
        late = {index: _dead_letter(whole, index, REFUSED, why) for index, why in places.items()}
        outcomes = self._outcomes(late, judged=not claimed)
        self._work.hooks.reached("mid-write", self._work.batch)
        dead_letters = self._letters | late
        sink.add_dead_letters([dead_letters[index] for index in sorted(dead_letters)])
        return outcomes

    def _outcomes(self, late: Mapping[int, DeadLetter], *, judged: bool) -> list[_Outcome]:
        """What becomes of each range if the sink refuses these."""
        decoded, dead_letters = self._found, {**self._letters, **late}
        dead_at = sorted(dead_letters)
        ends = np.cumsum([batch.num_rows for batch in self._batches])
        dead_ends = np.searchsorted(dead_at, ends)
        taken = np.searchsorted(numbers(decoded.rows_at), ends) + np.searchsorted(numbers(decoded.deletes_at), ends)
        taken -= np.searchsorted(sorted(late), ends)
        outcomes = []
        dead_end = 0
        for batch, range_, last, behind, taken_here in zip(
            self._batches, self._todo, self._lasts, dead_ends.tolist(), np.diff(taken, prepend=0), strict=True
        ):
            count, written = batch.num_rows, int(taken_here)
            of_range = [dead_letters[index] for index in dead_at[dead_end:behind]]
            dead_end = behind
            outcome = _Outcome(count, written, count - len(of_range) - written, last)
            outcome.dead.add(of_range)
            if judged:
                outcome.dead.check(range_, count, self._work.pipeline.dead_letters.max_share, ended=True)
            outcomes.append(outcome)
        return outcomes


def decode_batch(batch: pa.RecordBatch, pipeline: PipelineConfig) -> Prepared:
    """Decode a single batch. A record on which the decoder or the transform raises is a dead letter, even if all do."""
    decode = decoder(pipeline, refuse_nul=plugin_of(pipeline).refuses_nul)
    parts = _decode_apart(batch, decode, python_transform(pipeline), pipeline, hopeless=0)
    if len(parts) == 1:
        return parts[0]
    return Prepared(
        rows=RowChanges(
            pa.concat_batches([part.rows.rows for part in parts]),
            pa.concat_batches([part.rows.deletes for part in parts]),
        ),
        offsets=numbers(batch.column("offset")),
        dead_letters=[dead_letter for part in parts for dead_letter in part.dead_letters],
        skipped=sum(part.skipped for part in parts),
        last=last_fingerprint(batch),
        source=batch,
    )


def decoded(
    read: RangeReader, pipeline: PipelineConfig, *, ahead: bool = True, hopeless: int = HOPELESS
) -> RangePreparer:
    """Read and decode records, and put them through the Python transform if there is one. ``ahead``: a batch while the
    one before is written; for a single batch that costs a thread, and brings nothing. ``hopeless``: so many records
    that fail, with none that passes, are not the records' fault; 0 takes them for bad all the same."""

    def prepare(todo: OffsetRange) -> Iterator[Prepared]:
        if not ahead:
            yield from each(todo)
            return
        with one_ahead(each(todo)) as ready:
            yield from ready

    def each(todo: OffsetRange) -> Iterator[Prepared]:
        decode = decoder(pipeline, refuse_nul=plugin_of(pipeline).refuses_nul)
        # Looked up here, inside the act: a module that this executor lacks is then reported by name, and not tried
        # again.
        transform = python_transform(pipeline)
        position = todo.start
        for batch in read(todo):
            check_batch(batch, todo, position)
            position = batch.column("offset")[-1].as_py() + 1
            yield from _decode_apart(batch, decode, transform, pipeline, hopeless)

    return prepare


def set_aside(read: RangeReader, pipeline: PipelineConfig, why: str) -> RangePreparer:
    """Read records, and make dead letters of them as they are."""
    nothing = pa.RecordBatch.from_pylist([], schema=pa.schema([(pipeline.sink.lineage.offset, pa.int64())]))

    def prepare(todo: OffsetRange) -> Iterator[Prepared]:
        for batch in read(todo):
            check_batch(batch, todo, todo.start)
            dead_letters = [_dead_letter(batch, index, UNPROCESSABLE, why) for index in range(batch.num_rows)]
            offsets = numbers(batch.column("offset"))
            yield Prepared(
                RowChanges(nothing, nothing), offsets, dead_letters, last=last_fingerprint(batch), source=batch
            )

    return prepare


T = TypeVar("T")


@contextmanager
def one_ahead(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """The same items, the next one made in a thread while this one is used: a batch is read and decoded while the one
    before is on its way into the sink. Nobody else may take from ``items`` meanwhile; at the end the thread has ended.
    """
    ready: Queue[T | _Ended] = Queue(maxsize=1)
    enough = threading.Event()

    def make() -> None:
        ended = _Ended()
        try:
            for item in items:
                ready.put(item)
                if enough.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised where the items are used
            ended.error = error
        ready.put(ended)

    def take() -> Iterator[T]:
        while not isinstance(item := ready.get(), _Ended):
            yield item
        if item.error is not None:
            raise item.error

    thread = threading.Thread(target=make, name="one-ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        enough.set()
        while thread.is_alive():
            with suppress(Empty):  # it may wait to put down what nobody will take
                ready.get_nowait()
            thread.join(0.01)


@dataclass(slots=True)
class _Ended:
    error: BaseException | None = None


def numbers(array: pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """A column of whole numbers without nulls, as numpy sees it. ``to_numpy`` would first import pandas, which costs a
    worker's first task more than a second."""
    values = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())
    return values[array.offset : array.offset + len(array)]


def from_memory(records: pa.RecordBatch | None) -> RangeReader:
    """Records that were read before, for ``decoded``."""

    def read(todo: OffsetRange) -> Iterator[pa.RecordBatch]:
        if records is None:
            return
        offsets = numbers(records.column("offset"))
        first, end = (int(np.searchsorted(offsets, offset)) for offset in (todo.start, todo.until))
        part = max(1, min(BATCH_RECORDS, BATCH_BYTES * records.num_rows // max(1, records.nbytes)))
        for start in range(first, end, part):
            yield records.slice(start, min(part, end - start))

    return read


def check_batch(batch: pa.RecordBatch, wanted: OffsetRange, position: int) -> None:
    """Refuse records that are not of the range, or not in its order: nothing may rest on the reader's word alone."""
    offsets = numbers(batch.column("offset"))
    partition, topic = numbers(batch.column("partition")), batch.column("topic")
    in_order = offsets[0] >= position and offsets[-1] < wanted.until and bool(np.all(np.diff(offsets) > 0))
    one_topic = topic[0].as_py() == wanted.topic and pc.count_distinct(topic).as_py() == 1
    one_partition = one_topic and bool(np.all(partition == wanted.partition))
    if not (in_order and one_partition):
        raise ProtocolViolation(f"records from {batch.slice(0, 1).to_pylist()} are not those of {wanted}, in order")


def _decode_apart(
    batch: pa.RecordBatch, decode: Decoder, transform: Transform | None, pipeline: PipelineConfig, hopeless: int
) -> list[Prepared]:
    """A batch, decoded and transformed. Where that raises, its halves are, and what a single record raises makes it a
    dead letter. If none of them passes, it is not the records' fault, and raised."""
    prepared: list[Prepared] = []
    failed = 0

    def halves(part: pa.RecordBatch) -> None:
        nonlocal failed
        try:
            prepared.append(_decode(part, decode, transform, pipeline))
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            if part.num_rows > 1:
                middle = part.num_rows // 2
                halves(part.slice(0, middle))
                halves(part.slice(middle))
                return
            failed += 1
            if failed == min(batch.num_rows, hopeless) and failed == len(prepared) + 1:  # nothing has passed
                raise
            empty = _decode(part.slice(0, 0), decode, transform, pipeline)
            dead_letter = _dead_letter(part, 0, UNPROCESSABLE, f"{type(error).__name__}: {first_line(error)}")
            offsets, last = numbers(part.column("offset")), last_fingerprint(part)
            prepared.append(replace(empty, offsets=offsets, dead_letters=[dead_letter], last=last, source=part))

    halves(batch)
    return prepared


def _decode(batch: pa.RecordBatch, decode: Decoder, transform: Transform | None, pipeline: PipelineConfig) -> Prepared:
    decoded = decode.decode(batch)
    rows = _with_lineage(decoded.rows, batch, decoded.rows_at, pipeline)
    if transform is not None:
        rows = _transformed(transform, rows, pipeline)
    return Prepared(
        rows=RowChanges(rows, _with_lineage(decoded.deletes, batch, decoded.deletes_at, pipeline)),
        offsets=numbers(batch.column("offset")),
        dead_letters=[_dead_letter(batch, bad.index, bad.reason, bad.detail) for bad in decoded.refused],
        skipped=decoded.skipped,
        last=last_fingerprint(batch) if batch.num_rows else None,
        source=batch,
    )


def _with_lineage(
    rows: pa.RecordBatch, batch: pa.RecordBatch, at: pa.Int64Array, pipeline: PipelineConfig
) -> pa.RecordBatch:
    """Rows with the four columns that carry their records' identity, and what else of them the sink wants."""
    whole = len(at) == batch.num_rows
    columns = [batch.column(name) for name in ("topic", "partition", "offset", "timestamp")]
    columns += [batch.column("value").is_null() if p == "tombstone" else batch.column(p) for p in pipeline.carried]
    topic, partition, offset, timestamp, *carried = columns if whole else [column.take(at) for column in columns]
    timestamp = timestamp.cast(pa.timestamp("us", "UTC"))  # of those that are kept it can hold every one
    names = [*rows.schema.names, *pipeline.sink.lineage, *pipeline.carried.values()]
    return pa.RecordBatch.from_arrays([*rows.columns, topic, partition, offset, timestamp, *carried], names=names)


def python_transform(pipeline: PipelineConfig) -> Transform | None:
    """The declared function, if there is one."""
    if pipeline.transform is None or pipeline.transform.python is None:
        return None
    module, _, name = pipeline.transform.python.partition(":")
    try:
        function: Transform = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transform.python: {pipeline.transform.python} cannot be had: {error}",
            advice="Give MODULE:FUNCTION of a module on the Python path of the driver and the executors.",
        ) from error
    return function


def _transformed(transform: Transform, rows: pa.RecordBatch, pipeline: PipelineConfig) -> pa.RecordBatch:
    """Rows after the transform, if each still belongs to a record it came from."""
    out = transform(rows)
    missing = [name for name in (*pipeline.sink.lineage, *pipeline.carried.values()) if name not in out.schema.names]
    if missing:
        raise ConfigError(
            f"transform: the rows have lost {', '.join(missing)}",
            advice="Every row keeps its record's identity: pass the lineage columns through.",
        )
    topic, partition, offset, _ = pipeline.sink.lineage
    if rows.num_rows:
        check_lineage(out, pipeline, TopicPartition(rows.column(topic)[0].as_py(), rows.column(partition)[0].as_py()))
    # Without ``min_count`` the answer about no row at all is neither yes nor no.
    if not pc.all(pc.is_in(out.column(offset), value_set=rows.column(offset)), min_count=0).as_py():
        raise _changed_lineage(offset)
    return out


def check_lineage(rows: pa.RecordBatch, pipeline: PipelineConfig, tp: TopicPartition) -> None:
    """Refuse rows of a transform that are no longer of the partition they came from, or not in its order."""
    topic, partition, offset, _ = pipeline.sink.lineage
    for name, value in ((topic, tp.topic), (partition, tp.partition)):
        if rows.num_rows and pc.unique(rows.column(name)).to_pylist() != [value]:
            raise _changed_lineage(name)
    if np.any(np.diff(numbers(rows.column(offset))) < 0):
        raise _changed_lineage(offset)


def _changed_lineage(column: str) -> ConfigError:
    return ConfigError(
        f"transform: {column} was changed or put out of order",
        advice="Every row keeps its record's identity, and rows stay in the order of their offsets: pass the lineage "
        "columns through as they are.",
    )


def last_fingerprint(batch: pa.RecordBatch) -> Fingerprint:
    record = _record(batch, batch.num_rows - 1)
    return fingerprint(record["offset"], record["timestamp_ms"], record["key"], record["value"])


def _record(batch: pa.RecordBatch, index: int) -> dict[str, Any]:
    record = {name: batch.column(name)[index].as_py() for name in ("offset", "key", "value", "headers")}
    # Not as a datetime: making one, pyarrow imports pandas, and it has no year 10000.
    stamps = batch.column("timestamp")
    stamp = stamps[index].value
    per_ms = 1 if stamps.type.unit == "ms" else 1000  # Spark's are in microseconds
    return record | {"timestamp_ms": -1 if stamp is None else stamp // per_ms}


def _dead_letter(batch: pa.RecordBatch, index: int, reason: str, detail: str) -> DeadLetter:
    record = _record(batch, index)
    return DeadLetter(
        topic=batch.column("topic")[index].as_py(),
        partition=batch.column("partition")[index].as_py(),
        offset=record["offset"],
        timestamp_ms=record["timestamp_ms"],
        key=record["key"],
        value=record["value"],
        headers=[(pair["key"], pair["value"]) for pair in record["headers"] or []],
        reason=_reason(reason, detail),
        detail=str(detail),
    )


def _reason(reason: str, detail: str) -> str:
    """With the sink's own code of it, if it has one."""
    return f"{reason}-{detail.code}" if isinstance(detail, Refusal) and detail.code else reason


def _refused_dead_letters(
    refused: Mapping[int, str], source: pa.RecordBatch | None, todo: OffsetRange, pipeline: PipelineConfig
) -> list[DeadLetter]:
    """Dead letters of records that only the sink refused, by offset."""
    if not refused:
        return []
    if source is not None:
        offsets = numbers(source.column("offset"))
        places = {offset: int(np.searchsorted(offsets, offset)) for offset in refused}
        return [_dead_letter(source, places[offset], REFUSED, why) for offset, why in sorted(refused.items())]
    # The records have gone by, or went through SQL without their bytes: read them again.
    with Log(pipeline.source, pipeline.name) as log:
        records = log.records(TopicPartition(todo.topic, todo.partition), sorted(refused))
    return [
        DeadLetter(
            *(todo.topic, todo.partition, r.offset, r.timestamp_ms, r.key, r.value, r.headers),
            *(_reason(REFUSED, refused[r.offset]), str(refused[r.offset])),
        )
        for r in records
    ]
