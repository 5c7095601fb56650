"""The source's log: which partitions there are, where they begin and end, and which record is at an offset.

Theory of operation
-------------------
A ``Log`` is one handle per run. Offsets come from ``admin``, each request for all partitions at once; records are read
by a consumer that is assigned and never subscribes, so that no group sees a member come and go. Positions are committed
to the pipeline's consumer group through ``admin`` too: a consumer's synchronous commit has no time-out.

There are two end offsets of a partition. ``offsets`` gives the log's own end (the high watermark), against which a
position is judged. ``stable_ends`` gives where committed records end: beyond it a transaction is still open. A run
reads committed records only, so a declared start never lies beyond the stable end of its moment unless it is
an explicit offset: a transaction open at that moment would otherwise be read in half.

Owns: these questions. Must not know: the ledger's rules, Spark, any sink. Its neighbours are ``ledger`` (whose
``plan_start`` judges a ``LogView``) and ``admin`` (the requests, their time-outs and errors).
"""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, OffsetSpec, TopicDescription  # type: ignore[attr-defined]

from avow.errors import SourceError
from avow.kafka.admin import Admin, several, to_client
from avow.kafka.connect import Connection
from avow.kafka.headers import headers_of
from avow.kafka.metadata import ClusterView, TopicPartition
from avow.ledger import Entry, Fingerprint, LogView
from avow.retry import poll_until
from avow.settings import Source, Start

__all__ = ["Log", "LogRecord", "TopicPartition", "fingerprint"]

NEWS_S = 2.0  # as ``admin`` has it, but a mistyped name should not wait that long
NO_TIMESTAMP = -1  # of a record that has none
_URL_SAFE = str.maketrans("+/", "-_")


@dataclass(frozen=True, slots=True)
class LogRecord:
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
    """The source's topics. Close it, or use it as a context manager."""

    def __init__(self, source: Source, group: str, *, timeout_s: float = 30, key: str = "source.kafka") -> None:
        self._source = source
        self._group = group
        self.admin = Admin(Connection.of(source, group, key=key), timeout_s=timeout_s)
        self._readers: dict[str, client.Consumer] = {}  # by isolation level

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._close_readers()
        self.admin.close()

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def cluster(self) -> ClusterView:
        """Brokers, leaders and replicas of all topics."""
        return self.admin.cluster()

    # Which partitions there are

    def partitions(self) -> dict[TopicPartition, str]:
        """Every partition of the declared topics, or of those whose whole name matches the pattern -> topic id.

        A pattern never matches Kafka's internal topics. No match at all is an error: most likely a mistyped
        pattern.
        """
        pattern = self._source.topics_pattern
        if pattern is None:
            return self.partitions_of(self._source.topics)
        names = [name for name in self.admin.topic_names() if re.fullmatch(pattern, name)]
        described = self.admin.describe_topics(names).values()
        by_topic = _by_partition(topic for topic in described if topic is not None and not topic.is_internal)
        if not by_topic:
            raise SourceError(
                f"no topic at {self.admin.connection} matches source.topics_pattern = "
                f"{self._source.shown('topics_pattern')!r}",
                advice="The pattern must match a topic's whole name. Correct it, or create the topic.",
            )
        return by_topic

    def partitions_of(self, topics: Iterable[str], *, skip_missing: bool = False) -> dict[TopicPartition, str]:
        """Every partition of these topics -> topic id. They must exist; or those that do not are left out."""
        names = sorted(set(topics))
        described: dict[str, TopicDescription | None] = {}

        def complete() -> bool:
            described.update(self.admin.describe_topics(names))
            return None not in described.values()

        if poll_until(complete, NEWS_S) or skip_missing:
            return _by_partition(topic for topic in described.values() if topic is not None)
        missing = [name for name in names if described[name] is None]
        raise SourceError(
            f"{'topics' if missing[1:] else 'topic'} {several(missing)} "
            f"{'do' if missing[1:] else 'does'} not exist at {self.admin.connection}",
            advice="Create the topic or correct source.topics. Topics that the pipeline's user may not "
            "describe are hidden from it.",
        )

    # Where they begin and end

    def offsets(
        self, partitions: Iterable[TopicPartition], *, skip_deleted: bool = False
    ) -> dict[TopicPartition, tuple[int, int]]:
        """The earliest offset and the log's end, one past its last offset, be it committed or not. ``skip_deleted``:
        without the partitions that do not exist, which else are an error."""
        # In this order: an end only grows, so it cannot lie below an earliest offset that was asked for before.
        earliest = self.admin.earliest_offsets(partitions, skip_deleted=skip_deleted)
        ends = self.admin.end_offsets(earliest, skip_deleted=skip_deleted)
        return {tp: (earliest[tp], end) for tp, end in ends.items()}

    def stable_ends(
        self, partitions: Iterable[TopicPartition], *, skip_deleted: bool = False
    ) -> dict[TopicPartition, int]:
        """Where committed records end for now: a reader of them gets no further."""
        return self.admin.end_offsets(partitions, committed=True, skip_deleted=skip_deleted)

    def declared_start(self, start: Start, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The pipeline's start as offsets.

        ``latest``, and a time after the last record, are the stable end. A time is the first record that is not
        older. Explicit offsets are given back as they are (``plan_start`` judges them); a partition that they do
        not name starts at its earliest.
        """
        tps = tuple(partitions)
        match start:
            case "earliest":
                return self.admin.earliest_offsets(tps)
            case "latest":
                return self.stable_ends(tps)
            case datetime():
                return self._at_time(start, tps)
            case _:
                named = {p: start[p.topic][p.partition] for p in tps if p.partition in start.get(p.topic, {})}
                unnamed = (p for p in tps if p not in named)
                return named | self.admin.earliest_offsets(unnamed)

    def _at_time(self, moment: datetime, partitions: tuple[TopicPartition, ...]) -> dict[TopicPartition, int]:
        # Rounded up: Kafka counts milliseconds, and a record of the millisecond before is older.
        # Not below 0: to Kafka, negative offsets are constants, such as the end.
        since_ms = max(0, -((datetime(1970, 1, 1, tzinfo=UTC) - moment) // timedelta(milliseconds=1)))
        # The ends first: a record that comes in between is then found by its time, or read after the end.
        ends = self.stable_ends(partitions)
        spec = OffsetSpec.for_timestamp(since_ms)
        offsets = self.admin.list_offsets(f"offsets at {moment.isoformat()}", partitions, spec, committed=True)
        return {p: offset if offset >= 0 else ends[p] for p, offset in offsets.items()}

    # Which record is at an offset

    def view(self, entries: Mapping[TopicPartition, Entry | None]) -> dict[TopicPartition, LogView]:
        """All that ``plan_start`` needs to judge the ledger's entries.

        A partition that its topic does not have (any more) is an empty log under the topic's present id: a topic
        made again with fewer partitions is then judged like any other that was made again.
        """
        ids = self.partitions_of(partition.topic for partition in entries)
        topics = {partition.topic: topic_id for partition, topic_id in ids.items()}
        offsets = self.offsets(partition for partition in entries if partition in ids)
        fingerprints = self._fingerprints(entries, offsets)
        return {
            p: LogView(p.topic, p.partition, topics[p.topic], *offsets.get(p, (0, 0)), found=fingerprints.get(p))
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
        return {tp: timestamp_of(message) for tp, message in self._first_records(positions, "read_uncommitted").items()}

    def records(self, tp: TopicPartition, offsets: Iterable[int]) -> list[LogRecord]:
        """Single records with their bytes, for the few that have to be looked at again."""
        records = []
        for offset in offsets:
            message = self._first_records({tp: offset}, "read_committed").get(tp)
            if message is None or message.offset() != offset:
                raise SourceError(f"there is no committed record at offset {offset} of {tp}")
            key, value = as_bytes(message.key()), as_bytes(message.value())
            records.append(LogRecord(offset, timestamp_of(message), key, value, headers_of(message)))
        return records

    def _first_records(
        self, wanted: Mapping[TopicPartition, int], isolation: str
    ) -> dict[TopicPartition, client.Message]:
        """The first record at or after each offset; no item where there is none before the end."""
        if not wanted:
            return {}

        def call(_: AdminClient, timeout_s: float) -> dict[TopicPartition, client.Message]:
            try:
                return _read(wanted, self._reader(isolation), timeout_s)
            except KafkaException:
                self._close_readers()  # the next try looks up the leaders anew
                raise

        return self.admin.request(f"read records of {several(wanted)}", call)

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
                "error_cb": self.admin.errors.append,
            }
            self._readers[isolation] = self.admin.connection.make_client(client.Consumer, own)
        return self._readers[isolation]

    # The pipeline's consumer group

    def commit_offsets(self, positions: Mapping[TopicPartition, int]) -> None:
        """Commit these positions to the pipeline's group, for the tools that show lag. Nothing reads them back."""
        self.admin.commit_offsets(self._group, positions)

    def committed_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """What was last committed to the group, by us or by anyone. None: nothing."""
        wanted = list(partitions)
        offsets = self.admin.committed_offsets([self._group], wanted)[self._group] if wanted else {}
        return {tp: offsets[tp][0] if tp in offsets else None for tp in wanted}


def _read(
    wanted: Mapping[TopicPartition, int], reader: client.Consumer, timeout_s: float
) -> dict[TopicPartition, client.Message]:
    """The first record at or after each offset; no item where there is none before the end."""
    nothing_there = (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET)
    missing = set(wanted)
    messages: dict[TopicPartition, client.Message] = {}
    deadline = time.monotonic() + timeout_s
    reader.assign([to_client(partition, offset) for partition, offset in wanted.items()])
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
                messages[partition] = message
            elif error.code() not in nothing_there:
                raise KafkaException(error)
            missing.remove(partition)
            # The rest of this partition is not needed, and must not delay the others.
            reader.incremental_unassign([to_client(partition)])
    finally:
        reader.unassign()
    return messages


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
