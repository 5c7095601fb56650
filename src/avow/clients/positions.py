"""How far each partition has got, and what of it is committed to the group: the bookkeeping of commits.

A partition's *position* is the next offset that has not been handled. It moves forward only, by what was handled in
order, so it cannot pass a record that failed. Commits go one at a time: while one is on its way no other is sent, and
the next carries the newest positions. So an older commit cannot overtake a newer one, whatever becomes of its answer.

Owns: these two rules. Must not know: Kafka, threads, the clock. Its neighbour is ``group_offsets``, which sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from avow.errors import ProtocolViolation
from avow.kafka.log import TopicPartition


@dataclass(slots=True)
class _Place:
    position: int
    confirmed: int  # the newest that the group has acknowledged; -1: none


class Positions:
    """Of the partitions that are ours."""

    def __init__(self) -> None:
        self._places: dict[TopicPartition, _Place] = {}
        self._sent: dict[TopicPartition, int] | None = None

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._places

    def __getitem__(self, tp: TopicPartition) -> int:
        return self._places[tp].position

    def all(self) -> dict[TopicPartition, int]:
        return {tp: state.position for tp, state in self._places.items()}

    def assign(self, tp: TopicPartition, position: int, *, confirmed: bool) -> None:
        self._places[tp] = _Place(position, position if confirmed else -1)

    def revoke(self, gone: Collection[TopicPartition]) -> None:
        for tp in gone:
            self._places.pop(tp, None)

    def move(self, tp: TopicPartition, position: int) -> None:
        """Everything below is handled."""
        state = self._places[tp]
        if position < state.position:
            raise ProtocolViolation(f"the position of {tp} would move back from {state.position} to {position}")
        state.position = position

    def confirm(self, tp: TopicPartition, position: int) -> None:
        state = self._places.get(tp)
        if state is not None and position <= state.position:
            state.confirmed = max(state.confirmed, position)

    # Commits

    @property
    def unconfirmed(self) -> dict[TopicPartition, int]:
        return {tp: state.position for tp, state in self._places.items() if state.position > state.confirmed}

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
