"""``avow.Consumer``: records to a function, or into a loop, under a declared guarantee.

Theory of operation
-------------------
The order of acts is the guarantee's own (``guarantee.steps``), and the two acts are: *write*, the handler sees a
record; *claim*, the position moves past it. Claim first is at-most-once, write first is at-least-once, both in one
transaction of the handler's database is exactly-once.

Everything is built on one loop. A unit (a record or a batch, as declared) is taken, claimed if that comes first, handed
out record by record, and claimed if that comes after. A record counts as handled when the next one is asked for: in a
loop, when its body has run to the end; with a handler, when that has returned or its letter is kept. A loop that is
left by ``break`` or an error has not handled the record in hand. What was taken and not passed is read again.

Owns: that order, retries, and what is counted. Must not know: Kafka's client, SQL. Neighbours: ``terms`` (what is
declared), ``member`` (records), ``keeping`` and ``ledgered`` (positions), ``deadletters``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Self

import psycopg

from avow.clients import deadletters
from avow.clients.keeping import GroupKeeping
from avow.clients.ledgered import LedgerKeeping, Transaction
from avow.clients.member import Batch, Member, Record
from avow.clients.terms import Terms, checked
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import ConfigError, HandlerFailed, SinkError, SourceError, Superseded, first_line
from avow.kafka.log import Log, TopicPartition
from avow.settings import Offsets, PipelineConfig, declared

__all__ = ["Batch", "Consumer", "Record", "Totals", "Transaction"]

WAIT_S = 0.1  # for a first record; also how soon a wish to stop is seen
BACK_OFF_MAX_S = 30.0
OTHERS_EVERY_S = 0.5  # asked, at the end, how far they are
FENCED_S = 60.0  # how long a newer run may have a partition that the group says is ours

Handler = Callable[[Record], object]
TransactionHandler = Callable[[Record, Transaction], object]


@dataclass(slots=True)
class Totals:
    """What a consumer has done."""

    handled: int = 0  # handed out, and not failed
    retried: int = 0  # tries of the handler beyond the first
    dead: int = 0  # kept as dead letters


class _Stopped(Exception):
    """Asked to stop while waiting to try a record again."""


class Consumer:
    """Reads topics as a member of a group. Close it, or use it as a context manager.

    ``once`` ends at the end of the log as it was at the start; ``limit`` after so many records. ``kafka`` holds client
    settings, ``on_event`` is told in a line what a person may want to know. ``hooks`` are for tests.
    """

    def __init__(
        self,
        brokers: str,
        topics: Sequence[str] | str,
        group: str,
        guarantee: str = "at-least-once",
        *,
        commit: str | None = None,
        per: str = "batch",
        start: str | datetime | Offsets = "earliest",
        on_data_loss: str = "stop",
        on_failure: str = "stop",
        retries: int | None = None,
        back_off_s: float = 0.1,
        dead_letters: str | None = None,
        database: str | None = None,
        commit_interval_s: float = 5.0,
        max_records: int = 500,
        longest_s: float = 3600.0,
        assignment: str = "cooperative",
        once: bool = False,
        limit: int | None = None,
        kafka: Mapping[str, Any] | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        declared_terms = checked(
            guarantee,
            commit,
            per=per,
            on_failure=on_failure,
            retries=retries,
            back_off_s=back_off_s,
            commit_interval_s=commit_interval_s,
            assignment=assignment,
            max_records=max_records,
            longest_s=longest_s,
            database=database is not None,
        )
        self.terms = replace(declared_terms, hooks=hooks)
        source = {
            "brokers": brokers,
            "topics": [topics] if isinstance(topics, str) else list(topics),
            "start": start,
            "on_data_loss": on_data_loss,
            "kafka": dict(kafka or {}),
        }
        self._pipeline = _pipeline(group, self.terms, source, database, dead_letters)
        self._once = once
        self.finished = False  # it has done what once or limit ask for; not if it was stopped before
        self._limit = limit
        self._event = on_event
        self._stop = threading.Event()
        self._units: Generator[Batch] | None = None  # what ``transaction`` takes from
        self._open: _Open | None = None
        self._fenced: dict[TopicPartition, tuple[float, Superseded]] = {}
        self.totals = Totals()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Commit what is handled, and leave the group."""
        if self._units is not None:
            self._units.close()
            self._units = None
        if self._open is not None:
            opened, self._open = self._open, None
            opened.close()

    def stop(self) -> None:
        """End after the record in hand; under at-most-once, after the batch that is claimed. Safe to call from a signal
        handler, from another thread, and from the handler."""
        self._stop.set()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: it was stopped, or has done what ``once`` or ``limit`` ask for."""
        return self._stop.is_set()

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The partitions that are ours, and the next offset of each that is not handled or claimed."""
        return self._open.keeping.positions if self._open else {}

    # What is handed out

    def __iter__(self) -> Generator[Record]:
        """One record after another. One counts as handled when the next is asked for."""
        self._refuse_exactly_once()
        with closing(self._taken()) as units:
            for number, unit in enumerate(units):
                yield from self._handed(unit, number)

    def batches(self) -> Generator[Sequence[Record]]:
        """One batch after another, each of one partition. One counts as handled when the next is asked for."""
        self._refuse_exactly_once()
        with closing(self._taken(whole=True)) as units:
            for unit in units:
                if self.terms.claims_first and not self._claimed(unit):
                    continue
                if unit.records:
                    yield unit.records
                self.totals.handled += len(unit.records)
                if not self.terms.claims_first:
                    self._opened.grouped.passed(unit.where, unit.until)
                    self._opened.keeping.due(unit_done=True)

    def run(self, handler: Handler | TransactionHandler) -> Totals:
        """Give every record to the handler, until stopped; exactly-once gives it ``(record, transaction)``."""
        try:
            if self.terms.in_one_act:
                self._run_transactions(handler)  # type: ignore[arg-type]
            else:
                self._run_plain(handler)  # type: ignore[arg-type]
        except _Stopped:
            pass
        return self.totals

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """The next records, in a transaction in which their position moves: when the body has run to the end, both are
        committed; when it raises, neither. No records: the consumer has ``ended``, or they were handled before."""
        if not self.terms.in_one_act:
            raise ConfigError(
                f"transaction: {self.terms.guarantee} has none", advice="Declare exactly-once, with a database."
            )
        self._units = self._units or self._taken()
        unit = next(self._units, None)
        if unit is None:
            yield Transaction.empty()
            return
        try:
            with self._opened.ledgered.transaction(unit) as tx:
                yield tx
        except BaseException:
            self._units.close()  # reads again what it has not claimed
            self._units = None
            if self._opened.ledgered.broken:
                self._opened.ledgered.reread()
            raise
        self._counted(tx)

    def _refuse_exactly_once(self) -> None:
        if self.terms.in_one_act:
            raise ConfigError(
                "exactly-once has no plain loop: a record is handled in a transaction",
                advice="Use run(handler), whose handler is given (record, tx), or: with consumer.transaction() as tx.",
            )

    # Units

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            self._open = _Open(self._pipeline, self.terms, self._once, self._stop, self._event)
        return self._open

    def _taken(self, *, whole: bool = False) -> Generator[Batch]:
        """Units, until stopped or drained. What was taken and not passed by then is read again."""
        opened = self._opened
        try:
            while not self._stop.is_set():
                most = self.terms.max_records
                if self._limit is not None:
                    most = min(most, self._limit - self.totals.handled - self.totals.dead)
                if most <= 0 or opened.drained():
                    self.finished = True
                    self._stop.set()
                    return
                opened.keeping.due(unit_done=False)
                self._look_at_fenced()
                try:
                    batches = opened.member.take(most, WAIT_S)
                except SourceError:
                    opened.keeping.same_topics()  # it names the cause, if that is it
                    raise
                if batches and not opened.keeping.same_topics():
                    opened.rewind()
                    continue
                for unit in (unit for batch in batches for unit in (self._cut(batch) if not whole else [batch])):
                    yield unit
                    if self._stop.is_set():
                        return
                    if opened.keeping.positions.get(unit.where, -1) < unit.until:
                        break  # it was not claimed, or not to its end: the rest of what was taken is read again
                opened.rewind()
        finally:
            opened.rewind()

    def _cut(self, batch: Batch) -> list[Batch]:
        """A batch into units. Markers between and behind records belong to the record before."""
        if self.terms.per == "batch" or len(batch.records) < 2:
            return [batch]
        starts = [batch.start, *(record.offset for record in batch.records[1:])]
        ends = [*starts[1:], batch.until]
        return [
            Batch(batch.where, start, until, [record])
            for start, until, record in zip(starts, ends, batch.records, strict=True)
        ]

    def _handed(self, unit: Batch, number: int) -> Iterator[Record]:
        """A unit's records. The code behind a ``yield`` runs when the next is asked for."""
        first = self.terms.claims_first
        if first and not self._claimed(unit):
            return
        for record in unit.records:
            yield record
            self.totals.handled += 1
            if not first:
                self._opened.grouped.passed(unit.where, record.offset + 1)
                if self._stop.is_set():
                    return
        self.terms.hooks.reached("after-write", number)
        if not first:
            self._opened.grouped.passed(unit.where, unit.until)
            self._opened.keeping.due(unit_done=True)

    def _claimed(self, unit: Batch) -> bool:
        return self._opened.grouped.claim(unit)

    # Handlers

    def _run_plain(self, handler: Handler) -> None:
        with closing(iter(self)) as records:
            for record in records:
                error = self._attempt(record, partial(handler, record))
                if error is not None:
                    self._opened.letters.send(deadletters.letter(record, error))
                    self.totals.dead += 1
                    self.totals.handled -= 1  # it is about to be counted

    def _attempt(self, record: Record, handle: Callable[[], object]) -> Exception | None:
        """None if it was handled, or the last error of a record that is to be a dead letter."""
        pause = self.terms.back_off_s
        for tries_left in range(self.terms.retries, -1, -1):
            try:
                handle()
                return None
            except _Broken:
                raise
            except Exception as error:
                if tries_left:
                    self._event(f"{record}: the handler failed ({_said(error)}); trying again in {pause:g} s")
                    if self.terms.claims_first:
                        time.sleep(pause)  # what is claimed is handled to its end, whoever asks to stop
                    elif self._stop.wait(pause):
                        raise _Stopped from None
                    self.totals.retried += 1
                    pause = min(pause * 2, BACK_OFF_MAX_S)
                    continue
                if self.terms.on_failure == "stop":
                    times = f" {self.terms.retries + 1} times" if self.terms.retries else ""
                    raise HandlerFailed(
                        f"{record}: the handler failed{times}: {_said(error)}",
                        advice="The position is at this record, unless it was claimed before. Mend the handler and "
                        "start again, or declare on_failure = dead-letter.",
                    ) from error
                self._event(f"{record}: a dead letter: {_said(error)}")
                return error
        raise AssertionError

    def _run_transactions(self, handler: TransactionHandler) -> None:
        with closing(self._taken()) as units:
            for unit in units:
                ledgered = self._opened.ledgered
                try:
                    self._transact(unit, handler)
                except Superseded as error:
                    self._event(f"{unit.where}: {first_line(error)}")
                    self._fenced[unit.where] = (time.monotonic(), error)
                    self._opened.member.pause(unit.where)
                    ledgered.give_up(unit.where)
                except (psycopg.Error, SinkError, _Broken) as error:
                    if isinstance(error, psycopg.Error) and not ledgered.broken and not _passing(error):
                        raise SinkError(f"PostgreSQL: {first_line(error)}") from error
                    ledgered.failed(error.__cause__ if isinstance(error, _Broken) else error)  # type: ignore[arg-type]
                    ledgered.reread()

    def _transact(self, unit: Batch, handler: TransactionHandler) -> None:
        failed: HandlerFailed | None = None
        with self._opened.ledgered.transaction(unit) as tx:
            for record in tx.records:
                tx.at(record)
                try:
                    error = self._attempt(record, partial(self._saved, handler, record, tx))
                    if error is not None:
                        tx.bury(deadletters.letter(record, error))
                except (HandlerFailed, _Stopped) as end:
                    failed = end if isinstance(end, HandlerFailed) else None
                    tx.end_at(record.offset)
                    break
                if self._stop.is_set():
                    tx.end_at(record.offset + 1)
                    break
        self._counted(tx)
        if failed:
            raise failed

    def _saved(self, handler: TransactionHandler, record: Record, tx: Transaction) -> None:
        """One try. What it wrote is undone if it fails, and the transaction goes on."""
        try:
            with tx.connection.transaction():
                handler(record, tx)
                # A deferred constraint that this record violates must fail here, and not at the commit.
                tx.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except psycopg.Error as error:
            if tx.connection.closed:
                raise _Broken from error  # that is not the record's fault
            raise

    def _counted(self, tx: Transaction) -> None:
        self.totals.handled += len(tx.records) - tx.dead
        self.totals.dead += tx.dead
        self._opened.keeping.due(unit_done=True)

    def _look_at_fenced(self) -> None:
        """A newer run in a partition of ours is a rebalance that we have not heard of. If we never do, it is not."""
        ours = self._opened.member.ours
        for where, (since, error) in list(self._fenced.items()):
            if where not in ours or where in self._opened.keeping.positions:
                del self._fenced[where]
            elif time.monotonic() - since > FENCED_S:
                raise error


class _Broken(Exception):
    """The connection broke while the handler used it."""


class _Open:
    """What an open consumer holds."""

    def __init__(
        self, pipeline: PipelineConfig, terms: Terms, once: bool, stop: threading.Event, event: Callable[[str], None]
    ) -> None:
        self._terms = terms
        self._pipeline = pipeline
        group = pipeline.name
        self._log = Log(pipeline.source, group)
        try:
            known = self._log.partitions()
            self._ends = self._log.stable_ends(known) if once else None
            self.keeping: GroupKeeping | LedgerKeeping
            if terms.in_one_act:
                self.keeping = LedgerKeeping(pipeline, known, terms, stop, event)
                self.keeping.prepare()
                group = f"{group}.members"
            self.member = Member(
                pipeline.source,
                group,
                assignment=terms.assignment,
                longest_s=terms.longest_s,
                begin=lambda ours: self.keeping.begin(ours),
                release=lambda gone, lost: self.keeping.release(gone, lost),
                answered=lambda positions, error: self.grouped.answered(positions, error),
            )
            if not terms.in_one_act:
                self.keeping = GroupKeeping(pipeline.source, self._log, terms, self.member, known, event)
            # Before the first record: a topic that cannot be made is told now, and not by the first failure.
            wanted = terms.on_failure == "dead-letter" and not terms.in_one_act
            self._letters = deadletters.LetterBox(pipeline, self._log) if wanted else None
        except BaseException:
            self._log.close()
            raise
        self._closed = False
        self._asked_at = 0.0
        self.member.subscribe()

    @property
    def letters(self) -> deadletters.LetterBox:
        assert self._letters is not None
        return self._letters

    @property
    def grouped(self) -> GroupKeeping:
        assert isinstance(self.keeping, GroupKeeping)
        return self.keeping

    @property
    def ledgered(self) -> LedgerKeeping:
        assert isinstance(self.keeping, LedgerKeeping)
        return self.keeping

    def rewind(self) -> None:
        """Read on behind what is passed."""
        if self._closed:
            return  # a loop that was left ends after its consumer
        self.member.rewind(self.keeping.positions)

    def drained(self) -> bool:
        """Whether all is done that was there at the start, by us or by those who share the partitions with us."""
        if self._ends is None or not self.member.joined:
            return False
        positions = self.keeping.positions
        if any(position < self._ends.get(where, 0) for where, position in positions.items()):
            return False
        others = [where for where, end in self._ends.items() if where not in positions and end]
        if not others:
            return bool(positions) or not any(self._ends.values())
        if time.monotonic() - self._asked_at < OTHERS_EVERY_S:
            return False
        self._asked_at = time.monotonic()
        reached = self.keeping.elsewhere(others)
        return all(reached[where] >= self._ends[where] for where in others)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if isinstance(self.keeping, GroupKeeping):
                self.keeping.settle()
            else:
                self.keeping.close()
        finally:
            self.member.close()
            self._log.close()


def _pipeline(
    group: str, terms: Terms, source: dict[str, Any], database: str | None, dead_letters: str | None
) -> PipelineConfig:
    """A consumer as the pipeline that it is: its group is the name, under which a ledger knows it."""
    letters = dead_letters or f"{group}.dead-letters"
    sink = (
        {"kind": "postgres", "url": database, "table": "none"}  # the handler has tables of its own
        if database is not None
        else {"kind": "kafka", "topic": letters, "dead_letter_topic": letters}
    )
    document = {"name": group, "guarantee": str(terms.guarantee), "engine": "consumer", "source": source}
    try:
        return declared({**document, "decode": {"format": "raw"}, "sink": sink})
    except ConfigError as error:
        said = str(error).replace("source.", "").replace("sink.url", "database").replace("sink.topic", "dead_letters")
        said = "\n".join(f"group{line[4:]}" if line.startswith("name:") else line for line in said.splitlines())
        raise ConfigError(said, advice="Correct what the consumer was given.") from None


def _passing(error: psycopg.Error) -> bool:
    """Deadlocks, serialization failures, lock time-outs, a server that is going down."""
    return (error.sqlstate or "")[:2] in ("40", "55", "57")


def _said(error: BaseException) -> str:
    return deadletters.text_of(error)
