"""One partition's audit, as one task does it: its records and its rows side by side, window by window.

Records come decoded (and transformed) by the very code that a run uses; from there on nothing is shared with the way
rows take into the sink. A window is as long as a batch of records, so memory is bounded by that and by how often rows
are doubled, whatever the size of topic and table.

With a key (dedupe, upsert), the keys of all rows on both sides are yielded too, for ``keys`` to judge over all
partitions. Where rows carry no lineage, so is the content of the expected rows, for ``content``.

Owns: bringing the two sides together. Must not know: Spark. Neighbours: ``compare`` and ``values`` (which judge),
``sinks.auditing`` (the rows), ``engines.task`` (the records).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.audit.compare import NO_ROWS, NONE, By, Compared, Comparison
from avow.audit.values import Window, as_written
from avow.engines.task import BatchWork, Prepared, numbers
from avow.findings import Offsets, Span
from avow.kafka.log import TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.auditing import AuditReader


@dataclass(frozen=True, slots=True)
class Scope:
    """Which offsets of a partition are compared: ``judge.examine`` says."""

    number: int  # stands for the partition in frames
    start: int
    until: int
    behind_from: int
    readable_until: int
    compacted: bool


@dataclass(frozen=True, slots=True)
class ComparisonJob:
    """What the tasks of one audit have in common. It is pickled into each."""

    work: BatchWork
    snapshot: str
    scopes: Mapping[TopicPartition, Scope]
    columns: tuple[str, ...]  # of the table, as far as they are ours
    json_columns: frozenset[str]
    key_types: Mapping[str, pa.DataType]  # of sink.key, in its order, or of the content; empty under append
    by: By  # how rows are matched to records

    @property
    def partitions(self) -> dict[int, TopicPartition]:
        """By the numbers that stand for them."""
        return {scope.number: tp for tp, scope in self.scopes.items()}

    @property
    def key_names(self) -> list[str]:
        return [f"k{number}" for number in range(len(self.key_types))]

    @property
    def key_schema(self) -> pa.Schema:
        """Of the keys that are yielded: k0, k1, ... and where they were seen."""
        keys = zip(self.key_names, self.key_types.values(), strict=True)
        seen = [("part", pa.int32()), ("offset", pa.int64()), ("deletes", pa.bool_()), ("there", pa.bool_())]
        return pa.schema([*keys, *seen])


@dataclass(frozen=True, slots=True)
class _ExpectedWindow:
    """What is due in one window."""

    until: int
    rows: pa.RecordBatch | None
    deletes: pa.RecordBatch | None
    visible: Offsets | None = None  # None: the records of this window are known only at the end
    dead: Offsets = field(default_factory=NONE.copy)


def compare_partition(
    job: ComparisonJob, tp: TopicPartition, prepared: Iterable[Prepared], reading: AuditReader
) -> Iterator[pa.RecordBatch | Compared]:
    """The keys of all rows on both sides (with a key), and at last what the comparison came to."""
    walk = _PartitionComparison(job, tp, reading)
    start = walk.scope.start
    if job.key_types:
        start = 0  # rows that cannot be compared still say under which key they stand
    else:
        walk.comparison.count(unchecked=reading.rows_below(tp, start))
    actual = _Ordered(reading.rows(tp, job.columns, start), walk.offset)
    yield from walk.below(actual.take(walk.scope.start))
    for part in _expected_windows(prepared, job, walk.scope):
        yield from walk.window(part, actual.take(part.until))
    yield from walk.beyond(actual.take(math.inf))
    yield walk.comparison.result()


class _Ordered:
    """The rows of one partition, ascending by offset, handed out piece by piece."""

    def __init__(self, batches: Iterator[pa.RecordBatch], offset: str) -> None:
        self._batches, self._offset = batches, offset
        self._ahead: pa.RecordBatch | None = None  # read, and not handed out yet

    def take(self, until: float) -> Iterator[pa.RecordBatch]:
        """The next rows, up to this offset. To be read to its end before anything else is taken."""
        while (batch := self._ahead if self._ahead is not None else next(self._batches, None)) is not None:
            cut = int(np.searchsorted(batch.column(self._offset).to_numpy(), until))
            self._ahead = batch.slice(cut) if cut < batch.num_rows else None
            if cut:
                yield batch.slice(0, cut)
            if self._ahead is not None:
                break


class _PartitionComparison:
    """Walks along both sides, and gives the keys that it sees."""

    def __init__(self, job: ComparisonJob, tp: TopicPartition, reading: AuditReader) -> None:
        self._job, self._reading = job, reading
        self.scope = job.scopes[tp]
        self.offset = job.work.pipeline.sink.lineage.offset
        self.comparison = Comparison(tp.topic, tp.partition, self.scope.start, job.by, compacted=self.scope.compacted)
        self._dead_letters = reading.dead_letters(tp)
        self._evolved = reading.evolved(tp)
        self._begin = self.scope.start

    def below(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows before the first window: there is nothing to compare them with."""
        for batch in rows:
            self.comparison.count(unchecked=batch.num_rows)
            yield from self._keys(batch, actual=True)

    def window(self, part: _ExpectedWindow, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        dead_letters = self._dead_letters_until(part.until)
        expected = None if part.rows is None else self._reading.stored(part.rows)
        batches = [*rows]
        actual = pa.concat_batches(batches) if batches else None
        if expected is None and actual is not None:
            expected = actual.slice(0, 0)
        if expected is None:
            self.comparison.rows(part.until, NO_ROWS, NO_ROWS, dead_letters)
        else:
            actual = expected.slice(0, 0) if actual is None else self._reading.comparable(expected, actual)
            expected = as_written(expected, actual, self.offset, self._evolved)
            self._compare(part.until, expected.select(self._job.columns), actual, dead_letters)
            yield from self._keys(_without(expected, dead_letters, self.offset))
            yield from self._keys(actual, actual=True)
        deletes = NONE
        if part.deletes is not None and part.deletes.num_rows:
            deletes = part.deletes.column(self.offset).to_numpy()
            yield from self._keys(_without(part.deletes, self._dead_letters, self.offset), deletes=True)
        if part.visible is not None:
            self.comparison.records(part.until, part.visible, part.dead, deletes)

    def _compare(self, until: int, expected: pa.RecordBatch, actual: pa.RecordBatch, dead_letters: Offsets) -> None:
        window = Window(expected, actual, self.offset, self._job.json_columns)
        for change in window.changed(self.comparison.rows(until, *window.rows(), dead_letters)):
            self.comparison.changed(change.kind, change.offsets, change.columns)

    def beyond(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows past the last window: not claimed, or not committed, or not there to compare with."""
        offsets = [self._dead_letters[self._dead_letters >= self.scope.behind_from]]
        for batch in rows:
            at = batch.column(self.offset).to_numpy()
            self.comparison.count(unchecked=int((at < self.scope.behind_from).sum()))
            offsets.append(np.unique(at[at >= self.scope.behind_from]))
            yield from self._keys(batch, actual=True)
        self.comparison.beyond(np.unique(np.concatenate(offsets)), self.scope.readable_until)

    def _dead_letters_until(self, until: int) -> Offsets:
        within = (self._dead_letters >= self._begin) & (self._dead_letters < until)
        self._begin = until
        return self._dead_letters[within]

    def _keys(self, rows: pa.RecordBatch, *, deletes: bool = False, actual: bool = False) -> Iterator[pa.RecordBatch]:
        if not self._job.key_types or not rows.num_rows:
            return
        count = rows.num_rows
        yield pa.RecordBatch.from_arrays(
            [
                *(_cast(rows.column(name), type_) for name, type_ in self._job.key_types.items()),
                pa.repeat(pa.scalar(self.scope.number, pa.int32()), count),
                rows.column(self.offset),
                pa.repeat(deletes, count),
                pa.repeat(actual, count),
            ],
            schema=self._job.key_schema,
        )


def _without(rows: pa.RecordBatch, dead_letters: Offsets, offset: str) -> pa.RecordBatch:
    """Rows without those that the sink refused: they never stood under their key."""
    if not len(dead_letters):
        return rows
    return rows.filter(pc.invert(pc.is_in(rows.column(offset), value_set=pa.array(dead_letters))))


def _cast(column: pa.Array, type_: pa.DataType) -> pa.Array:
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return stored.cast(type_)


def _expected_windows(prepared: Iterable[Prepared], job: ComparisonJob, scope: Scope) -> Iterator[_ExpectedWindow]:
    """What is due, in windows that end between two records. Behind a SQL query, the records are known at the end."""
    offset = job.work.pipeline.sink.lineage.offset
    for part in prepared:
        rows = part.rows.rows
        dead = np.array([dead_letter.offset for dead_letter in part.dead_letters], np.int64)
        if not job.work.pipeline.by_sql:
            yield _ExpectedWindow(int(part.offsets[-1]) + 1, rows, part.rows.deletes, part.offsets, dead)
        elif len(part.offsets):
            yield _ExpectedWindow(scope.until, None, part.rows.deletes, part.offsets, dead)
        elif rows.num_rows:
            yield _ExpectedWindow(rows.column(offset)[-1].as_py() + 1, rows, None)
    # The last records may be followed by rows that have none.
    yield _ExpectedWindow(scope.until, None, None, NONE)


def offsets_of_phantoms(pipeline: PipelineConfig, planned: OffsetRange, spans: Sequence[Span]) -> Iterator[Offsets]:
    """Of the offsets in these spans, those at which there is a record, committed or not."""
    starts, untils = np.array([span.start for span in spans]), np.array([span.until for span in spans])
    with closing(Reader(pipeline.source, pipeline.name, isolation="read_uncommitted")) as reader:
        for batch in reader.read(planned):
            offsets = numbers(batch.column("offset"))
            at = np.searchsorted(starts, offsets, "right") - 1
            yield offsets[(at >= 0) & (offsets < untils[at])]
