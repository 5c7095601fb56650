"""Canaries: a pipeline that breaks its guarantee, and must be caught."""

from __future__ import annotations

from typing import ClassVar

from avow.prove import failpoints
from avow.prove.faults.base import Fault
from avow.prove.faults.processes import KilledAfterClaim


class CanarySwapped(KilledAfterClaim):
    """The acts in the wrong order: a crash after the claim loses records that at-least-once may not lose."""

    def prepare(self) -> None:
        super().prepare()
        self.env[failpoints.CANARY] = "swap"


class _CanarySink(Fault):
    sabotage: ClassVar[str]

    def prepare(self) -> None:
        self._every = 1_000 if self.scenario.plain else 10_000  # a handler takes one record at a time
        self.records_least = self._every * 12 // 5  # one of them in each of two partitions
        self.env = {failpoints.CANARY: f"{self.sabotage}:{self._every}"}

    def inject(self) -> None:
        """The sink does it, all the time; it needs as many records as that takes."""
        self.scenario.workload.burst(self.records_least)

    def fired(self) -> str:
        return f"the sink would {self.sabotage} one record in {self._every:,}"


class CanaryDrops(_CanarySink):
    sabotage = "drop"


class CanaryDoubles(_CanarySink):
    sabotage = "double"
