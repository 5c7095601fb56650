"""Positions in the Kafka consumer group: where to begin, and commits before or after the handler.

Theory of operation
-------------------
Begin: the group's committed position; where there is none, the declared start, which is committed before anything is
read. Otherwise "latest" would mean another place after each crash, and what lies between would be lost.

``claim`` is for at-most-once: it is answered, with yes, before the handler sees a record. ``passed`` and ``commit`` are
for at-least-once: positions move as records are handled, and are sent as declared. A commit that the group refuses is
no failure by itself: another member has our partitions, or will have them, and starts at the last committed position.
Only when nothing goes through for a while, it is.

Owns: when what is committed. Must not know: records, handlers. Neighbours: ``positions`` (the bookkeeping),
``kafka.group`` (which sends), ``postgres_offsets`` (the same for exactly-once).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from confluent_kafka import KafkaError, KafkaException

from avow import ledger
from avow.clients.config import CommitMode, ConsumerConfig
from avow.clients.positions import Positions
from avow.clients.records import Batch
from avow.errors import SourceError
from avow.kafka.connect import is_permanent
from avow.kafka.group import GroupMember
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry
from avow.settings import Source

PATIENCE_S = 60.0  # with commits that do not go through


class GroupOffsets:
    """``known``: the partitions there were at the start. Others were added, and so were those without a committed
    offset in a topic where the group has some: they are read from their first record."""

    def __init__(
        self,
        source: Source,
        log: Log,
        config: ConsumerConfig,
        member: GroupMember,
        known: Collection[TopicPartition],
        event: Callable[[str], None],
    ) -> None:
        self._source = source
        self._log = log
        self._config = config
        self._member = member
        member.on_commit = self._committed_async
        begun = {tp.topic for tp, position in log.committed_offsets(known).items() if position is not None}
        self._known = {tp for tp in known if tp.topic not in begun}
        self._event = event
        self._positions = Positions()
        self._tried_at = time.monotonic()
        self._refused_at: float | None = None  # since when nothing goes through
        self._batches = 0  # claimed, or handled

    # Partitions come and go

    def begin(self, assigned: list[TopicPartition]) -> dict[TopicPartition, int]:
        committed = self._log.committed_offsets(assigned)
        views = self._log.view(dict.fromkeys(assigned))
        fresh = {tp for tp in assigned if committed[tp] is None}
        declared = self._log.declared_start(self._source.start, fresh & self._known)
        declared |= self._log.declared_start("earliest", fresh - self._known)
        begin: dict[TopicPartition, int] = {}
        for tp in assigned:
            position = committed[tp]
            entry = None if position is None else Entry(position, views[tp].topic_id, 0)
            skip = self._source.on_data_loss == "skip"
            start = ledger.plan_start(entry, views[tp], declared.get(tp, 0), skip_lost=skip)
            if start.given_up:
                self._event(f"retention-loss: skipping {start.given_up} (on_data_loss = skip)")
            self._positions.assign(tp, start.position, confirmed=tp not in fresh)
            begin[tp] = start.position
        if fresh:
            self.commit()
        self._event(f"reading {len(assigned)} more partitions: {', '.join(f'{w} from {o}' for w, o in begin.items())}")
        return begin

    def release(self, gone: list[TopicPartition], lost: bool) -> None:
        if not lost:
            self.commit()
        self._positions.revoke(gone)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Everything below is handled, or claimed."""
        return self._positions.all()

    def elsewhere(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """How far other members are."""
        return {tp: position or 0 for tp, position in self._log.committed_offsets(partitions).items()}

    def same_topics(self) -> bool:
        """A group knows topics by their names alone."""
        return True

    # Commits

    def claim(self, batch: Batch) -> bool:
        """Commit a batch's end before it is handled. False: it must not be handled, and is to be read again."""
        if not self._committed({batch.tp: batch.until}):
            return False
        self._positions.move(batch.tp, batch.until)
        self._positions.confirm(batch.tp, batch.until)
        self._batches += 1
        return True

    def passed(self, tp: TopicPartition, position: int) -> None:
        self._positions.move(tp, position)

    def due(self, *, unit_done: bool) -> None:
        """Commit if the commit settings call for it: by time, or because a record or a batch is done."""
        self._batches += unit_done
        if self._config.commit.mode == CommitMode.AUTO:
            if time.monotonic() - self._tried_at >= self._config.commit.auto_commit_interval_ms / 1000:
                self._commit_async()
        elif self._config.commit.mode == CommitMode.ASYNC:
            # Also when nothing more comes: the last may have had to wait for an answer to the one before.
            self._commit_async()
        elif unit_done:
            self.commit()

    def close(self) -> None:
        self.commit()

    def commit(self) -> None:
        """Commit all that is handled, and wait for it. If the group refuses it, another member will do it again."""
        positions = self._positions.send_last()
        if positions:
            self._positions.answered(positions, yes=self._committed(positions))

    def _commit_async(self) -> None:
        positions = self._positions.send()
        if not positions:
            return
        self._tried_at = time.monotonic()
        try:
            self._member.commit_async(positions)
        except KafkaException as error:
            self._committed_async(positions, error.args[0])

    def _committed_async(self, positions: Mapping[TopicPartition, int], error: KafkaError | None) -> None:
        """What became of a commit that was not waited for."""
        self._positions.answered(positions, yes=self._judged(error))

    def _committed(self, positions: Mapping[TopicPartition, int]) -> bool:
        try:
            self._member.commit(positions)
        except KafkaException as error:
            return self._judged(error.args[0])
        return self._judged(None)

    def _judged(self, error: KafkaError | None) -> bool:
        if error is None:
            self._refused_at = None
            self._config.hooks.reached("after-claim", self._batches)
            return True
        if is_permanent(error):
            raise self._member.failure(error)
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        if now - self._refused_at > PATIENCE_S:
            raise SourceError(
                f"Kafka at {self._source.shown('brokers')} could not commit offsets to the consumer group: "
                f"{error.str()}",
                advice="Check the brokers and the Read right on the group. Records handled since the last commit will "
                "be handled again.",
            )
        self._event(f"the consumer group refused an offset commit: {error.str()}")
        return False
