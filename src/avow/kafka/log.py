"""What a run asks of Kafka's log: which partitions there are, where they begin and end, and what stands where.

Theory of operation
-------------------
A ``Log`` is one handle per run. Requests go through librdkafka's admin client, each for all partitions at once;
records are read by a consumer that is assigned and never subscribes, so that no group sees a member come and go.
Group positions are told through the admin client too: it is the offset commit of a consumer without a group
membership, but with a time-out of its own, which a consumer's synchronous commit has not.

Every call ends in time, with an answer or with a ``SourceError`` that says what was asked, of whom, and what to do.
Broker addresses are shown as the pipeline file wrote them; the client's own words are shown without any value that
the environment or a client setting gave.

Two ends of a partition are told apart. ``offsets`` gives the log's own end (the high watermark), against which a
position is judged. ``stable_ends`` gives where committed records end: beyond it a transaction is still open. A run
reads committed records only, so a declared start never lies beyond the stable end of its moment unless it is
an explicit offset: a transaction open at that moment would otherwise be read in half.

Owns: these questions, and the client settings they are asked with. Must not know: the ledger's rules, Spark, any
sink. Its neighbours are ``ledger`` (whose ``plan_start`` judges a ``LogView``) and ``metadata`` (leaders, replicas).
"""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

import confluent_kafka as client
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, OffsetSpec, TopicDescription  # type: ignore[attr-defined]

from avow.errors import ConfigError, SourceError
from avow.kafka.committed import committed, reader
from avow.kafka.connect import first_permanent, grant, is_permanent, made, settings_of, strike, words
from avow.kafka.headers import headers_of
from avow.kafka.metadata import ClusterView, as_view
from avow.ledger import Entry, Fingerprint, LogView
from avow.settings import Source, Start, revealed

__all__ = ["Log", "Record", "TopicPartition", "answers", "fingerprint"]

Answer = TypeVar("Answer")
Name = TypeVar("Name")

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_CHECK_BROKERS = (
    "Check that the cluster is up, and that source.brokers and the security settings in source.kafka are right."
)
_CHECK_TOPICS = "Check that the topics are there: one may have just been deleted."
_ADVICE = {
    KafkaError._AUTHENTICATION: "Check the sasl.* settings in source.kafka.",
    KafkaError._SSL: "Check security.protocol and the ssl.* settings in source.kafka.",
    KafkaError._RESOLVE: "Check the host names in source.brokers.",
    KafkaError.UNKNOWN_TOPIC_OR_PART: _CHECK_TOPICS,
    KafkaError._NOENT: _CHECK_TOPICS,
    KafkaError.UNKNOWN_MEMBER_ID: "A consumer has joined the group of this name, which is the pipeline's: stop it.",
}
# What a connection complains of, most telling first. A request over it only says that it timed out.
_TROUBLES = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE, KafkaError._TRANSPORT)

# What was asked for cannot be, and the broker says why.
_REFUSED = (
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,  # a name that no topic may have
)

# A broker learns of a new topic a moment after the one that was asked to make it.
_NOT_THERE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT)
_NEWS_S = 1.0
_GROUPS_AT_ONCE = 8

# What passes when a broker dies and others take over, or when one comes back.
_PASSING = (
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._WAIT_COORD,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)
_FIRST_TRY_S = 3.0
_PAUSE_S = 0.1

NO_TIMESTAMP = -1  # of a record that has none
_URL_SAFE = str.maketrans("+/", "-_")


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as it stands in the log."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def fingerprint(offset: int, timestamp_ms: int, key: bytes | None, value: bytes | None) -> Fingerprint:
    """Of one record, from nothing but these four: Spark's columns must give the same as Kafka's own record.

    ``timestamp_ms`` is -1 if the record has none.
    """
    # The lengths go first, -1 for none: else a byte could move from the key to the value unseen.
    lengths = struct.pack(">qq", *(-1 if part is None else len(part) for part in (key, value)))
    return Fingerprint(offset, timestamp_ms, zlib.crc32(value or b"", zlib.crc32(key or b"", zlib.crc32(lengths))))


class Log:
    """The source's topics, as Kafka tells of them. Close it, or use it as a context manager."""

    def __init__(self, source: Source, group: str, *, timeout_s: float = 30) -> None:
        self._source = source
        self._group = group
        self.timeout_s = timeout_s  # of one question, however often it has to be asked
        self._brokers = source.shown("brokers")
        self._troubles: deque[KafkaError] = deque(maxlen=100)
        troubles = self._troubles  # not self: the admin client ends with its last reference, and it holds this
        self._settings = settings_of(source) | {"error_cb": troubles.append}
        self._admin = made(AdminClient, self._settings, revealed(source.kafka))
        self._readers: dict[str, client.Consumer] = {}  # by isolation level

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()
        # The admin client has no close of its own.
        self.__dict__.pop("_admin", None)

    def _renew(self) -> None:
        self.close()
        self._admin = made(AdminClient, self._settings, revealed(self._source.kafka))

    @property
    def admin(self) -> AdminClient:
        """For questions that only one caller has."""
        return self._admin

    def cluster(self) -> ClusterView:
        """Brokers, leaders and replicas of all topics."""
        return self.ask("for its metadata", lambda timeout_s: as_view(self._admin.list_topics(timeout=timeout_s)))

    # Which partitions there are

    def partitions(self) -> dict[TopicPartition, str]:
        """Every partition of the declared topics, or of those whose whole name matches the pattern -> topic id.

        A pattern never matches Kafka's internal topics. No topic at all is an error: it is a slip of the pen far
        more often than a wish.
        """
        pattern = self._source.topics_pattern
        if pattern is None:
            return self.partitions_of(self._source.topics)
        found = _by_partition(
            topic
            for topic in self._described(name for name in self._topic_names() if re.fullmatch(pattern, name)).values()
            if topic is not None and not topic.is_internal
        )
        if not found:
            raise SourceError(
                f"no topic at {self._brokers} matches source.topics_pattern = {self._source.shown('topics_pattern')!r}",
                advice="The pattern must match a topic's whole name. Correct it, or create the topic.",
            )
        return found

    def partitions_of(self, topics: Iterable[str]) -> dict[TopicPartition, str]:
        """Every partition of these topics -> topic id. They must be there."""
        return _by_partition(self._declared(topics))

    def _topic_names(self) -> list[str]:
        return sorted(
            self.ask("for the names of all topics", lambda timeout_s: self._admin.list_topics(timeout=timeout_s).topics)
        )

    def _described(self, topics: Iterable[str]) -> dict[str, TopicDescription | None]:
        """None for a topic that is not there."""
        names = sorted(set(topics))
        if not names:
            return {}

        def request(timeout_s: float) -> dict[str, TopicDescription | None]:
            asked = self._admin.describe_topics(client.TopicCollection(names), request_timeout=timeout_s)
            return answers(asked, timeout_s, absent=KafkaError.UNKNOWN_TOPIC_OR_PART, watch=self._watch)

        return self.ask(f"for the partitions of {_several(names)}", request)

    def _declared(self, topics: Iterable[str]) -> list[TopicDescription]:
        """Topics that must be there."""
        names = sorted(set(topics))
        news_by = time.monotonic() + _NEWS_S
        while True:
            answers = self._described(names)
            missing = [name for name in names if answers[name] is None]
            if not missing:
                return [topic for topic in answers.values() if topic is not None]
            if time.monotonic() > news_by:
                break
            time.sleep(_PAUSE_S)
        raise SourceError(
            f"{'topics' if missing[1:] else 'topic'} {_several(missing)} "
            f"{'are' if missing[1:] else 'is'} not at {self._brokers}",
            advice="Create what is missing or correct source.topics. Topics that the pipeline's user may not "
            "describe are hidden from it.",
        )

    # Where they begin and end

    def offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """The earliest offset and the log's end, one past its last offset, be it committed or not."""
        asked = tuple(partitions)
        # In this order: an end only grows, so it cannot lie below an earliest offset that was asked for before.
        earliest = self._listed("earliest offsets", asked, _EARLIEST)
        ends = self._listed("ends", asked, _LATEST)
        return {partition: (earliest[partition], ends[partition]) for partition in asked}

    def stable_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Where committed records end for now: a reader of them gets no further."""
        return self._listed("stable ends", partitions, _LATEST, IsolationLevel.READ_COMMITTED)

    def declared_start(self, start: Start, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The pipeline's start as offsets.

        ``latest``, and a time after the last record, are the stable end. A time is the first record that is not
        older. Explicit offsets are given back as they are (``plan_start`` judges them); a partition that they do
        not name starts at its earliest.
        """
        asked = tuple(partitions)
        match start:
            case "earliest":
                return self._listed("earliest offsets", asked, _EARLIEST)
            case "latest":
                return self.stable_ends(asked)
            case datetime():
                return self._at_time(start, asked)
            case _:
                named = {p: start[p.topic][p.partition] for p in asked if p.partition in start.get(p.topic, {})}
                others = (p for p in asked if p not in named)
                return named | self._listed("earliest offsets", others, _EARLIEST)

    def _at_time(self, moment: datetime, partitions: tuple[TopicPartition, ...]) -> dict[TopicPartition, int]:
        # Rounded up: Kafka counts milliseconds, and a record of the millisecond before is older.
        # Not below 0: to Kafka, -1 and the numbers before it are words, such as the end.
        since_ms = max(0, -((datetime(1970, 1, 1, tzinfo=UTC) - moment) // timedelta(milliseconds=1)))
        # The ends first: a record that comes in between is then found by its time, or read after the end.
        ends = self.stable_ends(partitions)
        spec = OffsetSpec.for_timestamp(since_ms)
        found = self._listed(f"offsets at {moment.isoformat()}", partitions, spec, IsolationLevel.READ_COMMITTED)
        return {p: offset if offset >= 0 else ends[p] for p, offset in found.items()}

    def _listed(
        self,
        what: str,
        partitions: Iterable[TopicPartition],
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[TopicPartition, int]:
        wanted = tuple(partitions)
        if not wanted:
            return {}
        specs = {_theirs(partition): spec for partition in wanted}
        lowest = 0 if spec in (_EARLIEST, _LATEST) else -1  # -1: no record is so young

        def request(timeout_s: float) -> dict[TopicPartition, int]:
            asked = self._admin.list_offsets(specs, isolation_level=isolation, request_timeout=timeout_s)
            found = {
                _ours(theirs): answer.offset for theirs, answer in answers(asked, timeout_s, watch=self._watch).items()
            }
            # A leader that does not answer in time comes from librdkafka (2.16) as a good answer with a bad offset.
            if min(found.values()) < lowest:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return found

        return self.ask(f"for the {what} of {_several(wanted)}", request)

    # What stands where

    def view(self, entries: Mapping[TopicPartition, Entry | None]) -> dict[TopicPartition, LogView]:
        """All that ``plan_start`` needs to judge the ledger's entries.

        A partition that its topic does not have (any more) is an empty log under the topic's present id: a topic
        made again with fewer partitions is then judged like any other that was made again.
        """
        ids = _by_partition(self._declared(partition.topic for partition in entries))
        topics = {partition.topic: topic_id for partition, topic_id in ids.items()}
        offsets = self.offsets(partition for partition in entries if partition in ids)
        found = self._fingerprints(entries, offsets)
        return {
            p: LogView(p.topic, p.partition, topics[p.topic], *offsets.get(p, (0, 0)), found=found.get(p))
            for p in entries
        }

    def _fingerprints(
        self, entries: Mapping[TopicPartition, Entry | None], offsets: Mapping[TopicPartition, tuple[int, int]]
    ) -> dict[TopicPartition, Fingerprint]:
        """The records at the entries' last offsets, where there (still) is a record at exactly that offset."""
        wanted = {
            partition: entry.last.offset
            for partition, entry in entries.items()
            if entry is not None and entry.last is not None and partition in offsets
            # Nothing stands outside the log, and a consumer would go and look for it.
            if offsets[partition][0] <= entry.last.offset < offsets[partition][1]
        }
        # Uncommitted ones too: where a log was cut, the record that replaced ours may be of an open transaction.
        records = self._first_records(wanted, "read_uncommitted")
        return {
            partition: fingerprint(wanted[partition], timestamp_of(record), record.key(), record.value())
            for partition, record in records.items()
            if record.offset() == wanted[partition]
        }

    def timestamps_at(
        self, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int] | None = None
    ) -> dict[TopicPartition, int | None]:
        """The timestamp, in ms, of the first committed record at or after each position: now less this is the lag.

        None where there is none: the position is at the stable end, or has been overtaken by retention. ``ends``: the
        stable ends, from who knows them already.
        """
        ends = self.stable_ends(positions) if ends is None else ends
        behind = {partition: offset for partition, offset in positions.items() if offset < ends[partition]}
        records = self._first_records(behind, "read_committed")
        return {p: timestamp_of(records[p]) if p in records else None for p in positions}

    def first_timestamps(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The timestamp, in ms, of the first record at or after each position, committed or not; no item where there is
        none."""
        return {where: timestamp_of(one) for where, one in self._first_records(positions, "read_uncommitted").items()}

    def records(self, where: TopicPartition, offsets: Iterable[int]) -> list[Record]:
        """Single records with their bytes, for the few that have to be looked at again."""
        found = []
        for offset in offsets:
            message = self._first_records({where: offset}, "read_committed").get(where)
            if message is None or message.offset() != offset:
                raise SourceError(f"there is no committed record at offset {offset} of {where}")
            key, value = as_bytes(message.key()), as_bytes(message.value())
            found.append(Record(offset, timestamp_of(message), key, value, headers_of(message)))
        return found

    def _first_records(
        self, wanted: Mapping[TopicPartition, int], isolation: str
    ) -> dict[TopicPartition, client.Message]:
        """The first record at or after each offset; no item where there is none before the end."""
        if not wanted:
            return {}

        def request(timeout_s: float) -> dict[TopicPartition, client.Message]:
            return _read(wanted, self._reader(isolation), timeout_s)

        return self.ask(f"for records of {_several(wanted)}", request)

    def _reader(self, isolation: str) -> client.Consumer:
        if isolation not in self._readers:
            own = {
                "group.id": self._group,  # librdkafka wants one; nothing is committed to it from here
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": isolation,
                "enable.partition.eof": True,
                # One record each is wanted: fetch little (a larger batch still comes whole), do not wait for more.
                "queued.min.messages": 1,
                "fetch.message.max.bytes": 65_536,
                "fetch.wait.max.ms": 50,
                "fetch.queue.backoff.ms": 10,  # else so small a queue, once full, rests for a second
            }
            self._readers[isolation] = made(client.Consumer, self._settings | own, revealed(self._source.kafka))
        return self._readers[isolation]

    # What the group is told

    def tell(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit these positions to the pipeline's group, for the tools that show lag. Nothing reads them back.

        Kafka refuses it while the group has members.
        """
        if not positions:
            return
        offsets = [_theirs(partition, position) for partition, position in positions.items()]
        request = [client.ConsumerGroupTopicPartitions(self._group, offsets)]

        def told(timeout_s: float) -> None:
            asked = self._admin.alter_consumer_group_offsets(request, request_timeout=timeout_s)
            for partition in answers(asked, timeout_s, watch=self._watch)[self._group].topic_partitions:
                if partition.error is not None:
                    raise KafkaException(partition.error)

        self.ask(f"to take the positions of {_several(positions)} for group {self._group}", told)

    def told(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """What the group was last told, by us or by anyone. None: nothing."""
        wanted = list(partitions)
        found = self.committed([self._group], wanted)[self._group] if wanted else {}
        return {where: found[where][0] if where in found else None for where in wanted}

    def committed(
        self, groups: Sequence[str], partitions: Iterable[TopicPartition]
    ) -> dict[str, dict[TopicPartition, tuple[int, str]]]:
        """What groups have committed in these partitions: position and metadata. All groups are asked at once."""
        asked = [_theirs(partition) for partition in partitions]

        def of(group: str, timeout_s: float) -> dict[TopicPartition, tuple[int, str]]:
            with closing(reader(self._settings, group, revealed(self._source.kafka))) as one:
                return {_ours(at): (at.offset, at.metadata or "") for at in committed(one, timeout_s, asked)}

        def request(timeout_s: float) -> dict[str, dict[TopicPartition, tuple[int, str]]]:
            with ThreadPoolExecutor(_GROUPS_AT_ONCE) as pool:
                begun = {group: pool.submit(of, group, timeout_s) for group in groups}
                return {group: told.result() for group, told in begun.items()}

        return self.ask(f"for the positions of {f'group {groups[0]}' if len(groups) == 1 else 'groups'}", request)

    # How it is asked

    def ask(self, what: str, request: Callable[[float], Answer]) -> Answer:
        """The request's answer, or a ``SourceError`` that says what was asked, of whom, and why there is none; a
        ``ConfigError`` where Kafka refuses what was asked for.

        librdkafka's admin client asks one broker, the one it believes in charge, and waits for it to the end of the
        time-out even when that broker is dead and another has long taken over. So a question is asked in tries of
        growing length, each with a new client that looks up anew who is in charge: a request must take ``admin`` from
        here each time.
        """
        started = time.monotonic()
        try_s = _FIRST_TRY_S
        self._admin.poll(0)  # lets the connections complain of the past, to nobody
        self._troubles.clear()
        while True:
            try:
                return request(max(0.1, min(try_s, started + self.timeout_s - time.monotonic())))
            except KafkaException as error:
                code, said = error.args[0].code(), error.args[0].str()
                if is_permanent(error.args[0]):
                    raise self._refusal(what, error.args[0]) from None
            if code in _REFUSED:
                raise ConfigError(f"Kafka was asked {what}, and refuses it: {strike(self._hidden(), said)}")
            try:
                self._watch()
            except KafkaException as error:
                raise self._refusal(what, error.args[0]) from None
            patience_s = self.timeout_s if code in _PASSING else _NEWS_S if code in _NOT_THERE else 0
            if time.monotonic() - started + _PAUSE_S >= patience_s:
                raise self._failure(what, code)
            time.sleep(_PAUSE_S)
            self._renew()
            try_s *= 2

    def _watch(self) -> None:
        """Raises what the connections complain of if it stays so, however long a request is waited for."""
        self._admin.poll(0)
        if (complaint := first_permanent(self._troubles)) is not None:
            raise KafkaException(complaint)

    def _refusal(self, what: str, error: KafkaError) -> ConfigError:
        return ConfigError(
            f"Kafka at {self._brokers} was asked {what}, and refuses it: {strike(self._hidden(), words(error))}",
            advice=grant(error, topics=self._source.topics, group=self._group),
        )

    def _failure(self, what: str, code: int) -> SourceError:
        reason = KafkaError(code).str()
        if code in _PASSING:
            said = "" if code == KafkaError._TIMED_OUT else f": {reason}"
            reason = f"no answer within {self.timeout_s:g} s{said}"
        troubles = sorted(
            (trouble for trouble in self._troubles if trouble.code() in _TROUBLES),
            key=lambda trouble: _TROUBLES.index(trouble.code()),
        )
        if troubles:
            reason += f" ({strike(self._hidden(), words(troubles[0]))})"
        return SourceError(
            f"Kafka at {self._brokers} was asked {what}: {reason}",
            advice=_ADVICE.get(code) or (_ADVICE.get(troubles[0].code()) if troubles else None) or _CHECK_BROKERS,
        )

    def _hidden(self) -> list[str]:
        """What no message may show."""
        hidden = list(revealed(self._source.kafka).values())
        if self._brokers != self._source.brokers:
            for broker in self._source.brokers.split(","):
                hidden += [broker, broker.rpartition(":")[0]]
        return hidden


def _read(
    wanted: Mapping[TopicPartition, int], reader: client.Consumer, timeout_s: float
) -> dict[TopicPartition, client.Message]:
    """The first record at or after each offset; no item where there is none before the end."""
    nothing_there = (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET)
    missing = set(wanted)
    found: dict[TopicPartition, client.Message] = {}
    deadline = time.monotonic() + timeout_s
    reader.assign([_theirs(partition, offset) for partition, offset in wanted.items()])
    try:
        while missing:
            message = reader.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            partition = TopicPartition(message.topic() or "", message.partition() or 0)
            if partition not in missing:
                continue  # more of what was answered already
            error = message.error()
            if error is None:
                found[partition] = message
            elif error.code() not in nothing_there:
                raise KafkaException(error)
            missing.remove(partition)
            # What follows is of no use, and must not stand in the way of the others.
            reader.incremental_unassign([_theirs(partition)])
    finally:
        reader.unassign()
    return found


def answers(
    asked: Mapping[Name, Future[Any]],
    timeout_s: float,
    absent: int | None = None,
    watch: Callable[[], None] = lambda: None,
) -> dict[Name, Any]:
    """The answers, None for what Kafka says is absent. ``watch`` is called meanwhile, and may raise."""
    # Not left to request_timeout: librdkafka's list_offsets (2.16) waits for ever for a cluster that is not there.
    deadline = time.monotonic() + timeout_s
    answers: dict[Name, Any] = {}
    for name, future in asked.items():
        while not wait([future], max(0.0, min(_PAUSE_S, deadline - time.monotonic()))).done:
            watch()
            if time.monotonic() >= deadline:
                break
        try:
            answers[name] = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
        except KafkaException as error:
            if error.args[0].code() != absent:
                raise
            answers[name] = None
    return answers


def _by_partition(topics: Iterable[TopicDescription]) -> dict[TopicPartition, str]:
    """Each partition -> its topic's id, in order."""
    return {
        # In the letters that Kafka's own tools print; librdkafka uses two others.
        TopicPartition(topic.name, partition.id): str(topic.topic_id).translate(_URL_SAFE)
        for topic in sorted(topics, key=lambda topic: topic.name)
        for partition in sorted(topic.partitions, key=lambda partition: partition.id)
    }


def timestamp_of(record: client.Message) -> int:
    kind, timestamp_ms = record.timestamp()
    return NO_TIMESTAMP if kind == client.TIMESTAMP_NOT_AVAILABLE else timestamp_ms


def as_bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _theirs(partition: TopicPartition, offset: int = client.OFFSET_INVALID) -> client.TopicPartition:
    return client.TopicPartition(partition.topic, partition.partition, offset)


def _ours(partition: client.TopicPartition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def _several(things: Iterable[object]) -> str:
    """For messages: a few names, and how many more."""
    names = [str(thing) for thing in things]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
