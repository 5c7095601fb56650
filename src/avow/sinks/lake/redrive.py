"""Dead letters of a lake: reading them, and redriving them into the table of rows.

Two tables cannot be committed at once, so a redrive is numbered, and goes in three commits:

1. the dead letters are marked with the number N, above those of both tables, and their table takes N; only if its
   number is still the one that was seen, so that no two redrives ever mark with the same
2. the table of rows takes the rows, the new counts, and N; only if its number is still the one that was seen
3. the dead letters with mark N are removed

What a crash leaves is settled before the next redrive: a mark that is the number of the table of rows was delivered,
and its dead letters go; any other was not, and is taken off, after the number of the table of rows was raised above it
so that whoever set it cannot come back and deliver. With that the dead-letter table takes the raised number too: no
redrive may mark with a number that the table of rows has without having delivered.

Owns: that protocol. Must not know: decoding, any format. Neighbours: ``driver`` (commits), ``task`` (files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from avow import ledger
from avow.errors import PositionMoved, ProtocolViolation, SinkError
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, DeadLetterPreview, DeadLetterReader, RedriveSink, RowChanges, Selection, Written
from avow.sinks.lake import dead_letters as dead_letter_rows
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.driver import LakeDriver, TableChange, commit_with_retry
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot
from avow.sinks.lake.new_rows import NewRows, new_rows
from avow.sinks.lake.table import LakeTable, RowFilter
from avow.sinks.lake.task import LakeTask


class LakeDeadLetters(DeadLetterReader):
    def __init__(self, rows: LakeTable, dead_letters: LakeTable) -> None:
        self._rows, self._dead_letters = rows, dead_letters

    def _selected(self, selection: Selection) -> pa.Table:
        if not self._exists():
            return dead_letter_rows.SCHEMA.empty_table()
        return dead_letter_rows.selected(
            claimed_only(self._dead_letters.rows(dead_letter_rows.SUMMARY_COLUMNS), self._rows.ledger()), selection
        )

    def _exists(self) -> bool:
        return self._rows.load() and self._dead_letters.load()

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        rows = self._selected(selection)
        groups = rows.group_by("reason").aggregate([("offset", "count"), ("died_at", "max")])
        lines = [(row["reason"], row["offset_count"], row["died_at_max"]) for row in groups.to_pylist()]
        return sorted(lines, key=lambda line: -line[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        return sorted(_partitions_of(self._selected(selection)))

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return read_dead_letters(self._dead_letters, self._rows.ledger(), selection, limit) if self._exists() else []

    def previews(self, selection: Selection, limit: int) -> list[DeadLetterPreview]:
        if not self._exists():
            return []
        batches = [
            dead_letter_rows.preview_rows(batch)
            for batch in self._dead_letters.batches([*dead_letter_rows.SUMMARY_COLUMNS, "value"])
        ]
        if not batches:
            return []
        rows = claimed_only(pa.Table.from_batches(batches), self._rows.ledger())
        return dead_letter_rows.previews(dead_letter_rows.selected(rows, selection).slice(0, limit))


def claimed_only(rows: pa.Table, snapshot: LedgerSnapshot) -> pa.Table:
    """The dead letters of claimed records, without those that a redrive has delivered and not yet removed. From the
    position on, a claim has not come yet or never will, and then the records are read again."""
    if snapshot.redrives:
        rows = rows.filter(pc.not_equal(rows["redrive"].fill_null(0), snapshot.redrives))
    claimed = []
    for tp in _partitions_of(rows):
        state = snapshot.partitions.get(tp)
        claimed.append(rows.filter(RowFilter(tp, until=state.entry.position if state else 0).expression()))
    return pa.concat_tables(claimed) if claimed else rows


def _partitions_of(rows: pa.Table) -> list[TopicPartition]:
    groups = rows.group_by(["topic", "partition"]).aggregate([])
    return [TopicPartition(row["topic"], row["partition"]) for row in groups.to_pylist()]


def read_dead_letters(table: LakeTable, snapshot: LedgerSnapshot, selection: Selection, limit: int) -> list[DeadLetter]:
    """The first of those that are selected. Which they are is found without their keys and values: only these few are
    read whole, however large the table is."""
    part = None
    if selection.topic is not None and selection.partition is not None:
        tp = TopicPartition(selection.topic, selection.partition)
        part = RowFilter(tp, start=selection.from_offset, until=selection.until_offset)
    light = dead_letter_rows.selected(
        claimed_only(table.rows(dead_letter_rows.SUMMARY_COLUMNS, part), snapshot), selection
    ).slice(0, limit)
    dead_letters: list[DeadLetter] = []
    for row in light.group_by(["topic", "partition"], use_threads=False).aggregate([("offset", "list")]).to_pylist():
        tp = TopicPartition(row["topic"], row["partition"])
        whole = table.rows(None, RowFilter(tp, offsets=tuple(row["offset_list"])))
        dead_letters += dead_letter_rows.from_rows(dead_letter_rows.selected(whole, Selection()))
    return dead_letters


class LakeRedrive(RedriveSink):
    def __init__(self, pipeline: PipelineConfig, rows: LakeTable, dead_letters: LakeTable) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._pipeline, self._sink = pipeline, pipeline.sink
        self._rows, self._dead_letters = rows, dead_letters
        self._driver = LakeDriver(pipeline, rows, dead_letters)
        self._task: LakeTask | None = None
        self._run = 0  # the newest run, so that its files do not count as orphans
        self._delivered: list[tuple[list[DeadLetter], int, int]] = []

    @contextmanager
    def act(self) -> Iterator[None]:
        for table in (self._rows, self._dead_letters):
            if not table.load():
                raise SinkError(f"table {table.shown} does not exist", advice="Run the pipeline first.")
            self._driver.check(table)
        self._finish_interrupted()
        self._delivered.clear()
        yield
        for delivered in self._delivered:
            self._deliver(*delivered)

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:  # noqa: ARG002
        entries = self._rows.ledger().entries()  # nothing is locked: the commit compares
        return [entries[tp] for tp in partitions]

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return read_dead_letters(self._dead_letters, self._rows.ledger(), selection, limit)

    def write(self, rows: RowChanges) -> Written:
        # The columns as the rows have them: a transform may have changed them since the table was checked.
        self._run = self._rows.ledger().newest
        self._task = LakeTask(self._pipeline, self._run, self._driver.task_context_for(rows.rows))
        return self._task.write(rows)

    def finish(self, done: OffsetRange) -> Written:
        """With a key, what is left out is known only when it is brought in; here it is asked beforehand."""
        assert self._task is not None
        self._output = self._task.task_output(done, Counts(), None)
        self._skipped = sum(self._new_rows().skipped.values()) if self._sink.mode == "dedupe" else 0
        return Written(skipped=self._skipped)

    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        raise ProtocolViolation(f"a redrive cannot add dead letters, but got {len(dead_letters)}")

    def remove_dead_letters(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        self._delivered.append((dead_letters, written, skipped))

    def _new_rows(self) -> NewRows:
        return new_rows([self._output], self._rows, self._pipeline, self._driver.task_context(), self._run)

    def _deliver(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        if len(dead_letters) != written + skipped:
            raise ProtocolViolation(f"{len(dead_letters)} dead letters are not {written} written and {skipped} skipped")
        tp = TopicPartition(dead_letters[0].topic, dead_letters[0].partition)
        seen, marks = self._rows.ledger().redrives, self._dead_letters.ledger().redrives
        number = max(seen, marks) + 1
        offsets = tuple(dead_letter.offset for dead_letter in dead_letters)
        row_filter = RowFilter(tp, offsets=offsets)

        def marked(snapshot: LedgerSnapshot) -> TableChange:
            _refuse_concurrent(self._dead_letters, snapshot, marks)
            return TableChange(replace(snapshot, redrives=number), marked=(row_filter, number))

        def taken_in(snapshot: LedgerSnapshot) -> TableChange:
            _refuse_concurrent(self._rows, snapshot, seen)
            if snapshot.newest != self._run:
                # Files of the run before may be cleaned away, and a commit would still name them.
                raise SinkError(
                    f"the redrive was fenced: run {snapshot.newest} started",
                    advice="Nothing was delivered by this redrive. Redrive again.",
                )
            entry = snapshot.partitions[tp].entry
            self.confirm(entry)
            new = self._new_rows()
            if sum(new.skipped.values()) != self._skipped:
                raise PositionMoved(f"a run has brought keys of dead letters of {tp} meanwhile")
            counts = ledger.redriven(entry.counts, written, skipped)
            after = snapshot.with_entries({tp: replace(entry, counts=counts)})
            return TableChange(replace(after, redrives=number), new.files, new.merged)

        self._commit_to(self._dead_letters, marked)
        self._rows.load()  # staging takes its time: a run may have begun since
        self._commit_to(self._rows, taken_in)
        self._remove(number)

    def _remove(self, number: int) -> None:
        for tp in self._marked(number):
            self._commit_to(self._dead_letters, partial(TableChange, removed=RowFilter(tp, redrive=number)))

    def _marked(self, number: int) -> list[TopicPartition]:
        rows = self._dead_letters.rows(["topic", "partition", "redrive"])
        return _partitions_of(rows.filter(pc.equal(rows["redrive"], number)))

    def _finish_interrupted(self) -> None:
        """What an interrupted redrive has left."""
        marks = {n for n in pc.unique(self._dead_letters.rows(["redrive"])["redrive"]).to_pylist() if n is not None}
        if not marks:
            return
        number = delivered = self._rows.ledger().redrives
        if max(marks) > delivered:
            number = max(marks) + 1

            def fenced(snapshot: LedgerSnapshot) -> TableChange:
                if snapshot.redrives != delivered:
                    raise SinkError(
                        "another redrive is in progress", advice="Wait until it has ended, then redrive again."
                    )
                return TableChange(replace(snapshot, redrives=number))

            self._commit_to(self._rows, fenced)
        for mark in marks:
            if mark == delivered:
                self._remove(mark)
                continue
            for tp in self._marked(mark):
                row_filter = RowFilter(tp, redrive=mark)

                def unmarked(snapshot: LedgerSnapshot, row_filter: RowFilter = row_filter) -> TableChange:
                    return TableChange(
                        replace(snapshot, redrives=max(snapshot.redrives, number)), marked=(row_filter, None)
                    )

                self._commit_to(self._dead_letters, unmarked)

    def _commit_to(self, table: LakeTable, make: Callable[[LedgerSnapshot], TableChange | None]) -> None:
        commit_with_retry(table, self._driver.check, make, sink=self._sink)


def _refuse_concurrent(table: LakeTable, snapshot: LedgerSnapshot, seen: int) -> None:
    if snapshot.redrives != seen:
        raise SinkError(
            f"another redrive committed first to table {table.shown}",
            advice="Nothing was delivered by this redrive. Redrive again.",
        )
