"""The driver's side of a lake sink: runs, positions, and the commits that bring files and positions in together.

Owns: the order inside one act over two tables, and the loop that repeats a refused commit or gives it up. The rules are
``avow.ledger``'s, the order of acts is the engine's, and how a commit is written is the format's.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from avow import ledger
from avow.arrow import arrow_type
from avow.errors import ConfigError, PositionMoved, ProtocolViolation, SinkError
from avow.guarantee import Act
from avow.kafka.log import TopicPartition
from avow.ledger import NOTHING, Counts, Entry, OffsetRange
from avow.schema import Array, Field, Map, Struct, Type
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.base import Claimed, Held
from avow.sinks.lake import letters as graveyard
from avow.sinks.lake.book import Book
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.files import DataFile, FileWriter, Place
from avow.sinks.lake.staging import DELETED, Brief, Staged, Writers, partition_values
from avow.sinks.lake.table import Chosen, Conflict, LakeTable, Shape, comparable

# Of commits that others keep refusing by committing first.
ATTEMPTS_MAX = 40
IDLE_MAX = 5  # of refusals although nobody else has committed: a full disk, a locked catalog
PAUSE_S = 0.02

LETTER_COLUMNS = ("topic", "partition", "offset")
GRAVES = Shape(graveyard.SCHEMA)  # from which a redrive removes letters: as upsert does
_NUMBER = "__avow_number"  # of a row, beside its key while keys are joined or grouped


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit is to bring."""

    book: Book
    files: Sequence[DataFile] = ()
    merged: pa.Table | None = None  # rows to be brought in by key
    removed: Chosen | None = None
    marked: tuple[Chosen, int | None] | None = None


def nothing() -> None:
    return None


def committed(
    table: LakeTable,
    check: Callable[[LakeTable], None],
    make: Callable[[Book], Change | None],
    answered: Callable[[], None] = nothing,
    *,
    sure: bool = True,
    sink: LakeConfig,
) -> None:
    """Make a commit on the newest book, again and again while others come first.

    ``check`` refuses a table that others have made unfit for it. ``make`` judges the book and says what to commit; None
    if there is nothing left to do. ``answered`` is called when the table has said yes. Without ``sure``, a commit whose
    answer was lost is not looked for: it has failed.
    """
    name = uuid.uuid4().hex
    idle = 0
    for attempt in range(ATTEMPTS_MAX):
        before = table.version
        check(table)
        change = make(table.book())
        if change is None:
            return
        failure: Exception
        try:
            _commit(table, change, name, sink)
            answered()
            return
        except Conflict as conflict:
            failure = conflict
        except (OSError, SinkError) as error:
            if not sure:
                raise SinkError(f"the answer to a write into table {table.shown} was lost: {error}") from error
            failure = error
        # Refused, or unknown: a store that tried again by itself may have refused what it had taken.
        time.sleep(PAUSE_S * random.random() * min(attempt + 1, 10))
        if not table.load():
            raise SinkError(f"table {table.shown} is gone: {failure}") from failure
        if table.landed(name):
            return
        idle += table.version == before
        if idle > IDLE_MAX or not isinstance(failure, Conflict):
            raise SinkError(f"table {table.shown} did not take a commit: {failure}") from failure
    raise SinkError(
        f"others changed table {table.shown} {ATTEMPTS_MAX} times before us",
        advice="Let compaction and the like commit less often, or raise batch.interval.",
    )


def _commit(table: LakeTable, change: Change, name: str, sink: LakeConfig) -> None:
    if change.merged is not None:
        table.merge(change.merged, sink.key, sink.lineage, change.book, name)
    elif change.removed is not None:
        table.remove(change.removed, change.book, name)
    elif change.marked is not None:
        table.mark(*change.marked, change.book, name)
    else:
        table.commit(change.book, change.files, name)


class LakeDriver:
    """What the driver asks of a lake. ``rows`` and ``letters`` are its two tables."""

    def __init__(self, pipeline: PipelineConfig, rows: LakeTable, letters: LakeTable) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._pipeline, self._sink = pipeline, pipeline.sink
        self._rows, self._letters = rows, letters
        self._shape: Shape | None = None
        self._checked: dict[str, object] = {}  # by table, what its last check rested on
        # Between the acts of one batch: what dedupe left out, and what was really claimed.
        self._skipped: dict[OffsetRange, int] = {}
        self._claimed: set[OffsetRange] = set()
        self._numbers: set[int] = set()  # those taken, where others run beside

    def __enter__(self) -> LakeDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        return None

    # Before a run.

    def prepare(self) -> None:
        """Whether the store can be reached, and tables that are there can be trusted."""
        if self._rows.load():
            _refuse_rolled_back(self._rows)
        if self._letters.load():
            _refuse_rolled_back(self._letters)
            self._refuse_lost_rows()

    def _refuse_lost_rows(self) -> None:
        """Where the table's log no longer tells whether it went back: the last record that was read of each partition
        is a row or a dead letter. With a key, a transform or skipped tombstones it may rightly be neither."""
        pipeline, (topic, partition, offset, _) = self._pipeline, self._sink.lineage
        whole = self._sink.mode == "append" and pipeline.transform is None and pipeline.tombstones != "skip"
        if not (whole and self._rows.loaded and self._letters.loaded) or self._rows.past_is_known():
            return
        for where, held in self._rows.book().held.items():
            last, position = held.entry.last, held.entry.position
            if last is None or self._declares(where, position):
                continue
            row = Chosen(where, (topic, partition, offset), offsets=(last.offset,))
            letter = Chosen(where, LETTER_COLUMNS, offsets=(last.offset,))
            if self._rows.rows([offset], row).num_rows or self._letters.rows(["offset"], letter).num_rows:
                continue
            raise ConfigError(
                f"table {self._rows.shown} has no row and no dead letter of the last record that was claimed of "
                f"{where.topic}/{where.partition}, offset {last.offset}, and its log no longer has the commits since "
                "then: it was probably restored or rolled back",
                advice="Audit the table. If rows are missing, give the pipeline a new name and a new table, or bring "
                "the table forward again. If that row was removed on purpose, confirm the position: source.start = "
                f"{{ {json.dumps(where.topic)} = {{ {where.partition} = {position} }} }}.",
            )

    def _declares(self, where: TopicPartition, start: int) -> bool:
        """Whether this very offset was declared as where the partition starts."""
        declared = self._pipeline.source.start
        return isinstance(declared, Mapping) and declared.get(where.topic, {}).get(where.partition) == start

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        self._shape = shape(fields, self._sink, self._rows, rest=rest)
        made = not self._rows.load() and self._rows.create(self._shape)
        if not made:
            self._evolve(self._shape)
        self.check(self._rows)
        found = self._letters.load()
        self._refuse_lost_letters(found=found)
        if not found:
            self._letters.create(GRAVES)
        self.check(self._letters)
        return made

    def _evolve(self, wanted: Shape) -> None:
        table = self._rows
        missing = [one for one in wanted.schema if one.name not in table.schema().names]
        if missing and self._sink.evolve == "add" and all(one.nullable for one in missing):
            try:
                table.add_columns(missing)
            except Conflict:
                table.load()
                self._evolve(wanted)

    def _refuse_lost_letters(self, *, found: bool) -> None:
        """Where letters are counted, their table has a ledger too."""
        dead = sum(held.entry.counts.dead for held in self._rows.book().held.values())
        if dead and not (found and self._letters.book() != Book()):
            raise ConfigError(
                f"table {self._letters.shown} {'was made anew' if found else 'is gone'}, and with it {dead:,} dead "
                f"letters that table {self._rows.shown} counts",
                advice="Bring the table back as it was, or give the pipeline a new name and a new table.",
            )

    def check(self, table: LakeTable) -> None:
        """At the start, and before each commit: others may do to a table what is in no commit's way, and still breaks
        the promise."""
        _refuse_rolled_back(table)
        if table is self._rows:
            self._refuse_lost_rows()
        wanted, mode = (self._shape, self._sink.mode) if table is self._rows else (GRAVES, "upsert")
        basis = table.basis()
        if wanted is not None and basis != self._checked.get(table.shown):
            evolves = table is not self._rows or self._sink.evolve == "add"
            lines = [*table.refusals(wanted, mode), *differences(wanted, table)]
            _raise_differences(table.shown, lines, evolves=evolves)
            self._checked[table.shown] = basis

    def keepalive(self) -> None:
        return None

    def brief_for(self, rows: pa.RecordBatch) -> Brief:
        """For rows that no ``prepare_table`` has announced: the columns that they and the table have."""
        names = set(rows.schema.names)
        missing = names - set(self._rows.schema().names)
        lines = [f"column {name!r} is missing" for name in sorted(missing)]
        _raise_differences(self._rows.shown, lines, evolves=self._sink.evolve == "add")
        ours = pa.schema([one for one in self._rows.schema() if one.name in names])
        by = self._sink.partition_by
        derived = pa.field(f"{by.column}_day", pa.date32()) if by and by.day else by and ours.field(by.column)
        self._shape = Shape(ours, derived, by.column if by and by.day else None)
        return self.task_context()

    def task_context(self) -> Brief:
        assert self._shape is not None, "prepare_table comes first"
        return Brief(
            schema=self._rows.file_schema(self._shape.schema),
            data=self._rows.data,
            letters=self._letters.data,
            letter_schema=self._letters.file_schema(graveyard.SCHEMA),
            notes=self._rows.data.under("_avow"),
            partition=self._shape.partition,
            in_files=self._rows.partition_in_files,
        )

    # Runs and positions.

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Take a number, and fence with it whoever came before: everywhere, or where others run beside in these
        partitions. Only then take back dead letters of claims that never came: the table of rows would still take such
        a claim from a run that it has not fenced."""
        for table in (self._rows, self._letters):
            if not table.load():
                raise ProtocolViolation(f"table {table.shown} is not there")
        run, fenced = 0, set[TopicPartition]()

        def begun(book: Book) -> Change:
            nonlocal run, fenced
            run = max(book.newest, self._letters.book().newest) + 1
            if partitions is None:
                return Change(book.fenced(run))
            # What we took before and nobody has taken since goes along to the new number: one that no partition has is
            # nobody's any more (``upkeep``).
            own = {where for where, held in book.held.items() if held.entry.run in self._numbers}
            fenced = own | (set(partitions) & book.held.keys())
            return Change(book.fenced(run, fenced))

        self._committed(self._rows, begun)
        if partitions is None:
            self._committed(self._letters, lambda book: Change(book.fenced(run)))
            self._take_back(self._rows.book().held, run)
        else:
            self._numbers.add(run)
            self._take_letters(fenced, run)
        return run

    def _take_letters(self, partitions: Set[TopicPartition], run: int) -> None:
        """Fence partitions that the table of rows has just given to this run in the table of dead letters too, and take
        back what is to be."""
        held = self._rows.book().held

        def fenced(book: Book) -> Change | None:
            if book.run >= run or not partitions:
                return None  # it was fenced as a whole
            missing = {where: Entry(held[where].entry.position, "", 0) for where in partitions - book.held.keys()}
            after = book.with_entries(missing)
            return Change(after.fenced(run, [where for where in partitions if after.entry(where).run != run]))

        self._committed(self._letters, fenced)
        self._take_back(partitions, run)

    def _take_back(self, partitions: Collection[TopicPartition], run: int) -> None:
        """Dead letters from the claimed position on were buried for a claim that never came: their records come
        again."""
        claimed, buried = self._rows.book().held, self._letters.book().held
        for where in partitions:
            position = claimed[where].entry.position
            if where not in buried or buried[where].entry.position <= position:
                continue

            def back(book: Book, where: TopicPartition = where, position: int = position) -> Change | None:
                entry = book.entry(where)
                ledger.check_fence(entry, run)
                if entry.position <= position:
                    return None
                chosen = Chosen(where, LETTER_COLUMNS, start=position)
                return Change(book.with_entries({where: replace(entry, position=position)}), removed=chosen)

            self._committed(self._letters, back)

    def entries(self) -> dict[TopicPartition, Entry]:
        return self._rows.book().entries() if self._rows.loaded or self._rows.load() else {}

    def look(self) -> dict[TopicPartition, Held]:
        return dict(self._rows.book().held) if self._rows.load() else {}

    def claims_of(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:  # noqa: ARG002
        return {}  # the book has totals only

    def claims(self, limit: int) -> None:  # noqa: ARG002 - the table's versions are not one of each claim
        return None

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        for where in entries.keys() - self._rows.book().held.keys():
            self._refuse_rows_of(where, entries[where].position)
        run = max((entry.run for entry in entries.values()), default=0)
        taken = set[TopicPartition]()

        def adopted(book: Book) -> Change | None:
            nonlocal taken
            missing = {where: entry for where, entry in entries.items() if where not in book.held}
            # One that an older run has written meanwhile stays, and is ours from now on.
            older = {where for where in entries.keys() & book.held.keys() if book.entry(where).run < run}
            taken = missing.keys() | older
            return Change(book.with_entries(missing).fenced(run, older)) if taken else None

        self._committed(self._rows, adopted)
        self._take_letters(taken, run)

    def _refuse_rows_of(self, where: TopicPartition, start: int) -> None:
        """Rows of a partition that has no position: reading on behind them is all that neither doubles nor leaves out,
        unless a start was declared for this very partition."""
        topic, partition, offset, _ = self._sink.lineage
        found = self._rows.batches([offset], Chosen(where, (topic, partition, offset)))
        greatest = max((pc.max(batch.column(0)).as_py() for batch in found if batch.num_rows), default=None)
        declared = self._pipeline.source.start
        named = isinstance(declared, Mapping) and where.partition in declared.get(where.topic, {})
        if greatest is None or start == greatest + 1 or (named and start > greatest):
            return
        raise ConfigError(
            f"table {self._rows.shown} has rows of {where.topic}/{where.partition} up to offset {greatest}, and no "
            f"position of pipeline {self._pipeline.name}, which would begin at offset {start}",
            advice="The positions were lost (the table was replaced or restored), or another pipeline has written "
            "these rows. Name a new table, remove the rows, or declare the offset behind them in source.start.",
        )

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = NOTHING) -> None:  # noqa: ARG002
        def claimed(book: Book) -> Change | None:
            where = TopicPartition(done.topic, done.partition)
            entry = _entry(book, where)
            todo = ledger.judge(entry.position, done)
            return Change(book.with_entries({where: ledger.claim(entry, todo, run, counts)})) if todo else None

        self._committed(self._rows, claimed)

    # Acts over what tasks have staged.

    def commit(
        self,
        step: frozenset[Act],
        outputs: Sequence[object],
        run: int,
        batch: int,  # noqa: ARG002
        *,
        last: bool,
        answered: Callable[[], None] = nothing,
    ) -> None:
        """One act of the guarantee, for all ranges of a batch at once. ``last``: it tells the counts too."""
        staged = [part for part in outputs if isinstance(part, Staged)]
        assert len(staged) == len(outputs), f"not what tasks have staged: {outputs!r}"
        if Act.WRITE in step:
            self._bury(staged, run)
        acting = Acting(
            self._rows,
            self._sink,
            self._pipeline,
            self.task_context(),
            step,
            staged,
            run,
            last,
            self._skipped,
            self._claimed,
        )
        self._committed(self._rows, acting.change, answered, sure=Act.CLAIM in step)
        if last:
            self._skipped.clear()
            self._claimed.clear()
            if self._sink.mode != "append":
                self._remove_notes(staged)

    def _remove_notes(self, staged: Sequence[Staged]) -> None:
        """What is in the table now is needed no more. One that stays is found by ``upkeep``."""
        notes = self.task_context().notes
        for file in (file for part in staged for file in part.files):
            with suppress(OSError):
                notes.filesystem.delete_file(f"{notes.root}/{file.name}")

    def _bury(self, staged: Sequence[Staged], run: int) -> None:
        """Dead letters first, each once: their table has positions of its own."""
        with_letters = [part for part in staged if part.letters]
        if not with_letters:
            return

        def buried(book: Book) -> Change | None:
            files: list[DataFile] = []
            entries = {}
            for part in with_letters:
                where = TopicPartition(part.done.topic, part.done.partition)
                entry = book.entry(where) if where in book.held else Entry(part.done.start, "", book.run)
                ledger.check_fence(entry, run)
                if entry.position >= part.done.until:
                    continue
                found = part.letters if entry.position <= part.done.start else self._later(part, entry.position, run)
                files += found
                entries[where] = replace(entry, position=part.done.until)
            return Change(book.with_entries(entries), files) if entries else None

        self._committed(self._letters, buried)

    def _later(self, part: Staged, position: int, run: int) -> list[DataFile]:
        """The letters from an offset on, in a file of their own."""
        found = read_files(self._letters.data, part.letters)
        found = found.filter(pc.greater_equal(found["offset"], position))
        schema = self._letters.file_schema(graveyard.SCHEMA)
        writer = FileWriter(self._letters.data, schema, (self._pipeline.name, run), self._sink.file_mb << 20)
        for batch in found.cast(schema).to_batches():
            writer.write(batch)
        return writer.close()

    def _committed(
        self,
        table: LakeTable,
        make: Callable[[Book], Change | None],
        answered: Callable[[], None] = nothing,
        *,
        sure: bool = True,
    ) -> None:
        committed(table, self.check, make, answered, sure=sure, sink=self._sink)


@dataclass(slots=True)
class Acting:
    """One act: judged anew on every book it meets."""

    rows: LakeTable
    sink: LakeConfig
    pipeline: PipelineConfig
    brief: Brief
    step: frozenset[Act]
    staged: Sequence[Staged]
    run: int
    last: bool
    skipped: dict[OffsetRange, int]
    claimed: set[OffsetRange]

    def change(self, book: Book) -> Change | None:
        todo = [part for part in self.staged if self._is_due(book, part)]
        files, merged = self.files(todo) if Act.WRITE in self.step else ([], None)
        entries = {}
        if Act.CLAIM in self.step:
            self.claimed.clear()
            self.claimed.update(part.done for part in todo)
        for part in todo:
            where = TopicPartition(part.done.topic, part.done.partition)
            entry = _entry(book, where)
            counts, last = (self._counts(part), part.last) if self.last else (NOTHING, None)
            if Act.CLAIM in self.step:
                entries[where] = ledger.claim(entry, part.done, self.run, counts, last)
            elif self.last:
                entries[where] = replace(entry, counts=entry.counts + counts, last=last or entry.last)
        if not (entries or files or merged is not None):
            return None
        return Change(book.with_entries(entries), files, merged)

    def _is_due(self, book: Book, part: Staged) -> bool:
        """Whether a range is still to be done: not if it was claimed, unless that was the act before this one."""
        entry = _entry(book, TopicPartition(part.done.topic, part.done.partition))
        ledger.check_fence(entry, self.run)
        if self.last and Act.CLAIM not in self.step:
            return part.done in self.claimed
        todo = ledger.judge(entry.position, part.done)
        if todo and todo != part.done:
            raise PositionMoved(f"{part.done} was staged, but the position is {entry.position}")
        return bool(todo)

    def _counts(self, part: Staged) -> Counts:
        """Dedupe knows what it left out only when it has seen the table."""
        left_out = self.skipped.get(part.done, 0)
        counts = part.counts
        return Counts(counts.read, counts.written - left_out, counts.dead, counts.skipped + left_out)

    def files(self, todo: Sequence[Staged]) -> tuple[list[DataFile], pa.Table | None]:
        if self.sink.mode == "append":
            return [file for part in todo for file in part.files], None
        # Deletes stand behind the rows of their batch there; the order that counts is that of the offsets.
        offset = self.sink.lineage[2]
        notes = [(part, read_files(self.brief.notes, part.files).sort_by(offset)) for part in todo if part.files]
        if not notes:
            return [], None
        if self.sink.mode == "upsert":
            merged = _one_per_key(pa.concat_tables(table for _, table in notes), self.sink, "last")
            return [], self._with_partition(merged)
        return self._deduped(notes), None

    def _deduped(self, notes: Sequence[tuple[Staged, pa.Table]]) -> list[DataFile]:
        """The first of each key that the table does not have. This version cannot change before the commit does."""
        every = pa.concat_tables(table for _, table in notes)
        fresh = _one_per_key(every, self.sink, "first").drop_columns([DELETED])
        keys = list(self.sink.key)
        there = self.rows.keys(keys, fresh)
        if there.num_rows:
            # Joined by numbers: a join keeps no order, and takes no nested columns along.
            numbered = comparable(fresh, keys).append_column(_NUMBER, pa.array(range(fresh.num_rows), pa.int64()))
            absent = numbered.join(there, keys, join_type="left anti")[_NUMBER]
            fresh = fresh.take(absent.combine_chunks().sort())
        topic, partition, offset, _ = self.sink.lineage
        taken = fresh.select([topic, partition, offset]).group_by([topic, partition, offset]).aggregate([])
        for part, table in notes:
            mine = pc.and_(pc.equal(taken[topic], part.done.topic), pc.equal(taken[partition], part.done.partition))
            records = pc.count_distinct(table[offset]).as_py()
            self.skipped[part.done] = records - taken.filter(mine).num_rows
        return self._as_files(fresh)

    def _with_partition(self, rows: pa.Table) -> pa.Table:
        """With the column that is derived for partitioning, where the table has it as one of its own."""
        partition = self.brief.partition
        if partition is None or self.rows.partition_in_files or partition.name in rows.schema.names:
            return rows
        batches = rows.to_batches()
        values = [partition_values(batch, self.sink) for batch in batches]
        return rows.append_column(partition, pa.chunked_array(values, partition.type))

    def _as_files(self, rows: pa.Table) -> list[DataFile]:
        brief = replace(self.brief, notes=self.brief.data)
        writers = Writers(self.pipeline, self.run, brief, self.sink)
        for batch in rows.to_batches():
            writers.write(pa.RecordBatch.from_arrays(batch.columns, schema=brief.schema))
        return writers.close()


def _one_per_key(rows: pa.Table, sink: LakeConfig, which: str) -> pa.Table:
    """The first or the last row of each key. Rows of one partition stand in their order; partitions have none."""
    numbered = comparable(rows, sink.key).append_column(_NUMBER, pa.array(range(rows.num_rows), pa.int64()))
    chosen = numbered.group_by(list(sink.key), use_threads=False).aggregate(
        [(_NUMBER, "min" if which == "first" else "max")]
    )
    return rows.take(chosen[f"{_NUMBER}_{'min' if which == 'first' else 'max'}"].combine_chunks().sort())


def read_files(folder: Place, files: Sequence[DataFile]) -> pa.Table:
    found = folder.filesystem
    return pa.concat_tables(pq.read_table(f"{folder.root}/{file.name}", filesystem=found) for file in files)


def _entry(book: Book, where: TopicPartition) -> Entry:
    if where not in book.held:
        raise ProtocolViolation(f"the ledger has no position for {where.topic}/{where.partition}")
    return book.entry(where)


# The columns.


def shape(fields: tuple[Field, ...], sink: LakeConfig, table: LakeTable, *, rest: bool) -> Shape:
    """What the table must have: the payload, ``_rest`` where unknown fields are kept, and the lineage."""
    topic, partition, offset, timestamp = sink.lineage
    columns = [
        pa.field(one.name, table.storable(arrow_type(one.type)), nullable=not (one.required or one.name in sink.key))
        for one in fields
    ]
    columns += [pa.field(REST_COLUMN, pa.string())] if rest else []
    columns += [
        pa.field(topic, pa.string(), nullable=False),
        pa.field(partition, pa.int32(), nullable=False),
        pa.field(offset, pa.int64(), nullable=False),
        pa.field(timestamp, pa.timestamp("us", "UTC")),
    ]
    schema = pa.schema(columns)
    required = frozenset(path for one in fields for path in _required(one.type, one.name))
    by = sink.partition_by
    if by is None:
        return Shape(schema, required=required)
    if found := sink.partition_problem(fields):
        raise ConfigError(f"sink.partition_by: {found[0]}", advice=f"Allowed is {found[1]}.")
    if not by.day:
        return Shape(schema, schema.field(by.column), required=required)
    return Shape(schema, pa.field(f"{by.column}_day", pa.date32()), by.column, required)


def differences(wanted: Shape, table: LakeTable) -> list[str]:
    found = {one.name: one for one in table.schema()}
    lines = []
    for one in wanted.schema:
        there = found.get(one.name)
        if there is None:
            lines.append(f"column {one.name!r} ({one.type}) is missing")
        elif not same_type(there.type, one.type):
            lines.append(f"column {one.name!r} is {there.type}, and {one.type} is needed")
        else:
            stricter = [path for path in _stricter(there, one, one.name) if path not in wanted.required]
            lines += [f"column {path!r} must have a value, and the pipeline's may be null" for path in stricter]
    ours = {*wanted.schema.names, *([wanted.partition.name] if wanted.partition is not None else [])}
    lines += [
        f"column {name!r} must have a value, and the pipeline has none for it"
        for name, there in found.items()
        if name not in ours and not there.nullable
    ]
    return lines


def _stricter(there: pa.Field, wanted: pa.Field, path: str) -> Iterator[str]:
    """Where a table's values, or parts of them, must be there, and ours may be null."""
    if wanted.nullable and not there.nullable:
        yield path
    for name, theirs, ours in _parts(there.type, wanted.type):
        yield from _stricter(theirs, ours, f"{path}.{name}")


def _parts(there: pa.DataType, wanted: pa.DataType) -> Iterator[tuple[str, pa.Field, pa.Field]]:
    if pa.types.is_struct(wanted):
        yield from ((one.name, there.field(one.name), one) for one in wanted.fields)
    elif pa.types.is_map(wanted):
        yield "value", there.item_field, wanted.item_field
    elif pa.types.is_list(wanted):
        yield "element", there.value_field, wanted.value_field


def _required(type_: Type, path: str) -> Iterator[str]:
    """The parts of a declared type that are never null, by their paths."""
    match type_:
        case Struct():
            for one in type_.fields:
                yield from [f"{path}.{one.name}"] if one.required else []
                yield from _required(one.type, f"{path}.{one.name}")
        case Array():
            yield from _required(type_.element, f"{path}.element")
        case Map():
            yield from _required(type_.value, f"{path}.value")


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types hold the same values: Arrow has several for one of a table's."""
    return bool(_plain(one) == _plain(other))


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(pa.field("element", _plain(type_.value_type)))
    if pa.types.is_map(type_):
        return pa.map_(_plain(type_.key_type), pa.field("value", _plain(type_.item_type)))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(one.name, _plain(one.type)) for one in type_.fields])
    if pa.types.is_timestamp(type_):
        return pa.timestamp(type_.unit, "UTC" if type_.tz else None)
    return type_


def _refuse_rolled_back(table: LakeTable) -> None:
    why = table.rolled_back()
    if why:
        raise ConfigError(
            f"table {table.shown} went back behind its positions: {why}",
            advice="What was claimed is gone, and avow would not bring it again. Audit the table; then give the "
            "pipeline a new name and a new table, or bring the table forward again.",
        )


def _raise_differences(shown: str, lines: Sequence[str], *, evolves: bool) -> None:
    """``evolves``: what sink.evolve = "add" can do was done."""
    if lines:
        add = "" if evolves or not any("is missing" in line for line in lines) else ', set sink.evolve = "add"'
        raise ConfigError(
            f"table {shown} cannot take this pipeline's rows:\n" + "\n".join(f"  {line}" for line in lines),
            advice=f"Alter the table or decode.schema (docs/PIPELINE.md){add}, or name a new table.",
        )
