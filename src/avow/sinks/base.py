"""The contract of a sink: ``SinkPlugin``, and what the driver and the tasks of a run ask of what it opens.

A sink has two sides. ``DriverSink`` is asked once per run and between batches: tables, runs, positions. ``TaskSink`` is
asked by each task, for acts in the guarantee's order. Where a task cannot act alone, because a table has one commit for
all of them, tasks have a ``StagingSink`` and the driver acts on a ``CommittingSink``. ``Letters`` and ``Redriving`` are
for dead letters.

Owns: the shape of all this. Must not know: any one sink. Its neighbours are ``avow.sinks`` (the registry), ``plan``
(which reads the offers and refuses the rest before any I/O) and ``engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

from avow.guarantee import Act, Guarantee
from avow.ledger import NOTHING, Counts, Entry, Fingerprint, OffsetRange
from avow.schema import Field
from avow.settings import Mode, PipelineConfig, Problem, SinkConfig

if TYPE_CHECKING:  # `avow plan` need not wait for Arrow and Kafka's client
    import pyarrow as pa

    from avow.kafka.log import TopicPartition
    from avow.sinks.reading import Reading


@dataclass(frozen=True, slots=True)
class Offer:
    """One mode of a sink: the guarantees it keeps, each with what it comes to in this mode."""

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
    title: ClassVar[str]  # as people write it
    Config: ClassVar[type[SinkConfig]]  # reads [sink]
    offers: ClassVar[Mapping[Mode, Offer]]
    assumes: ClassVar[tuple[str, ...]] = ()  # what must hold outside avow for the offers to hold

    # Capabilities
    spans_partitions: ClassVar[bool] = False  # one act can hold the claims of many partitions
    commits_per_batch: ClassVar[bool] = False  # tasks write what nobody sees, and the driver makes it visible
    ledger_in_group: ClassVar[bool] = False  # the ledger is the consumer group itself: nobody else may commit to it
    atomic_writes: ClassVar[bool] = True  # also outside of exactly-once a write that failed has left nothing
    refuses_nul: ClassVar[bool] = False  # text with U+0000 cannot be stored: such a record is a dead letter

    # What the plan says of dead letters, beside where they are
    dead_letter_promise: ClassVar[str] = (
        "They are written in the same act as the rows of their batch; the rest of the batch goes on."
    )

    # For ``avow prove``: who reads the sink back without any of its code, as MODULE:CLASS (a ``Witness``), and which
    # faults concern it beside those that concern every sink.
    witness: ClassVar[str] = ""
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

    @abstractmethod
    def open_redrive(self, pipeline: PipelineConfig) -> Redriving:
        """For a redrive of dead letters."""

    @abstractmethod
    def open_dead_letters(self, pipeline: PipelineConfig) -> Letters:
        """The pipeline's dead letters, to be read."""

    @abstractmethod
    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> Reading:
        """For an audit: the sink now, or at the moment that another reader's ``snapshot`` names."""

    # The plan

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:  # noqa: ARG002
        """Why this pipeline's guarantee cannot be kept here, or its declaration makes no sense."""
        return iter(())

    @abstractmethod
    def dead_letter_place(self, pipeline: PipelineConfig) -> str:
        """Where dead letters are, as it is shown to people."""

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
class Rows:
    """What goes into the sink at once. Both have the lineage columns; rows stand in the order of their offsets."""

    rows: pa.RecordBatch  # the payload's columns
    deletes: pa.RecordBatch  # upsert only: the key columns of rows to delete


class Refusal(str):
    """Why the sink refused a record, with the sink's own code of it, if it has one: ``refused-by-sink-CODE``."""

    code: str

    def __new__(cls, text: str, code: str = "") -> Self:
        made = super().__new__(cls, text)
        made.code = code
        return made


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
    """A record that cannot be taken, kept with its bytes and the reason."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    reason: str
    detail: str
    full_bytes: int | None = None  # of the record's value, where the sink could keep only the beginning of the record


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A dead letter as a list has it: however large its value is, only the beginning is held."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    head: bytes | None  # of the value, no more than GLIMPSE_BYTES
    size: int  # of the value


GLIMPSE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters are meant. What is None does not matter."""

    reason: str | None = None
    topic: str | None = None
    partition: int | None = None
    from_offset: int | None = None
    until_offset: int | None = None
    since: datetime | None = None  # when it died
    until: datetime | None = None


GIVEN_UP_BATCH = -1  # the batch of a claim that no batch has made: its range was given up to retention


@dataclass(frozen=True, slots=True)
class Held:
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
class Move:
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


class DriverSink(Protocol):
    """The sink as the driver of a run sees it. Not for use by two threads at once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def prepare(self) -> None:
        """Make or upgrade the ledger. What needs no knowledge of the rows is checked here, before Spark starts."""

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Make or check where rows go. ``fields`` are the payload's; with ``rest`` there is a column of unknown fields
        too. True if it was made."""

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number and fence the older ones; in these partitions alone, where others run beside."""

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position of the pipeline."""

    def look(self) -> dict[TopicPartition, Held]:
        """The ledger as it is now, for those who only look: nothing is changed. Empty before the first run."""

    def claims_of(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:
        """The claims that these offsets were part of; no item where the ledger keeps none, or keeps it no longer."""

    def claims(self, limit: int) -> list[Claim] | None:
        """The newest of each partition, no more than so many of it; None where the ledger keeps no log of them."""

    def keepalive(self) -> None:
        """Called about once an hour while a run lasts: write positions anew that the sink would forget."""

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays."""

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = NOTHING) -> None:
        """Claim a range that no task will claim: it was given up to retention."""

    def task_context(self) -> object:
        """What the tasks must know of the sink beside the pipeline: a frozen value that the engine brings to them.
        Asked after ``prepare_table``."""


@runtime_checkable
class Remarking(Protocol):
    """A driver's side whose ledger remembers how the pipeline was declared."""

    remarks: list[str]  # what is declared otherwise now; after ``prepare_table``


@runtime_checkable
class CommittingSink(DriverSink, Protocol):
    """A sink whose acts are the driver's: tasks stage, and one commit takes in what all of them have."""

    def commit(
        self,
        step: frozenset[Act],
        outputs: Sequence[object],
        run: int,
        batch: int,
        *,
        last: bool,
        answered: Callable[[], None],
    ) -> None:
        """One act of the guarantee over the ``task_output`` of tasks. ``last``: the counts are told with it.
        ``answered`` is called when the sink has said yes; if that raises, the answer is lost."""


class Writer(Protocol):
    """What can be done with records inside an act."""

    def write(self, rows: Rows) -> Written:
        """Put rows into the sink. Refused ones are named by their number in ``rows.rows``."""

    def finish(self, done: OffsetRange) -> Written:
        """After the last ``write`` of a range: apply what was put aside. Refused ones are named by offset."""

    def bury(self, letters: list[DeadLetter]) -> None:
        """Keep dead letters."""


class _Acting(Protocol):
    def act(self) -> AbstractContextManager[None]:
        """One atomic act: all that is done inside, or nothing."""

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        """Their entries in the ledger; with ``lock``, nobody else can claim until the act ends. More than one only
        where acts span partitions (``SinkPlugin``)."""


@runtime_checkable
class StagingSink(Writer, Protocol):
    """The sink as one task sees it, where the acts are the driver's: what is written shows only by a commit."""

    def task_output(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> object:
        """What the driver's ``commit`` needs to make it visible: a frozen value that the engine brings there."""


class TaskSink(Writer, _Acting, Protocol):
    """The sink as one task sees it: acts, each atomic, and what can be done inside one."""

    def claim(self, moves: Sequence[Move], batch: int) -> None:
        """Store claims that ``ledger.claim`` has made of entries read with ``lock``."""

    def tally(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:
        """Add what became of records that were claimed before they were written."""


class Redriving(Writer, _Acting, Protocol):
    """The sink as a redrive sees it: dead letters leave in the act in which their rows enter."""

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Chosen dead letters of one partition, held until the act ends."""

    def unbury(self, letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Take dead letters that were delivered after all out of the graveyard."""


class Letters(Protocol):
    """The dead letters of one pipeline, for looking at."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        """Reason, how many, when the last one died."""

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        """Where there are some."""

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Ascending by topic, partition and offset."""

    def glimpses(self, selection: Selection, limit: int) -> list[Glimpse]:
        """The same, to be listed."""
