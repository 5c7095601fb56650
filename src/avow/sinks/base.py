"""The contract of a sink: ``SinkPlugin``, and what the driver and the tasks of a run ask of what it opens.

A sink has two sides. ``DriverSink`` is asked once per run and between batches: tables, runs, positions. ``TaskSink`` is
asked by each task, for acts in the guarantee's order. Where a task cannot act alone, because a table has one commit for
all of them, tasks have a ``StagingSink`` and the driver acts on a ``CommittingSink``. ``DeadLetterReader`` and
``RedriveSink`` are for dead letters. A sink subclasses these and inherits what is the same for most; what is abstract
is its own to write.

Owns: the shape of all this. Must not know: any one sink. Its neighbours are ``avow.sinks`` (the registry), ``plan``
(which reads the offers and refuses the rest before any I/O) and ``engines``.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from avow import ledger
from avow.guarantee import Act, Guarantee
from avow.ledger import NOTHING, Counts, Entry, Fingerprint, OffsetRange
from avow.schema import Field
from avow.settings import Mode, PipelineConfig, Problem, SinkConfig

if TYPE_CHECKING:  # `avow plan` need not wait for Arrow and Kafka's client
    import pyarrow as pa

    from avow.kafka.log import TopicPartition
    from avow.sinks.auditing import AuditReader


@dataclass(frozen=True, slots=True)
class Offer:
    """One mode of a sink: the guarantees it keeps, each with what it means in this mode."""

    notes: Mapping[Guarantee, str]  # one sentence each, shown to users as it is

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        return frozenset(self.notes)


class SinkPlugin(ABC):
    """A sink, by the word in ``sink.kind``: what it offers and can do, as data, and how its parts are opened.

    A plugin is a subclass, and one instance of it that ``avow.plugins`` finds. Its module imports no client: the
    openers do, when they are called.
    """

    kind: ClassVar[str]
    title: ClassVar[str]  # the sink's name for messages
    Config: ClassVar[type[SinkConfig]]  # reads [sink]
    offers: ClassVar[Mapping[Mode, Offer]]
    assumes: ClassVar[tuple[str, ...]] = ()  # what must hold outside avow for the offers to hold

    # Capabilities
    spans_partitions: ClassVar[bool] = False  # one act can hold the claims of many partitions
    commits_per_batch: ClassVar[bool] = False  # tasks write invisible files, which the driver commits
    ledger_by_topic: ClassVar[bool] = False  # with a table for each topic, each has a ledger too, and numbers its runs
    ledger_in_group: ClassVar[bool] = False  # the ledger is the consumer group itself: no other client may commit to it
    atomic_writes: ClassVar[bool] = True  # also outside of exactly-once a write that failed has left nothing
    refuses_nul: ClassVar[bool] = False  # text with U+0000 cannot be stored: such a record is a dead letter

    # What the plan says of dead letters, beside where they are
    dead_letter_promise: ClassVar[str] = (
        "Dead letters are written in the same act as the rows of their batch; the other records of the batch are "
        "written."
    )

    # For ``avow prove``: who reads the sink back without any of its code, as MODULE:CLASS (an ``Oracle``), and which
    # faults concern it beside those that concern every sink.
    oracle: ClassVar[str] = ""
    faults: ClassVar[frozenset[str]] = frozenset()

    def offered(self, mode: Mode) -> frozenset[Guarantee]:
        """The guarantees this sink keeps in a mode; none if it lacks the mode."""
        offer = self.offers.get(mode)
        return offer.guarantees if offer else frozenset()

    @abstractmethod
    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        """For the driver of a run; a ``CommittingSink`` where ``commits_per_batch``."""

    @abstractmethod
    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> TaskSink | StagingSink:
        """For one task of a run; a ``StagingSink`` where ``commits_per_batch``. ``context``: the driver's
        ``task_context``."""

    def open_redrive(self, pipeline: PipelineConfig) -> RedriveSink:
        """For a redrive of dead letters: a task of no run, unless tasks only stage."""
        sink = self.open_task(pipeline, 0, None)
        assert not isinstance(sink, StagingSink)
        return sink

    @abstractmethod
    def open_dead_letters(self, pipeline: PipelineConfig) -> DeadLetterReader:
        """The pipeline's dead letters, to be read."""

    @abstractmethod
    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> AuditReader:
        """For an audit: the sink now, or at the moment that another reader's ``snapshot`` names."""

    # The plan

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:  # noqa: ARG002
        """Why this pipeline's guarantee cannot be kept, or why its declaration is contradictory."""
        return iter(())

    @abstractmethod
    def dead_letter_place(self, pipeline: PipelineConfig) -> str:
        """Where dead letters are stored, for messages."""

    def warnings(self, pipeline: PipelineConfig) -> Iterator[str]:  # noqa: ARG002
        """What a user should know before the first run."""
        return iter(())

    def topics_written(self, pipeline: PipelineConfig) -> frozenset[str]:  # noqa: ARG002
        """The topics of the source's cluster that it writes to, as far as the file names them."""
        return frozenset()

    def check_provable(self, pipeline: PipelineConfig) -> None:  # noqa: ARG002
        """Raise ConfigError where a proof of this pipeline cannot be read back."""
        return None


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What goes into the sink at once. Both have the lineage columns; rows stand in the order of their offsets."""

    rows: pa.RecordBatch  # the payload's columns
    deletes: pa.RecordBatch  # upsert only: the key columns of rows to delete


class Refusal(str):
    """Why the sink refused a record, with the sink's own code of it, if it has one: ``refused-by-sink-CODE``."""

    code: str

    def __new__(cls, text: str, code: str = "") -> Self:
        refusal = super().__new__(cls, text)
        refusal.code = code
        return refusal


@dataclass(frozen=True, slots=True)
class Written:
    """What the sink says of rows it was given."""

    refused: Mapping[int, str] = field(default_factory=dict)  # row number (write) or offset (finish) -> why
    skipped: int = 0  # records left out by declaration: a key that is there already


def refuse_whole(refused: Mapping[int, str], offsets: Sequence[int]) -> dict[int, str]:
    """Rows to refuse, with why, given some of them: a record of which one row is refused is a dead letter, so none of
    its rows goes in, or a redrive would double them. ``offsets``: of all rows, which are of one partition."""
    why = {offsets[row]: reason for row, reason in sorted(refused.items(), reverse=True)}
    return {row: why[offset] for row, offset in enumerate(offsets) if offset in why}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that cannot be taken, stored with its bytes and the reason."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    reason: str
    detail: str
    full_bytes: int | None = None  # of the record's value, where the sink could store only the beginning of the record


@dataclass(frozen=True, slots=True)
class DeadLetterPreview:
    """A dead letter as a list has it: however large its value is, it has only the beginning."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    head: bytes | None  # of the value, no more than PREVIEW_BYTES
    size: int  # of the value


PREVIEW_BYTES = 1024


def preview(dead_letter: DeadLetter) -> DeadLetterPreview:
    value = dead_letter.value
    return DeadLetterPreview(
        dead_letter.topic,
        dead_letter.partition,
        dead_letter.offset,
        dead_letter.timestamp_ms,
        dead_letter.reason,
        dead_letter.detail,
        None if value is None else value[:PREVIEW_BYTES],
        len(value or b"") if dead_letter.full_bytes is None else dead_letter.full_bytes,
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter of dead letters. Fields that are None match any."""

    reason: str | None = None
    topic: str | None = None
    partition: int | None = None
    from_offset: int | None = None
    until_offset: int | None = None
    since: datetime | None = None  # when it died
    until: datetime | None = None

    def conditions(self) -> list[tuple[str, str, Any]]:
        """The same as conditions that all hold: column of a dead letter, comparison, value."""
        every = (
            ("reason", "=", self.reason),
            ("topic", "=", self.topic),
            ("partition", "=", self.partition),
            ("offset", ">=", self.from_offset),
            ("offset", "<", self.until_offset),
            ("died_at", ">=", self.since),
            ("died_at", "<", self.until),
        )
        return [condition for condition in every if condition[2] is not None]


def headers_text(headers: Sequence[tuple[str, bytes | None]]) -> str:
    """A record's headers as JSON pairs, for sinks without a type for them. Values are any bytes, so they are base64;
    ASCII, so that any key can be stored."""
    return json.dumps([[key, None if value is None else base64.b64encode(value).decode()] for key, value in headers])


def headers_from_text(text: str) -> list[tuple[str, bytes | None]]:
    return [(key, None if value is None else base64.b64decode(value)) for key, value in json.loads(text)]


# A dead letter as a row of a table.
DEAD_LETTER_COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers", "reason", "detail")


def dead_letter_values(dead_letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as the values of ``DEAD_LETTER_COLUMNS``, with its headers as text."""
    values = {column: getattr(dead_letter, column) for column in DEAD_LETTER_COLUMNS}
    return values | {"headers": headers_text(dead_letter.headers)}


def dead_letter_of(row: Sequence[Any]) -> DeadLetter:
    """A dead letter from the values of ``DEAD_LETTER_COLUMNS``."""
    return DeadLetter(*(*row[:6], headers_from_text(row[6]), *row[7:]))


# An entry of the ledger as a row of a table.
ENTRY_COLUMNS = (
    *("position", "topic_id", "run", "read", "written", "dead", "skipped"),
    *("last_offset", "last_timestamp_ms", "last_crc32"),
)


def entry_values(entry: Entry) -> tuple[Any, ...]:
    """An entry as the values of ``ENTRY_COLUMNS``."""
    counts, last = entry.counts, entry.last
    fingerprint = (last.offset, last.timestamp_ms, last.crc32) if last else (None, None, None)
    numbers = (counts.read, counts.written, counts.dead, counts.skipped)
    return (entry.position, entry.topic_id, entry.run, *numbers, *fingerprint)


def entry_of(row: Sequence[Any]) -> Entry:
    """An entry from the values of ``ENTRY_COLUMNS``."""
    position, topic_id, run, read, written, dead, skipped, *last = row
    return Entry(
        position=position,
        topic_id=topic_id,
        run=run,
        counts=Counts(read, written, dead, skipped),
        last=Fingerprint(*last) if last[0] is not None else None,
    )


GIVEN_UP_BATCH = -1  # the batch of a claim that no batch has made: its range was given up to retention


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition of the ledger."""

    entry: Entry
    start: int  # where its first claim began, or will begin


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the claim log."""

    topic: str
    partition: int
    start: int
    until: int
    run: int
    batch: int
    counts: Counts
    at: datetime


@dataclass(frozen=True, slots=True)
class LedgerUpdate:
    """A claim that is to be stored: what ``ledger.claim`` has made of an entry."""

    before: Entry
    after: Entry
    done: OffsetRange


@dataclass(frozen=True, slots=True)
class Claimed:
    """One claim, where the ledger keeps a log of them."""

    done: OffsetRange
    counts: Counts  # nothing yet, where records are claimed before they are written
    guarantee: Guarantee  # of the run that made it
    given_up: bool = False  # to retention


class ClosingContext:
    """Something to be used in a ``with`` statement, or closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what it holds open; nothing, unless a subclass says so."""


class DriverSink(ClosingContext, ABC):
    """The sink as the driver of a run sees it. Not for use by two threads at once."""

    _pipeline: PipelineConfig
    # After ``prepare_table``: what it has altered, and what is declared otherwise than when the pipeline last ran.
    remarks: Sequence[str] = ()

    @abstractmethod
    def prepare(self) -> None:
        """Make or upgrade the ledger. What needs no knowledge of the rows is checked here, before Spark starts."""

    @abstractmethod
    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Make or check where rows go. ``fields`` are the payload's; with ``rest`` there is a column of unknown fields
        too. True if it was made."""

    def open_topic(self, part: PipelineConfig) -> DriverSink:
        """What one topic's table is asked of, where each topic has one (``SinkConfig.by_topic``): ``prepare_table`` and
        what follows on it. Closed with this sink. ``part``: the topic's part of the pipeline."""
        raise NotImplementedError

    @abstractmethod
    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number and fence the older ones; in these partitions alone, where others run beside."""

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position of the pipeline."""
        return {tp: state.entry for tp, state in self.ledger_snapshot().items()}

    @abstractmethod
    def ledger_snapshot(self) -> dict[TopicPartition, PartitionState]:
        """The ledger as it is now. Reading it changes nothing; it is empty before the first run."""

    def claims_of(self, tp: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:  # noqa: ARG002
        """The claims that these offsets were part of; no item where the ledger keeps none, or keeps it no longer."""
        return {}

    def claims(self, limit: int) -> list[Claim] | None:  # noqa: ARG002
        """The newest of each partition, no more than so many of it; None where the ledger keeps no log of them."""
        return None

    def keepalive(self) -> None:
        """Called about once an hour while a run lasts: write positions anew that the sink would forget."""
        return None

    @abstractmethod
    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays."""

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = NOTHING) -> None:
        """Claim a range that no task will claim: it was given up to retention. Here, by an act of a task."""
        from avow import sinks
        from avow.kafka.log import TopicPartition

        task = sinks.task_sink(self._pipeline, run, self.task_context())
        assert not isinstance(task, StagingSink)
        with task.act():
            (entry,) = task.entries([TopicPartition(done.topic, done.partition)], lock=True)
            todo = ledger.judge(entry.position, done)
            if todo:
                task.claim([LedgerUpdate(entry, ledger.claim(entry, todo, run, counts), todo)], batch)

    def task_context(self) -> object:
        """What the tasks must know of the sink beside the pipeline: a frozen value that the engine brings to them.
        Asked after ``prepare_table``."""
        return None


class CommittingSink(DriverSink):
    """A sink whose acts are the driver's: tasks stage, and one commit takes in what all of them have."""

    @abstractmethod
    def commit(
        self,
        step: frozenset[Act],
        outputs: Sequence[object],
        run: int,
        batch: int,
        *,
        last: bool,
        on_committed: Callable[[], None],
    ) -> None:
        """One act of the guarantee over the ``task_output`` of tasks. ``last``: the counts are stored with it.
        ``on_committed`` is called when the sink has acknowledged it; if that raises, the answer is lost."""


class Writer(ABC):
    """What can be done with records inside an act."""

    @abstractmethod
    def write(self, rows: RowChanges) -> Written:
        """Put rows into the sink. Refused ones are named by their number in ``rows.rows``."""

    def finish(self, done: OffsetRange) -> Written:  # noqa: ARG002
        """After the last ``write`` of a range: apply what was put aside. Refused ones are named by offset."""
        return Written()

    @abstractmethod
    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        """Store dead letters."""


class StagingSink(Writer):
    """The sink as one task sees it, where the acts are the driver's: what is written shows only by a commit."""

    @abstractmethod
    def task_output(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> object:
        """What the driver's ``commit`` needs to make it visible: a frozen value that the engine brings there."""


class RedriveSink(Writer):
    """The sink as a redrive sees it: dead letters leave in the act in which their rows enter."""

    # Given by the engine. A sink whose ``lock`` locks nothing calls it with the partition's entry that its commit rests
    # on: it raises PositionMoved if a run has come to a record that deletes one of the rows.
    confirm: Callable[[Entry], None]

    @abstractmethod
    def act(self) -> AbstractContextManager[None]:
        """One atomic act: all that is done inside, or nothing."""

    @abstractmethod
    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        """Their entries in the ledger; with ``lock``, nobody else can claim until the act ends. More than one only
        where acts span partitions (``SinkPlugin``)."""

    @abstractmethod
    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Selected dead letters of one partition, locked until the act ends."""

    @abstractmethod
    def remove_dead_letters(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Remove dead letters that were delivered after all, and count them by ``ledger.redriven``."""


class TaskSink(RedriveSink):
    """The sink as one task sees it: acts, each atomic, and what can be done inside one."""

    @abstractmethod
    def claim(self, updates: Sequence[LedgerUpdate], batch: int) -> None:
        """Store claims that ``ledger.claim`` has made of entries read with ``lock``."""

    @abstractmethod
    def add_counts(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        """Add what became of records that were claimed before they were written (``ledger.tallied``)."""


class DeadLetterReader(ClosingContext, ABC):
    """The dead letters of one pipeline, to be read."""

    @abstractmethod
    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        """Reason, how many, when the last one died."""

    @abstractmethod
    def partitions(self, selection: Selection) -> list[TopicPartition]:
        """Where there are some."""

    @abstractmethod
    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Ascending by topic, partition and offset."""

    def previews(self, selection: Selection, limit: int) -> list[DeadLetterPreview]:
        """The same, to be listed. A sink that can leave large values where they are does."""
        return [preview(dead_letter) for dead_letter in self.select(selection, limit)]
