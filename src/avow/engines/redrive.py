"""Redrive: bring dead letters into the sink after all, under the identity of their records.

A dead letter is removed in the same act in which its row enters the table, so redriving twice, or being killed in
between, cannot double it. What is still bad stays, with its new reason. Only dead letters of records that are claimed
and counted are taken (``_redrivable``).

Under upsert a redriven record comes after records that followed it. A row that a later one wrote is kept by the offset
guard; a row that a later null value deleted has left no offset to compare with, so the topic is read for those.

Owns: that act. Neighbours: ``task`` (decode) and the sink's ``RedriveSink`` side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from avow import ledger, sinks
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.engines.task import decode_batch
from avow.engines.topics import resolved_part
from avow.errors import PositionMoved, RetentionLoss
from avow.guarantee import Guarantee
from avow.kafka.batches import COLUMNS, headers_column
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import Entry, OffsetRange
from avow.retry import random_pauses, retry
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, RedriveSink, RowChanges, Selection

Done = TypeVar("Done")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_ONCE = 1_000
TRIES_MAX = 20  # of one act, while a run or another redrive comes first
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Redriven:
    written: int = 0
    skipped: int = 0  # left out by the transform, or a repeated key
    still_dead: int = 0

    def __add__(self, other: Redriven) -> Redriven:
        return Redriven(self.written + other.written, self.skipped + other.skipped, self.still_dead + other.still_dead)


def redrive(
    pipeline: PipelineConfig,
    selection: Selection,
    spark: Callable[[], SparkSession],
    progress: Callable[[Redriven], None] = lambda _: None,
    hooks: Hooks = NO_HOOKS,
) -> Redriven:
    """Redrive what is selected, a thousand at a time, each thousand in one act."""
    total = Redriven()
    with sinks.dead_letters(pipeline) as dead_letters:
        partitions = dead_letters.partitions(selection)
    whole = pipeline
    for tp in partitions:
        pipeline = resolved_part(whole, tp.topic)
        sink = sinks.redriving(pipeline)
        chosen = replace(selection, topic=tp.topic, partition=tp.partition, from_offset=selection.from_offset or 0)
        with ExitStack() as opened:
            deletes = None
            if pipeline.tombstones == "delete":
                deletes = opened.enter_context(closing(_Deletes(pipeline, tp)))
                _tried(partial(_read_deletes, sink, pipeline, tp, chosen, deletes))
            while True:
                done, last = _tried(partial(_redrive_some, sink, pipeline, tp, chosen, deletes, spark, hooks))
                if last is None:
                    break
                chosen = replace(chosen, from_offset=last + 1)
                total += done
                progress(total)
    return total


def _tried(act: Callable[[], Done]) -> Done:
    """Nothing of an act is there if somebody else came first; then it is done anew."""
    return retry(act, PositionMoved, random_pauses(PAUSE_S, PAUSE_S, TRIES_MAX))


def _redrive_some(
    sink: RedriveSink,
    pipeline: PipelineConfig,
    tp: TopicPartition,
    selection: Selection,
    deletes: _Deletes | None,
    spark: Callable[[], SparkSession],
    hooks: Hooks,
) -> tuple[Redriven, int | None]:
    """One act. Gives what it came to, and the last offset it looked at: None if there was no dead letter left."""
    with sink.act():
        # The partition's entry is locked, so that a run in progress and a redrive do not count over each other.
        (entry,) = sink.entries([tp], lock=True)
        dead_letters = sink.dead_letters(_redrivable(selection, entry, pipeline.guarantee), AT_ONCE)
        if not dead_letters:
            return Redriven(), None
        whole = [
            dead_letter for dead_letter in dead_letters if dead_letter.full_bytes is None
        ]  # of the others the record itself is gone
        if not whole:
            return Redriven(still_dead=len(dead_letters)), dead_letters[-1].offset
        span = OffsetRange(tp.topic, tp.partition, dead_letters[0].offset, dead_letters[-1].offset + 1)
        prepared = decode_batch(_batch(whole), pipeline)
        rows, bad = prepared.rows, {dead_letter.offset for dead_letter in prepared.dead_letters}
        if pipeline.by_sql:
            from avow.engines import sql

            result, failed = sql.apply(spark(), rows.rows, pipeline)
            rows, bad = RowChanges(result, rows.deletes), bad | failed
        sink.confirm = lambda _: None
        if deletes is not None and rows.rows.num_rows:
            deletes.read(entry, dead_letters[0].offset + 1)
            rows = RowChanges(deletes.without_deleted(rows.rows), rows.deletes)
            sink.confirm = partial(deletes.confirm, rows.rows)
        offset = pipeline.sink.lineage.offset
        refused = sink.write(rows).refused
        bad |= {rows.rows.column(offset)[row].as_py() for row in refused}
        applied = sink.finish(span)
        bad |= set(applied.refused)
        delivered = [dead_letter for dead_letter in whole if dead_letter.offset not in bad]
        in_table = set(pc.unique(rows.rows.column(offset)).to_pylist()) | set(rows.deletes.column(offset).to_pylist())
        written = len([dead_letter for dead_letter in delivered if dead_letter.offset in in_table]) - applied.skipped
        if delivered:
            sink.remove_dead_letters(delivered, written, len(delivered) - written)
            hooks.reached("redriven", 0)  # everything is handed over, and nothing of it is committed
    return Redriven(written, len(delivered) - written, len(dead_letters) - len(delivered)), dead_letters[-1].offset


def _redrivable(selection: Selection, entry: Entry, guarantee: Guarantee) -> Selection:
    """What of a selection may be redriven. From the position on, records are read again if the claim never comes. Where
    the claim comes first, records behind the last one that was counted may be counted any moment, as dead."""
    until = entry.position
    if guarantee is Guarantee.AT_MOST_ONCE:
        until = entry.last.offset + 1 if entry.last else 0
    if selection.until_offset is not None:
        until = min(until, selection.until_offset)
    return replace(selection, until_offset=until)


def _read_deletes(
    sink: RedriveSink, pipeline: PipelineConfig, tp: TopicPartition, selection: Selection, deletes: _Deletes
) -> None:
    """Read the topic before the acts, each of which then reads only what came since: it can take minutes, in which a
    run could not claim."""
    with sink.act():
        (entry,) = sink.entries([tp], lock=False)
        dead_letters = sink.dead_letters(_redrivable(selection, entry, pipeline.guarantee), 1)
    if dead_letters:
        deletes.read(entry, dead_letters[0].offset + 1)


class _Deletes:
    """The keys of a partition that later records have deleted: rows of records before them would come back."""

    def __init__(self, pipeline: PipelineConfig, tp: TopicPartition) -> None:
        self._pipeline, self._tp = pipeline, tp
        self._log = Log(pipeline.source, pipeline.name)
        self._reader = Reader(pipeline.source, pipeline.name)
        self._start = self._next = 0  # what was read
        self._keys: dict[tuple[Any, ...], int] = {}

    def close(self) -> None:
        self._reader.close()
        self._log.close()

    def read(self, entry: Entry, start: int) -> None:
        """Read on from ``start``, up to the last record that can be in the table where the ledger has this entry."""
        pipeline, tp, until = self._pipeline, self._tp, entry.position
        if not self._start <= start <= self._next:
            self._start = self._next = start
        written_first = pipeline.guarantee is Guarantee.AT_LEAST_ONCE  # more can be there than is claimed
        if until <= self._next and not written_first:
            return
        # Before the stable end: a client that is asked for offsets first may take seconds (librdkafka 2.16).
        view = self._log.view({tp: None})[tp]
        if written_first:
            until = max(self._next, until, self._log.stable_ends([tp])[tp])
        since = OffsetRange(tp.topic, tp.partition, self._next, until)
        ledger.check_topic(f"{tp} was claimed up to offset {entry.position}", entry.topic_id, view.topic_id)
        if since and view.earliest > since.start:
            raise RetentionLoss(
                f"retention-loss: {tp} begins at offset {view.earliest}, so it cannot be known whether a record after "
                f"offset {since.start - 1} has deleted its key, and a redrive would bring the row back",
                advice="Send the corrected records to the topic again: they are then the latest of their keys. "
                f"Or redrive only what lies behind: --from-offset {view.earliest - 1}.",
            )
        for batch in self._reader.read(since) if since else ():
            deleting = batch if pipeline.decode.deletes_by_value else batch.filter(batch.column("value").is_null())
            if deleting.num_rows:
                deletes = decode_batch(deleting, pipeline).rows.deletes
                offsets = deletes.column(pipeline.sink.lineage.offset).to_pylist()
                self._keys |= zip(_tuples(deletes, list(pipeline.sink.key)), offsets, strict=True)
        self._next = until

    def confirm(self, rows: pa.RecordBatch, entry: Entry) -> None:
        """Before rows are committed where the ledger has this entry: a run may have come on meanwhile."""
        self.read(entry, self._next)
        if self.without_deleted(rows).num_rows < rows.num_rows:
            raise PositionMoved(f"a run has claimed a record of {self._tp} that deletes the row of a dead letter")

    def without_deleted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows, without those of keys that a later record has deleted."""
        offsets = rows.column(self._pipeline.sink.lineage.offset).to_pylist()
        keys = _tuples(rows, list(self._pipeline.sink.key))
        kept = [self._keys.get(key, -1) < at for key, at in zip(keys, offsets, strict=True)]
        return rows.filter(pa.array(kept, pa.bool_()))


def _tuples(rows: pa.RecordBatch, keys: list[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(rows.column(key).to_pylist() for key in keys), strict=True))


def _batch(dead_letters: list[DeadLetter]) -> pa.RecordBatch:
    """Dead letters as the records they were."""
    # Not by way of datetime, which has no year 10000: a producer may set any timestamp.
    stamps = pa.array([dead_letter.timestamp_ms for dead_letter in dead_letters], pa.int64()).cast(
        pa.timestamp("ms", "UTC")
    )
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([dead_letter.topic for dead_letter in dead_letters], pa.string()),
            "partition": pa.array([dead_letter.partition for dead_letter in dead_letters], pa.int32()),
            "offset": pa.array([dead_letter.offset for dead_letter in dead_letters], pa.int64()),
            "timestamp": stamps.cast(COLUMNS.field("timestamp").type),
            "key": pa.array([dead_letter.key for dead_letter in dead_letters], pa.binary()),
            "value": pa.array([dead_letter.value for dead_letter in dead_letters], pa.binary()),
            "headers": headers_column([dead_letter.headers for dead_letter in dead_letters]),
        }
    )
