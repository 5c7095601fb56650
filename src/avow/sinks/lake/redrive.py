"""Dead letters of a lake: looking at them, and bringing them into the table of rows after all.

Two tables cannot be committed at once, so a redrive is numbered, and goes in three commits:

1. the letters are marked with the number N, above those of both tables, and their table takes N; only if its number
   is still the one that was seen, so that no two redrives ever mark with the same
2. the table of rows takes the rows, the new counts, and N; only if its number is still the one that was seen
3. the letters with mark N are removed

What a crash leaves is settled before the next redrive: a mark that is the number of the table of rows was delivered,
and its letters go; any other was not, and is taken off, after the number of the table of rows was raised above it so
that whoever set it cannot come back and deliver. With that the table of letters takes the raised number too: no redrive
may mark with a number that the table of rows has without having delivered.

Owns: that protocol. Must not know: decoding, any format. Neighbours: ``driver`` (commits), ``staging`` (files).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from avow import ledger
from avow.errors import ProtocolViolation, SinkError
from avow.guarantee import Act
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, Glimpse, Rows, Selection, Written
from avow.sinks.lake import letters as graveyard
from avow.sinks.lake.book import Book
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.driver import LETTER_COLUMNS, Acting, Change, LakeDriver, committed
from avow.sinks.lake.staging import LakeStaging
from avow.sinks.lake.table import Chosen, LakeTable


class LakeLetters:
    """The dead letters of one pipeline, for looking at."""

    def __init__(self, rows: LakeTable, letters: LakeTable) -> None:
        self._rows, self._letters = rows, letters

    def __enter__(self) -> LakeLetters:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _selected(self, selection: Selection) -> pa.Table:
        if not self._exists():
            return graveyard.SCHEMA.empty_table()
        return graveyard.selected(there(self._letters.rows(graveyard.LIGHT), self._rows.book()), selection)

    def _exists(self) -> bool:
        return self._rows.load() and self._letters.load()

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        chosen = self._selected(selection)
        found = chosen.group_by("reason").aggregate([("offset", "count"), ("died_at", "max")])
        lines = [(row["reason"], row["offset_count"], row["died_at_max"]) for row in found.to_pylist()]
        return sorted(lines, key=lambda line: -line[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        found = self._selected(selection).group_by(["topic", "partition"]).aggregate([])
        return sorted(TopicPartition(row["topic"], row["partition"]) for row in found.to_pylist())

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return read_letters(self._letters, self._rows.book(), selection, limit) if self._exists() else []

    def glimpses(self, selection: Selection, limit: int) -> list[Glimpse]:
        if not self._exists():
            return []
        some = [graveyard.shortened(batch) for batch in self._letters.batches([*graveyard.LIGHT, "value"])]
        if not some:
            return []
        found = there(pa.Table.from_batches(some), self._rows.book())
        return graveyard.glimpses(graveyard.selected(found, selection).slice(0, limit))


def there(found: pa.Table, book: Book) -> pa.Table:
    """The dead letters of claimed records, without those that a redrive has delivered and not yet removed. From the
    position on, a claim has not come yet or never will, and then the records are read again."""
    if book.redrives:
        found = found.filter(pc.not_equal(found["redrive"].fill_null(0), book.redrives))
    claimed = []
    for row in found.group_by(["topic", "partition"]).aggregate([]).to_pylist():
        held = book.held.get(TopicPartition(row["topic"], row["partition"]))
        mine = pc.and_(pc.equal(found["topic"], row["topic"]), pc.equal(found["partition"], row["partition"]))
        claimed.append(found.filter(pc.and_(mine, pc.less(found["offset"], held.entry.position if held else 0))))
    return pa.concat_tables(claimed) if claimed else found


def read_letters(table: LakeTable, book: Book, selection: Selection, limit: int) -> list[DeadLetter]:
    """The first of those that are selected. Which they are is found without their keys and values: only these few are
    read whole, however large the table is."""
    part = None
    if selection.topic is not None and selection.partition is not None:
        where = TopicPartition(selection.topic, selection.partition)
        part = Chosen(where, LETTER_COLUMNS, selection.from_offset, selection.until_offset)
    light = graveyard.selected(there(table.rows(graveyard.LIGHT, part), book), selection).slice(0, limit)
    found: list[DeadLetter] = []
    for row in light.group_by(["topic", "partition"], use_threads=False).aggregate([("offset", "list")]).to_pylist():
        where = TopicPartition(row["topic"], row["partition"])
        whole = table.rows(None, Chosen(where, LETTER_COLUMNS, offsets=tuple(row["offset_list"])))
        found += graveyard.from_rows(graveyard.selected(whole, Selection()))
    return found


class LakeRedriving:
    """The sink as a redrive sees it."""

    def __init__(self, pipeline: PipelineConfig, rows: LakeTable, letters: LakeTable) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._pipeline, self._sink = pipeline, pipeline.sink
        self._rows, self._letters = rows, letters
        self._driver = LakeDriver(pipeline, rows, letters)
        self._staging: LakeStaging | None = None
        self._run = 0  # whose files these are: the newest, so that nobody takes them for left behind
        self._delivered: list[tuple[list[DeadLetter], int, int]] = []

    @contextmanager
    def act(self) -> Iterator[None]:
        for table in (self._rows, self._letters):
            if not table.load():
                raise SinkError(f"table {table.shown} is not there", advice="Run the pipeline first.")
            self._driver.check(table)
        self._settle()
        self._delivered.clear()
        yield
        for delivered in self._delivered:
            self._deliver(*delivered)

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:  # noqa: ARG002
        found = self._rows.book().entries()  # nobody is held off: the commit compares
        return [found[where] for where in partitions]

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return read_letters(self._letters, self._rows.book(), selection, limit)

    def write(self, rows: Rows) -> Written:
        # The columns as the rows have them: a transform may have changed them since the table was checked.
        self._run = self._rows.book().newest
        self._staging = LakeStaging(self._pipeline, self._run, self._driver.brief_for(rows.rows))
        return self._staging.write(rows)

    def finish(self, done: OffsetRange) -> Written:
        """With a key, what is left out is known only when it is brought in; here it is asked beforehand."""
        assert self._staging is not None
        self._ready = self._staging.task_output(done, Counts(), None)
        if self._sink.mode != "dedupe" or not self._ready.files:
            return Written()
        skipped: dict[OffsetRange, int] = {}
        self._acting(skipped).files([self._ready])
        return Written(skipped=skipped.get(done, 0))

    def bury(self, letters: list[DeadLetter]) -> None:
        raise ProtocolViolation(f"a redrive buries nothing, and was asked to bury {len(letters)}")

    def unbury(self, letters: list[DeadLetter], written: int, skipped: int) -> None:
        self._delivered.append((letters, written, skipped))

    def _acting(self, skipped: dict[OffsetRange, int]) -> Acting:
        step, brief = frozenset({Act.WRITE}), self._driver.task_context()
        return Acting(self._rows, self._sink, self._pipeline, brief, step, [], self._run, True, skipped, set())

    def _deliver(self, letters: list[DeadLetter], written: int, skipped: int) -> None:
        if len(letters) != written + skipped:
            raise ProtocolViolation(f"{len(letters)} letters are not {written} written and {skipped} skipped")
        where = TopicPartition(letters[0].topic, letters[0].partition)
        seen, marks = self._rows.book().redrives, self._letters.book().redrives
        number = max(seen, marks) + 1
        offsets = tuple(letter.offset for letter in letters)
        chosen = Chosen(where, LETTER_COLUMNS, offsets=offsets)

        def marked(book: Book) -> Change:
            _refuse_other(self._letters, book, marks)
            return Change(replace(book, redrives=number), marked=(chosen, number))

        def taken_in(book: Book) -> Change:
            _refuse_other(self._rows, book, seen)
            if book.newest != self._run:
                # Files of the run before may be cleaned away, and a commit would still name them.
                raise SinkError(
                    f"run {book.newest} began meanwhile", advice="Nothing was delivered by this redrive. Redrive again."
                )
            files, merged = self._acting({}).files([self._ready])
            entry = book.held[where].entry
            counts = ledger.redriven(entry.counts, written, skipped)
            after = book.with_entries({where: replace(entry, counts=counts)})
            return Change(replace(after, redrives=number), files, merged)

        self._committed(self._letters, marked)
        self._rows.load()  # staging takes its time: a run may have begun since
        self._committed(self._rows, taken_in)
        self._remove(number)

    def _remove(self, number: int) -> None:
        for where in self._marked(number):
            chosen = Chosen(where, LETTER_COLUMNS, redrive=number)
            self._committed(self._letters, lambda book, chosen=chosen: Change(book, removed=chosen))

    def _marked(self, number: int) -> list[TopicPartition]:
        found = self._letters.rows(["topic", "partition", "redrive"])
        found = found.filter(pc.equal(found["redrive"], number)).group_by(["topic", "partition"]).aggregate([])
        return [TopicPartition(row["topic"], row["partition"]) for row in found.to_pylist()]

    def _settle(self) -> None:
        """What an interrupted redrive has left."""
        marks = {n for n in pc.unique(self._letters.rows(["redrive"])["redrive"]).to_pylist() if n is not None}
        if not marks:
            return
        number = delivered = self._rows.book().redrives
        if max(marks) > delivered:
            number = max(marks) + 1

            def fenced(book: Book) -> Change:
                if book.redrives != delivered:
                    raise SinkError("another redrive is at work", advice="Let it end, then redrive again.")
                return Change(replace(book, redrives=number))

            self._committed(self._rows, fenced)
        for mark in marks:
            if mark == delivered:
                self._remove(mark)
                continue
            for where in self._marked(mark):
                chosen = Chosen(where, LETTER_COLUMNS, redrive=mark)

                def unmarked(book: Book, chosen: Chosen = chosen) -> Change:
                    return Change(replace(book, redrives=max(book.redrives, number)), marked=(chosen, None))

                self._committed(self._letters, unmarked)

    def _committed(self, table: LakeTable, make: object) -> None:
        committed(table, self._driver.check, make, sink=self._sink)  # type: ignore[arg-type]


def _refuse_other(table: LakeTable, book: Book, seen: int) -> None:
    if book.redrives != seen:
        raise SinkError(
            f"another redrive came between: it changed table {table.shown}",
            advice="Nothing was delivered by this redrive. Redrive again.",
        )
