"""The driver's side of a lake sink: runs, positions, and the commits that bring files and positions in together.

Owns: the order inside one act over two tables, and the loop that repeats a refused commit or gives it up. The rules are
``avow.ledger``'s, the order of acts is the engine's, and how a commit is written is the format's.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from avow import ledger
from avow.errors import ConfigError, PositionMoved, ProtocolViolation, SinkError
from avow.guarantee import Act
from avow.kafka.log import TopicPartition
from avow.ledger import NOTHING, Counts, Entry, OffsetRange
from avow.retry import random_pauses
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.base import CommittingSink, PartitionState
from avow.sinks.lake import alterations
from avow.sinks.lake import dead_letters as dead_letter_rows
from avow.sinks.lake.columns import (
    as_table_has,
    changed,
    changes,
    differences,
    partitioned,
    refuse_differences,
    table_layout,
)
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.files import DataFile, FileWriter
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot
from avow.sinks.lake.new_rows import NewRows, new_rows, read_files
from avow.sinks.lake.table import CommitConflict, LakeTable, RowFilter, TableLayout
from avow.sinks.lake.task import LakeTaskContext, LakeTaskOutput

# Of commits that others keep refusing by committing first.
ATTEMPTS_MAX = 40
IDLE_MAX = 5  # refusals without another writer's commit: a full disk, a locked catalog
PAUSE_S = 0.02

DEAD_LETTER_LAYOUT = TableLayout(dead_letter_rows.SCHEMA)  # from which a redrive removes letters: as upsert does


@dataclass(frozen=True, slots=True)
class TableChange:
    """What a commit is to bring."""

    snapshot: LedgerSnapshot
    files: Sequence[DataFile] = ()
    merged: pa.Table | None = None  # rows to be brought in by key
    removed: RowFilter | None = None
    marked: tuple[RowFilter, int | None] | None = None


def commit_with_retry(
    table: LakeTable,
    check: Callable[[LakeTable], None],
    make: Callable[[LedgerSnapshot], TableChange | None],
    on_committed: Callable[[], None] = lambda: None,
    *,
    sure: bool = True,
    sink: LakeConfig,
) -> None:
    """Commit on the newest version of the table, and retry while others commit first.

    ``check`` refuses a table that others have made unfit. ``make`` gets the ledger of that version and says what to
    commit, or None if nothing is left to do. ``on_committed`` is called when the table has taken the commit. Without
    ``sure``, a commit whose outcome is unknown counts as failed, and is not looked for in the table.
    """
    name = uuid.uuid4().hex
    idle = 0
    for pause in random_pauses(PAUSE_S, 10 * PAUSE_S, ATTEMPTS_MAX + 1):
        before = table.version
        check(table)
        change = make(table.ledger())
        if change is None:
            return
        failure: Exception
        try:
            _apply(table, change, name, sink)
            on_committed()
            return
        except CommitConflict as conflict:
            failure = conflict
        except (OSError, SinkError) as error:
            if not sure:
                raise SinkError(f"the response to a commit to table {table.shown} was lost: {error}") from error
            failure = error
        # Refused, or unknown: a store that tried again by itself may have refused what it had taken.
        time.sleep(pause)
        if not table.load():
            raise SinkError(f"table {table.shown} no longer exists: {failure}") from failure
        if table.has_commit(name):
            return
        idle += table.version == before
        if idle > IDLE_MAX or not isinstance(failure, CommitConflict):
            raise SinkError(f"could not commit to table {table.shown}: {failure}") from failure
    raise _given_up(table)


def _given_up(table: LakeTable) -> SinkError:
    return SinkError(
        f"gave up after {ATTEMPTS_MAX} commit conflicts on table {table.shown}",
        advice="Run compaction and other writers less often, or raise batch.interval.",
    )


def _apply(table: LakeTable, change: TableChange, name: str, sink: LakeConfig) -> None:
    if change.merged is not None:
        table.merge(change.merged, sink.key, sink.lineage, change.snapshot, name)
    elif change.removed is not None:
        table.remove(change.removed, change.snapshot, name)
    elif change.marked is not None:
        table.mark(*change.marked, change.snapshot, name)
    else:
        table.commit(change.snapshot, change.files, name)


class LakeDriver(CommittingSink):
    """What the driver asks of a lake. ``rows`` and ``dead_letters`` are its two tables."""

    def __init__(self, pipeline: PipelineConfig, rows: LakeTable, dead_letters: LakeTable) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._pipeline, self._sink = pipeline, pipeline.sink
        self._rows, self._dead_letters = rows, dead_letters
        self._layout: TableLayout | None = None
        self._checked: dict[str, object] = {}  # by table, what its last check rested on
        # Between the acts of one batch: what dedupe left out, and what was really claimed.
        self._skipped: dict[OffsetRange, int] = {}
        self._claimed: set[OffsetRange] = set()
        self._unanswered = False  # whether the last commit of rows failed, and may be in the table or come into it
        self._numbers: set[int] = set()  # those taken, where others run beside

    # Before a run.

    def prepare(self) -> None:
        """Whether the store can be reached, and tables that are there can be trusted."""
        if self._rows.load():
            _refuse_rolled_back(self._rows)
        if self._dead_letters.load():
            _refuse_rolled_back(self._dead_letters)
            self._refuse_lost_rows()

    def _refuse_lost_rows(self) -> None:
        """Where the table's log no longer shows whether it was rolled back: the last record that was read of each
        partition is a row or a dead letter. With a key, a transform or skipped records it may rightly be neither."""
        pipeline, (topic, partition, offset, _) = self._pipeline, self._sink.lineage
        skips = pipeline.tombstones == "skip" or pipeline.decode.skips_records
        whole = self._sink.mode == "append" and pipeline.transform is None and not skips
        if not (whole and self._rows.loaded and self._dead_letters.loaded) or self._rows.has_full_history():
            return
        for tp, state in self._rows.ledger().partitions.items():
            last, position = state.entry.last, state.entry.position
            if last is None or self._declared_start(tp) == position:
                continue
            row = RowFilter(tp, (topic, partition, offset), offsets=(last.offset,))
            dead_letter = RowFilter(tp, offsets=(last.offset,))
            if self._rows.rows([offset], row).num_rows or self._dead_letters.rows(["offset"], dead_letter).num_rows:
                continue
            raise ConfigError(
                f"table {self._rows.shown} has neither a row nor a dead letter of the last claimed record of "
                f"{tp.topic}/{tp.partition}, offset {last.offset}, and its log no longer has the commits since "
                "then: it was probably restored or rolled back",
                advice="Audit the table. If rows are missing, give the pipeline a new name and a new table, or restore "
                "the newer version. If that row was deleted on purpose, confirm the position: source.start = "
                f"{{ {json.dumps(tp.topic)} = {{ {tp.partition} = {position} }} }}.",
            )

    def _declared_start(self, tp: TopicPartition) -> int | None:
        """The offset that was declared for this very partition."""
        declared = self._pipeline.source.start
        return declared.get(tp.topic, {}).get(tp.partition) if isinstance(declared, Mapping) else None

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        self._layout = table_layout(fields, self._sink, self._rows, rest=rest)
        made = not self._rows.load() and self._rows.create(self._layout)
        altered = [] if made or self._sink.evolve != "add" else self._evolve(self._layout)
        self.remarks = [f"table {self._rows.shown}: {what}" for what in altered]
        if self._sink.evolve == "add":
            self._refuse_misfit(self._layout, self._rows.schema())
            self._layout = as_table_has(self._layout, self._rows.schema())
        self.check(self._rows)
        exists = self._dead_letters.load()
        self._refuse_lost_dead_letters(exists=exists)
        if not exists:
            self._dead_letters.create(DEAD_LETTER_LAYOUT)
        self.check(self._dead_letters)
        return made

    def _evolve(self, wanted: TableLayout) -> list[str]:
        """Add and widen columns, unless something else does not fit. What was done."""
        table = self._rows
        for pause in random_pauses(PAUSE_S, 10 * PAUSE_S, ATTEMPTS_MAX):
            before = table.schema()
            fields = changes(wanted, before, table.can_widen)
            self._refuse_misfit(wanted, changed(before, fields))
            if not fields:
                return []
            try:
                table.alter(fields, alterations.noted(table.alterations(), before, fields, table.ledger()))
            except CommitConflict:
                time.sleep(pause)
                table.load()
                continue
            known = {field.name: field.type for field in before}
            return [
                f"column {field.name!r} was widened from {known[field.name]} to {field.type}"
                if field.name in known
                else f"column {field.name!r} ({field.type}) was added"
                for field in fields
            ]
        raise _given_up(table)

    def _refuse_misfit(self, wanted: TableLayout, existing: pa.Schema) -> None:
        table, evolve = self._rows, self._sink.evolve
        lines = [*table.incompatibilities(wanted, self._sink.mode), *differences(wanted, existing, evolve=evolve)]
        refuse_differences(table.shown, lines, evolve, table.never_widens)

    def _refuse_lost_dead_letters(self, *, exists: bool) -> None:
        """Where dead letters are counted, their table has a ledger too."""
        dead = sum(state.entry.counts.dead for state in self._rows.ledger().partitions.values())
        if dead and not (exists and self._dead_letters.ledger() != LedgerSnapshot()):
            raise ConfigError(
                f"table {self._dead_letters.shown} {'was recreated' if exists else 'does not exist'}, so "
                f"{dead:,} dead letters that table {self._rows.shown} counts are missing",
                advice="Restore the dead-letter table, or give the pipeline a new name and a new table.",
            )

    def check(self, table: LakeTable) -> None:
        """At the start, and before each commit: others may do to a table what is in no commit's way, and still breaks
        the promise."""
        _refuse_rolled_back(table)
        if table is self._rows:
            self._refuse_lost_rows()
        compatibility_key = table.compatibility_key()
        if compatibility_key == self._checked.get(table.shown):
            return
        if table is not self._rows:
            lines = table.incompatibilities(DEAD_LETTER_LAYOUT, "upsert")
            lines += differences(DEAD_LETTER_LAYOUT, table.schema(), evolve="refuse")
            refuse_differences(table.shown, lines, None)
        elif self._layout is None:
            return
        else:
            self._refuse_misfit(self._layout, table.schema())
            if self._sink.evolve == "add" and as_table_has(self._layout, table.schema()) != self._layout:
                # What tasks have staged is in the types of before.
                self._layout = None
                raise PositionMoved(f"columns of table {table.shown} were widened since the run began")
        self._checked[table.shown] = compatibility_key

    def task_context_for(self, rows: pa.RecordBatch) -> LakeTaskContext:
        """For rows that no ``prepare_table`` has announced: the columns that they and the table have."""
        names = set(rows.schema.names)
        storable = [field.with_type(self._rows.storable(field.type)) for field in rows.schema]
        lines = [
            line
            for line in differences(TableLayout(pa.schema(storable)), self._rows.schema(), evolve=self._sink.evolve)
            if "NOT NULL" not in line  # which is asked of every row
        ]
        refuse_differences(self._rows.shown, lines, self._sink.evolve, self._rows.never_widens)
        ours = pa.schema([field for field in self._rows.schema() if field.name in names])
        self._layout = partitioned(ours, self._sink.partition_by)
        return self.task_context()

    def task_context(self) -> LakeTaskContext:
        assert self._layout is not None, "prepare_table comes first"
        return LakeTaskContext(
            schema=self._rows.file_schema(self._layout.schema),
            data=self._rows.data,
            dead_letters=self._dead_letters.data,
            dead_letter_schema=self._dead_letters.file_schema(dead_letter_rows.SCHEMA),
            staging=self._rows.data.under("_avow"),
            partition=self._layout.partition,
            in_files=self._rows.partition_in_files,
        )

    # Runs and positions.

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Take a number, and fence all earlier runs with it: everywhere, or where others run beside in these
        partitions. Only then take back dead letters of claims that never came: the table of rows would still take such
        a claim from a run that it has not fenced."""
        for table in (self._rows, self._dead_letters):
            if not table.load():
                raise ProtocolViolation(f"table {table.shown} does not exist")
        run, fenced = 0, set[TopicPartition]()

        def begun(snapshot: LedgerSnapshot) -> TableChange:
            nonlocal run, fenced
            run = max(snapshot.newest, self._dead_letters.ledger().newest) + 1
            if partitions is None:
                return TableChange(snapshot.fenced(run))
            # Partitions that we still own take the new number, too: a number that no partition has
            # belongs to no live run (``maintenance``).
            own = {tp for tp, state in snapshot.partitions.items() if state.entry.run in self._numbers}
            fenced = own | (set(partitions) & snapshot.partitions.keys())
            return TableChange(snapshot.fenced(run, fenced))

        self._commit_to(self._rows, begun)
        if partitions is None:
            self._commit_to(self._dead_letters, lambda snapshot: TableChange(snapshot.fenced(run)))
            self._remove_unclaimed(self._rows.ledger().partitions, run)
        else:
            self._numbers.add(run)
            self._fence_dead_letters(fenced, run)
        return run

    def _fence_dead_letters(self, partitions: Set[TopicPartition], run: int) -> None:
        """Fence partitions that the table of rows has just given to this run in the table of dead letters too, and take
        back what is to be."""
        state = self._rows.ledger().partitions

        def fenced(snapshot: LedgerSnapshot) -> TableChange | None:
            if snapshot.run >= run or not partitions:
                return None  # it was fenced as a whole
            missing = {tp: Entry(state[tp].entry.position, "", 0) for tp in partitions - snapshot.partitions.keys()}
            after = snapshot.with_entries(missing)
            return TableChange(after.fenced(run, [tp for tp in partitions if after.entry(tp).run != run]))

        self._commit_to(self._dead_letters, fenced)
        self._remove_unclaimed(partitions, run)

    def _remove_unclaimed(self, partitions: Collection[TopicPartition], run: int) -> None:
        """Remove dead letters from the claimed position on: their claim never came, and their records are read
        again."""
        claimed, committed = self._rows.ledger().partitions, self._dead_letters.ledger().partitions
        for tp in partitions:
            position = claimed[tp].entry.position
            if tp not in committed or committed[tp].entry.position <= position:
                continue

            def back(snapshot: LedgerSnapshot, tp: TopicPartition = tp, position: int = position) -> TableChange | None:
                entry = snapshot.entry(tp)
                ledger.check_fence(entry, run)
                if entry.position <= position:
                    return None
                row_filter = RowFilter(tp, start=position)
                return TableChange(snapshot.with_entries({tp: replace(entry, position=position)}), removed=row_filter)

            self._commit_to(self._dead_letters, back)

    def entries(self) -> dict[TopicPartition, Entry]:
        return self._rows.ledger().entries() if self._rows.loaded or self._rows.load() else {}

    def ledger_snapshot(self) -> dict[TopicPartition, PartitionState]:
        return dict(self._rows.ledger().partitions) if self._rows.load() else {}

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        for tp in entries.keys() - self._rows.ledger().partitions.keys():
            self._refuse_rows_of(tp, entries[tp].position)
        run = max((entry.run for entry in entries.values()), default=0)
        taken = set[TopicPartition]()

        def adopted(snapshot: LedgerSnapshot) -> TableChange | None:
            nonlocal taken
            missing = {tp: entry for tp, entry in entries.items() if tp not in snapshot.partitions}
            # One that an older run has written meanwhile stays, and is ours from now on.
            older = {tp for tp in entries.keys() & snapshot.partitions.keys() if snapshot.entry(tp).run < run}
            taken = missing.keys() | older
            return TableChange(snapshot.with_entries(missing).fenced(run, older)) if taken else None

        self._commit_to(self._rows, adopted)
        self._fence_dead_letters(taken, run)

    def _refuse_rows_of(self, tp: TopicPartition, start: int) -> None:
        """Rows of a partition that has no position: reading on behind them is all that neither doubles nor leaves out,
        unless a start was declared for this very partition."""
        lineage = self._sink.lineage
        batches = self._rows.batches([lineage.offset], RowFilter(tp, lineage[:3]))
        greatest = max((pc.max(batch.column(0)).as_py() for batch in batches if batch.num_rows), default=None)
        declared = self._declared_start(tp) is not None
        if greatest is None or start == greatest + 1 or (declared and start > greatest):
            return
        raise ConfigError(
            f"table {self._rows.shown} has rows of {tp.topic}/{tp.partition} up to offset {greatest}, but no "
            f"position of pipeline {self._pipeline.name}, which would start at offset {start}",
            advice="The positions were lost (the table was replaced or restored), or another pipeline wrote "
            "these rows. Name a new table, delete the rows, or declare the offset after them in source.start.",
        )

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = NOTHING) -> None:  # noqa: ARG002
        def claimed(snapshot: LedgerSnapshot) -> TableChange | None:
            tp = TopicPartition(done.topic, done.partition)
            entry = _entry(snapshot, tp)
            todo = ledger.judge(entry.position, done)
            return TableChange(snapshot.with_entries({tp: ledger.claim(entry, todo, run, counts)})) if todo else None

        self._commit_to(self._rows, claimed)

    # Acts over what tasks have staged.

    def commit(
        self,
        step: frozenset[Act],
        outputs: Sequence[object],
        run: int,
        batch: int,  # noqa: ARG002
        *,
        last: bool,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        staged = [output for output in outputs if isinstance(output, LakeTaskOutput)]
        assert len(staged) == len(outputs), f"not the output of this sink's tasks: {outputs!r}"
        if Act.WRITE in step:
            self._commit_dead_letters(self._with_due_dead_letters(step, staged, run, last=last), run)

        def change(snapshot: LedgerSnapshot) -> TableChange | None:
            return self._act(snapshot, step, staged, run, last=last)

        self._unanswered = True
        self._commit_to(self._rows, change, on_committed, sure=Act.CLAIM in step)
        self._unanswered = False
        if last:
            self._skipped.clear()
            self._claimed.clear()
            if self._sink.mode != "append":
                self._remove_staging_files(staged)

    def _act(
        self,
        snapshot: LedgerSnapshot,
        step: frozenset[Act],
        outputs: Sequence[LakeTaskOutput],
        run: int,
        *,
        last: bool,
    ) -> TableChange | None:
        """Judged anew on every version of the table that it meets."""
        claims = Act.CLAIM in step
        due = [output for output in outputs if self._is_due(snapshot, output, run, claimed_before=last and not claims)]
        new = NewRows()
        if Act.WRITE in step:
            new = new_rows(due, self._rows, self._pipeline, self.task_context(), run)
            self._skipped = dict(new.skipped)  # of this try alone
        if claims:
            self._claimed = {output.done for output in due}
        entries = {}
        for output in due:
            entry = _entry(snapshot, output.tp)
            counts, fingerprint = (self._counts(output), output.last) if last else (NOTHING, None)
            if claims:
                entries[output.tp] = ledger.claim(entry, output.done, run, counts, fingerprint)
            elif last:
                entries[output.tp] = ledger.tallied(entry, counts, fingerprint)
        if not (entries or new.files or new.merged is not None):
            return None
        return TableChange(snapshot.with_entries(entries), new.files, new.merged)

    def _is_due(self, snapshot: LedgerSnapshot, output: LakeTaskOutput, run: int, *, claimed_before: bool) -> bool:
        """Whether a range is still to be done: not if it was claimed, unless that was the act before this one."""
        entry = _entry(snapshot, output.tp)
        ledger.check_fence(entry, run)
        if claimed_before:
            return output.done in self._claimed
        todo = ledger.judge(entry.position, output.done)
        if todo and todo != output.done:
            raise PositionMoved(f"cannot commit {output.done}: the position is {entry.position}")
        return bool(todo)

    def _counts(self, output: LakeTaskOutput) -> Counts:
        """Dedupe knows what it left out only when it has seen the table."""
        skipped, counts = self._skipped.get(output.done, 0), output.counts
        return replace(counts, written=counts.written - skipped, skipped=counts.skipped + skipped)

    def _remove_staging_files(self, outputs: Sequence[LakeTaskOutput]) -> None:
        """What is in the table now is needed no more. One that stays is found by ``maintenance``."""
        staging = self.task_context().staging
        for file in (file for output in outputs for file in output.files):
            with suppress(OSError):
                staging.filesystem.delete_file(f"{staging.root}/{file.name}")

    def _with_due_dead_letters(
        self, step: frozenset[Act], outputs: Sequence[LakeTaskOutput], run: int, *, last: bool
    ) -> list[LakeTaskOutput]:
        """Those with dead letters whose range is still to be done. A record is set aside in the run of its last try,
        and may be a row by then: that commit can have failed for us alone."""
        outputs = [output for output in outputs if output.dead_letters]
        if outputs and self._unanswered:
            # Behind a commit of nothing, the one before is in the table, or refused for good.
            self._commit_to(self._rows, TableChange)
        snapshot, claimed_before = self._rows.ledger(), last and Act.CLAIM not in step
        return [output for output in outputs if self._is_due(snapshot, output, run, claimed_before=claimed_before)]

    def _commit_dead_letters(self, outputs: Sequence[LakeTaskOutput], run: int) -> None:
        """Dead letters first, each once: their table has positions of its own."""
        if not outputs:
            return

        def change(snapshot: LedgerSnapshot) -> TableChange | None:
            files: list[DataFile] = []
            entries = {}
            for output in outputs:
                tp, done = output.tp, output.done
                entry = snapshot.entry(tp) if tp in snapshot.partitions else Entry(done.start, "", snapshot.run)
                ledger.check_fence(entry, run)
                if entry.position < done.until:
                    files += self._dead_letters_from(output, entry.position, run)
                    entries[tp] = replace(entry, position=done.until)
            return TableChange(snapshot.with_entries(entries), files) if entries else None

        self._commit_to(self._dead_letters, change)

    def _dead_letters_from(self, output: LakeTaskOutput, position: int, run: int) -> Sequence[DataFile]:
        """The dead letters from an offset on; those of a part of the range in a file of their own."""
        if position <= output.done.start:
            return output.dead_letters
        rows = read_files(self._dead_letters.data, output.dead_letters)
        rows = rows.filter(pc.greater_equal(rows["offset"], position))
        schema = self._dead_letters.file_schema(dead_letter_rows.SCHEMA)
        writer = FileWriter(self._dead_letters.data, schema, (self._pipeline.name, run), self._sink.file_mb << 20)
        for batch in rows.cast(schema).to_batches():
            writer.write(batch)
        return writer.close()

    def _commit_to(
        self,
        table: LakeTable,
        make: Callable[[LedgerSnapshot], TableChange | None],
        on_committed: Callable[[], None] = lambda: None,
        *,
        sure: bool = True,
    ) -> None:
        commit_with_retry(table, self.check, make, on_committed, sure=sure, sink=self._sink)


def _entry(snapshot: LedgerSnapshot, tp: TopicPartition) -> Entry:
    if tp not in snapshot.partitions:
        raise ProtocolViolation(f"the ledger has no position for {tp}")
    return snapshot.entry(tp)


def _refuse_rolled_back(table: LakeTable) -> None:
    why = table.rolled_back()
    if why:
        raise ConfigError(
            f"table {table.shown} was rolled back behind its positions: {why}",
            advice="Claimed records are missing, and avow would not deliver them again. Audit the table; then give the "
            "pipeline a new name and a new table, or restore the newer version.",
        )
