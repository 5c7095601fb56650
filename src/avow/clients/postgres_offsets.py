"""Positions in PostgreSQL, in the transaction of the handler's own writes: exactly-once.

Theory of operation
-------------------
The ledger is that of pipelines: the same tables, rules and fences. When partitions become ours, a run's number is taken
and older ones are fenced in them. A transaction locks the partition's entry, so that nobody else can claim meanwhile,
hands out what is not claimed yet, and claims it before it commits. If the answer to the commit is lost, the ledger says
what became of it: we read on where it stands.

The group that shares out the partitions is ``GROUP.members``, as for the consumer engine; nothing is committed to it.
Positions are committed to ``GROUP`` for lag tools.

Owns: transactions of handlers. Must not know: handlers. Neighbours: ``engines.driver`` (where to begin),
``sinks.postgres.driver`` (the ledger's SQL), ``group_offsets`` (the same for the weaker guarantees).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import psycopg

from avow import ledger
from avow.clients.config import ConsumerConfig
from avow.clients.records import Batch, Record
from avow.engines.driver import ATTEMPTS_WITHOUT_PROGRESS, BACK_OFF_S, STOPS, RunDriver
from avow.engines.progress import Observer
from avow.errors import AvowError, ConfigError, ProtocolViolation, SinkError, SourceError, first_line
from avow.kafka.log import TopicPartition, fingerprint
from avow.ledger import Counts, Entry, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DEAD_LETTER_COLUMNS, DeadLetter, LedgerUpdate, dead_letter_values
from avow.sinks.postgres import driver, session
from avow.sinks.postgres.config import PostgresConfig

PUBLISH_EVERY_S = 1.0
KEY_BYTES = 1_000  # of an idempotency key: an entry of PostgreSQL's index has room for some 2,700


class _Queries:
    """The ledger's SQL on the handler's connection."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(session.interpolate(sql, values)).fetchall()

    def run(self, sql: str, *values: str) -> int:
        return self._connection.execute(session.interpolate(sql, values)).rowcount


@dataclass(eq=False, repr=False)
class Transaction:
    """One transaction over records of one partition. It commits the handler's writes and the position, or neither."""

    _pipeline: str
    _run: int
    _number: int
    connection: psycopg.Connection[Any]  # write through this one, and neither commit nor roll it back
    _entry: Entry
    _todo: OffsetRange
    records: Sequence[Record]  # what is to be handled: nothing of it has been before

    def __post_init__(self) -> None:
        self._record: Record | None = self.records[0] if len(self.records) == 1 else None
        self._repeats: set[int] = set()
        self._dead_letters: set[int] = set()

    @classmethod
    def empty(cls) -> Transaction:
        """Of nothing: no connection is needed for it."""
        return cls("", 0, 0, cast(Any, None), Entry(0, "", 0), OffsetRange("", 0, 0, 0), ())

    def at(self, record: Record) -> None:
        """This one is being handled."""
        self._record = record

    def first_time(self, key: bytes | str | None = None) -> bool:
        """Whether this idempotency key is new, under this group; from now on it is not. Without one, the record's own,
        from the header ``avow-key``: a message that its producer sent twice is two records with the same key."""
        if key is None:
            key = self._record.idempotency_key if self._record is not None else None
        if key is None:
            raise ConfigError(
                "first_time: the record has no idempotency key",
                advice=f"{self._record or 'The record'} has no header avow-key: let the producer set it, or "
                "pass a key.",
            )
        stored, before = _stored(key.encode(errors="surrogatepass") if isinstance(key, str) else key)
        inserted = self.connection.execute(
            "INSERT INTO avow.keys (pipeline, key) SELECT %(pipeline)s, %(stored)s WHERE NOT EXISTS (SELECT FROM "
            "avow.keys WHERE pipeline = %(pipeline)s AND key = %(before)s) ON CONFLICT DO NOTHING RETURNING 1",
            {"pipeline": self._pipeline, "stored": stored, "before": before},
        ).fetchone()
        if inserted is None and self._record is not None:
            self._repeats.add(self._record.offset)
        return inserted is not None

    def add_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Keep a record that could not be handled."""
        self._dead_letters.add(dead_letter.offset)
        row = dead_letter_values(dead_letter)
        row["detail"] = session.storable(dead_letter.detail, self.connection)
        self.connection.execute(
            'INSERT INTO avow.dead_letters (pipeline, topic, partition, "offset", timestamp_ms, key, value, headers,'
            " reason, detail, run) VALUES (%s, %s, %s, %s, %s, %s, %s, %s::json, %s, %s, %s) ON CONFLICT DO NOTHING",
            (self._pipeline, *(row[column] for column in DEAD_LETTER_COLUMNS), self._run),
        )

    def end_at(self, offset: int) -> None:
        """Claim no further: what lies behind was not handled."""
        self._todo = replace(self._todo, until=offset)
        self.records = [record for record in self.records if record.offset < offset]
        self._repeats = {repeat for repeat in self._repeats if repeat < offset}

    @property
    def dead(self) -> int:
        """How many were kept as dead letters."""
        return len(self._dead_letters)

    @property
    def until(self) -> int:
        """Where the position will be."""
        return self._todo.until

    def claim(self) -> None:
        if not self._todo:
            return
        read, repeats = len(self.records), len(self._repeats - self._dead_letters)
        counts = Counts(read, read - self.dead - repeats, self.dead, repeats)
        last = self.records[-1] if self.records else None
        mark = fingerprint(last.offset, last.timestamp_ms, last.key, last.value) if last else None
        after = ledger.claim(self._entry, self._todo, self._run, counts, mark)
        update = LedgerUpdate(self._entry, after, self._todo)
        driver.write_claims(_Queries(self.connection), self._pipeline, [update], self._number)


def _stored(key: bytes) -> tuple[str, str]:
    """An idempotency key as the table has it, and as versions before this one wrote it.

    Plain text stays as it is. What is no text, and what could be taken for such a key or for how it was written before,
    is written in hexadecimal digits behind a control character; of a key that is too long for an index, the digest.
    """
    before = key.decode("utf-8", "backslashreplace").replace("\0", "\\x00")
    marked = before.startswith("\x01")
    stored = before
    if len(key) > KEY_BYTES:
        stored = f"\x01sha256:{hashlib.sha256(key).hexdigest()}"
    elif marked or "\\x" in before:
        stored = f"\x01{key.hex()}"
    return stored, stored if marked else before


class PostgresOffsets:
    """``known``: the partitions there were at the start, with the ids of their topics. Others were added, and so were
    those without a position in a topic that the ledger knows: they are read from their first record."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        known: Mapping[TopicPartition, str],
        config: ConsumerConfig,
        stop: threading.Event,
        event: Callable[[str], None],
    ) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._pipeline = pipeline
        self._url = pipeline.sink.url.get_secret_value()
        self._known = known
        self._begun: set[str] = set()  # ids of topics that were read before this process began
        self._config = config
        self._stop = stop
        self._event = event
        self._observer = Observer(event=event)
        self._driver = RunDriver(pipeline, self._observer)
        self._connection: psycopg.Connection[Any] | None = None
        self._published_at = 0.0
        self._unpublished = False
        self._transactions = 0
        self._ids: dict[TopicPartition, str] = {}  # of the topics, as the ledger has them
        self._failures = 0  # of the database, since it last did something for us

    def prepare(self) -> None:
        sink = self._driver.sink
        sink.prepare()
        self._begun = {entry.topic_id for entry in sink.entries().values()}

    def close(self) -> None:
        self._publish()
        self._driver.close()
        self._disconnect()

    # Partitions come and go

    def begin(self, assigned: list[TopicPartition]) -> dict[TopicPartition, int]:
        added = [tp for tp in assigned if self._known.get(tp) in {None, *self._begun}]
        while True:
            try:
                self._driver.begin(assigned, added=added)
                self._ids |= {tp: entry.topic_id for tp, entry in self._driver.sink.entries().items()}
                break
            except SinkError as error:
                self.failed(error)
                self._reopen()
        self._disconnect()
        # Now, and not with the next batch: a process that is paused in between would commit after its successor.
        self._driver.publish_now()
        return {tp: self._driver.positions[tp] for tp in assigned}

    def _reopen(self) -> None:
        """The driver's connection may be as dead as the one that failed, and the server still away."""
        positions, run = self.positions, self._driver.run  # nobody has taken them from us
        with suppress(AvowError):
            self._driver.close()
        while True:
            try:
                self._driver = RunDriver(self._pipeline, self._observer)
                break
            except SinkError as error:
                self.failed(error)
        self._driver.positions, self._driver.run = positions, run

    def release(self, gone: list[TopicPartition], lost: bool) -> None:
        if not lost:
            self._publish()
        self._driver.release(gone, lost=lost)

    def give_up(self, tp: TopicPartition) -> None:
        """A newer run has it."""
        self._driver.positions.pop(tp, None)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._driver.positions)

    def elsewhere(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        entries = self._driver.sink.entries()
        return {tp: entries[tp].position if tp in entries else 0 for tp in partitions}

    def due(self, *, unit_done: bool) -> None:
        self._unpublished |= unit_done
        if time.monotonic() - self._published_at >= PUBLISH_EVERY_S:
            self._publish()

    def _publish(self) -> None:
        if self._unpublished:
            self._driver.publish_now()
            self._unpublished, self._published_at = False, time.monotonic()

    def same_topics(self) -> bool:
        """Whether the topics are still those that the ledger knows; asked when records have come, before they are
        handled. One that was made again is a named stop. False: Kafka does not say, and they are to be read again."""
        positions = self.positions
        try:
            tps = self._driver.log.partitions_of({tp.topic for tp in positions})
        except SourceError as error:
            self._event(f"could not read the topic ids from Kafka ({first_line(error)}); reading the batch again")
            self._stop.wait(1)
            return False
        ids = {tp.topic: topic_id for tp, topic_id in tps.items()}
        for tp, position in positions.items():
            ledger.check_topic(f"{tp} was claimed up to offset {position}", self._ids[tp], ids[tp.topic])
        return True

    # Transactions

    @contextmanager
    def transaction(self, batch: Batch) -> Iterator[Transaction]:
        """Over what of the batch is not claimed yet."""
        tp, run = batch.tp, self._driver.run
        connection = self._connected()
        name = self._pipeline.name
        with connection.transaction():
            # Local to the transaction, as in ``session``.
            connection.execute(
                session.local_settings(driver.application(name, run), self._config.poll.max_poll_interval_ms / 1000)
            )
            (entry,) = driver.read_entries(_Queries(connection), name, [tp], lock=True)
            ledger.check_fence(entry, run)
            todo = ledger.judge(entry.position, OffsetRange(tp.topic, tp.partition, batch.start, batch.until))
            records = [record for record in batch.records if record.offset >= todo.start]
            tx = Transaction(name, run, self._transactions, connection, entry, todo, records)
            yield tx
            tx.claim()
        self._config.hooks.reached("after-claim-write", self._transactions)
        self._failures = 0
        self._transactions += 1
        self._driver.positions[tp] = max(tx.until, entry.position)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._disconnect()
            try:
                # Statements are not prepared: behind a pooler the next one may reach another server process.
                self._connection = psycopg.connect(
                    session.with_keepalive(self._url), autocommit=True, prepare_threshold=None
                )
            except psycopg.Error as error:
                raise session.connect_error(str(error), self._url) from None
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def broken(self) -> bool:
        """Whether the connection is closed."""
        return self._connection is None or self._connection.closed

    def failed(self, error: Exception) -> None:
        """The database failed: wait, or give up. What we know of positions is then read anew."""
        if isinstance(error, tuple(STOPS.values())):
            raise error
        self._disconnect()
        self._failures += 1
        if self._failures > ATTEMPTS_WITHOUT_PROGRESS:
            raise SinkError(
                f"gave up after {self._failures} attempts without progress: {first_line(error)}",
                advice="No position is lost: start again when the cause is fixed.",
            ) from error
        pause = BACK_OFF_S[min(self._failures, len(BACK_OFF_S)) - 1]
        self._event(f"failed ({first_line(error)}); retrying from the ledger in {pause:g} s")
        self._stop.wait(pause)

    def refresh(self) -> None:
        """Go by the ledger: we do not know what became of our last transaction."""
        while not self._stop.is_set():
            try:
                entries = self._driver.sink.entries()
                break
            except SinkError as error:
                self.failed(error)
                self._reopen()
        else:
            return
        for tp in self._driver.positions:
            if tp not in entries:
                raise ProtocolViolation(f"the ledger no longer has the position of {tp}")
            self._driver.positions[tp] = entries[tp].position
