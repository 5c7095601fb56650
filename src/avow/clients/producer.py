"""A producer with a declared guarantee that accounts for every send.

::

    with Producer("localhost:9092", guarantee="exactly-once") as producer:
        place = producer.send("payments", b'{"id": 1}', key="acc-1").wait()   # topic, partition, offset

    with Producer("localhost:9092", guarantee="exactly-once", transactional_id="shop-1") as producer:
        with producer.transaction():            # both or neither
            producer.send("orders", order)
            producer.send("payments", payment)

Theory of operation
-------------------
``send`` hands the record to librdkafka, which has threads of its own, and gives a ``Delivery``: a place where its end
will be written. Ends are written while somebody calls ``send``, ``wait``, ``flush`` or leaves the block. What is on its
way is bounded in records and bytes; at the bound ``send`` waits. A record has ``delivery_timeout_s``, so waiting ends;
one that alone is larger than the bound has failed.

In a transaction a send ends when the transaction does. A transaction in which one send failed is aborted. If it cannot
be found out whether one was committed, its sends are unknown, and the producer is closed: a new one with the
same transactional id first waits for the end of what the old one left.

Owns: sends and their ends. Must not know: files, command lines. Neighbours: ``durability`` (what the words come to) and
``delivery`` (what Kafka's answers come to).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.clients.cluster import FENCED, PATIENCE_S, connect, in_sync_problem, superseded, translate_errors
from avow.clients.delivery import Delivery, LogPosition, Outcome, ProducerTotals, outcome_of, words_of
from avow.clients.durability import OWNED, Durability, choose
from avow.errors import AvowError, ConfigError, SourceError, first_line
from avow.guarantee import Guarantee
from avow.kafka.connect import Connection, flushed, in_time, unless_refused
from avow.kafka.headers import CHECKSUM, KEY, SEQUENCE, checksum

Headers = Iterable[tuple[str, bytes | str | None]]

DELIVERY_TIMEOUT_MS = 120_000
TRANSACTION_TIMEOUT_MS = 60_000
LATE_S = 5.0  # the client looks about once a second for records whose time is over
BEFORE_ABORT_S = 5.0
WAIT_S = 0.02  # of threads that wait, one may have been given the end of another's send

_CLOSED = "close was called"


@dataclass(eq=False, repr=False)
class ProducerTransaction:
    """Sends that become visible together."""

    _client: client.Producer
    _connection: Connection
    deliveries: list[Delivery] = field(default_factory=list)

    def send_offsets(self, offsets: Sequence[client.TopicPartition], group: Any) -> None:
        """Commit these offsets of a consumer group with it. ``group`` is its ``consumer_group_metadata()``."""
        with translate_errors(self._connection, "add offsets to the transaction"):
            in_time(PATIENCE_S, lambda: self._client.send_offsets_to_transaction(list(offsets), group, PATIENCE_S))


class Producer:
    """Sends records. To be used in a ``with`` block, at whose end every send has ended.

    - ``durability``: see ``avow.clients.durability``; if none is named, the guarantee's first, or transactional where a
      ``transactional_id`` is given
    - ``transactional_id``: a second producer with the same one takes over from the first
    - ``client_id``: who this is, to the brokers and in the header ``avow-seq``
    - ``idempotency_key``: makes the key of a record from its value, where ``send`` is not given one
    - ``on_failure``: is called with every delivery that failed, or that should have been answered and was not. Without
      it, the block's end raises if there was one
    - ``config``: librdkafka's settings, for TLS, passwords and the like
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        guarantee: Guarantee | str,
        durability: Durability | str | None = None,
        transactional_id: str | None = None,
        client_id: str | None = None,
        idempotency_key: Callable[[bytes], str | None] | None = None,
        on_failure: Callable[[Delivery], object] | None = None,
        delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if transactional_id is not None and durability is None:
            durability = Durability.TRANSACTIONAL
        self.choice = choose(guarantee, durability)
        if transactional_id is not None and not self.choice.transactional:
            raise ConfigError(
                f"transactional_id: durability {self.choice.durability} has no transactions",
                advice="Leave out transactional_id or durability.",
            )
        self.id = f"{transactional_id or client_id or 'p'}.{uuid4().hex[:12]}"  # of this very producer
        self._connection = connect(bootstrap_servers, {name: str(value) for name, value in (config or {}).items()})
        self._make_key = idempotency_key
        self._on_failure = on_failure
        self._timeout_s = delivery_timeout_ms / 1000
        self._lock = threading.Lock()
        ended = (Outcome.ACKNOWLEDGED, Outcome.FAILED, Outcome.UNKNOWN)
        self._ended: dict[str, int] = dict.fromkeys(ended, 0)
        self._sent = 0
        self._pending: set[Delivery] = set()
        self._first_bad: Delivery | None = None
        self._transaction: ProducerTransaction | None = None
        self._unusable = ""
        self._fenced = False
        _refuse_owned(self._connection.config)
        defaults = self._defaults(transactional_id or self.id) | ({} if client_id is None else {"client.id": client_id})
        errors: deque[KafkaError] = deque(maxlen=100)
        self._client = self._connection.make_client(client.Producer, {"error_cb": errors.append}, defaults=defaults)
        room = self._connection.config.get("queue.buffering.max.kbytes", defaults["queue.buffering.max.kbytes"])
        self._room_bytes = int(room) * 1024
        self._patient = True  # a send waits for room
        if self.choice.transactional:
            with translate_errors(self._connection, f"take over the transactional id {transactional_id or self.id}"):
                begin = partial(self._client.init_transactions, PATIENCE_S)
                unless_refused(self._client, errors, PATIENCE_S + 1, begin)

    def _defaults(self, transactional_id: str) -> dict[str, Any]:
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
        return own

    # Delivery

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
    ) -> Delivery:
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
            tag = tag or f"send {self._sent}"
            delivery = Delivery(topic, self._sent, tag, self._wait_for, self.choice.answered, idempotency_key)
            self._sent += 1
            self._pending.add(delivery)
        if self._transaction is not None:
            self._transaction.deliveries.append(delivery)
        target = {} if partition is None else {"partition": partition}
        stamped = [*headers, *self._stamps(delivery, data)]
        try:
            on_delivery = self._on_delivery(delivery)
            refused = self._hand_over(topic, data, key=key, headers=stamped, on_delivery=on_delivery, **target)
        except KafkaException as error:
            self._note_fencing(error.args[0])
            refused = self._words(error.args[0])
        except BaseException:
            self._end(delivery, Outcome.FAILED, "the client did not accept it", raised=True)
            raise
        if refused:
            delivery.error = refused  # the client did not take it, so it never left
            if self._transaction is None:
                self._end(delivery, Outcome.FAILED, refused)
        self._serve(self._client.poll, 0)
        return delivery

    def _hand_over(self, topic: str, value: bytes | None, **more: Any) -> str:
        """Enqueue the record; if the queue is full, wait for room. Returns why it was not accepted; empty if it was."""
        deadline = time.monotonic() + self._timeout_s + LATE_S  # by then all of those have ended
        while True:
            try:
                self._client.produce(topic, value, **more)
                return ""
            except BufferError:
                if len(value or b"") > self._room_bytes:
                    return f"it is larger than queue.buffering.max.kbytes ({self._room_bytes // 1024:,})"
                if not self._patient or time.monotonic() > deadline:
                    return "the client's queue is full (queue.buffering.max.messages, queue.buffering.max.kbytes)"
                self._serve(self._client.poll, 0.1)

    def stop_waiting(self) -> None:
        """From now on a send fails instead of waiting for room in the queue. Safe to call from a signal handler."""
        self._patient = False

    def _stamps(self, delivery: Delivery, value: bytes | None) -> Iterator[tuple[str, bytes | str]]:
        yield SEQUENCE, f"{self.id}/{delivery.number}"
        if delivery.idempotency_key is not None:
            yield KEY, delivery.idempotency_key
        if value is not None:
            yield CHECKSUM, checksum(value)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every send has ended, or for so long."""
        self._flush(self._timeout_s + PATIENCE_S if timeout_s is None else timeout_s)

    @property
    def totals(self) -> ProducerTotals:
        with self._lock:
            return ProducerTotals(sent=self._sent, pending=len(self._pending), **self._ended)

    # Ends

    def _on_delivery(self, delivery: Delivery) -> Callable[[KafkaError | None, client.Message], None]:
        in_transaction = self._transaction is not None

        def on_delivery(error: KafkaError | None, message: client.Message) -> None:
            if error is not None:
                self._note_fencing(error)
                delivery.error = self._words(error)
                if not in_transaction:
                    self._end(delivery, outcome_of(error), delivery.error)
                return
            delivery.arrived = True
            if not self.choice.answered:
                self._end(delivery, Outcome.UNKNOWN, "it was sent; with acks=0 there is no acknowledgement")
                return
            partition, offset = message.partition(), message.offset()
            # A broker that recognised a second copy may not say where the first one is.
            if partition is not None and offset is not None and offset >= 0:
                delivery.place = LogPosition(delivery.topic, partition, offset)
            if not in_transaction:
                self._end(delivery, Outcome.ACKNOWLEDGED)

        return on_delivery

    def _end(self, delivery: Delivery, outcome: Outcome, error: str = "", *, raised: bool = False) -> None:
        """Write a send's end. ``raised``: the sender gets an exception beside it."""
        with self._lock:
            if delivery not in self._pending:
                return
            self._pending.discard(delivery)
            self._ended[outcome] += 1
            delivery.error = error
            delivery.outcome = outcome  # last: waiting threads read it
            due = outcome is Outcome.ACKNOWLEDGED or (outcome is Outcome.UNKNOWN and not self.choice.answered)
            if due or raised:
                return
            self._first_bad = self._first_bad or delivery
        if self._on_failure is not None:
            self._on_failure(delivery)

    def _serve(self, call: Callable[[float], object], timeout_s: float) -> None:
        """Let the client write ends. A fatal error, above all that it is fenced, it raises out of whatever is called;
        then the ends that it was about to write are lost: what they belong to is aborted, or unknown at the close."""
        try:
            call(timeout_s)
        except KafkaException as error:
            self._note_fencing(error.args[0])

    def _flush(self, timeout_s: float) -> None:
        self._serve(partial(flushed, self._client), timeout_s)

    def _wait_for(self, delivery: Delivery, timeout_s: float | None) -> None:
        if delivery.outcome is Outcome.PENDING and self._transaction is not None:
            raise ConfigError(
                "a send inside a transaction ends with the transaction", advice="Call wait after the block."
            )
        deadline = time.monotonic() + (self._timeout_s + PATIENCE_S if timeout_s is None else timeout_s)
        while delivery.outcome is Outcome.PENDING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SourceError(f"{delivery.tag} to {delivery.topic} timed out; it may still be written")
            self._serve(self._client.poll, min(left, WAIT_S))

    def _words(self, error: KafkaError) -> str:
        return self._connection.redact(words_of(error))

    # Transactions

    @contextmanager
    def transaction(self) -> Iterator[ProducerTransaction]:
        """A block whose sends, to any topics, become visible together; or not at all, if it raises or one fails."""
        self._check_usable()
        if not self.choice.transactional:
            raise ConfigError(
                f"durability {self.choice.durability} has no transactions",
                advice='Give the producer guarantee="exactly-once" and a transactional_id.',
            )
        if self._transaction is not None:
            raise ConfigError("a transaction is already open: a producer has one at a time")
        with translate_errors(self._connection, "begin a transaction"):
            self._client.begin_transaction()
        opened = self._transaction = ProducerTransaction(self._client, self._connection)
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

    def _commit(self, opened: ProducerTransaction) -> None:
        self._flush(PATIENCE_S)
        bad = next((delivery for delivery in opened.deliveries if not delivery.arrived), None)
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
                    self._give_up(opened, self._words(cause))
                    raise self._failure(self._unusable) from None
        for delivery in opened.deliveries:
            self._end(delivery, Outcome.ACKNOWLEDGED)

    def _abort(self, opened: ProducerTransaction, why: str, *, commit_was_tried: bool = False) -> None:
        """Readers of committed records never see it. Without a commit request, it stays uncommitted if this fails."""
        try:
            self._client.abort_transaction(PATIENCE_S)
        except KafkaException as error:
            self._note_fencing(error.args[0])
            self._unusable = self._words(error.args[0])
            if commit_was_tried:
                self._give_up(opened, self._unusable)
                return
        for delivery in opened.deliveries:
            delivery.place = None
            self._end(delivery, Outcome.FAILED, why, raised=True)

    def _give_up(self, opened: ProducerTransaction, error: str) -> None:
        why = self._unusable = f"the outcome of the commit is unknown: {error}"
        for delivery in opened.deliveries:
            self._end(delivery, Outcome.UNKNOWN, why, raised=True)

    def _note_fencing(self, error: KafkaError) -> None:
        self._fenced |= error.code() in FENCED

    def _failure(self, why: str, bad: Delivery | None = None) -> AvowError:
        if self._fenced:
            return superseded(why)
        return SourceError(why, advice=self._advice(bad) if bad else "")

    def _check_usable(self) -> None:
        if self._unusable:
            raise self._failure(f"this producer is closed: {self._unusable}")

    # The end

    def close(self) -> None:
        """Wait until every send has ended. The outcome of one that has not ended by then is unknown."""
        if self._unusable == _CLOSED:
            return
        self.flush()
        with suppress(KafkaException):
            self._client.purge()
        self._flush(1)
        for delivery in list(self._pending):
            self._end(delivery, Outcome.UNKNOWN, "the producer was closed before an acknowledgement came")
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

    def _advice(self, bad: Delivery) -> str:
        """Advice from the topic's own state, if that explains the failure."""
        short = in_sync_problem(self._connection, bad.topic) if self.choice.level.acks == "all" else ""
        return short or "Check that the topic exists, and check the brokers' logs."


def _refuse_owned(options: Mapping[str, str]) -> None:
    owned = sorted(OWNED & options.keys())
    if owned:
        raise ConfigError(
            f"config: {owned[0]} is set by guarantee and durability",
            advice="Remove it, and choose guarantee and durability.",
        )
