"""Admin requests to a Kafka cluster. This is the one place that makes them, with one set of time-outs and retries.

Theory of operation
-------------------
librdkafka's admin client asks one broker, the one it believes to be in charge, and waits for it to the end of the
time-out even when that broker is dead and another has long taken over. So a request is made in tries of growing length,
each with a new client, which looks up anew who is in charge. Every request ends in time: with an answer, with an error
of the connection's kind that says what was asked, of whom and why there is no answer, or with a ``ConfigError`` where
Kafka refuses what was asked for. A permanent error, such as a wrong password, ends it at once.

Committed offsets are read through a consumer (``committed``): librdkafka's admin request for them ends the process.

Owns: these requests. Must not know: pipelines, sinks, the ledger. Its neighbours are ``connect`` (clients and errors),
``brokers`` (what librdkafka has no request for) and those who ask: ``log``, ``topics``, ``groups``, the Kafka sink.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any, Self, TypeVar

import confluent_kafka as client
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigEntry,
    ConfigResource,
    ConsumerGroupDescription,
    ConsumerGroupListing,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from avow.errors import AvowError
from avow.kafka.committed import committed, reader
from avow.kafka.connect import BROKER_AWAY, Connection, first_permanent, is_permanent, is_refused, words
from avow.kafka.metadata import ClusterView, TopicPartition, as_view

Answer = TypeVar("Answer")
Name = TypeVar("Name")

EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

FIRST_TRY_S = 3.0
PAUSE_S = 0.1
NEWS_S = 5.0  # a broker learns of a new topic a moment after the one that was asked to create it
GROUPS_AT_ONCE = 8
# librdkafka 2.16 ends the process (assertion eonce->refcnt > 0) when a group's coordinator answers a request after its
# time-out, or when a client with such a request is destroyed. So these requests have a long one; it is we who stop
# waiting, and the client is kept until its request has ended.
LATE_S = 120.0
_unfinished: list[tuple[AdminClient, list[Future[Any]]]] = []
_unfinished_lock = threading.Lock()

# What passes when a broker dies and others take over, or when one comes back.
_PASSING = BROKER_AWAY | {
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}
_UNKNOWN_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT)
# What a connection reports, most telling first, and what to do. A request over it only says that it timed out.
_CONNECTION_ADVICE = {
    KafkaError._AUTHENTICATION: "Check the sasl.* settings in {key}.",
    KafkaError._SSL: "Check security.protocol and the ssl.* settings in {key}.",
    KafkaError._RESOLVE: "Check the host names in {address}.",
    KafkaError._TRANSPORT: "",
}


class Admin:
    """Admin requests to one cluster. ``timeout_s`` is for one request, however often it is tried. Not for use by two
    threads at once. Close it, or use it as a context manager."""

    def __init__(self, connection: Connection, *, timeout_s: float = 30) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.errors: deque[KafkaError] = deque(maxlen=100)  # what connections reported, those of our readers too
        self._client = self._connect()

    def _connect(self) -> AdminClient:
        errors = self.errors  # not self: the client ends with its last reference, and it holds this
        return self.connection.make_client(AdminClient, {"error_cb": errors.append})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.__dict__.pop("_client", None)  # librdkafka's admin client has no close of its own

    def request(self, action: str, call: Callable[[AdminClient, float], Answer]) -> Answer:
        """The answer of a call that is given a client and a time-out. ``action`` is a verb: "create topic t"."""
        started = time.monotonic()
        try_s = FIRST_TRY_S
        self._client.poll(0)  # drops pending connection reports
        self.errors.clear()
        while True:
            try:
                return call(self._client, max(0.1, min(try_s, started + self.timeout_s - time.monotonic())))
            except KafkaException as failed:
                error: KafkaError = failed.args[0]
            lasting = error if is_permanent(error) or is_refused(error) else self._permanent_error()
            if lasting is not None:
                raise self.connection.translate(action, lasting)
            code = error.code()
            patience_s = self.timeout_s if code in _PASSING else NEWS_S if code in _UNKNOWN_TOPIC else 0
            if time.monotonic() - started + PAUSE_S >= min(patience_s, self.timeout_s):
                raise self._failure(action, error)
            time.sleep(PAUSE_S)
            self._client = self._connect()
            try_s *= 2

    def _permanent_error(self) -> KafkaError | None:
        """What the connections report, if that stays: a request would wait for it to the end of its time-out."""
        self._client.poll(0)
        return first_permanent(self.errors)

    def _failure(self, action: str, error: KafkaError) -> AvowError:
        if error.code() not in _PASSING:
            return self.connection.translate(action, error)
        reason = "" if error.code() == KafkaError._TIMED_OUT else f": {KafkaError(error.code()).str()}"
        advice = ""
        for code, known in _CONNECTION_ADVICE.items():
            if reported := next((error_ for error_ in list(self.errors) if error_.code() == code), None):
                reason += f" ({self.connection.redact(words(reported))})"
                advice = known.format(key=self.connection.key, address=self.connection.address)
                break
        return self.connection.error(
            f"Kafka at {self.connection} could not {action}: no answer within {self.timeout_s:g} s{reason}",
            advice=advice or self.connection.check_brokers,
        )

    def _results(
        self, futures: Mapping[Name, Future[Any]], timeout_s: float, absent: Collection[int] = ()
    ) -> dict[Name, Any]:
        """Of a request; None for what Kafka answers with one of the errors ``absent``."""
        # Not left to request_timeout: librdkafka's list_offsets (2.16) waits for ever for a cluster that is not there.
        deadline = time.monotonic() + timeout_s
        results: dict[Name, Any] = {}
        for name, future in futures.items():
            while not wait([future], max(0.0, min(PAUSE_S, deadline - time.monotonic()))).done:
                if (lasting := self._permanent_error()) is not None:
                    raise KafkaException(lasting)
                if time.monotonic() >= deadline:
                    _leave_to_finish(self._client, futures.values())
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            try:
                results[name] = future.result()
            except KafkaException as error:
                if error.args[0].code() not in absent:
                    raise
                results[name] = None
        return results

    def _ask(
        self,
        action: str,
        send: Callable[[AdminClient, float], Mapping[Name, Future[Any]]],
        absent: Collection[int] = (),
    ) -> dict[Name, Any]:
        """The results of the requests that ``send`` makes, given a client and a time-out."""
        return self.request(action, lambda client_, t: self._results(send(client_, t), t, absent))

    # The cluster

    def cluster(self) -> ClusterView:
        """Live brokers, leaders and replicas of all topics."""
        return self.request("describe the cluster", lambda client_, t: as_view(client_.list_topics(timeout=t)))

    def racks(self) -> dict[int, str]:
        """Broker -> its rack, empty if it has none."""
        described = self._ask(
            "describe its brokers", lambda client_, t: {"": client_.describe_cluster(request_timeout=t)}
        )
        return {node.id: node.rack or "" for node in described[""].nodes}

    # Topics

    def topic_names(self) -> list[str]:
        return sorted({partition.topic for partition in self.cluster().partitions})

    def describe_topics(self, topics: Iterable[str]) -> dict[str, TopicDescription | None]:
        """None for a topic that does not exist. They are described, not listed by name: that may create them."""
        names = sorted(set(topics))
        if not names:
            return {}
        return self._ask(
            f"describe topic {several(names)}",
            lambda client_, t: client_.describe_topics(client.TopicCollection(names), request_timeout=t),
            absent=[KafkaError.UNKNOWN_TOPIC_OR_PART],
        )

    def partitions_of(self, topic: str) -> list[TopicPartition]:
        """Empty if there is no such topic."""
        described = self.describe_topics([topic])[topic]
        return [] if described is None else [TopicPartition(topic, partition.id) for partition in described.partitions]

    def topic_configs(self, topics: Iterable[str]) -> dict[str, dict[str, ConfigEntry]]:
        """Without the topics whose configuration the user may not describe: that takes a right of its own."""
        resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in sorted(set(topics))}
        if not resources:
            return {}
        configs = self._ask(
            f"describe the configuration of topic {several(resources)}",
            lambda client_, t: client_.describe_configs(list(resources.values()), request_timeout=t),
            absent=[KafkaError.TOPIC_AUTHORIZATION_FAILED],
        )
        return {topic: configs[resource] for topic, resource in resources.items() if configs[resource] is not None}

    def create_topic(
        self, name: str, partitions: int, replicas: int | list[list[int]] = -1, config: Mapping[str, str] | None = None
    ) -> bool:
        """False if it exists already. ``replicas``: how many, -1 for the brokers' default, or on which brokers."""
        placed = {"replication_factor": replicas} if isinstance(replicas, int) else {"replica_assignment": replicas}
        topic = NewTopic(name, partitions, **placed, config=dict(config or {}))
        tries = 0

        def call(client_: AdminClient, timeout_s: float) -> bool:
            nonlocal tries
            tries += 1
            futures = client_.create_topics([topic], operation_timeout=timeout_s, request_timeout=timeout_s)
            try:
                self._results(futures, timeout_s)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
                return tries > 1  # by a try whose answer was late
            return True

        return self.request(f"create topic {name}", call)

    def create_partitions(self, topic: str, count: int) -> None:
        more = [NewPartitions(topic, count)]
        self._ask(
            f"raise topic {topic} to {count} partitions",
            lambda client_, t: client_.create_partitions(more, operation_timeout=t, request_timeout=t),
        )

    def delete_topic(self, name: str) -> None:
        """It need not exist: a try whose answer was late may have deleted it."""
        self._ask(
            f"delete topic {name}",
            lambda client_, t: client_.delete_topics([name], operation_timeout=t, request_timeout=t),
            absent=[KafkaError.UNKNOWN_TOPIC_OR_PART],
        )

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete all records before these offsets. Where each partition begins afterwards."""
        offsets = [to_client(tp, offset) for tp, offset in before.items()]
        deleted = self._ask(
            f"delete records of {several(before)}",
            lambda client_, t: client_.delete_records(offsets, operation_timeout=t, request_timeout=t),
        )
        return {from_client(tp): done.low_watermark for tp, done in deleted.items()}

    # Offsets of the log

    def list_offsets(
        self,
        action: str,
        partitions: Iterable[TopicPartition],
        spec: OffsetSpec,
        *,
        committed: bool = False,
        skip_deleted: bool = False,
    ) -> dict[TopicPartition, int]:
        """``action``: the offsets' name for messages. ``committed``: as a reader of committed records sees them.
        ``skip_deleted``: without the partitions that do not exist, which else are an error."""
        specs = {to_client(tp): spec for tp in partitions}
        if not specs:
            return {}
        lowest = 0 if spec in (EARLIEST, LATEST) else -1  # -1: no record is so young
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        def call(client_: AdminClient, timeout_s: float) -> dict[TopicPartition, int]:
            futures = client_.list_offsets(specs, isolation_level=level, request_timeout=timeout_s)
            answers = self._results(futures, timeout_s, _UNKNOWN_TOPIC if skip_deleted else ())
            offsets = {from_client(tp): answer.offset for tp, answer in answers.items() if answer is not None}
            # A leader that does not answer in time comes from librdkafka (2.16) as a good answer with a bad offset, and
            # its partition would be taken for empty.
            if min(offsets.values(), default=lowest) < lowest:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return offsets

        return self.request(f"list the {action} of {several(map(from_client, specs))}", call)

    def earliest_offsets(
        self, partitions: Iterable[TopicPartition], *, skip_deleted: bool = False
    ) -> dict[TopicPartition, int]:
        return self.list_offsets("earliest offsets", partitions, EARLIEST, skip_deleted=skip_deleted)

    def end_offsets(
        self, partitions: Iterable[TopicPartition], *, committed: bool = False, skip_deleted: bool = False
    ) -> dict[TopicPartition, int]:
        """One past the last offset; ``committed``: the last stable offset."""
        action = "last stable offsets" if committed else "ends"
        return self.list_offsets(action, partitions, LATEST, committed=committed, skip_deleted=skip_deleted)

    # Consumer groups

    def list_groups(self) -> list[ConsumerGroupListing]:
        def call(client_: AdminClient, timeout_s: float) -> Any:
            listing = self._results({"": client_.list_consumer_groups(request_timeout=timeout_s)}, timeout_s)[""]
            if listing.errors:  # of a broker that did not answer: its groups are not in the list
                raise KafkaException(listing.errors[0])
            return listing.valid

        return list(self.request("list its consumer groups", call))

    def describe_groups(self, groups: Collection[str]) -> dict[str, ConsumerGroupDescription]:
        names = sorted(set(groups))
        if not names:
            return {}
        return self._ask(
            f"describe consumer group {several(names)}",
            lambda client_, _: client_.describe_consumer_groups(names, request_timeout=LATE_S),
        )

    def commit_offsets(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        """Kafka refuses it while the group has members."""
        if not positions:
            return
        offsets = [to_client(tp, position) for tp, position in positions.items()]

        def call(client_: AdminClient, timeout_s: float) -> None:
            request = [client.ConsumerGroupTopicPartitions(group, offsets)]
            futures = client_.alter_consumer_group_offsets(request, request_timeout=LATE_S)
            for tp in self._results(futures, timeout_s)[group].topic_partitions:
                if tp.error is not None:
                    raise KafkaException(tp.error)

        self.request(f"commit the offsets of {several(positions)} to consumer group {group}", call)

    def committed_offsets(
        self, groups: Sequence[str], partitions: Iterable[TopicPartition]
    ) -> dict[str, dict[TopicPartition, tuple[int, str]]]:
        """Each group's committed offsets in these partitions, with their metadata. All groups are asked at once."""
        tps = [to_client(tp) for tp in partitions]

        def of(group: str, timeout_s: float) -> dict[TopicPartition, tuple[int, str]]:
            with closing(reader(self.connection, group, self.errors.append)) as consumer:
                return {from_client(tp): (tp.offset, tp.metadata or "") for tp in committed(consumer, timeout_s, tps)}

        def call(_: AdminClient, timeout_s: float) -> dict[str, dict[TopicPartition, tuple[int, str]]]:
            with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
                begun = {group: pool.submit(of, group, timeout_s) for group in groups}
                return {group: future.result() for group, future in begun.items()}

        return self.request(f"read the committed offsets of consumer group {several(groups)}", call)


def _leave_to_finish(client_: AdminClient, futures: Iterable[Future[Any]]) -> None:
    """Keep a client whose request nobody waits for any more, and let those go whose requests have ended."""
    with _unfinished_lock:
        _unfinished[:] = [(kept, left) for kept, left in _unfinished if not all(future.done() for future in left)]
        _unfinished.append((client_, list(futures)))


def to_client(tp: TopicPartition, offset: int = client.OFFSET_INVALID) -> client.TopicPartition:
    return client.TopicPartition(tp.topic, tp.partition, offset)


def from_client(tp: client.TopicPartition) -> TopicPartition:
    return TopicPartition(tp.topic, tp.partition)


def several(items: Iterable[object]) -> str:
    """For messages: a few names, and how many more."""
    names = [str(item) for item in items]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
