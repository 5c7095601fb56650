"""Kafka's clients of this process: producers, the group's reader, and what the output topics take.

Theory of operation
-------------------
A transactional id is one input partition of one pipeline: whoever asks for it last (``init_transactions``) fences all
before, ends what they had open, and alone can commit. So a committed offset that was read while the id was ours and
that is committed in our transaction is a compare-and-set: if the transaction goes through, nobody claimed in between.

Producers are kept from task to task, one per partition, because making one costs more than a small batch. One that is
kept may have been fenced by another worker's meanwhile. It would find out at the end, with the batch for nothing; so a
kept producer begins its transaction with the position as it left it. Kafka takes that only from an owner, and then
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import confluent_kafka as client
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from avow.client_cache import ClientCache
from avow.errors import AvowError, ConfigError, SinkError, TopicRecreated
from avow.kafka import committed
from avow.kafka.connect import (
    flushed,
    grant,
    in_time,
    is_permanent,
    made,
    settings_at,
    settings_of,
    strike,
    unless_refused,
    words,
)
from avow.kafka.log import TopicPartition
from avow.settings import PipelineConfig, revealed
from avow.sinks.kafka import entries
from avow.sinks.kafka.config import KafkaConfig, dead_letter_topic, declared_outputs, on_other_cluster
from avow.sinks.kafka.entries import Kept

Answer = TypeVar("Answer")

KEY = "sink.kafka"  # where the file has the settings that a client may complain of

# Of one request to the cluster: long enough for a coordinator or a leader to be replaced.
PATIENCE_S = 60.0
TRY_S = 5.0  # of one try at a question
# Of an open transaction, beyond its own time-out: its coordinator looks for those every ten seconds.
ENDS_S = 60.0
ASK_S = 600.0  # of anything that is waited for: each of its requests has a time-out of its own
# Of the group's coordinator. A producer goes on waiting for a dead one; a new producer finds its successor.
SEND_S = 5.0
# Transactional producers, per process. It goes through its partitions in their order: with one more than are kept, each
# would be thrown away just before its turn. At rest one costs six threads and half a megabyte, to make one a tenth of a
# second.
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

# Trying again does not help.
_REFUSED = {
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "The brokers' transaction.max.timeout.ms is lower: lower [sink.kafka] "
    "transaction.timeout.ms.",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "The ledger needs some 400 bytes, and 24 for each output topic: raise the "
    "brokers' offset.metadata.max.bytes.",
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: "The cluster is too old for transactions.",
}
_RIGHTS = ("Create", "Write", "Read", "Describe", "DescribeConfigs")  # to output topics and the dead letters
_ADVICE = {
    KafkaError.NOT_ENOUGH_REPLICAS: "Too few replicas of an output topic are in sync: check the brokers.",
    KafkaError._ALL_BROKERS_DOWN: "Check that the cluster is up.",
}


def failure(what: str, error: KafkaException, pipeline: PipelineConfig | None = None) -> AvowError:
    """Kafka's error as ours, with what was tried."""
    cause: KafkaError = error.args[0]
    code = cause.code()
    if is_permanent(cause):
        if pipeline is None:
            return ConfigError(f"Kafka refuses {what}: {words(cause)}", advice=grant(cause, KEY, rights=_RIGHTS))
        assert isinstance(pipeline.sink, KafkaConfig)
        hidden = {**revealed(pipeline.source.kafka), **revealed(pipeline.sink.kafka)}.values()
        topics = sorted({*declared_outputs(pipeline), dead_letter_topic(pipeline)})
        own = {"group": pipeline.name, "transactional_ids": f"{pipeline.name}/"}
        return ConfigError(
            f"Kafka refuses {what}: {strike(hidden, words(cause))}",
            advice=grant(cause, KEY, topics=topics, rights=_RIGHTS, **own),
        )
    if code in _REFUSED:
        return ConfigError(f"Kafka refuses {what}: {cause.str()}", advice=_REFUSED[code])
    return SinkError(f"Kafka did not do {what}: {cause.str()}", advice=_ADVICE.get(code, "Check the brokers' logs."))


def is_fenced(error: KafkaException) -> bool:
    """Whether another producer has taken the transactional id; after that any call fails for good."""
    return error.args[0].code() in (KafkaError._FENCED, KafkaError._FATAL)


@contextmanager
def as_ours(what: str, pipeline: PipelineConfig | None = None) -> Iterator[None]:
    """An error of Kafka's is told as ours."""
    try:
        yield
    except KafkaException as error:
        raise failure(what, error, pipeline) from None
    except TimeoutError:
        raise failure(what, KafkaException(KafkaError(KafkaError._TIMED_OUT)), pipeline) from None


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
    cleanup_policy: str = "delete"

    @property
    def compacted(self) -> bool:
        """Whether it takes no record without a key."""
        return "compact" in self.cleanup_policy


EVER_MS = 2**63 - 1


def limits_of(partitions: int, config: Mapping[str, str]) -> Limits:
    """What a topic's configuration comes to. Brokers before Kafka 3.6 have one bound of timestamps for both directions,
    and later ones heed it where theirs are not set; without any, there is no bound."""
    both = int(config.get("message.timestamp.difference.max.ms", EVER_MS))
    before, after = (int(config.get(f"message.timestamp.{way}.max.ms", EVER_MS)) for way in ("before", "after"))
    return Limits(
        partitions,
        int(config["max.message.bytes"]),
        before if before < EVER_MS else both,
        after if after < EVER_MS else both,
        config["cleanup.policy"],
    )


class Clients:
    """One process's clients of one pipeline."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        assert isinstance(pipeline.sink, KafkaConfig)
        self.group = pipeline.name
        self.pipeline = pipeline
        self._source = pipeline.source
        source, own = revealed(pipeline.source.kafka), revealed(pipeline.sink.kafka)
        self._complaints: deque[KafkaError] = deque(maxlen=100)  # of all clients' connections
        self._ledger_settings = settings_of(pipeline.source) | {"error_cb": self._complaints.append}
        # On its own cluster the output has settings of its own; on the source's, what it does not say is the same.
        self.elsewhere = on_other_cluster(pipeline)
        brokers = str(pipeline.sink.brokers) if self.elsewhere else pipeline.source.brokers
        self._output_settings = settings_at(brokers, own if self.elsewhere else source | own)
        self._output_settings["error_cb"] = self._complaints.append
        self._given = source | own
        self._letters_topic = dead_letter_topic(pipeline)
        # No record may be larger than the client itself takes, whatever the topic says.
        queue_bytes = int(self._output_settings.get("queue.buffering.max.kbytes", QUEUE_KBYTES)) * 1024
        self._bytes_max = min(int(self._output_settings.get("message.max.bytes", MESSAGE_BYTES_MAX)), queue_bytes)
        self.timeout_ms = int(own.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS))
        self._output = self._source
        if self.elsewhere:
            self._output = self._source.model_copy(update={"brokers": brokers, "kafka": pipeline.sink.kafka})
        self._producing: OrderedDict[TopicPartition, Producing] = OrderedDict()
        self._plain: client.Producer | None = None
        self._failed: list[KafkaError] = []  # what the plain producer could not deliver
        self._readers: dict[bool, client.Consumer] = {}  # of the group's offsets: stable ones, or as they are
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
            "transactional.id": self.transactional_id(where),
            "transaction.timeout.ms": str(self.timeout_ms),
            # Else the first request to a coordinator waits half a second for its connection.
            "enable.sparse.connections": "false",
        }
        producer = made(client.Producer, PRODUCING | self._sizes() | settings | own, self._given, KEY)
        with as_ours(f"the fencing of other writers of {where}", self.pipeline):
            self._unless_refused(producer, lambda: producer.init_transactions(PATIENCE_S))
        self._producing[where] = Producing(producer, self.kept(where))
        return self._producing[where]

    def _unless_refused(self, one: AdminClient | client.Producer, call: Callable[[], Answer]) -> Answer:
        self._complaints.clear()
        return unless_refused(one, self._complaints, ASK_S, call)

    def transactional_id(self, where: TopicPartition) -> str:
        return f"{self.group}/{where}"

    def begun(self, where: TopicPartition) -> Producing:
        """A producer that owns the partition, with a transaction that is open."""
        kept = self._producing.get(where)
        if kept is not None and kept.last is not None:
            try:
                kept.client.begin_transaction()
                self.send(kept, where, kept.last)
                self._producing.move_to_end(where)
                return kept
            except KafkaException as error:
                # Fenced, or of no use for another reason: the next one tells. If it waits for a coordinator that is
                # dead, so will the others.
                if error.args[0].code() == KafkaError._TIMED_OUT:
                    self.forget_all()
                if is_fenced(error):
                    time.sleep(FENCED_PAUSE_S)
        found = self.fresh(where)
        with as_ours(f"the beginning of a transaction for {where}", self.pipeline):
            found.client.begin_transaction()
        return found

    def forget(self, where: TopicPartition) -> None:
        """Throw a producer away: it failed, or another one has taken its place."""
        found = self._producing.pop(where, None)
        if found is not None:
            with suppress(KafkaException):
                found.client.purge()

    def forget_all(self) -> None:
        for where in list(self._producing):
            self.forget(where)

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
        left = flushed(self._plain, PATIENCE_S + 5)
        if self._failed or left:
            error = self._failed[0] if self._failed else KafkaError(KafkaError._TIMED_OUT)
            self.forget_plain()
            raise failure("the writing of records", KafkaException(error), self.pipeline)

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

    def _reader(self, *, stable: bool = True) -> client.Consumer:
        if stable not in self._readers:
            self._readers[stable] = committed.reader(
                self._ledger_settings, self.group, self._given, stable=stable, key=KEY
            )
        return self._readers[stable]

    def positions(
        self, timeout_s: float, partitions: Iterable[TopicPartition] | None = None, *, stable: bool = True
    ) -> tuple[dict[TopicPartition, Kept], list[TopicPartition]]:
        """The ledger's entries, of these partitions or of all that are read. With ``stable``, one that a transaction is
        about to change is waited for; partitions where that is not over in time, or nobody answers, are beside it."""
        try:
            wanted = self._read_from(stable=stable) if partitions is None else partitions
            asked = [client.TopicPartition(one.topic, one.partition) for one in wanted]
            reader = self._reader(stable=stable)
            if stable:
                found, left = committed.settled(reader, timeout_s, asked)
            else:
                found, left = committed.committed(reader, timeout_s, asked), []
        except KafkaException as error:
            self._readers.pop(stable).close()
            raise failure(f"the reading of the positions of group {self.group}", error, self.pipeline) from None
        if left:  # it would go on asking
            self._readers.pop(stable).close()
        by_partition = {TopicPartition(one.topic, one.partition): one for one in found}
        return {
            where: entries.read(self.group, where, one.offset, one.metadata, self._present)
            for where, one in sorted(by_partition.items())
        }, sorted(TopicPartition(one.topic, one.partition) for one in left)

    def members(self) -> list[str]:
        """Who has joined the group, which nobody should."""

        def request(admin: AdminClient) -> list[str]:
            asked = admin.describe_consumer_groups([self.group], request_timeout=TRY_S)
            found = asked[self.group].result(TRY_S + 5).members
            return [f"{member.client_id} at {member.host.lstrip('/')}" for member in found]

        return self.ask(f"the describing of group {self.group}", request, ledger=True)

    def _present(self) -> str:
        """Whom to suspect."""
        try:
            found = self.members()
        except AvowError:
            return "nobody says who is in it now"
        return f"in it now: {several(found)}" if found else "nobody is in it now"

    def _read_from(self, *, stable: bool) -> list[TopicPartition]:
        """The partitions that the pipeline reads, as far as they are there."""
        try:
            told = self._reader(stable=stable).list_topics(timeout=SEND_S)
        except KafkaException:  # it may be asking a dead broker, and a new one finds another
            self._readers.pop(stable).close()
            told = self._reader(stable=stable).list_topics(timeout=PATIENCE_S)
        pattern, topics = self._source.topics_pattern, self._source.topics
        return [
            TopicPartition(name, number)
            for name, topic in told.topics.items()
            for number in topic.partitions
            if (name in topics if pattern is None else re.fullmatch(pattern, name))
        ]

    def kept(self, where: TopicPartition) -> Kept | None:
        """The ledger's entry, None if there is none. One that a transaction is about to change is waited for."""
        found, left = self.positions(PATIENCE_S, [where])
        if left:
            timed_out = KafkaException(KafkaError(KafkaError._TIMED_OUT))
            raise failure(f"the reading of the position of {where}", timed_out, self.pipeline)
        return found.get(where)

    def send(self, producing: Producing, where: TopicPartition, kept: Kept) -> None:
        """Put an entry into the open transaction. The last one counts."""
        timed = replace(kept, at_ms=int(time.time() * 1000))
        offset = client.TopicPartition(where.topic, where.partition, timed.entry.position, entries.written(timed))
        group = self._reader().consumer_group_metadata()
        in_time(SEND_S, lambda: producing.client.send_offsets_to_transaction([offset], group, SEND_S))
        producing.last = timed

    @property
    def ends_within_s(self) -> float:
        """How long an open transaction is waited for that Kafka should end by itself."""
        return self.timeout_ms / 1000 + ENDS_S

    def close(self) -> None:
        """Let everything go. A producer that has nothing open goes quickly."""
        self._producing.clear()
        self._admins.clear()
        self._plain = None
        while self._readers:
            self._readers.popitem()[1].close()

    # The output topics

    def limits(self, topic: str) -> Limits:
        known = self._limits.get(topic)
        if known is None or known[0] < time.monotonic() - LIMITS_KEPT_S:
            self._limits[topic] = (time.monotonic(), self._ask_limits(topic))
        return self._limits[topic][1]

    def topic_ids(self, names: Collection[str], *known: Mapping[str, str]) -> dict[str, str]:
        """The ids of these topics as the ledger keeps them; no item where there is no such topic. ``known``: what the
        ledger has of them. One that is not the topic it was is refused."""
        what = f"the describing of topics {several(sorted(names))}"
        # A broker hears of a new topic a moment after another.
        news_by = time.monotonic() + NEWS_S
        while True:
            ids = self.ask(what, lambda admin: _topic_ids(admin, names))
            found = {entries.topic_key(name): entries.short_id(topic_id) for name, topic_id in ids.items()}
            keys = {name: entries.topic_key(name) for name in names}
            wrong = ((name, was[key], found.get(key)) for name, key in keys.items() for was in known if key in was)
            changed = next((one for one in wrong if one[1] != one[2]), None)
            if changed is None:
                return found
            if time.monotonic() > news_by:
                raise self._made_again(*changed)
            time.sleep(0.1)

    def _made_again(self, name: str, was: str, is_: str | None) -> TopicRecreated:
        kind = "dead-letter topic" if name == self._letters_topic else "output topic"
        lost = "which partitions were begun, and the dead letters" if name == self._letters_topic else "what it held"
        now = f"but the topic of that name now has id {is_}...: it was deleted and made again" if is_ else "and is gone"
        return TopicRecreated(
            f"topic-recreated: {kind} {name} was written to as id {was}..., {now}",
            advice=f"With the old topic, {lost} is lost. Give the pipeline a new name, which begins at source.start, "
            "and another output if this one is not empty.",
        )

    def refuse_other_outputs(self, where: TopicPartition, kept: Kept, outputs: Collection[str]) -> None:
        """The position is that of the topics that were written to: in others, what came before would be missing. One
        that is added as a route is another matter."""
        known = kept.topics.keys() - {entries.topic_key(self._letters_topic)}
        if not known or any(entries.topic_key(name) in known for name in outputs):
            return
        there = self.ask("the listing of topics", lambda admin: admin.list_topics(timeout=TRY_S).topics)
        names = sorted(name for name in there if entries.topic_key(name) in known)
        before = f"topic{'s' if len(names) > 1 else ''} {several(names)}" if names else "a topic that is gone"
        now = several(sorted(outputs))
        back = f"Set sink.topic to {several(names)} again. Or give" if names else "Give"
        raise ConfigError(
            f"pipeline {self.group} has delivered into {before}, and sink.topic is {now} now: its records would be "
            "split",
            advice=f"{back} the pipeline a new name: it fills {now} from source.start, or goes on there if that names "
            f'the positions (start = {{ "{where.topic}" = {{ "{where.partition}" = {kept.entry.position} }} }}, and '
            "the other partitions likewise).",
        )

    def forget_limits(self) -> None:
        self._limits.clear()

    def ask(self, what: str, request: Callable[[AdminClient], Answer], *, ledger: bool = False) -> Answer:
        """Ask the output's cluster something, or with ``ledger`` the source's, where the group is.

        The client is kept for the next question. One that failed is not: librdkafka's goes on asking a dead broker that
        it believes in charge, and a new one looks up who is.
        """
        began = time.monotonic()
        try:
            with as_ours(what, self.pipeline):
                while True:
                    if ledger not in self._admins:
                        settings = self._ledger_settings if ledger else self._output_settings
                        self._admins[ledger] = made(AdminClient, settings, self._given, KEY)
                    try:
                        return self._unless_refused(self._admins[ledger], partial(request, self._admins[ledger]))
                    except KafkaException as error:
                        code = error.args[0].code()
                        patience_s = NEWS_S if code == KafkaError.UNKNOWN_TOPIC_OR_PART else 0.0
                        if code in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
                            patience_s = PATIENCE_S
                            del self._admins[ledger]
                        if time.monotonic() - began > patience_s:
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
            "fetch.wait.max.ms": "50",  # how late the end of a partition is told
        }
        return made(client.Consumer, self._output_settings | own, self._given, KEY)

    def committed_records(self, topic: str, since: dict[int, int] | None = None) -> Iterator[client.Message]:
        """Every committed record of a topic of the output's cluster, up to where its log ends now; or from the offsets
        ``since`` on, which are then those ends.

        Not up to where committed records end now: a transaction that somebody else has open would hide what was
        committed after it began, such as the taking back of a letter. It is waited for.
        """
        ends = self.settled_ends(topic)
        starts = since or {}
        left = {number for number, end in ends.items() if end > starts.get(number, 0)}
        if left:
            yield from self._records_until(topic, starts, ends, left)
        if since is not None:
            since.update(ends)

    def _records_until(
        self, topic: str, starts: Mapping[int, int], ends: Mapping[int, int], left: set[int]
    ) -> Iterator[client.Message]:
        reader = self.output_reader()
        try:
            reader.assign([client.TopicPartition(topic, n, starts.get(n) or client.OFFSET_BEGINNING) for n in left])
            heard = time.monotonic()
            while left:
                with as_ours(f"the reading of topic {topic}", self.pipeline):
                    for record in reader.consume(10_000, 0.2):
                        heard = time.monotonic()
                        number = record.partition()
                        error = record.error()
                        if error is not None and error.code() != KafkaError._PARTITION_EOF:
                            raise KafkaException(error)
                        if number not in left:
                            continue
                        # A leader that is new, or a follower that is late, may say that the partition ends before this.
                        if (record.offset() or 0) >= ends[number]:
                            left.discard(number)
                        elif error is None:
                            yield record
                    if time.monotonic() - heard > PATIENCE_S:
                        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        finally:
            reader.close()

    def starts(self, topic: str) -> dict[int, int]:
        """Where the partitions of an output topic begin: above 0, records that were there are gone."""

        def request(admin: AdminClient) -> dict[int, int]:
            partitions = _partitions(admin, topic)
            return _offsets(admin, topic, partitions, _EARLIEST, IsolationLevel.READ_UNCOMMITTED)

        return self.ask(f"the reading of topic {topic}", request)

    def settled_ends(self, topic: str) -> dict[int, int]:
        """Where the partitions of an output topic end, once every transaction has ended that was open below. Empty if
        there is no such topic."""
        what = f"the reading of topic {topic}"

        def ends_of(level: IsolationLevel) -> dict[int, int]:
            return self.ask(what, lambda admin: _offsets(admin, topic, partitions, _LATEST, level))

        partitions = self.ask(what, lambda admin: _partitions(admin, topic))
        if not partitions:
            return {}
        ends = ends_of(IsolationLevel.READ_UNCOMMITTED)
        deadline = time.monotonic() + self.ends_within_s
        while behind := [n for n, end in ends_of(IsolationLevel.READ_COMMITTED).items() if end < ends[n]]:
            if time.monotonic() > deadline:
                where = TopicPartition(topic, behind[0])
                raise SinkError(
                    f"hanging-transaction: a transaction is open in {where} and does not end{self._held_by(where)}",
                    advice="kafka-transactions.sh finds and aborts it. Or stop who writes there, and try again.",
                )
            time.sleep(0.1)
        return ends

    def _held_by(self, where: TopicPartition) -> str:
        from avow.kafka.brokers import about  # a client that only this needs

        found = about(self._output, lambda brokers: brokers.holders([where])) or {}
        return "".join(f": from offset {one.first_offset}, {one.says()}" for one in found.get(where, [])[:1])

    def _ask_limits(self, topic: str) -> Limits:
        resource = ConfigResource(ResourceType.TOPIC, topic)

        def request(admin: AdminClient) -> Limits:
            count = len(_partitions(admin, topic))
            if not count:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            config = admin.describe_configs([resource], request_timeout=TRY_S)[resource].result(TRY_S + 5)
            limits = limits_of(count, {name: entry.value for name, entry in config.items() if entry.value is not None})
            return replace(limits, message_bytes_max=min(limits.message_bytes_max, self._bytes_max))

        return self.ask(f"the describing of topic {topic}", request)


def _partitions(admin: AdminClient, topic: str) -> list[int]:
    """None if there is no such topic. It is described: to be listed by its name would make it."""
    asked = admin.describe_topics(client.TopicCollection([topic]), request_timeout=TRY_S)
    try:
        return [one.id for one in asked[topic].result(TRY_S + 5).partitions]
    except KafkaException as error:
        if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise
        return []


def _topic_ids(admin: AdminClient, names: Collection[str]) -> dict[str, str]:
    """No item where there is no such topic."""
    found = {}
    asked = admin.describe_topics(client.TopicCollection(list(names)), request_timeout=TRY_S)
    for name, answer in asked.items():
        try:
            found[name] = str(answer.result(TRY_S + 5).topic_id)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]


def _offsets(
    admin: AdminClient, topic: str, partitions: Collection[int], spec: OffsetSpec, level: IsolationLevel
) -> dict[int, int]:
    if not partitions:
        return {}
    asked = admin.list_offsets(
        {client.TopicPartition(topic, number): spec for number in partitions},
        isolation_level=level,
        request_timeout=TRY_S,
    )
    found = {where.partition: answer.result(TRY_S + 5).offset for where, answer in asked.items()}
    # A leader that does not answer in time comes from librdkafka (2.16) as a good answer with a bad offset, and its
    # partition would be taken for empty.
    if min(found.values()) < 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return found


_clients = ClientCache(Clients.close, keep=1)


def cached(pipeline: PipelineConfig) -> Clients:
    """This thread's own clients, of one pipeline at a time."""
    assert isinstance(pipeline.sink, KafkaConfig)
    settings = (*revealed(pipeline.source.kafka).items(), "|", *revealed(pipeline.sink.kafka).items())
    key = (pipeline.name, pipeline.source.brokers, pipeline.sink.brokers, settings)
    return _clients.get(key, lambda: Clients(pipeline))


def several(names: list[str]) -> str:
    """A few of them, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def expect(kept: Kept | None, where: TopicPartition) -> Kept:
    if kept is None:
        raise ConfigError(
            f"the position of {where} is gone from the consumer group while the pipeline runs: somebody has deleted "
            "the group, or its offsets",
            advice="Nothing of this range was claimed. Start the pipeline again: it stops, and says at which offsets "
            "to begin under a new name.",
        )
    return kept
