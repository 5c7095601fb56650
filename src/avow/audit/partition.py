"""One partition's audit, as one task does it: its records and its rows side by side, window by window.

Records come decoded (and transformed) by the very code that a run uses; from there on nothing is shared with the way
rows take into the sink. A window is as long as a batch of records, so memory is bounded by that and by how often rows
are doubled, whatever the size of topic and table.

With a key (dedupe, upsert), the keys of all rows on both sides are given away too, for ``keys`` to judge when they have
been brought together. Where rows do not say which record they came from, so is the content of what is due, for
``content``.

Owns: bringing the two sides together. Must not know: Spark. Neighbours: ``compare`` and ``values`` (which judge),
``table`` (the rows), ``engines.task`` (the records).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.audit import table
from avow.audit.compare import NO_ROWS, NONE, By, Compared, Comparison
from avow.audit.values import Window
from avow.engines.task import Prepared, Work, numbers
from avow.findings import Offsets, Span
from avow.kafka.log import TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.reading import Reading


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
class Job:
    """What the tasks of one audit have in common. It is pickled into each."""

    work: Work
    snapshot: str
    scopes: Mapping[TopicPartition, Scope]
    columns: tuple[str, ...]  # of the table, as far as they are ours
    json_columns: frozenset[str]
    key_types: Mapping[str, pa.DataType]  # of sink.key, in its order, or of the content; empty under append
    by: By  # how rows are known

    @property
    def key_schema(self) -> pa.Schema:
        """Keys on their way together: k0, k1, ... and where they were seen."""
        keys = [(f"k{number}", type_) for number, type_ in enumerate(self.key_types.values())]
        seen = [("part", pa.int32()), ("offset", pa.int64()), ("deletes", pa.bool_()), ("there", pa.bool_())]
        return pa.schema([*keys, *seen])


@dataclass(frozen=True, slots=True)
class _Part:
    """What is due in one window."""

    until: int
    rows: pa.RecordBatch | None
    deletes: pa.RecordBatch | None
    visible: Offsets | None = None  # None: the records of this window are told later
    dead: Offsets = field(default_factory=NONE.copy)


def compare_partition(
    job: Job, where: TopicPartition, prepared: Iterable[Prepared], reading: Reading
) -> Iterator[pa.RecordBatch | Compared]:
    """The keys of all rows on both sides (with a key), and at last what the comparison came to."""
    pipeline, scope = job.work.pipeline, job.scopes[where]
    comparison = Comparison(where.topic, where.partition, scope.start, job.by, compacted=scope.compacted)
    letters = reading.letters(where)
    start = scope.start
    if job.key_types:
        start = 0  # rows that cannot be compared still say under which key they stand
    else:
        comparison.unchecked(reading.rows_below(where, start))
    there = table.Ordered(reading.rows(where, job.columns, start), pipeline.sink.lineage[2])
    walk = _Walk(job, scope, comparison, letters, reading)
    yield from walk.below(there.take(scope.start))
    for part in _parts(prepared, job, scope):
        yield from walk.window(part, there.take(part.until))
    yield from walk.beyond(there.rest())
    yield comparison.result()


class _Walk:
    """Walks along both sides, and gives the keys that it sees."""

    def __init__(self, job: Job, scope: Scope, comparison: Comparison, letters: Offsets, reading: Reading) -> None:
        self._reading = reading
        self._job = job
        self._scope = scope
        self._comparison = comparison
        self._letters = letters
        self._offset = job.work.pipeline.sink.lineage[2]
        self._begin = scope.start

    def below(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows before the first window: there is nothing to compare them with."""
        for batch in rows:
            self._comparison.unchecked(batch.num_rows)
            yield from self._keys(batch, there=True)

    def window(self, part: _Part, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        letters = self._letters_until(part.until)
        due, there = None if part.rows is None else self._reading.stored(part.rows), _one([*rows])
        if due is None and there is not None:
            due = there.slice(0, 0)
        if due is None:
            self._comparison.rows(part.until, NO_ROWS, NO_ROWS, letters)
        else:
            there = due.slice(0, 0) if there is None else self._reading.comparable(due, there)
            self._compare(part.until, due.select(self._job.columns), there, letters)
            yield from self._keys(_without(due, letters, self._offset))
            yield from self._keys(there, there=True)
        deletes = NONE
        if part.deletes is not None and part.deletes.num_rows:
            deletes = part.deletes.column(self._offset).to_numpy()
            yield from self._keys(_without(part.deletes, self._letters, self._offset), deletes=True)
        if part.visible is not None:
            self._comparison.records(part.until, part.visible, part.dead, deletes)

    def _compare(self, until: int, due: pa.RecordBatch, there: pa.RecordBatch, letters: Offsets) -> None:
        window = Window(due, there, self._offset, self._job.json_columns)
        for change in window.changed(self._comparison.rows(until, *window.rows(), letters)):
            self._comparison.changed(change.kind, change.offsets, change.columns)

    def beyond(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows past the last window: not claimed, or not committed, or not there to compare with."""
        offsets = [self._letters[self._letters >= self._scope.behind_from]]
        for batch in rows:
            at = batch.column(self._offset).to_numpy()
            self._comparison.unchecked(int((at < self._scope.behind_from).sum()))
            offsets.append(np.unique(at[at >= self._scope.behind_from]))
            yield from self._keys(batch, there=True)
        self._comparison.beyond(np.unique(np.concatenate(offsets)), self._scope.readable_until)

    def _letters_until(self, until: int) -> Offsets:
        within = (self._letters >= self._begin) & (self._letters < until)
        self._begin = until
        return self._letters[within]

    def _keys(self, rows: pa.RecordBatch, *, deletes: bool = False, there: bool = False) -> Iterator[pa.RecordBatch]:
        if not self._job.key_types or not rows.num_rows:
            return
        count = rows.num_rows
        yield pa.RecordBatch.from_arrays(
            [
                *(_cast(rows.column(name), type_) for name, type_ in self._job.key_types.items()),
                pa.repeat(pa.scalar(self._scope.number, pa.int32()), count),
                rows.column(self._offset),
                pa.repeat(deletes, count),
                pa.repeat(there, count),
            ],
            schema=self._job.key_schema,
        )


def _without(rows: pa.RecordBatch, letters: Offsets, offset: str) -> pa.RecordBatch:
    """Rows without those that the sink refused: they never stood under their key."""
    if not len(letters):
        return rows
    return rows.filter(pc.invert(pc.is_in(rows.column(offset), value_set=pa.array(letters))))


def _cast(column: pa.Array, type_: pa.DataType) -> pa.Array:
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    return stored.cast(type_)


def _parts(prepared: Iterable[Prepared], job: Job, scope: Scope) -> Iterator[_Part]:
    """What is due, in windows that end between two records. Behind a SQL query, the records are known at the end."""
    offset = job.work.pipeline.sink.lineage[2]
    for part in prepared:
        rows = part.rows.rows
        dead = np.array([letter.offset for letter in part.letters], np.int64)
        if not job.work.pipeline.by_sql:
            yield _Part(int(part.offsets[-1]) + 1, rows, part.rows.deletes, part.offsets, dead)
        elif len(part.offsets):
            yield _Part(scope.until, None, part.rows.deletes, part.offsets, dead)
        elif rows.num_rows:
            yield _Part(rows.column(offset)[-1].as_py() + 1, rows, None)
    # The last records may be followed by rows that have none.
    yield _Part(scope.until, None, None, NONE)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch | None:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0] if batches else None


def offsets_of_phantoms(pipeline: PipelineConfig, planned: OffsetRange, spans: Sequence[Span]) -> Iterator[Offsets]:
    """Of the offsets in these spans, those at which there is a record, committed or not."""
    starts, untils = np.array([span.start for span in spans]), np.array([span.until for span in spans])
    with closing(Reader(pipeline.source, pipeline.name, isolation="read_uncommitted")) as reader:
        for batch in reader.read(planned):
            offsets = numbers(batch.column("offset"))
            at = np.searchsorted(starts, offsets, "right") - 1
            yield offsets[(at >= 0) & (offsets < untils[at])]
