"""A member of a consumer group: which partitions are ours, what comes of them, and commits, one after another.

Theory of operation
-------------------
Partitions come and go only inside ``take``: the client calls us then, and at no other time. So a record in hand is
never taken away in the middle, and who takes a partition over waits for it, as long as ``max.poll.interval.ms`` allows;
heartbeats are the client's own thread's. Nobody polls behind a handler's back to stretch that: a member that polls
while its handler hangs would keep its partitions for ever, and one that is asked for them could only wait anyway.

Where we read on is in our hands. What was taken and not passed is read again (``rewind``): after a failure, and when
somebody breaks out of a loop.

One thread does everything: the client lets no other in while it calls us. A synchronous commit has no time-out: it
waits until the group's coordinator says something, or the request is given up.

Owns: the client and its settings. Must not know: where positions are kept, what is done with records. Neighbours:
``keeping`` (which says where to begin) and ``consumer``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.errors import AvowError, ConfigError, SourceError
from avow.kafka.connect import first_permanent, grant, is_permanent, made, settings_of, strike, words
from avow.kafka.headers import KEY, headers_of
from avow.kafka.log import TopicPartition
from avow.kafka.reader import FETCH, FIXED
from avow.settings import Source, revealed

NEWS = {"topic.metadata.refresh.interval.ms": 10_000}  # how soon added partitions are seen, unless declared
STRATEGIES = {"cooperative": "cooperative-sticky", "eager": "range,roundrobin"}


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as it stands in the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]

    @property
    def idempotency_key(self) -> bytes | None:
        """What the producer called this message, in the header ``avow-key``; the last one, if there are several."""
        return next((value for name, value in reversed(self.headers) if name == KEY), None)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one partition, and the whole range that they stand in: markers and aborted records have offsets."""

    where: TopicPartition
    start: int
    until: int
    records: Sequence[Record]


class Member:
    """One membership. ``begin`` is asked where to read partitions that have become ours; ``release`` is told which no
    longer are, and whether they were lost: then somebody else may have them already."""

    def __init__(
        self,
        source: Source,
        group: str,
        *,
        assignment: str,
        longest_s: float,
        begin: Callable[[list[TopicPartition]], Mapping[TopicPartition, int]],
        release: Callable[[list[TopicPartition], bool], None],
        answered: Callable[[Mapping[TopicPartition, int], KafkaError | None], None],
    ) -> None:
        self._source = source
        self._begin = begin
        self._release = release
        self._answered = answered
        self._eager = assignment == "eager"
        given = revealed(source.kafka)
        self._group = group
        self._complaints: deque[KafkaError] = deque(maxlen=100)
        own: dict[str, Any] = {
            "group.id": group,
            "error_cb": self._complaints.append,
            "partition.assignment.strategy": STRATEGIES[assignment],
            "max.poll.interval.ms": int(longest_s * 1000),
            "on_commit": self._on_commit,
        }
        self._client = made(client.Consumer, settings_of(source) | FETCH | NEWS | given | FIXED | own, given)
        self.joined = False  # the group has said which partitions are ours, be it none
        self._next: dict[TopicPartition, int] = {}  # where we read on
        self._changed: set[TopicPartition] = set()  # came or went in the present take
        self._astray: set[TopicPartition] = set()  # the client reads elsewhere than at ``_next``
        self._id = ""

    def subscribe(self) -> None:
        given, taken = self._on_assign, self._on_revoke
        self._client.subscribe(list(self._source.topics), on_assign=given, on_revoke=taken, on_lost=self._on_lost)

    def close(self) -> None:
        """Leave the group. What is not committed by now is not committed."""
        with suppress(RuntimeError):  # closed already
            self._client.close()

    @property
    def ours(self) -> dict[TopicPartition, int]:
        """The partitions that are ours, and where we read on."""
        return dict(self._next)

    # Partitions come and go

    def _on_assign(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self.joined = True
        self._id = consumer.memberid() or ""
        ours = [TopicPartition(one.topic, one.partition) for one in partitions]
        begin = self._begin(ours) if ours else {}
        self._next |= begin
        self._changed.update(ours)
        offsets = _offsets(begin)
        (consumer.assign if self._eager else consumer.incremental_assign)(offsets)
        if offsets:
            consumer.resume(offsets)  # it may have been paused in an earlier stay

    def _on_revoke(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._gone(consumer, partitions, False)

    def _on_lost(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._gone(consumer, partitions, True)

    def _gone(self, consumer: client.Consumer, partitions: list[client.TopicPartition], lost: bool) -> None:
        gone = [TopicPartition(one.topic, one.partition) for one in partitions]
        try:
            self._release(gone, lost)
        finally:
            for where in gone:
                self._next.pop(where, None)
            self._astray.difference_update(gone)
            self._changed.update(gone)
            if self._eager:
                consumer.unassign()
            else:
                consumer.incremental_unassign(partitions)

    # Records

    def take(self, most: int, wait_s: float) -> list[Batch]:
        """What is at hand; where there is nothing, what comes next. In the order of each partition."""
        self._changed.clear()
        self.rewind({where: self._next[where] for where in self._astray})
        first = self._client.poll(wait_s)
        if first is None:
            if (complaint := first_permanent(self._complaints)) is not None:
                raise self.failure(complaint)
            return []
        messages = [first, *self._client.consume(most - 1, 0)] if most > 1 else [first]
        batches: dict[TopicPartition, list[client.Message]] = {}
        for (topic, partition), some in groupby(messages, _place):
            found = list(some)
            if topic is None:
                self._note(found[0].error())
                continue
            where = TopicPartition(topic, partition)
            if where not in self._next or where in self._astray:
                continue  # not ours any more, or not what we want next
            if where in self._changed:
                # It came or went between two of these messages, so some may be of an earlier stay. Read them again.
                self._astray.add(where)
                continue
            batches.setdefault(where, []).extend(found)
        return [batch for where, found in batches.items() for batch in self._batch(where, found)]

    def _batch(self, where: TopicPartition, messages: list[client.Message]) -> list[Batch]:
        start = until = self._next[where]
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(_record(message))
                until = records[-1].offset + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                until = max(until, message.offset() or 0)
            else:
                raise self.failure(error)
        if until == start:
            return []
        self._next[where] = until
        return [Batch(where, start, until, records)]

    def _note(self, error: KafkaError | None) -> None:
        # We were too slow and are out of the group. The client says so once more, by taking our partitions away.
        if error is not None and error.code() != KafkaError._MAX_POLL_EXCEEDED:
            raise self.failure(error)

    def failure(self, error: KafkaError) -> AvowError:
        said = strike(revealed(self._source.kafka).values(), words(error))
        if is_permanent(error):
            return ConfigError(
                f"Kafka at {self._source.shown('brokers')} refuses records to group {self._group}: {said}",
                advice=grant(error, "the client's settings", topics=self._source.topics, group=self._group),
            )
        return SourceError(
            f"Kafka at {self._source.shown('brokers')}, asked for records: {said}",
            advice="Check the brokers and the topics' leaders. The positions are whole: start again when it is mended.",
        )

    def rewind(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read on at these positions."""
        for where, position in positions.items():
            if where not in self._next or (self._next[where] == position and where not in self._astray):
                continue
            self._next[where] = position
            try:
                self._client.seek(client.TopicPartition(where.topic, where.partition, position))
                self._astray.discard(where)
            except KafkaException:
                # It is just coming or going. Until the client has it, nothing that comes of it is what we want.
                self._astray.add(where)

    def pause(self, where: TopicPartition) -> None:
        """Take no more of it."""
        with suppress(KafkaException):
            self._client.pause([client.TopicPartition(where.topic, where.partition)])

    # Commits

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Raises a KafkaException if the group says no, or that we are not its member."""
        self._refuse_outcast()
        for one in self._client.commit(offsets=_offsets(positions), asynchronous=False):
            if one.error is not None:
                raise KafkaException(one.error)

    def commit_later(self, positions: Mapping[TopicPartition, int]) -> None:
        """The same without waiting: ``answered`` is told. It raises if it was not even sent."""
        self._refuse_outcast()
        self._client.commit(offsets=_offsets(positions), asynchronous=True)

    def _refuse_outcast(self) -> None:
        # A client that was thrown out forgets its id, and Kafka takes a commit without one as soon as the group is
        # empty: over the positions of whoever was there meanwhile.
        if self._client.memberid() != self._id:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def _on_commit(self, error: KafkaError | None, partitions: list[client.TopicPartition]) -> None:
        wrong = next((one.error for one in partitions if one.error is not None), error)
        self._answered({TopicPartition(one.topic, one.partition): one.offset for one in partitions}, wrong)


def _offsets(positions: Mapping[TopicPartition, int]) -> list[client.TopicPartition]:
    return [client.TopicPartition(w.topic, w.partition, position) for w, position in positions.items()]


def _place(message: client.Message) -> tuple[str | None, int]:
    return message.topic(), message.partition()  # type: ignore[return-value]


def _record(message: client.Message) -> Record:
    kind, timestamp_ms = message.timestamp()
    return Record(
        message.topic(),  # type: ignore[arg-type]
        message.partition(),  # type: ignore[arg-type]
        message.offset(),  # type: ignore[arg-type]
        -1 if kind == client.TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
        message.key(),
        message.value(),
        headers_of(message),
    )
