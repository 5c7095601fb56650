"""Kafka's clients of this process: producers, the group's reader, and what the output topics take.

Theory of operation
-------------------
A transactional id is one input partition of one pipeline: whoever asks for it last (``init_transactions``) fences all
before, ends what they had open, and alone can commit. So a committed offset that was read while the id was ours and
that is committed in our transaction is a compare-and-set: if the transaction goes through, nobody claimed in between.

Producers are cached from task to task, one per partition, because making one costs more than a small batch. A cached
one may have been fenced by another worker's meanwhile. It would find out at the end, with the batch for nothing; so a
cached producer begins its transaction with the position as it left it. Kafka takes that only from an owner, and then
nobody else can have changed it.

After any error the producer is thrown away too. Its successor's ``init_transactions`` waits for the outcome of what it
left, and only then is the position read again: neither librdkafka nor the Java client can be trusted to know the
outcome of a transaction by themselves after an indefinite error.

Owns: the clients, their settings and what their errors mean. Must not know: rows, or which act comes first.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException
from pydantic import SecretStr

from avow.client_cache import ClientCache
from avow.errors import AvowError, ConfigError, PositionGone, SinkError, TopicRecreated
from avow.kafka import committed
from avow.kafka.admin import Admin, several
from avow.kafka.connect import Connection, flushed, in_time, unless_refused
from avow.kafka.log import TopicPartition
from avow.kafka.reader import read_to_end
from avow.retry import poll_until
from avow.settings import PipelineConfig, unwrap_secrets
from avow.sinks.kafka import entries
from avow.sinks.kafka.config import config_of, dead_letter_topic, declared_outputs, on_other_cluster
from avow.sinks.kafka.entries import StoredEntry

KEY = "sink.kafka"  # where the file has the settings that a client may complain of

# Of one request to the cluster: long enough for a coordinator or a leader to be replaced.
PATIENCE_S = 60.0
# Of an open transaction, beyond its own time-out: its coordinator checks every ten seconds.
ENDS_S = 60.0
INIT_S = 600.0  # of init_transactions, which has a time-out of its own
# Of the group's coordinator. A producer goes on waiting for a dead one; a new producer finds its successor.
SEND_S = 5.0
# Transactional producers, per process. It goes through its partitions in their order: with one more than are cached,
# each would be thrown away just before its turn. At rest one costs six threads and half a megabyte, making one takes
# a tenth of a second.
PRODUCERS_MAX = 64
LIMITS_KEPT_S = 60.0
# Whoever has taken a partition's id may be a redrive, which is done in a moment. Taken back at once, it never would be.
FENCED_PAUSE_S = 3.0
NEWS_S = 5.0  # a broker learns of a new topic a moment after the one that was asked to make it

# Abandoned for so long, a transaction is aborted by the cluster. Until then it holds up readers of committed records;
# a new run ends it sooner. A task has this long for its range.
TRANSACTION_TIMEOUT_MS = 60_000

QUEUE_KBYTES = 131_072
BATCH_BYTES = 1_000_000  # the broker's own limit is a little above it
# The user's own settings come after these.
PRODUCING = {
    "compression.type": "lz4",
    "linger.ms": "20",
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": str(QUEUE_KBYTES),
    # As Java's default partitioner: a key goes to the partition in which a Java producer would put it.
    "partitioner": "murmur2_random",
}
MESSAGE_BYTES_MAX = 104_857_600 - 65_536  # below what a broker's socket takes

_RIGHTS = ("Create", "Write", "Read", "Describe", "DescribeConfigs")  # to output topics and the dead letters


def is_fenced(error: KafkaException) -> bool:
    """Whether another producer has taken the transactional id; after that any call fails for good."""
    return error.args[0].code() in (KafkaError._FENCED, KafkaError._FATAL)


@dataclass(slots=True)
class PartitionProducer:
    """A transactional producer, and the ledger's entry as it read it or has left it."""

    client: client.Producer
    last: StoredEntry | None


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """What an output topic takes."""

    partitions: int
    message_bytes_max: int  # before compression, to be sure
    before_max_ms: int  # how far a timestamp may lie in the past
    after_max_ms: int  # or in the future
    cleanup_policy: str = "delete"

    @property
    def compacted(self) -> bool:
        """Whether it takes no record without a key."""
        return "compact" in self.cleanup_policy


EVER_MS = 2**63 - 1


def limits_of(partitions: int, config: Mapping[str, str]) -> TopicLimits:
    """What a topic's configuration comes to. Brokers before Kafka 3.6 have one bound of timestamps for both directions,
    and later ones heed it where theirs are not set; without any, there is no bound."""
    both = int(config.get("message.timestamp.difference.max.ms", EVER_MS))
    before, after = (int(config.get(f"message.timestamp.{way}.max.ms", EVER_MS)) for way in ("before", "after"))
    return TopicLimits(
        partitions,
        int(config["max.message.bytes"]),
        before if before < EVER_MS else both,
        after if after < EVER_MS else both,
        config["cleanup.policy"],
    )


def give_way() -> None:
    """Pause, so that the producer that fenced ours can finish its transactions."""
    time.sleep(FENCED_PAUSE_S)


class KafkaClients:
    """One process's clients of one pipeline."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        sink = config_of(pipeline)
        self.group = pipeline.name
        self._source = pipeline.source
        own = unwrap_secrets(sink.kafka)
        self._errors: deque[KafkaError] = deque(maxlen=100)  # what connections of producers reported
        # On its own cluster the output has settings of its own; on the source's, what it does not say is the same.
        self.elsewhere = on_other_cluster(pipeline)
        self.ledger_connection = replace(
            Connection.of(pipeline.source, pipeline.name),
            key=KEY,
            error=SinkError,
            topics=sorted({*declared_outputs(pipeline), dead_letter_topic(pipeline)}),
            rights=_RIGHTS,
            transactional_ids=f"{pipeline.name}/",
        )
        self.connection = replace(
            self.ledger_connection,
            bootstrap_servers=str(sink.brokers) if self.elsewhere else pipeline.source.brokers,
            shown=sink.shown("brokers") if self.elsewhere else pipeline.source.shown("brokers"),
            config=own if self.elsewhere else unwrap_secrets(pipeline.source.kafka) | own,
        )
        self._dead_letter_topic = dead_letter_topic(pipeline)
        # No record may be larger than the client itself takes, whatever the topic says.
        config = self.connection.config
        queue_bytes = int(config.get("queue.buffering.max.kbytes", QUEUE_KBYTES)) * 1024
        self._bytes_max = min(int(config.get("message.max.bytes", MESSAGE_BYTES_MAX)), queue_bytes)
        self.timeout_ms = int(own.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS))
        self._producers: OrderedDict[TopicPartition, PartitionProducer] = OrderedDict()
        self._plain: client.Producer | None = None
        self._failed: list[KafkaError] = []  # what the plain producer could not deliver
        self._readers: dict[bool, client.Consumer] = {}  # of the group's offsets: stable ones, or as they are
        self._limits: dict[str, tuple[float, TopicLimits]] = {}

    @cached_property
    def admin(self) -> Admin:
        """Of the output's cluster."""
        return Admin(self.connection, timeout_s=PATIENCE_S)

    @cached_property
    def ledger_admin(self) -> Admin:
        """Of the source's cluster, where the group is."""
        return Admin(self.ledger_connection, timeout_s=PATIENCE_S)

    # Producers

    def new_producer(self, tp: TopicPartition) -> PartitionProducer:
        """A new producer for one input partition. It has fenced all others, and waited for the end of what they had
        open; so the entry that is read then stands until it claims, or is fenced itself."""
        self.discard(tp)
        while len(self._producers) >= PRODUCERS_MAX:
            self._producers.popitem(last=False)
        connection = self.ledger_connection if self.elsewhere else self.connection
        own = {
            "error_cb": self._errors.append,
            "transactional.id": self.transactional_id(tp),
            "transaction.timeout.ms": str(self.timeout_ms),
            # Else the first request to a coordinator waits half a second for its connection.
            "enable.sparse.connections": "false",
        }
        producer = connection.make_client(client.Producer, own, defaults=PRODUCING | self._sizes())
        self._errors.clear()
        with self.connection.translate_errors(f"fence other writers of {tp}"):
            unless_refused(producer, self._errors, INIT_S, lambda: producer.init_transactions(PATIENCE_S))
        self._producers[tp] = PartitionProducer(producer, self.stored_entry(tp))
        return self._producers[tp]

    def transactional_id(self, tp: TopicPartition) -> str:
        return f"{self.group}/{tp}"

    def begin_transaction(self, tp: TopicPartition) -> PartitionProducer:
        """A producer that owns the partition, with a transaction that is open."""
        stored = self._producers.get(tp)
        if stored is not None and stored.last is not None:
            try:
                stored.client.begin_transaction()
                self.send(stored, tp, stored.last)
                self._producers.move_to_end(tp)
                return stored
            except KafkaException as error:
                # Fenced, or closed for another reason: the next one shows. If it waits for a coordinator that is
                # dead, so will the others.
                if error.args[0].code() == KafkaError._TIMED_OUT:
                    self.discard_all()
                if is_fenced(error) and not self._moved_on(tp, stored.last):
                    give_way()
        new = self.new_producer(tp)
        with self.connection.translate_errors(f"begin a transaction for {tp}"):
            new.client.begin_transaction()
        return new

    def _moved_on(self, tp: TopicPartition, last: StoredEntry) -> bool:
        """Whether the producer that fenced ours has claimed a range. Then it is another worker's of the run, and its
        transaction has ended: on Spark any worker may have a partition's next range. A redrive claims no range, and may
        have more transactions to make."""
        now, _ = self.positions(PATIENCE_S, [tp], stable=False)
        return tp in now and now[tp].entry.position > last.entry.position

    def discard(self, tp: TopicPartition) -> None:
        """Throw a producer away: it failed, or another one has taken its place."""
        discarded = self._producers.pop(tp, None)
        if discarded is not None:
            with suppress(KafkaException):
                discarded.client.purge()

    def discard_all(self) -> None:
        for tp in list(self._producers):
            self.discard(tp)

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
            self._plain = self.connection.make_client(client.Producer, own, defaults=PRODUCING | self._sizes())
        return self._plain

    def flush_plain(self) -> None:
        """Wait until all that was written is acknowledged, or say what was not."""
        if self._plain is None:
            return
        left = flushed(self._plain, PATIENCE_S + 5)
        if self._failed or left:
            error = self._failed[0] if self._failed else KafkaError(KafkaError._TIMED_OUT)
            self.discard_plain()
            raise self.connection.translate("write records", error)

    def discard_plain(self) -> None:
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

    def _reader(self, *, stable: bool = True) -> client.Consumer:
        if stable not in self._readers:
            self._readers[stable] = committed.reader(self.ledger_connection, self.group, stable=stable)
        return self._readers[stable]

    def positions(
        self, timeout_s: float, partitions: Iterable[TopicPartition] | None = None, *, stable: bool = True
    ) -> tuple[dict[TopicPartition, StoredEntry], list[TopicPartition]]:
        """The ledger's entries, of these partitions or of all that are read. With ``stable``, one that a transaction is
        about to change is waited for; partitions where that is not over in time, or nobody answers, are beside it."""
        try:
            wanted = self._read_from() if partitions is None else partitions
            asked = [client.TopicPartition(offset.topic, offset.partition) for offset in wanted]
            reader = self._reader(stable=stable)
            if stable:
                offsets, left = committed.settled(reader, timeout_s, asked)
            else:
                offsets, left = committed.committed(reader, timeout_s, asked), []
        except KafkaException as error:
            self._readers.pop(stable).close()
            what = f"read the committed offsets of group {self.group}"
            raise self.ledger_connection.translate(what, error.args[0]) from None
        if left:  # it would go on asking
            self._readers.pop(stable).close()
        by_partition = {TopicPartition(offset.topic, offset.partition): offset for offset in offsets}
        return {
            tp: entries.parse(self.group, tp, offset.offset, offset.metadata, self._present)
            for tp, offset in sorted(by_partition.items())
        }, sorted(TopicPartition(offset.topic, offset.partition) for offset in left)

    def members(self) -> list[str]:
        """The group's members; there should be none."""
        members = self.ledger_admin.describe_groups([self.group])[self.group].members
        return [f"{member.client_id} at {member.host.lstrip('/')}" for member in members]

    def _present(self) -> str:
        """The group's members, for an error message."""
        try:
            members = self.members()
        except AvowError:
            return "its members could not be read"
        return f"its members now: {several(members)}" if members else "it has no members now"

    def _read_from(self) -> list[TopicPartition]:
        """The partitions that the pipeline reads, as far as they are there."""
        pattern, topics = self._source.topics_pattern, self._source.topics
        return [
            TopicPartition(partition.topic, partition.partition)
            for partition in self.ledger_admin.cluster().partitions
            if (partition.topic in topics if pattern is None else re.fullmatch(pattern, partition.topic))
        ]

    def stored_entry(self, tp: TopicPartition) -> StoredEntry | None:
        """The ledger's entry, None if there is none. One that a transaction is about to change is waited for."""
        stored, left = self.positions(PATIENCE_S, [tp])
        if left:
            timed_out = KafkaError(KafkaError._TIMED_OUT)
            raise self.ledger_connection.translate(f"read the committed offset of {tp}", timed_out)
        return stored.get(tp)

    def send(self, producer: PartitionProducer, tp: TopicPartition, stored: StoredEntry) -> None:
        """Put an entry into the open transaction. The last one counts."""
        timed = replace(stored, at_ms=int(time.time() * 1000))
        offset = client.TopicPartition(tp.topic, tp.partition, timed.entry.position, entries.serialize(timed))
        group = self._reader().consumer_group_metadata()
        in_time(SEND_S, lambda: producer.client.send_offsets_to_transaction([offset], group, SEND_S))
        producer.last = timed

    @property
    def ends_within_s(self) -> float:
        """How long an open transaction is waited for that Kafka should end by itself."""
        return self.timeout_ms / 1000 + ENDS_S

    def close(self) -> None:
        """Close everything. A producer that has nothing open closes quickly."""
        self._producers.clear()
        self.__dict__.pop("admin", None)
        self.__dict__.pop("ledger_admin", None)
        self._plain = None
        while self._readers:
            self._readers.popitem()[1].close()

    # The output topics

    def limits(self, topic: str) -> TopicLimits:
        known = self._limits.get(topic)
        if known is None or known[0] < time.monotonic() - LIMITS_KEPT_S:
            self._limits[topic] = (time.monotonic(), self._ask_limits(topic))
        return self._limits[topic][1]

    def topic_ids(self, names: Collection[str], *known: Mapping[str, str]) -> dict[str, str]:
        """The ids of these topics as the ledger keeps them; no item where there is no such topic. ``known``: what the
        ledger has of them. One that is not the topic it was is refused."""

        def ask() -> tuple[dict[str, str], tuple[str, str, str | None] | None]:
            described = self.admin.describe_topics(names).items()
            ids = {entries.topic_key(name): entries.short_id(str(topic.topic_id)) for name, topic in described if topic}
            keys = {name: entries.topic_key(name) for name in names}
            wrong = ((name, was[key], ids.get(key)) for name, key in keys.items() for was in known if key in was)
            return ids, next((topic for topic in wrong if topic[1] != topic[2]), None)

        ids, changed = ask()
        if changed is not None:  # or this broker does not know the topic yet
            poll_until(lambda: ask()[1] is None, NEWS_S)
            ids, changed = ask()
        if changed is not None:
            raise self._recreated(*changed)
        return ids

    def _recreated(self, name: str, was: str, is_: str | None) -> TopicRecreated:
        kind = "dead-letter topic" if name == self._dead_letter_topic else "output topic"
        lost = "the start records and dead letters" if name == self._dead_letter_topic else "the delivered records"
        now = f"but now has id {is_}...: it was deleted and recreated" if is_ else "but no longer exists"
        return TopicRecreated(
            f"topic-recreated: {kind} {name} had id {was}... when it was written to, {now}",
            advice=f"With the old topic, {lost} are lost. Give the pipeline a new name, which starts at source.start, "
            "and another output topic if this one is not empty.",
        )

    def refuse_other_outputs(self, tp: TopicPartition, stored: StoredEntry, outputs: Collection[str]) -> None:
        """The position is that of the topics that were written to: in others, what came before would be missing. One
        that is added as a route is another matter."""
        known = stored.topics.keys() - {entries.topic_key(self._dead_letter_topic)}
        if not known or any(entries.topic_key(name) in known for name in outputs):
            return
        names = sorted(name for name in self.admin.topic_names() if entries.topic_key(name) in known)
        before = f"topic{'s' if len(names) > 1 else ''} {several(names)}" if names else "a topic that is gone"
        now = several(sorted(outputs))
        back = f"Set sink.topic to {several(names)} again. Or give" if names else "Give"
        raise ConfigError(
            f"pipeline {self.group} has delivered into {before}, but sink.topic is now {now}: its records would be "
            "split between the topics",
            advice=f"{back} the pipeline a new name: it fills {now} from source.start, or continues there if that "
            f'names the positions (start = {{ "{tp.topic}" = {{ "{tp.partition}" = {stored.entry.position} }} }}, and '
            "the other partitions likewise).",
        )

    def clear_limits(self) -> None:
        self._limits.clear()

    def output_reader(self) -> client.Consumer:
        """Reads the output's topics, committed records only. To be assigned, never subscribed, and closed."""
        own = {
            "group.id": self.group,
            "enable.auto.commit": "false",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": "true",
            "fetch.wait.max.ms": "50",  # how late the end of a partition is reported
        }
        return self.connection.make_client(client.Consumer, own)

    def committed_records(self, topic: str, since: dict[int, int] | None = None) -> Iterator[client.Message]:
        """Every committed record of a topic of the output's cluster, up to where its log ends now; or from the offsets
        ``since`` on, which are then those ends.

        Not up to where committed records end now: a transaction that somebody else has open would hide what was
        committed after it began, such as the removal of a dead letter. It is waited for.
        """
        ends = {TopicPartition(topic, number): end for number, end in self.settled_ends(topic).items()}
        starts = {TopicPartition(topic, number): start for number, start in (since or {}).items()}
        yield from self.records_between(starts, ends)
        if since is not None:
            since.update((tp.partition, end) for tp, end in ends.items())

    def records_between(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> Iterator[client.Message]:
        """Committed records of the output's cluster."""
        if not any(end > starts.get(tp, 0) for tp, end in ends.items()):
            return
        what = f"read topic {several(sorted({tp.topic for tp in ends}))}"
        with closing(self.output_reader()) as consumer, self.connection.translate_errors(what):
            yield from read_to_end(consumer, starts, ends, silence_s=PATIENCE_S)

    def starts(self, topic: str) -> dict[int, int]:
        """Where the partitions of an output topic begin: above 0, records that were there are gone."""
        return _by_number(self.admin.earliest_offsets(self.admin.partitions_of(topic)))

    def settled_ends(self, topic: str) -> dict[int, int]:
        """Where the partitions of an output topic end, once every transaction has ended that was open below. Empty if
        there is no such topic."""
        partitions = self.admin.partitions_of(topic)
        ends = self.admin.end_offsets(partitions)

        def settled() -> bool:
            stable = self.admin.end_offsets(partitions, committed=True)
            behind[:] = [tp for tp in partitions if stable[tp] < ends[tp]]
            return not behind

        behind: list[TopicPartition] = []
        if not poll_until(settled, self.ends_within_s):
            raise SinkError(
                f"hanging-transaction: a transaction is open in {behind[0]} and does not end{self._held_by(behind[0])}",
                advice="Find and abort it with kafka-transactions.sh. Or stop its producer, and try again.",
            )
        return _by_number(ends)

    def _held_by(self, tp: TopicPartition) -> str:
        from avow.kafka.brokers import try_query  # a client that only this needs

        config = {name: SecretStr(str(value)) for name, value in self.connection.config.items()}
        cluster = {"brokers": self.connection.bootstrap_servers, "kafka": config}
        holders = try_query(self._source.model_copy(update=cluster), lambda brokers: brokers.holders([tp])) or {}
        return "".join(
            f": from offset {holder.first_offset}, {holder.describe()}" for holder in holders.get(tp, [])[:1]
        )

    def _ask_limits(self, topic: str) -> TopicLimits:
        count = len(poll_until(lambda: self.admin.partitions_of(topic), NEWS_S))
        config = self.admin.topic_configs([topic]).get(topic) if count else None
        if config is None:
            code = KafkaError.TOPIC_AUTHORIZATION_FAILED if count else KafkaError.UNKNOWN_TOPIC_OR_PART
            raise self.connection.translate(f"describe topic {topic}", KafkaError(code))
        limits = limits_of(count, {name: entry.value for name, entry in config.items() if entry.value is not None})
        return replace(limits, message_bytes_max=min(limits.message_bytes_max, self._bytes_max))


def _by_number(offsets: Mapping[TopicPartition, int]) -> dict[int, int]:
    return {tp.partition: offset for tp, offset in offsets.items()}


_clients = ClientCache(KafkaClients.close, keep=1)


def cached(pipeline: PipelineConfig) -> KafkaClients:
    """This thread's own clients, of one pipeline at a time."""
    sink = config_of(pipeline)
    settings = (*unwrap_secrets(pipeline.source.kafka).items(), "|", *unwrap_secrets(sink.kafka).items())
    key = (pipeline.name, pipeline.source.brokers, sink.brokers, settings)
    return _clients.get(key, lambda: KafkaClients(pipeline))


def expect(stored: StoredEntry | None, tp: TopicPartition) -> StoredEntry:
    if stored is None:
        raise PositionGone(
            f"the position of {tp} is gone from the consumer group while the pipeline runs: the group or its "
            "offsets were deleted",
            advice="Nothing of this range was claimed. Start the pipeline again: it stops with the offsets at which "
            "to start under a new name.",
        )
    return stored
