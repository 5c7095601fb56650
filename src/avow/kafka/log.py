"""What a run asks of Kafka's log: which partitions there are, where they begin and end, and what stands where.

Theory of operation
-------------------
A ``Log`` is one handle per run. Requests go through librdkafka's admin client, each for all partitions at once;
records are read by a consumer that is assigned and never subscribes, so that no group sees a member come and go.
Group positions are told through the admin client too: it is the offset commit of a consumer without a group
membership, but with a time-out of its own, which a consumer's synchronous commit has not.

Every call ends in time, with an answer or with a ``SourceError`` that says what was asked, of whom, and what to do.
Broker addresses are shown as the pipeline file wrote them, and Kafka's reason by its code: the text that comes with
it may hold what the environment gave.

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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

import confluent_kafka as client
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from avow.errors import ConfigError, SourceError
from avow.kafka.metadata import QUIET
from avow.ledger import Entry, Fingerprint, LogView
from avow.settings import Source, Start, revealed

__all__ = ["Log", "Record", "TopicPartition", "fingerprint"]

Name = TypeVar("Name")

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_CHECK_BROKERS = "Check that source.brokers is right and that the cluster is up."
_ADVICE = {
    KafkaError._AUTHENTICATION: "Check the sasl.* settings of source.kafka.",
    KafkaError.SASL_AUTHENTICATION_FAILED: "Check the sasl.* settings of source.kafka.",
    KafkaError._SSL: "Check security.protocol and the ssl.* settings of source.kafka.",
    KafkaError._RESOLVE: "Check the host names in source.brokers.",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Give the pipeline's user the right to describe and read the topics.",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Give the pipeline's user the right to read the group named like it.",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "Check that the topics are there: one may have just been deleted.",
    KafkaError._NOENT: "Check that the topics are there: one may have just been deleted.",
    KafkaError.UNKNOWN_MEMBER_ID: "A consumer has joined the group of this name, which is the pipeline's: stop it.",
}
# What the connections complained of, most telling first: a request over them only says that it timed out.
_TROUBLES = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE, KafkaError._ALL_BROKERS_DOWN)


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

    def __init__(self, source: Source, group: str, *, timeout_s: float = 15) -> None:
        self._source = source
        self._group = group
        self._timeout_s = timeout_s  # of one request; a method makes at most four
        self._brokers = source.shown("brokers")
        self._troubles: deque[int] = deque(maxlen=100)
        troubles = self._troubles  # not self: the admin client ends with its last reference, and it holds this
        self._settings = _client_settings(source) | {"error_cb": lambda error: troubles.append(error.code())}
        self._admin = _made(AdminClient, self._settings, source)
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

    # Which partitions there are

    def partitions(self) -> dict[TopicPartition, str]:
        """Every partition of the declared topics, or of those whose whole name matches the pattern -> topic id.

        A pattern never matches Kafka's internal topics. No topic at all is an error: it is a slip of the pen far
        more often than a wish.
        """
        pattern = self._source.topics_pattern
        if pattern is None:
            return self._described(self._source.topics)
        names = [name for name in self._topic_names() if re.fullmatch(pattern, name)]
        found = self._described(names, declared=False)
        if not found:
            raise SourceError(
                f"no topic at {self._brokers} matches source.topics_pattern = {self._source.shown('topics_pattern')!r}",
                advice="The pattern must match a topic's whole name. Correct it, or create the topic.",
            )
        return found

    def _topic_names(self) -> list[str]:
        with self._asking("for the names of all topics"):
            return sorted(self._admin.list_topics(timeout=self._timeout_s).topics)

    def _described(self, topics: Iterable[str], *, declared: bool = True) -> dict[TopicPartition, str]:
        """Partitions with their topic's id. Of topics that only matched: not the missing, not the internal."""
        names = sorted(set(topics))
        if not names:
            return {}
        with self._asking(f"for the partitions of {_several(names)}"):
            asked = self._admin.describe_topics(client.TopicCollection(names), request_timeout=self._timeout_s)
            answers = self._answers(asked, absent=KafkaError.UNKNOWN_TOPIC_OR_PART)
        missing = [name for name in names if answers[name] is None]
        if missing and declared:
            raise SourceError(
                f"{'topics' if missing[1:] else 'topic'} {_several(missing)} of source.topics "
                f"{'are' if missing[1:] else 'is'} not at {self._brokers}",
                advice="Create what is missing or correct source.topics; topics that the user may not describe are "
                "hidden from it.",
            )
        told = [answer for answer in answers.values() if answer is not None]
        return {
            TopicPartition(topic.name, partition.id): str(topic.topic_id)
            for topic in sorted(told, key=lambda topic: topic.name)
            if declared or not topic.is_internal
            for partition in sorted(topic.partitions, key=lambda partition: partition.id)
        }

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
        since_ms = -((datetime(1970, 1, 1, tzinfo=UTC) - moment) // timedelta(milliseconds=1))
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
        with self._asking(f"for the {what} of {_several(wanted)}"):
            specs = {_theirs(partition): spec for partition in wanted}
            asked = self._admin.list_offsets(specs, isolation_level=isolation, request_timeout=self._timeout_s)
            return {_ours(theirs): answer.offset for theirs, answer in self._answers(asked).items()}

    # What stands where

    def view(self, entries: Mapping[TopicPartition, Entry | None]) -> dict[TopicPartition, LogView]:
        """All that ``plan_start`` needs to judge the ledger's entries.

        A partition that its topic does not have (any more) is an empty log under the topic's present id: a topic
        made again with fewer partitions is then judged like any other that was made again.
        """
        ids = self._described(partition.topic for partition in entries)
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
            partition: fingerprint(wanted[partition], _timestamp_ms(record), record.key(), record.value())
            for partition, record in records.items()
            if record.offset() == wanted[partition]
        }

    def timestamps_at(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The timestamp, in ms, of the first committed record at or after each position: now less this is the lag.

        None where there is none: the position is at the stable end, or has been overtaken by retention.
        """
        ends = self.stable_ends(positions)
        behind = {partition: offset for partition, offset in positions.items() if offset < ends[partition]}
        records = self._first_records(behind, "read_committed")
        return {p: _timestamp_ms(records[p]) if p in records else None for p in positions}

    def records(self, where: TopicPartition, offsets: Iterable[int]) -> list[Record]:
        """Single records with their bytes, for the few that have to be looked at again."""
        found = []
        for offset in offsets:
            message = self._first_records({where: offset}, "read_committed").get(where)
            if message is None or message.offset() != offset:
                raise SourceError(f"there is no committed record at offset {offset} of {where}")
            headers = [(name, _bytes(value)) for name, value in message.headers() or ()]
            found.append(Record(offset, _timestamp_ms(message), _bytes(message.key()), _bytes(message.value()), headers))
        return found

    def _first_records(
        self, wanted: Mapping[TopicPartition, int], isolation: str
    ) -> dict[TopicPartition, client.Message]:
        """The first record at or after each offset; no item where there is none before the end."""
        if not wanted:
            return {}
        nothing_there = (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET)
        missing, found = set(wanted), {}
        deadline = time.monotonic() + self._timeout_s
        with self._asking(f"for records of {_several(wanted)}"):
            reader = self._reader(isolation)
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
            self._readers[isolation] = _made(client.Consumer, self._settings | own, self._source)
        return self._readers[isolation]

    # What the group is told

    def tell(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit these positions to the pipeline's group, for the tools that show lag. Nothing reads them back.

        Kafka refuses it while the group has members.
        """
        if positions:
            offsets = [_theirs(partition, position) for partition, position in positions.items()]
            with self._asking(f"to take the positions of {_several(positions)} for group {self._group}"):
                request = [client.ConsumerGroupTopicPartitions(self._group, offsets)]
                self._group_answer(self._admin.alter_consumer_group_offsets(request, request_timeout=self._timeout_s))

    def told(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """What the group was last told, by us or by anyone. None: nothing."""
        asked = [_theirs(partition) for partition in partitions]
        if not asked:
            return {}
        with self._asking(f"for the positions of group {self._group}"):
            request = [client.ConsumerGroupTopicPartitions(self._group, asked)]
            answer = self._group_answer(
                self._admin.list_consumer_group_offsets(request, request_timeout=self._timeout_s)
            )
        return {_ours(theirs): theirs.offset if theirs.offset >= 0 else None for theirs in answer}

    def _group_answer(self, asked: Mapping[str, Future[Any]]) -> list[client.TopicPartition]:
        answer: list[client.TopicPartition] = self._answers(asked)[self._group].topic_partitions
        for partition in answer:
            if partition.error is not None:
                raise KafkaException(partition.error)
        return answer

    # How it is asked

    def _answers(self, asked: Mapping[Name, Future[Any]], absent: int | None = None) -> dict[Name, Any]:
        """The answers, None for what Kafka says is absent. Not later than the time-out, whatever librdkafka does:

        its list_offsets waits for ever for a cluster that is not there (2.16), its request_timeout notwithstanding.
        """
        deadline = time.monotonic() + self._timeout_s
        answers: dict[Name, Any] = {}
        for name, future in asked.items():
            try:
                answers[name] = future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
            except KafkaException as error:
                if error.args[0].code() != absent:
                    raise
                answers[name] = None
        return answers

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turns what Kafka's client raises within into a ``SourceError`` that says what was asked."""
        self._admin.poll(0)  # lets the connections complain of the past, to nobody
        self._troubles.clear()
        try:
            yield
        except KafkaException as error:
            self._admin.poll(0)
            raise self._failure(what, error.args[0].code()) from error

    def _failure(self, what: str, code: int) -> SourceError:
        trouble = next((trouble for trouble in _TROUBLES if trouble in self._troubles), code)
        reason = _reason(code)
        if code == KafkaError._TIMED_OUT:
            reason = f"no answer within {self._timeout_s:g} s"
        if trouble != code:
            reason += f" ({_reason(trouble)})"
        return SourceError(
            f"Kafka at {self._brokers} was asked {what}: {reason}",
            advice=_ADVICE.get(code) or _ADVICE.get(trouble) or _CHECK_BROKERS,
        )


def _client_settings(source: Source) -> dict[str, Any]:
    given = revealed(source.kafka)
    settings: dict[str, Any] = {"bootstrap.servers": source.brokers}
    if not any(name.startswith("reconnect.backoff.") for name in given):
        # Looks again soon after a refused connection: librdkafka's own back-off grows to ten seconds.
        settings["reconnect.backoff.max.ms"] = 250
    return settings | given


Client = TypeVar("Client", AdminClient, client.Consumer)


def _made(kind: type[Client], settings: dict[str, Any], source: Source) -> Client:
    """A client with these settings. What it does not take of the user's is a ``ConfigError`` that names it."""
    try:
        return kind(settings, logger=QUIET)
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        given = revealed(source.kafka)
        text = _complaint(error)
        keys = [f"source.kafka.{name}" for name in _culprits(given, text)] or ["source.kafka"]
        # Not "from error": librdkafka quotes values.
        raise ConfigError(
            f"{', '.join(keys)}: librdkafka, Kafka's C client, says: {_without_values(text, given.values())}",
            advice="Client settings are spelled as librdkafka spells them; some of Java's are not among them.",
        ) from None


def _complaint(error: Exception) -> str:
    cause = error.args[0] if error.args else ""
    return cause.str() if isinstance(cause, KafkaError) else str(cause)


def _culprits(given: Mapping[str, str], text: str) -> list[str]:
    named = [name for name in given if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)]
    return named or [name for name, value in given.items() if _complains(name, value, text)]


def _complains(name: str, value: str, text: str) -> bool:
    """Whether this setting alone gives the same complaint. Of Java's settings, librdkafka does not say the name."""
    try:
        AdminClient({name: value}, logger=QUIET)
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        return _complaint(error) == text
    return False


def _without_values(text: str, values: Iterable[str]) -> str:
    """The text with every value, and every word that stands in one, struck out."""
    known = sorted(filter(None, values), key=len, reverse=True)
    for value in known:
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    hide = re.compile(r"[^\s\"'`:,=]{3,}")
    return hide.sub(lambda word: "***" if any(word[0] in value for value in known) else word[0], text)


def _reason(code: int) -> str:
    return KafkaError(code).str()


def _timestamp_ms(record: client.Message) -> int:
    kind, timestamp_ms = record.timestamp()
    return -1 if kind == client.TIMESTAMP_NOT_AVAILABLE else timestamp_ms


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _theirs(partition: TopicPartition, offset: int = client.OFFSET_INVALID) -> client.TopicPartition:
    return client.TopicPartition(partition.topic, partition.partition, offset)


def _ours(partition: client.TopicPartition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def _several(things: Iterable[object]) -> str:
    """For messages: a few names, and how many more."""
    names = [str(thing) for thing in things]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
