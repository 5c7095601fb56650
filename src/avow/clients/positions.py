"""How far each partition has got, and what of it is committed to the group: the bookkeeping of commits.

A partition's *position* is the next offset that has not been handled. It moves forward only, by what was handled in
order, so it cannot pass a record that failed. Commits go one at a time: while one is on its way no other is sent, and
the next carries the newest positions. So an older commit cannot overtake a newer one, whatever becomes of its answer.

Owns: these two rules. Must not know: Kafka, threads, the clock. Its neighbour is ``group_offsets``, which sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from avow.errors import ProtocolViolation
from avow.kafka.log import TopicPartition


class Positions:
    """Of the partitions that are ours."""

    def __init__(self) -> None:
        self._positions: dict[TopicPartition, int] = {}
        self._confirmed: dict[TopicPartition, int] = {}  # the newest that the group has acknowledged; -1: none
        self._sent: dict[TopicPartition, int] | None = None

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._positions

    def __getitem__(self, tp: TopicPartition) -> int:
        return self._positions[tp]

    def all(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def assign(self, tp: TopicPartition, position: int, *, confirmed: bool) -> None:
        self._positions[tp], self._confirmed[tp] = position, position if confirmed else -1

    def revoke(self, gone: Collection[TopicPartition]) -> None:
        for tp in gone:
            self._positions.pop(tp, None)
            self._confirmed.pop(tp, None)

    def move(self, tp: TopicPartition, position: int) -> None:
        """Everything below is handled."""
        if position < self._positions[tp]:
            raise ProtocolViolation(f"the position of {tp} would move back from {self._positions[tp]} to {position}")
        self._positions[tp] = position

    def confirm(self, tp: TopicPartition, position: int) -> None:
        if position <= self._positions.get(tp, -1):
            self._confirmed[tp] = max(self._confirmed[tp], position)

    # Commits

    @property
    def unconfirmed(self) -> dict[TopicPartition, int]:
        return {tp: position for tp, position in self._positions.items() if position > self._confirmed[tp]}

    def send(self) -> dict[TopicPartition, int]:
        """What to commit now, without waiting for it; nothing while another commit is on its way."""
        if self._sent is not None:
            return {}
        newest = self.unconfirmed
        self._sent = newest or None
        return newest

    def send_last(self) -> dict[TopicPartition, int]:
        """What to commit and to wait for. An answer that is still to come to another commit does not matter now."""
        self._sent = self.unconfirmed or None
        return dict(self._sent or {})

    def answered(self, sent: Mapping[TopicPartition, int], *, yes: bool) -> None:
        """To what was sent. An answer to something older changes nothing."""
        if sent != self._sent:
            return
        self._sent = None
        if yes:
            for tp, position in sent.items():
                self.confirm(tp, position)
