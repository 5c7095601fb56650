"""Positions kept in the Kafka group: where to begin, and commits before or after the handler.

Theory of operation
-------------------
Begin: the group's committed position; where there is none, the declared start, which is committed before anything is
read. Otherwise "latest" would mean another place after each crash, and what lies between would be lost.

``claim`` is for at-most-once: it is answered, with yes, before the handler sees a record. ``passed`` and ``settle`` are
for at-least-once: positions move as records are handled, and are sent as declared. A commit that the group refuses is
no failure by itself: somebody else has our partitions, or will have them, and begins at the last one that went through.
Only when nothing goes through for a while, it is.

Owns: when what is committed. Must not know: records, handlers. Neighbours: ``positions`` (the bookkeeping), ``member``
(which sends), ``ledgered`` (the same for exactly-once).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from confluent_kafka import KafkaError, KafkaException

from avow import ledger
from avow.clients.member import Batch, Member
from avow.clients.positions import Positions
from avow.clients.terms import Terms
from avow.errors import SourceError
from avow.kafka.connect import is_permanent
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry
from avow.settings import Source

PATIENCE_S = 60.0  # with commits that do not go through


class GroupKeeping:
    """``known``: the partitions there were at the start. Others were added, and so were those without a committed
    offset in a topic where the group has some: they are read from their first record."""

    def __init__(
        self,
        source: Source,
        log: Log,
        terms: Terms,
        member: Member,
        known: Collection[TopicPartition],
        event: Callable[[str], None],
    ) -> None:
        self._source = source
        self._log = log
        self._terms = terms
        self._member = member
        begun = {where.topic for where, position in log.told(known).items() if position is not None}
        self._known = {where for where in known if where.topic not in begun}
        self._event = event
        self._positions = Positions()
        self._tried_at = time.monotonic()
        self._refused_at: float | None = None  # since when nothing goes through
        self._batches = 0  # claimed, or handled

    # Partitions come and go

    def begin(self, ours: list[TopicPartition]) -> dict[TopicPartition, int]:
        told = self._log.told(ours)
        views = self._log.view(dict.fromkeys(ours))
        fresh = {where for where in ours if told[where] is None}
        declared = self._log.declared_start(self._source.start, {where for where in fresh if where in self._known})
        declared |= self._log.declared_start("earliest", {where for where in fresh if where not in self._known})
        begin: dict[TopicPartition, int] = {}
        for where in ours:
            position = told[where]
            entry = None if position is None else Entry(position, views[where].topic_id, 0)
            skip = self._source.on_data_loss == "skip"
            start = ledger.plan_start(entry, views[where], declared.get(where, 0), skip_lost=skip)
            if start.given_up:
                self._event(f"retention-loss: {start.given_up} is skipped, as declared")
            self._positions.assign(where, start.position, confirmed=where not in fresh)
            begin[where] = start.position
        if fresh:
            self.settle()
        self._event(f"reading {len(ours)} more partitions: {', '.join(f'{w} from {o}' for w, o in begin.items())}")
        return begin

    def release(self, gone: list[TopicPartition], lost: bool) -> None:
        if not lost:
            self.settle()
        self._positions.revoke(gone)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Everything below is handled, or claimed."""
        return self._positions.all()

    def elsewhere(self, others: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """How far other members are."""
        return {where: position or 0 for where, position in self._log.told(others).items()}

    def same_topics(self) -> bool:
        """A group knows topics by their names alone."""
        return True

    # Commits

    def claim(self, batch: Batch) -> bool:
        """Commit a batch's end before it is handled. False: it must not be handled, and is to be read again."""
        if not self._committed({batch.where: batch.until}):
            return False
        self._positions.move(batch.where, batch.until)
        self._positions.confirm(batch.where, batch.until)
        self._batches += 1
        return True

    def passed(self, where: TopicPartition, position: int) -> None:
        self._positions.move(where, position)

    def due(self, *, unit_done: bool) -> None:
        """Commit if the terms say so: now and then, or because a record or a batch is done."""
        self._batches += unit_done
        if self._terms.commit == "auto":
            if time.monotonic() - self._tried_at >= self._terms.commit_interval_s:
                self._commit_later()
        elif self._terms.commit == "async":
            # Also when nothing more comes: the last may have had to wait for an answer to the one before.
            self._commit_later()
        elif unit_done:
            self.settle()

    def settle(self) -> None:
        """Commit all that is handled, and wait for it. If the group refuses it, somebody else will do it again."""
        positions = self._positions.send_last()
        if positions:
            self._positions.answered(positions, yes=self._committed(positions))

    def _commit_later(self) -> None:
        positions = self._positions.send()
        if not positions:
            return
        self._tried_at = time.monotonic()
        try:
            self._member.commit_later(positions)
        except KafkaException as error:
            self.answered(positions, error.args[0])

    def answered(self, positions: Mapping[TopicPartition, int], error: KafkaError | None) -> None:
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
            self._terms.hooks.reached("after-claim", self._batches)
            return True
        if is_permanent(error):
            raise self._member.failure(error)
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        if now - self._refused_at > PATIENCE_S:
            raise self._failure(error.str())
        self._event(f"a commit was refused: {error.str()}")
        return False

    def _failure(self, said: str) -> SourceError:
        return SourceError(
            f"Kafka at {self._source.shown('brokers')} did not take positions: {said}",
            advice="Check the brokers and the right to read the group. What was handled and not committed comes again.",
        )
