"""A producer with a declared guarantee, every one of whose sends is accounted for.

::

    with Producer("localhost:9092", guarantee="exactly-once") as producer:
        place = producer.send("payments", b'{"id": 1}', key="acc-1").wait()   # topic, partition, offset

    with Producer("localhost:9092", guarantee="exactly-once", durability="transactional", name="shop-1") as producer:
        with producer.transaction():            # both or neither
            producer.send("orders", order)
            producer.send("payments", payment)

Theory of operation
-------------------
``send`` hands the record to librdkafka, which has threads of its own, and gives a ``Sending``: a place where its end
will be written. Ends are written while somebody calls ``send``, ``wait``, ``flush`` or leaves the block. What is on its
way is bounded in records and bytes; at the bound ``send`` waits. A record has ``delivery_timeout_s``, so waiting ends;
one that alone is larger than the bound has failed.

In a transaction a send ends when the transaction does. A transaction in which one send failed is aborted. If it cannot
be found out whether one was committed, its sends are unknown, and the producer is of no more use: a new one of the same
name first waits for the end of what the old one left.

Owns: sends and their ends. Must not know: files, command lines. Neighbours: ``durability`` (what the words come to) and
``sending`` (what Kafka's answers come to).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.clients.cluster import FENCED, PATIENCE_S, as_ours, in_sync_problem, superseded
from avow.clients.durability import OWNED, Durability, choose
from avow.clients.sending import Outcome, Place, Sending, Totals, outcome_of, words_of
from avow.errors import AvowError, ConfigError, SourceError, first_line
from avow.guarantee import Guarantee
from avow.kafka.connect import flushed, in_time, made, settings_at, strike, unless_refused
from avow.kafka.headers import CHECKSUM, KEY, SEQUENCE, checksum

Headers = Iterable[tuple[str, bytes | str | None]]

DELIVERY_TIMEOUT_S = 120.0
TRANSACTION_TIMEOUT_MS = 60_000
LATE_S = 5.0  # the client looks about once a second for records whose time is over
BEFORE_ABORT_S = 5.0
WAIT_S = 0.02  # of threads that wait, one may have been given the end of another's send

_CLOSED = "it is closed"


class Transaction:
    """Sends that become visible together."""

    def __init__(self, producer: client.Producer) -> None:
        self._client = producer
        self.sendings: list[Sending] = []

    def positions(self, offsets: Sequence[client.TopicPartition], group: Any) -> None:
        """Let these offsets of a consumer group be committed with it. ``group`` is ``consumer_group_metadata()``."""
        with as_ours("the sending of positions", {}):
            in_time(PATIENCE_S, lambda: self._client.send_offsets_to_transaction(list(offsets), group, PATIENCE_S))


class Producer:
    """Sends records. To be used in a ``with`` block, at whose end every send has ended.

    - ``durability``: see ``avow.clients.durability``; if none is named, the guarantee's first
    - ``name``: who this is. With durability transactional it is the transactional id: a second producer of the name
      takes over from the first
    - ``idempotency_key``: makes the key of a record from its value, where ``send`` is not given one
    - ``on_failure``: is called with every send that failed, or that should have been answered and was not. Without it,
      the block's end raises if there was one
    - ``kafka``: librdkafka's settings, for TLS, passwords and the like
    """

    def __init__(
        self,
        brokers: str,
        *,
        guarantee: Guarantee | str,
        durability: Durability | str | None = None,
        name: str | None = None,
        idempotency_key: Callable[[bytes], str | None] | None = None,
        on_failure: Callable[[Sending], object] | None = None,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        self.choice = choose(guarantee, durability)
        self.id = f"{name or 'p'}.{uuid4().hex[:12]}"  # of this very producer: numbers count from 0
        self._brokers = brokers
        self._given = dict(kafka or {})
        self._make_key = idempotency_key
        self._on_failure = on_failure
        self._timeout_s = delivery_timeout_s
        self._lock = threading.Lock()
        self._ended = dict.fromkeys((Outcome.ACKNOWLEDGED, Outcome.FAILED, Outcome.UNKNOWN), 0)
        self._sent = 0
        self._pending: set[Sending] = set()
        self._first_bad: Sending | None = None
        self._transaction: Transaction | None = None
        self._unusable = ""
        self._fenced = False
        _refuse_owned(self._given)
        settings = self._settings(name or self.id)
        complaints: deque[KafkaError] = deque(maxlen=100)
        self._client = made(client.Producer, settings | {"error_cb": complaints.append}, self._given, "kafka")
        self._room_bytes = int(settings["queue.buffering.max.kbytes"]) * 1024
        self._patient = True  # a send waits for room
        if self.choice.transactional:
            with as_ours(f"the taking over of {name or self.id}", self._given):
                begin = partial(self._client.init_transactions, PATIENCE_S)
                unless_refused(self._client, complaints, PATIENCE_S + 1, begin)

    def _settings(self, transactional_id: str) -> dict[str, Any]:
        own = {**self.choice.settings(), "message.timeout.ms": str(int(self._timeout_s * 1000))}
        if self.choice.transactional:
            own |= {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": str(TRANSACTION_TIMEOUT_MS),
                # It must end within the transaction.
                "message.timeout.ms": str(int(min(self._timeout_s * 1000, TRANSACTION_TIMEOUT_MS))),
                # Else the first request to a coordinator waits half a second for its connection.
                "enable.sparse.connections": "false",
            }
        return own | settings_at(self._brokers, self._given)

    # Sending

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        idempotency_key: str | None = None,
        tag: str = "",
    ) -> Sending:
        """Send one record. Waits while the queue is full. A null ``value`` is a tombstone; ``tag`` is for messages."""
        self._check_usable()
        if self.choice.transactional and self._transaction is None:
            raise ConfigError(
                "a transactional producer sends in a transaction",
                advice="with producer.transaction(): producer.send(...)",
            )
        data = value.encode() if isinstance(value, str) else value
        if idempotency_key is None and self._make_key is not None and data is not None:
            idempotency_key = self._make_key(data)
        with self._lock:
            sending = Sending(topic, self._sent, tag, self._wait_for, answered=self.choice.answered)
            self._sent += 1
            self._pending.add(sending)
        sending.idempotency_key = idempotency_key
        if self._transaction is not None:
            self._transaction.sendings.append(sending)
        where = {} if partition is None else {"partition": partition}
        stamped = [*headers, *self._stamps(sending, data)]
        try:
            told = self._told(sending)
            refused = self._hand_over(topic, data, key=key, headers=stamped, on_delivery=told, **where)
        except KafkaException as error:
            self._note_fencing(error.args[0])
            refused = self._words(error.args[0])
        except BaseException:
            self._end(sending, Outcome.FAILED, "it was not handed over", told=True)
            raise
        if refused:
            sending.error = refused  # the client did not take it, so it never left
            if self._transaction is None:
                self._end(sending, Outcome.FAILED, refused)
        self._serve(self._client.poll, 0)
        return sending

    def _hand_over(self, topic: str, value: bytes | None, **more: Any) -> str:
        """Give it to the client; where there is no room, wait for the end of some that are on their way. Why it was not
        taken; empty if it was."""
        deadline = time.monotonic() + self._timeout_s + LATE_S  # by then all of those have ended
        while True:
            try:
                self._client.produce(topic, value, **more)
                return ""
            except BufferError:
                if len(value or b"") > self._room_bytes:
                    return f"it is larger than queue.buffering.max.kbytes, {self._room_bytes // 1024:,}, lets in at all"
                if not self._patient or time.monotonic() > deadline:
                    return "there was no room for it among those that are on their way"
                self._serve(self._client.poll, 0.1)

    def stop_waiting(self) -> None:
        """From now on a send that would have to wait for room fails, also one that does now. Safe to call from a signal
        handler."""
        self._patient = False

    def _stamps(self, sending: Sending, value: bytes | None) -> Iterator[tuple[str, bytes | str]]:
        yield SEQUENCE, f"{self.id}/{sending.number}"
        if sending.idempotency_key is not None:
            yield KEY, sending.idempotency_key
        if value is not None:
            yield CHECKSUM, checksum(value)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every send has ended, or for so long."""
        self._flush(self._timeout_s + PATIENCE_S if timeout_s is None else timeout_s)

    @property
    def totals(self) -> Totals:
        with self._lock:
            ended = self._ended
            return Totals(
                self._sent,
                ended[Outcome.ACKNOWLEDGED],
                ended[Outcome.FAILED],
                ended[Outcome.UNKNOWN],
                len(self._pending),
            )

    # Ends

    def _told(self, sending: Sending) -> Callable[[KafkaError | None, client.Message], None]:
        in_transaction = self._transaction is not None

        def told(error: KafkaError | None, message: client.Message) -> None:
            if error is not None:
                self._note_fencing(error)
                sending.error = self._words(error)
                if not in_transaction:
                    self._end(sending, outcome_of(error), sending.error)
                return
            sending.arrived = True
            partition, offset = message.partition(), message.offset()
            # A broker that recognised a second copy may not say where the first one is.
            if self.choice.answered and partition is not None and offset is not None and offset >= 0:
                sending.place = Place(sending.topic, partition, offset)
            if not self.choice.answered:
                self._end(sending, Outcome.UNKNOWN, "it has left this machine, and nobody answers")
            elif not in_transaction:
                self._end(sending, Outcome.ACKNOWLEDGED)

        return told

    def _end(self, sending: Sending, outcome: Outcome, error: str = "", *, told: bool = False) -> None:
        """Write a send's end. ``told``: whoever sent it is told otherwise, by an exception."""
        with self._lock:
            if sending not in self._pending:
                return
            self._pending.discard(sending)
            self._ended[outcome] += 1
            sending.error = error
            sending.outcome = outcome  # last: whoever waits looks at it
            due = outcome is Outcome.ACKNOWLEDGED or (outcome is Outcome.UNKNOWN and not self.choice.answered)
            if due or told:
                return
            self._first_bad = self._first_bad or sending
        if self._on_failure is not None:
            self._on_failure(sending)

    def _serve(self, call: Callable[[float], object], timeout_s: float) -> None:
        """Let the client write ends. A fatal error, above all that it is fenced, it raises out of whatever is called;
        then the ends that it was about to write are lost: what they belong to is aborted, or unknown at the close."""
        try:
            call(timeout_s)
        except KafkaException as error:
            self._note_fencing(error.args[0])

    def _flush(self, timeout_s: float) -> None:
        self._serve(partial(flushed, self._client), timeout_s)

    def _wait_for(self, sending: Sending, timeout_s: float | None) -> None:
        if sending.outcome is Outcome.PENDING and self._transaction is not None:
            raise ConfigError("a send in a transaction ends when the transaction does", advice="Wait after the block.")
        deadline = time.monotonic() + (self._timeout_s + PATIENCE_S if timeout_s is None else timeout_s)
        while sending.outcome is Outcome.PENDING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SourceError(f"{sending.tag} to {sending.topic} has not ended; it may still arrive")
            self._serve(self._client.poll, min(left, WAIT_S))

    def _words(self, error: KafkaError) -> str:
        return strike(self._given.values(), words_of(error))

    # Transactions

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A block whose sends, to any topics, become visible together; or not at all, if it raises or one fails."""
        self._check_usable()
        if not self.choice.transactional:
            raise ConfigError(
                f"durability {self.choice.durability} has no transactions",
                advice='Make the producer with guarantee="exactly-once", durability="transactional".',
            )
        if self._transaction is not None:
            raise ConfigError("a transaction is open already: a producer has one at a time")
        with as_ours("the beginning of a transaction", self._given):
            self._client.begin_transaction()
        opened = self._transaction = Transaction(self._client)
        try:
            try:
                yield opened
            except BaseException as error:
                # While the coordinator, busy with the one before, has not heard of it, an abort is a fatal error.
                self._flush(BEFORE_ABORT_S)
                self._abort(opened, f"the transaction was aborted: {first_line(error)}")
                raise
            self._commit(opened)
        finally:
            self._transaction = None

    def _commit(self, opened: Transaction) -> None:
        self._flush(PATIENCE_S)
        bad = next((one for one in opened.sendings if not one.arrived), None)
        if bad is not None:
            why = f"the transaction was aborted: {bad.tag} to {bad.topic}: {bad.error or 'it was not acknowledged'}"
            self._abort(opened, why)
            raise self._failure(why, bad)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._client.commit_transaction(PATIENCE_S)
                break
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.txn_requires_abort():
                    why = f"the transaction was aborted: {self._words(cause)}"
                    self._abort(opened, why, commit_was_tried=True)
                    raise self._failure(self._unusable or why) from None
                if not cause.retriable() or time.monotonic() > deadline:
                    self._note_fencing(cause)
                    self._give_up(opened, f"nobody knows whether the transaction was committed: {self._words(cause)}")
                    raise self._failure(self._unusable) from None
        for one in opened.sendings:
            self._end(one, Outcome.ACKNOWLEDGED)

    def _abort(self, opened: Transaction, why: str, *, commit_was_tried: bool = False) -> None:
        """Nothing of it will be seen. What nobody asked to commit is never committed, even if this fails."""
        try:
            self._client.abort_transaction(PATIENCE_S)
        except KafkaException as error:
            self._note_fencing(error.args[0])
            self._unusable = self._words(error.args[0])
            if commit_was_tried:
                self._give_up(opened, f"nobody knows whether the transaction was committed: {self._unusable}")
                return
        for one in opened.sendings:
            one.place = None
            self._end(one, Outcome.FAILED, why, told=True)

    def _give_up(self, opened: Transaction, why: str) -> None:
        self._unusable = why
        for one in opened.sendings:
            self._end(one, Outcome.UNKNOWN, why, told=True)

    def _note_fencing(self, error: KafkaError) -> None:
        self._fenced |= error.code() in FENCED

    def _failure(self, why: str, bad: Sending | None = None) -> AvowError:
        if self._fenced:
            return superseded(why)
        return SourceError(why, advice=self._advice(bad) if bad else "")

    def _check_usable(self) -> None:
        if self._unusable:
            raise self._failure(f"this producer is of no more use: {self._unusable}")

    # The end

    def close(self) -> None:
        """Wait until every send has ended. What has not by then is unknown."""
        if self._unusable == _CLOSED:
            return
        self.flush()
        with suppress(KafkaException):
            self._client.purge()
        self._flush(1)
        for one in list(self._pending):
            self._end(one, Outcome.UNKNOWN, "the producer was closed before its end")
        self._unusable = _CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        bad = self._first_bad
        if bad is not None and kind is None and self._on_failure is None:
            raise SourceError(
                f"{self.totals}; the first, {bad.tag} to {bad.topic}: {bad.outcome}: {bad.error}",
                advice=self._advice(bad),
            )

    def _advice(self, bad: Sending) -> str:
        """What the cluster itself says about the topic, if that explains it."""
        short = in_sync_problem(self._brokers, self._given, bad.topic) if self.choice.level.acks == "all" else ""
        return short or "Check that the topic is there, and the brokers' logs."


def _refuse_owned(given: Mapping[str, str]) -> None:
    owned = sorted(OWNED & given.keys())
    if owned:
        raise ConfigError(
            f"kafka.{owned[0]} is what guarantee and durability say", advice="Leave it out, and choose those two."
        )
