"""``avow.Consumer``: records to a function, or into a loop, under a declared guarantee.

Theory of operation
-------------------
The order of acts is the guarantee's own (``guarantee.steps``), and the two acts are: *write*, the handler sees a
record; *claim*, the position moves past it. Claim first is at-most-once, write first is at-least-once, both in one
transaction of the handler's database is exactly-once.

Everything is built on one loop. A unit (a record or a batch, as declared) is taken, claimed if that comes first, handed
out record by record, and claimed if that comes after. A record counts as handled when the next one is asked for: in a
loop, when its body has run to the end; with a handler, when that has returned or its dead letter is stored. A loop that
is left by ``break`` or an error has not handled the current record. What was taken and not passed is read again.

Owns: that order, retries, and what is counted. Must not know: Kafka's client, SQL. Neighbours: ``config`` (what is
declared), ``kafka.group`` (the membership), ``group_offsets`` and ``postgres_offsets`` (positions), ``deadletters``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Literal

import psycopg

from avow.clients import deadletters
from avow.clients.config import CommitConfig, CommitMode, CommitUnit, ConsumerConfig, PollConfig, RetryConfig
from avow.clients.group_offsets import GroupOffsets
from avow.clients.postgres_offsets import PostgresOffsets, Transaction
from avow.clients.records import Batch, Record
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import ConfigError, HandlerFailed, SinkError, SourceError, Superseded, first_line
from avow.guarantee import Guarantee
from avow.kafka.connect import Connection
from avow.kafka.group import GroupMember
from avow.kafka.log import Log, TopicPartition
from avow.retry import backoff
from avow.settings import Offsets, PipelineConfig, declared
from avow.sinks.base import ClosingContext

__all__ = ["Batch", "Consumer", "ConsumerTotals", "Record", "Transaction"]

WAIT_S = 0.1  # for a first record; also how soon a call of stop() is noticed

Handler = Callable[[Record], object]
TransactionHandler = Callable[[Record, Transaction], object]


@dataclass(slots=True)
class ConsumerTotals:
    """Counts of a consumer."""

    handled: int = 0  # handed out, and not failed
    retried: int = 0  # tries of the handler beyond the first
    dead: int = 0  # kept as dead letters


class _Stopped(Exception):
    """``stop`` was called during the pause before a retry."""


class Consumer(ClosingContext):
    """Reads topics as a member of a consumer group. Close it, or use it as a context manager.

    - ``guarantee``: exactly-once needs ``database``, a PostgreSQL URL, and stores positions there
    - ``auto_offset_reset``: where a new group begins: earliest, latest, a time, or offsets by topic and partition
    - ``on_data_loss``: stop or skip, where retention has deleted records that were not read
    - ``commit``: a ``CommitConfig``, or its mode alone; ``retry``, ``poll``: likewise
    - ``dead_letters``: what becomes of a record that keeps failing. False: the consumer stops. True, or the name of a
      topic: the record is kept in GROUP.dead-letters, or there; under exactly-once in ``avow.dead_letters``
    - ``once``: end at the end of the log as it was at the start; ``limit``: after so many records
    - ``config``: librdkafka's settings, for TLS, passwords and the like
    - ``on_event``: is called with log lines. ``hooks`` are for tests
    """

    def __init__(
        self,
        topics: Sequence[str] | str,
        *,
        bootstrap_servers: str,
        group_id: str,
        guarantee: Guarantee | str = Guarantee.AT_LEAST_ONCE,
        database: str | None = None,
        auto_offset_reset: str | datetime | Offsets = "earliest",
        on_data_loss: Literal["stop", "skip"] = "stop",
        commit: CommitConfig | CommitMode | str | None = None,
        retry: RetryConfig | None = None,
        dead_letters: bool | str = False,
        poll: PollConfig | None = None,
        once: bool = False,
        limit: int | None = None,
        config: Mapping[str, Any] | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self.config = ConsumerConfig.resolve(
            guarantee,
            commit=commit,
            retry=retry,
            poll=poll,
            dead_letters=bool(dead_letters),
            database=database is not None,
            hooks=hooks,
        )
        source = {
            "brokers": bootstrap_servers,
            "topics": [topics] if isinstance(topics, str) else list(topics),
            "start": auto_offset_reset,
            "on_data_loss": on_data_loss,
            "kafka": dict(config or {}),
        }
        topic = dead_letters if isinstance(dead_letters, str) else f"{group_id}.dead-letters"
        self._pipeline = _pipeline(group_id, self.config.guarantee, source, database, topic)
        self._once = once
        self.finished = False  # it has done what once or limit ask for; not if it was stopped before
        self._limit = limit
        self._event = on_event
        self._stop = threading.Event()
        self._units: Generator[Batch] | None = None  # what ``transaction`` takes from
        self._open: _Open | None = None
        self.totals = ConsumerTotals()

    def close(self) -> None:
        """Commit what is handled, and leave the group."""
        if self._units is not None:
            self._units.close()
            self._units = None
        if self._open is not None:
            opened, self._open = self._open, None
            opened.close()

    def stop(self) -> None:
        """Stop after the current record; under at-most-once, after the claimed batch. Safe to call from a signal
        handler, from another thread, and from the handler."""
        self._stop.set()

    @property
    def ended(self) -> bool:
        """Whether the consumer has stopped, or has reached the end that ``once`` or ``limit`` set."""
        return self._stop.is_set()

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The partitions that are ours, and the next offset of each that is not handled or claimed."""
        return self._open.offsets.positions if self._open else {}

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
                if self.config.claims_first and not self._opened.group_offsets.claim(unit):
                    continue
                if unit.records:
                    yield unit.records
                self.totals.handled += len(unit.records)
                if not self.config.claims_first:
                    self._opened.group_offsets.passed(unit.tp, unit.until)
                    self._opened.offsets.due(unit_done=True)

    def run(self, handler: Handler | TransactionHandler) -> ConsumerTotals:
        """Call the handler with every record, until stopped; under exactly-once with ``(record, transaction)``."""
        try:
            if self.config.in_one_act:
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
        if not self.config.in_one_act:
            raise ConfigError(
                f"transaction(): {self.config.guarantee} has no transactions",
                advice="Declare exactly-once, with a database.",
            )
        self._units = self._units or self._taken()
        unit = next(self._units, None)
        if unit is None:
            yield Transaction.empty()
            return
        try:
            with self._opened.postgres_offsets.transaction(unit) as tx:
                yield tx
        except BaseException:
            self._units.close()  # reads again what it has not claimed
            self._units = None
            if self._opened.postgres_offsets.broken:
                self._opened.postgres_offsets.refresh()
            raise
        self._counted(tx)

    def _refuse_exactly_once(self) -> None:
        if self.config.in_one_act:
            raise ConfigError(
                "exactly-once cannot iterate over records: each is handled in a transaction",
                advice="Use run(handler), which calls handler(record, tx), or: with consumer.transaction() as tx.",
            )

    # Units

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            self._open = _Open(self._pipeline, self.config, self._once, self._stop, self._event)
        return self._open

    def _taken(self, *, whole: bool = False) -> Generator[Batch]:
        """Units, until stopped or drained. What was taken and not passed by then is read again."""
        opened = self._opened
        try:
            while not self._stop.is_set():
                most = self.config.poll.max_poll_records
                if self._limit is not None:
                    most = min(most, self._limit - self.totals.handled - self.totals.dead)
                if most <= 0 or opened.drained():
                    self.finished = True
                    self._stop.set()
                    return
                opened.offsets.due(unit_done=False)
                try:
                    batches = [Batch.of(fetched) for fetched in opened.member.take(most, WAIT_S)]
                except SourceError:
                    opened.offsets.same_topics()  # it names the cause, if that is it
                    raise
                if batches and not opened.offsets.same_topics():
                    opened.rewind()
                    continue
                split = self.config.commit.per == CommitUnit.RECORD and not whole
                for unit in (unit for batch in batches for unit in (batch.split() if split else [batch])):
                    yield unit
                    if self._stop.is_set():
                        return
                    if opened.offsets.positions.get(unit.tp, -1) < unit.until:
                        break  # it was not claimed, or not to its end: the rest of what was taken is read again
                opened.rewind()
        finally:
            opened.rewind()

    def _handed(self, unit: Batch, number: int) -> Iterator[Record]:
        """A unit's records. The code behind a ``yield`` runs when the next is asked for."""
        first = self.config.claims_first
        if first and not self._opened.group_offsets.claim(unit):
            return
        for record in unit.records:
            yield record
            self.totals.handled += 1
            if not first:
                self._opened.group_offsets.passed(unit.tp, record.offset + 1)
                if self._stop.is_set():
                    return
        self.config.hooks.reached("after-write", number)
        if not first:
            self._opened.group_offsets.passed(unit.tp, unit.until)
            self._opened.offsets.due(unit_done=True)

    # Handlers

    def _run_plain(self, handler: Handler) -> None:
        with closing(iter(self)) as records:
            for record in records:
                error = self._attempt(record, partial(handler, record))
                if error is not None:
                    self._opened.dead_letters.send(deadletters.dead_letter_of(record, error))
                    self.totals.dead += 1
                    self.totals.handled -= 1  # it is about to be counted

    def _attempt(self, record: Record, handle: Callable[[], object]) -> Exception | None:
        """None if it was handled, or the last error of a record that is to be a dead letter."""
        retry = self.config.retry
        pauses = backoff(
            retry.retry_backoff_ms / 1000, retry.retry_backoff_max_ms / 1000, attempts=self.config.retries + 1
        )
        for pause in chain(pauses, [None]):
            try:
                handle()
                return None
            except Exception as failed:  # noqa: BLE001 - whatever the handler raises
                error = failed
            if isinstance(error, psycopg.Error) and self.config.in_one_act and self._opened.postgres_offsets.broken:
                raise error  # the connection broke while the handler used it: that is not the record's fault
            if pause is not None:
                self._event(f"{record}: the handler failed ({deadletters.text_of(error)}); retrying in {pause:g} s")
                if self.config.claims_first:
                    time.sleep(pause)  # what is claimed is handled to its end, also during a stop
                elif self._stop.wait(pause):
                    raise _Stopped from None
                self.totals.retried += 1
        if not self.config.dead_letters:
            times = f" {self.config.retries + 1} times" if self.config.retries else ""
            raise HandlerFailed(
                f"{record}: the handler failed{times}: {deadletters.text_of(error)}",
                advice="The position is at this record (at-most-once: after its batch). Fix the handler and start "
                "again, or declare dead_letters.",
            ) from error
        self._event(f"{record}: added to the dead letters: {deadletters.text_of(error)}")
        return error

    def _run_transactions(self, handler: TransactionHandler) -> None:
        with closing(self._taken()) as units:
            for unit in units:
                postgres = self._opened.postgres_offsets
                try:
                    self._transact(unit, handler)
                except Superseded as error:
                    postgres.give_up(unit.tp)
                    self._opened.member.give_up([unit.tp], error)
                except (psycopg.Error, SinkError) as error:
                    if isinstance(error, psycopg.Error) and not postgres.broken and not _passing(error):
                        raise SinkError(f"PostgreSQL: {first_line(error)}") from error
                    postgres.failed(error)
                    postgres.refresh()

    def _transact(self, unit: Batch, handler: TransactionHandler) -> None:
        failed: HandlerFailed | None = None
        with self._opened.postgres_offsets.transaction(unit) as tx:
            for record in tx.records:
                tx.at(record)
                try:
                    error = self._attempt(record, partial(self._saved, handler, record, tx))
                    if error is not None:
                        tx.add_dead_letter(deadletters.dead_letter_of(record, error))
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
        with tx.connection.transaction():
            handler(record, tx)
            # A deferred constraint that this record violates must fail here, and not at the commit.
            tx.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def _counted(self, tx: Transaction) -> None:
        self.totals.handled += len(tx.records) - tx.dead
        self.totals.dead += tx.dead
        self._opened.offsets.due(unit_done=True)


class _Open:
    """What an open consumer holds."""

    offsets: GroupOffsets | PostgresOffsets  # one of the next two, as the guarantee needs it
    group_offsets: GroupOffsets
    postgres_offsets: PostgresOffsets
    dead_letters: deadletters.DeadLetterTopic  # if they are declared, and go into a topic

    def __init__(
        self,
        pipeline: PipelineConfig,
        config: ConsumerConfig,
        once: bool,
        stop: threading.Event,
        event: Callable[[str], None],
    ) -> None:
        group = pipeline.name
        self._log = Log(pipeline.source, group, key="config")
        try:
            known = self._log.partitions()
            self._ends = self._log.stable_ends(known) if once else None
            if config.in_one_act:
                self.offsets = self.postgres_offsets = PostgresOffsets(pipeline, known, config, stop, event)
                self.postgres_offsets.prepare()
                group = f"{group}.members"
            self.member = GroupMember(
                Connection.of(pipeline.source, group, key="config"),
                on_assign=lambda tps: self.offsets.begin(tps),
                on_revoke=lambda gone, lost: self.offsets.release(gone, lost),
                on_event=event,
                strategy=config.poll.partition_assignment_strategy,
                own={"max.poll.interval.ms": config.poll.max_poll_interval_ms},
                advice="Check the brokers and the topics' leaders. No position is lost: start again when the cause "
                "is fixed.",
            )
            if not config.in_one_act:
                self.offsets = self.group_offsets = GroupOffsets(
                    pipeline.source, self._log, config, self.member, known, event
                )
                if config.dead_letters:
                    # Before the first record: a topic that cannot be created is an error now, and not at the first
                    # failure.
                    self.dead_letters = deadletters.DeadLetterTopic(pipeline, self._log.admin.connection)
        except BaseException:
            self._log.close()
            raise
        self._closed = False
        self.member.subscribe(pipeline.source.topics)

    def rewind(self) -> None:
        """Read on behind what is passed."""
        if not self._closed:  # a loop that was left ends after its consumer
            self.member.rewind(self.offsets.positions)

    def drained(self) -> bool:
        """Whether all is done that was there at the start, by us or by those who share the partitions with us."""
        ends = self._ends
        return ends is not None and self.member.drained(ends, self.offsets.positions, self.offsets.elsewhere)

    def close(self) -> None:
        self._closed = True
        try:
            self.offsets.close()
        finally:
            self.member.close()
            self._log.close()


# The settings of a pipeline -> of a consumer; in this order.
_NAMES = {
    **{"source.brokers": "bootstrap_servers", "source.start": "auto_offset_reset", "source.kafka": "config"},
    **{"source.": "", "sink.url": "database", "sink.topic": "dead_letters", "sink.dead_letter_topic": "dead_letters"},
}


def _pipeline(
    group_id: str, guarantee: Guarantee, source: dict[str, Any], database: str | None, dead_letters: str
) -> PipelineConfig:
    """A consumer as the pipeline that it is: its group is the name, under which a ledger knows it."""
    sink = (
        {"kind": "postgres", "url": database, "table": "none"}  # the handler has tables of its own
        if database is not None
        else {"kind": "kafka", "topic": dead_letters, "dead_letter_topic": dead_letters}
    )
    document = {"name": group_id, "guarantee": str(guarantee), "engine": "consumer", "source": source}
    try:
        return declared({**document, "decode": {"format": "raw"}, "sink": sink})
    except ConfigError as error:
        message = str(error)
        for pipeline_key, option in _NAMES.items():
            message = message.replace(pipeline_key, option)
        message = "\n".join(
            f"group_id{line[4:]}" if line.startswith("name:") else line for line in message.splitlines()
        )
        raise ConfigError(message, advice="Correct the consumer's arguments.") from None


def _passing(error: psycopg.Error) -> bool:
    """Deadlocks, serialization failures, lock time-outs, a server that is going down."""
    return (error.sqlstate or "")[:2] in ("40", "55", "57")
