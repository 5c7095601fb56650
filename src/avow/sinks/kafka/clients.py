"""Kafka's clients of this process: producers, the group's reader, and what the output topics take.

Theory of operation
-------------------
A transactional id is one input partition of one pipeline: whoever asks for it last (``init_transactions``) fences all
before, ends what they had open, and alone can commit. So a committed offset that was read while the id was ours and
that is committed in our transaction is a compare-and-set: if the transaction goes through, nobody claimed in between.

Producers are kept from task to task, a few per process, because making one costs more than a small batch. One that is
kept may have been fenced by another worker's meanwhile. It would find out at the end, with the batch for nothing; so a
kept producer begins its transaction with the position as it left it. Kafka takes that only from an owner, and then
nobody else can have changed it.

After any error the producer is thrown away too. Its successor's ``init_transactions`` waits for the outcome of what it
left, and only then is the position read again: neither librdkafka nor the Java client can be trusted to know the
outcome of a transaction by themselves after an indefinite error.

Owns: the clients, their settings and what their errors mean. Must not know: rows, or which act comes first.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import confluent_kafka as client
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from avow.errors import AvowError, ConfigError, ProtocolViolation, SinkError
from avow.kafka.connect import made, settings_at, settings_of
from avow.kafka.log import TopicPartition
from avow.settings import Kafka, Pipeline, revealed
from avow.sinks.kafka import entries
from avow.sinks.kafka.entries import Kept

Answer = TypeVar("Answer")

KEY = "sink.kafka"  # where the file has the settings that a client may complain of

# Of one request to the cluster: long enough for a coordinator or a leader to be replaced.
PATIENCE_S = 60.0
PRODUCERS_MAX = 8  # transactional ones, per process
LIMITS_KEPT_S = 60.0
NEWS_S = 5.0  # a broker learns of a new topic a moment after the one that was asked to make it

# Abandoned for so long, a transaction is aborted by the cluster. Until then it holds up readers of committed records;
# a new run ends it sooner. A task has this long for its range.
TRANSACTION_TIMEOUT_MS = 60_000

BATCH_BYTES = 1_000_000  # the broker's own limit is a little above it
# The user's own settings come after these.
PRODUCING = {
    "compression.type": "lz4",
    "linger.ms": "20",
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": "131072",
    # As Java's default partitioner: a key goes to the partition in which a Java producer would put it.
    "partitioner": "murmur2_random",
}
MESSAGE_BYTES_MAX = 104_857_600 - 65_536  # below what a broker's socket takes

# Trying again does not help.
_REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Give the pipeline's user the right to write to the topics of [sink].",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Give the pipeline's user the right to read the group named like it.",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Give the pipeline's user the right to write and describe "
    "transactional ids that begin with the pipeline's name and a slash.",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Give the pipeline's user the right to write idempotently.",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "The brokers' transaction.max.timeout.ms is lower: lower [sink.kafka] "
    "transaction.timeout.ms.",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "The ledger needs some 400 bytes: raise the brokers' "
    "offset.metadata.max.bytes.",
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: "The cluster is too old for transactions.",
}
_ADVICE = {
    KafkaError.NOT_ENOUGH_REPLICAS: "Too few replicas of an output topic are in sync: check the brokers.",
    KafkaError._ALL_BROKERS_DOWN: "Check that the cluster is up.",
}


def failure(what: str, error: KafkaException) -> AvowError:
    """Kafka's error as ours, with what was tried."""
    cause: KafkaError = error.args[0]
    code = cause.code()
    if code in _REFUSED:
        return ConfigError(f"Kafka refuses {what}: {cause.str()}", advice=_REFUSED[code])
    return SinkError(f"Kafka did not do {what}: {cause.str()}", advice=_ADVICE.get(code, "Check the brokers' logs."))


@contextmanager
def as_ours(what: str) -> Iterator[None]:
    """An error of Kafka's is told as ours."""
    try:
        yield
    except KafkaException as error:
        raise failure(what, error) from None
    except TimeoutError:
        raise failure(what, KafkaException(KafkaError(KafkaError._TIMED_OUT))) from None


@dataclass(slots=True)
class Producing:
    """A transactional producer, and the ledger's entry as it read it or has left it."""

    client: client.Producer
    last: Kept | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What an output topic takes."""

    partitions: int
    message_bytes_max: int  # before compression, to be sure
    before_max_ms: int  # how far a timestamp may lie in the past
    after_max_ms: int  # or in the future


class Clients:
    """One process's clients of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        assert isinstance(pipeline.sink, Kafka)
        self.group = pipeline.name
        source, own = revealed(pipeline.source.kafka), revealed(pipeline.sink.kafka)
        self._ledger_settings = settings_of(pipeline.source)
        # On its own cluster the output has settings of its own; on the source's, what it does not say is the same.
        self.elsewhere = pipeline.elsewhere
        brokers = str(pipeline.sink.brokers) if self.elsewhere else pipeline.source.brokers
        self._output_settings = settings_at(brokers, own if self.elsewhere else source | own)
        self._given = source | own
        self.timeout_ms = int(own.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS))
        self._producing: OrderedDict[TopicPartition, Producing] = OrderedDict()
        self._plain: client.Producer | None = None
        self._failed: list[KafkaError] = []  # what the plain producer could not deliver
        self._group_reader: client.Consumer | None = None
        self._admins: dict[bool, AdminClient] = {}  # of the output's cluster and of the ledger's
        self._limits: dict[str, tuple[float, Limits]] = {}

    # Producers

    def fresh(self, where: TopicPartition) -> Producing:
        """A new producer for one input partition. It has fenced all others, and waited for the end of what they had
        open; so the entry that is read then stands until it claims, or is fenced itself."""
        self.forget(where)
        while len(self._producing) >= PRODUCERS_MAX:
            self._producing.popitem(last=False)
        settings = self._ledger_settings if self.elsewhere else self._output_settings
        own = {
            "transactional.id": f"{self.group}/{where.topic}/{where.partition}",
            "transaction.timeout.ms": str(self.timeout_ms),
            # Else the first request to a coordinator waits half a second for its connection.
            "enable.sparse.connections": "false",
        }
        producer = made(client.Producer, PRODUCING | self._sizes() | settings | own, self._given, KEY)
        with as_ours(f"the fencing of other writers of {where}"):
            producer.init_transactions(PATIENCE_S)
        self._producing[where] = Producing(producer, self.kept(where))
        return self._producing[where]

    def begun(self, where: TopicPartition) -> Producing:
        """A producer that owns the partition, with a transaction that is open."""
        kept = self._producing.get(where)
        if kept is not None and kept.last is not None:
            try:
                kept.client.begin_transaction()
                self.send(kept, where, kept.last)
                self._producing.move_to_end(where)
                return kept
            except KafkaException:
                pass  # fenced, or of no use for another reason: the next one tells
        found = self.fresh(where)
        with as_ours(f"the beginning of a transaction for {where}"):
            found.client.begin_transaction()
        return found

    def forget(self, where: TopicPartition) -> None:
        """Throw a producer away: it failed, or another one has taken its place."""
        found = self._producing.pop(where, None)
        if found is not None:
            with suppress(KafkaException):
                found.client.purge()

    @property
    def plain(self) -> client.Producer:
        """The idempotent producer for writes that are an act of their own."""
        if self._plain is None:
            failed = self._failed
            own: dict[str, Any] = {
                "enable.idempotence": "true",
                "message.timeout.ms": str(int(PATIENCE_S * 1000)),
                "delivery.report.only.error": True,
                "on_delivery": lambda error, _: failed.append(error),
            }
            self._plain = made(
                client.Producer, PRODUCING | self._sizes() | self._output_settings | own, self._given, KEY
            )
        return self._plain

    def flush_plain(self) -> None:
        """Wait until all that was written is acknowledged, or say what was not."""
        if self._plain is None:
            return
        left = self._plain.flush(PATIENCE_S + 5)
        if self._failed or left:
            error = self._failed[0] if self._failed else KafkaError(KafkaError._TIMED_OUT)
            self.forget_plain()
            raise failure("the writing of records", KafkaException(error))

    def forget_plain(self) -> None:
        if self._plain is not None:
            with suppress(KafkaException):
                self._plain.purge()
        self._plain = None
        self._failed = []

    def _sizes(self) -> dict[str, str]:
        """No batch may be larger than the smallest output topic takes, and a dead letter may be as large as it is."""
        smallest = min((limits.message_bytes_max for _, limits in self._limits.values()), default=BATCH_BYTES)
        return {"message.max.bytes": str(MESSAGE_BYTES_MAX), "batch.size": str(min(BATCH_BYTES, smallest))}

    # The ledger

    @property
    def _reader(self) -> client.Consumer:
        """Reads the group's offsets. It never subscribes, so the group sees no member."""
        if self._group_reader is None:
            own = {
                "group.id": self.group,
                "enable.auto.commit": "false",
                # With this the cluster answers only when no open transaction is about to change the offset.
                "isolation.level": "read_committed",
            }
            self._group_reader = made(client.Consumer, self._ledger_settings | own, self._given, KEY)
        return self._group_reader

    def kept(self, where: TopicPartition) -> Kept | None:
        """The ledger's entry, None if there is none. One that a transaction is about to change is waited for."""
        asked = client.TopicPartition(where.topic, where.partition)
        try:
            with as_ours(f"the reading of the position of {where}"):
                (found,) = self._reader.committed([asked], timeout=PATIENCE_S)
                if found.error is not None:
                    raise KafkaException(found.error)
        except AvowError:
            self._group_reader = None
            raise
        if found.offset < 0:
            return None
        return entries.read(self.group, where, found.offset, found.metadata)

    def send(self, producing: Producing, where: TopicPartition, kept: Kept) -> None:
        """Put an entry into the open transaction. The last one counts."""
        timed = replace(kept, at_ms=int(time.time() * 1000))
        offset = client.TopicPartition(where.topic, where.partition, timed.entry.position, entries.written(timed))
        producing.client.send_offsets_to_transaction([offset], self._reader.consumer_group_metadata(), PATIENCE_S)
        producing.last = timed

    def close(self) -> None:
        """Let everything go. A producer that has nothing open goes quickly."""
        self._producing.clear()
        self._admins.clear()
        self._plain = None
        if self._group_reader is not None:
            self._group_reader.close()
            self._group_reader = None

    # The output topics

    def limits(self, topic: str) -> Limits:
        known = self._limits.get(topic)
        if known is None or known[0] < time.monotonic() - LIMITS_KEPT_S:
            self._limits[topic] = (time.monotonic(), self._ask_limits(topic))
        return self._limits[topic][1]

    def forget_limits(self) -> None:
        self._limits.clear()

    def ask(self, what: str, request: Callable[[AdminClient], Answer], *, ledger: bool = False) -> Answer:
        """Ask the output's cluster something, or with ``ledger`` the source's, where the group is.

        The client is kept for the next question. One that failed is not: librdkafka's may go on asking a dead broker.
        """
        if ledger not in self._admins:
            self._admins[ledger] = made(
                AdminClient, self._ledger_settings if ledger else self._output_settings, self._given, KEY
            )
        news_by = time.monotonic() + NEWS_S
        try:
            with as_ours(what):
                while True:
                    try:
                        return request(self._admins[ledger])
                    except KafkaException as error:
                        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() > news_by:
                            raise
                    time.sleep(0.1)
        except AvowError:
            self._admins.pop(ledger, None)
            raise

    def output_reader(self) -> client.Consumer:
        """Reads the output's topics, committed records only. To be assigned, never subscribed, and closed."""
        own = {
            "group.id": self.group,
            "enable.auto.commit": "false",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": "true",
        }
        return made(client.Consumer, self._output_settings | own, self._given, KEY)

    def settled_ends(self, topic: str) -> dict[int, int]:
        """Where the partitions of an output topic end, once every transaction has ended that was open below. Empty if
        there is no such topic."""
        what = f"the reading of topic {topic}"

        def ends_of(level: IsolationLevel) -> dict[int, int]:
            return self.ask(what, lambda admin: _ends(admin, topic, partitions, level))

        partitions = self.ask(what, lambda admin: _partitions(admin, topic))
        if not partitions:
            return {}
        ends = ends_of(IsolationLevel.READ_UNCOMMITTED)
        deadline = time.monotonic() + self.timeout_ms / 1000 + PATIENCE_S
        while behind := [n for n, end in ends_of(IsolationLevel.READ_COMMITTED).items() if end < ends[n]]:
            if time.monotonic() > deadline:
                raise SinkError(
                    f"hanging-transaction: a transaction is open in {topic}/{behind[0]} and does not end",
                    advice="kafka-transactions.sh finds and aborts it. Or stop who writes there, and try again.",
                )
            time.sleep(0.1)
        return ends

    def _ask_limits(self, topic: str) -> Limits:
        resource = ConfigResource(ResourceType.TOPIC, topic)

        def request(admin: AdminClient) -> Limits:
            count = len(_partitions(admin, topic))
            if not count:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            config = admin.describe_configs([resource], request_timeout=PATIENCE_S)[resource].result(PATIENCE_S)
            names = ("max.message.bytes", "message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
            return Limits(count, *(int(config[name].value) for name in names))

        return self.ask(f"the describing of topic {topic}", request)


def _partitions(admin: AdminClient, topic: str) -> list[int]:
    """None if there is no such topic."""
    found = admin.list_topics(topic, timeout=PATIENCE_S).topics[topic]
    if found.error is not None:
        if found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return []
        raise KafkaException(found.error)
    return list(found.partitions)


def _ends(admin: AdminClient, topic: str, partitions: Iterable[int], level: IsolationLevel) -> dict[int, int]:
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(
        {client.TopicPartition(topic, number): latest for number in partitions},
        isolation_level=level,
        request_timeout=PATIENCE_S,
    )
    return {where.partition: answer.result(PATIENCE_S).offset for where, answer in asked.items()}


_kept: dict[tuple[object, ...], Clients] = {}


def cached(pipeline: Pipeline) -> Clients:
    """This process's own clients. Keyed by pid: Spark's Python workers are forked, and clients do not survive that."""
    assert isinstance(pipeline.sink, Kafka)
    settings = (*revealed(pipeline.source.kafka).items(), "|", *revealed(pipeline.sink.kafka).items())
    key = (os.getpid(), pipeline.name, pipeline.source.brokers, pipeline.sink.brokers, settings)
    if key not in _kept:
        _kept[key] = Clients(pipeline)
    return _kept[key]


def expect(kept: Kept | None, where: TopicPartition) -> Kept:
    if kept is None:
        raise ProtocolViolation(f"the ledger has no position for {where}: a run writes one before it reads")
    return kept
