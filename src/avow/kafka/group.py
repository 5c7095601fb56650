"""A member of a consumer group: subscribes, is assigned partitions and loses them, reads records, commits offsets.

Theory of operation
-------------------
Partitions are assigned and revoked only inside ``take``: the client calls back then, and at no other time. So a record
in hand is never taken away in the middle, and who takes a partition over waits for it, as long as
``max.poll.interval.ms`` allows; heartbeats are sent by the client's own thread. Nobody polls behind a handler's back to
stretch that: a member that polls while its handler hangs would keep its partitions for ever, and one that is asked for
them could only wait anyway.

``on_assign`` says where to read each partition from; ``on_revoke`` is called before partitions go, and says whether
they were lost: then another member may have them already. What was taken and not passed is read again (``rewind``).

A process that stood still, or lost Kafka, for longer than the group waits is removed from it, and another one takes
over its partitions. It may learn that from the ledger (``Superseded``) before the group says so. Then it gives these
partitions up and goes on as a member; the group will assign it others. Only if the group still calls them ours after a
while, the newer run is no member's but stands beside the group (Spark, by mistake), and that one has the pipeline.

One thread does everything: the client lets no other in while it calls back. A synchronous commit has no time-out: it
waits until the group's coordinator says something, or the request is given up.

Owns: the membership. Must not know: where positions are stored, what is done with records. Its neighbours are the
consumer engine and ``avow.clients.consumer``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from avow.errors import AvowError, Superseded, first_line
from avow.kafka.admin import from_client, several, to_client
from avow.kafka.connect import Connection, RecentErrors, first_permanent
from avow.kafka.metadata import TopicPartition
from avow.kafka.reader import FETCH, FIXED

FENCED_S = 60.0  # how long a newer run may have a partition that the group says is ours
OTHERS_EVERY_S = 0.5  # how often other members' progress is asked for, at the end

Positions = Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Messages of one partition, and the whole range that they stand in: markers and aborted records have offsets."""

    tp: TopicPartition
    start: int
    until: int
    messages: Sequence[client.Message]


class GroupMember:
    """One membership in the connection's group. ``defaults`` are client settings that the user may change, ``own``
    those that no setting may override."""

    def __init__(
        self,
        connection: Connection,
        *,
        on_assign: Callable[[list[TopicPartition]], Positions],
        on_revoke: Callable[[list[TopicPartition], bool], None],
        on_event: Callable[[str], None],
        strategy: str = "cooperative-sticky",
        defaults: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        advice: str = "",
    ) -> None:
        self._connection = connection
        self._assigned, self._revoked, self._event = on_assign, on_revoke, on_event
        self.on_commit: Callable[[Positions, KafkaError | None], None] | None = None  # the outcome of commit_async
        self._eager = strategy != "cooperative-sticky"
        self._advice = advice  # on an error that may pass
        self._errors = RecentErrors()
        self._client = connection.make_client(
            client.Consumer,
            FIXED
            | {
                "group.id": connection.group,
                "error_cb": self._errors.append,
                "partition.assignment.strategy": strategy,
                "on_commit": self._on_commit,
                **(own or {}),
            },
            # How soon added partitions are seen.
            defaults=FETCH | {"topic.metadata.refresh.interval.ms": 10_000, **(defaults or {})},
        )
        self.joined = False  # the group has assigned partitions, maybe none
        self._topics: list[str] = []
        self._next: dict[TopicPartition, int] = {}  # where we read on
        self._changed: set[TopicPartition] = set()  # came or went behind the first record of the present take
        self._astray: set[TopicPartition] = set()  # the client reads elsewhere than at ``_next``
        self._fenced: dict[TopicPartition, tuple[float, Superseded]] = {}  # ours, says the group: since when not
        self._id = ""
        self._others_at = 0.0

    def subscribe(self, topics: Collection[str]) -> None:
        if sorted(topics) == self._topics:
            return
        self._topics = sorted(topics)
        self._connection = replace(self._connection, topics=self._topics)
        assign, revoke = self._on_assign, self._on_revoke
        self._client.subscribe(self._topics, on_assign=assign, on_revoke=revoke, on_lost=self._on_lost)

    def close(self) -> None:
        """Leave the group. What is not committed by now is not committed."""
        with suppress(RuntimeError):  # closed already
            self._client.close()

    # Partitions come and go

    def _on_assign(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self.joined = True
        self._id = consumer.memberid() or ""
        tps = [from_client(tp) for tp in partitions]
        self._changed.update(tps)
        begin: dict[TopicPartition, int] = {}
        fenced: Superseded | None = None
        try:
            begin = dict(self._assigned(tps)) if tps else {}
        except Superseded as error:
            fenced = error
        self._next |= begin
        self._opened(consumer, begin)
        offsets = _offsets(dict.fromkeys(tps, client.OFFSET_END) | begin)
        (consumer.assign if self._eager else consumer.incremental_assign)(offsets)
        if fenced is not None:
            self.give_up(tps, fenced)
        elif begin:
            consumer.resume(_offsets(begin))  # it may have been paused in an earlier stay
        self._pause([tp for tp in tps if tp not in begin])

    def _on_revoke(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._gone(consumer, partitions, False)

    def _on_lost(self, consumer: client.Consumer, partitions: list[client.TopicPartition]) -> None:
        self._gone(consumer, partitions, True)

    def _gone(self, consumer: client.Consumer, partitions: list[client.TopicPartition], lost: bool) -> None:
        gone = [from_client(tp) for tp in partitions]
        try:
            self._revoked(gone, lost)
        finally:
            for tp in gone:
                self._next.pop(tp, None)
                self._fenced.pop(tp, None)
            self._astray.difference_update(gone)
            self._changed.update(gone)
            if self._eager:
                consumer.unassign()
            else:
                consumer.incremental_unassign(partitions)
            self._forget(gone)

    def _opened(self, consumer: client.Consumer, positions: Positions) -> None:
        """These are about to be assigned. For subclasses that gather what they take."""

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are no longer ours."""

    def _moved(self, tp: TopicPartition, position: int) -> None:
        """It is read from there on, whatever was taken of it."""

    def give_up(self, partitions: Collection[TopicPartition], error: Superseded) -> None:
        """A newer run has these: read no more of them, until the group has reassigned them."""
        self._event(f"{several(sorted(partitions))}: {first_line(error)}; waiting for the group to reassign")
        self._astray.difference_update(partitions)
        for tp in partitions:
            self._next.pop(tp, None)
            self._fenced[tp] = (time.monotonic(), error)
        self._forget(partitions)
        self._pause(partitions)

    def leave(self, topics: Collection[str]) -> None:
        """Read no more of these. They are to be left out of the next ``subscribe``."""
        partitions = [tp for tp in self._next if tp.topic in topics]
        self._astray.difference_update(partitions)
        for tp in partitions:
            del self._next[tp]
        self._forget(partitions)
        self._pause(partitions)

    def _pause(self, partitions: Iterable[TopicPartition]) -> None:
        with suppress(KafkaException):  # it is just going
            self._client.pause([to_client(tp) for tp in partitions])

    def _raise_superseded(self) -> None:
        """A newer run in one of our partitions is a rebalance that has not reached us. If it never does, we are
        superseded."""
        for since, error in self._fenced.values():
            if time.monotonic() - since > FENCED_S:
                raise error

    # Records

    def take(self, most: int, wait_s: float) -> list[Fetched]:
        """What is at hand; where there is nothing, what comes next. In the order of each partition."""
        self.before_take()
        first = self._client.poll(wait_s)
        if first is None:
            self.raise_permanent()
            return []
        self._changed.clear()
        messages = [first, *self._client.consume(most - 1, 0)] if most > 1 else [first]
        by_partition: dict[TopicPartition, list[client.Message]] = {}
        for (topic, partition), of_partition in groupby(messages, _place):
            if topic is None:
                self._raise_error(next(of_partition).error())
                continue
            tp = TopicPartition(topic, partition)
            if tp not in self._next or tp in self._astray:
                continue  # not ours any more, or not what we want next
            if tp in self._changed:
                # It came or went behind the first record, which may be of an earlier stay: what lies between that one
                # and our position would be passed unseen.
                self._astray.add(tp)
                continue
            by_partition.setdefault(tp, []).extend(of_partition)
        return [
            fetched
            for tp, of_partition in by_partition.items()
            if (fetched := self._fetched(tp, of_partition)) is not None
        ]

    def before_take(self) -> None:
        self._raise_superseded()
        self.rewind({tp: self._next[tp] for tp in self._astray})

    def raise_permanent(self) -> None:
        """Where nothing comes: what the connections report, if that stays."""
        if (error := first_permanent(self._errors)) is not None:
            raise self.failure(error)

    def _fetched(self, tp: TopicPartition, messages: list[client.Message]) -> Fetched | None:
        start = until = self._next[tp]
        records = []
        for message in messages:
            error = message.error()
            if error is None:
                records.append(message)
                until = (message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                until = max(until, message.offset() or 0)
            else:
                raise self.failure(error)
        if until == start:
            return None
        self._next[tp] = until
        return Fetched(tp, start, until, records)

    def _raise_error(self, error: KafkaError | None) -> None:
        # max.poll.interval.ms was exceeded: we were removed from the group. The client also revokes our partitions.
        if error is not None and error.code() != KafkaError._MAX_POLL_EXCEEDED:
            raise self.failure(error)

    def failure(self, error: KafkaError) -> AvowError:
        action = f"read records as a member of group {self._connection.group}"
        return self._connection.translate(action, error, self._advice)

    def rewind(self, positions: Positions) -> None:
        """Read on at these positions."""
        for tp, position in positions.items():
            if tp not in self._next or (self._next[tp] == position and tp not in self._astray):
                continue
            self._next[tp] = position
            self._moved(tp, position)
            try:
                self._client.seek(to_client(tp, position))
                self._astray.discard(tp)
            except KafkaException:
                # It is just coming or going. Until the client has it, nothing that comes of it is what we want.
                self._astray.add(tp)

    def drained(
        self, ends: Positions, positions: Positions, elsewhere: Callable[[list[TopicPartition]], Positions]
    ) -> bool:
        """Whether all up to the ends is done: by us (``positions``), or by other members (``elsewhere``)."""
        # Not before the group has assigned ours, and the ledger was asked: there may be a reason to stop.
        if not self.joined or any(position < ends.get(tp, 0) for tp, position in positions.items()):
            return False
        unassigned = [tp for tp, end in ends.items() if tp not in positions and end]
        if not unassigned:
            return bool(positions) or not any(ends.values())
        if time.monotonic() - self._others_at < OTHERS_EVERY_S:
            return False
        self._others_at = time.monotonic()
        reached = elsewhere(unassigned)
        return all(reached.get(tp, 0) >= ends[tp] for tp in unassigned)

    # Commits

    def commit(self, positions: Positions) -> None:
        """Raises a KafkaException if the group refuses, or we are not its member any more."""
        self._refuse_removed()
        for tp in self._client.commit(offsets=_offsets(positions), asynchronous=False):
            if tp.error is not None:
                raise KafkaException(tp.error)

    def commit_async(self, positions: Positions) -> None:
        """The same without waiting: ``on_commit`` is called with the outcome. Raises if it was not even sent."""
        self._refuse_removed()
        self._client.commit(offsets=_offsets(positions), asynchronous=True)

    def _refuse_removed(self) -> None:
        # A client that was removed from the group forgets its id, and Kafka takes a commit without one as soon as the
        # group is empty: over the positions of whoever was there meanwhile.
        if self._client.memberid() != self._id:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def _on_commit(self, error: KafkaError | None, partitions: list[client.TopicPartition]) -> None:
        wrong = next((tp.error for tp in partitions if tp.error is not None), error)
        if self.on_commit is not None:
            self.on_commit({from_client(tp): tp.offset for tp in partitions}, wrong)


def _offsets(positions: Positions) -> list[client.TopicPartition]:
    return [to_client(tp, position) for tp, position in positions.items()]


def _place(message: client.Message) -> tuple[str | None, int]:
    return message.topic(), message.partition()  # type: ignore[return-value]
