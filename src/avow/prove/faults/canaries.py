"""Canaries: a pipeline that breaks its word, and must be caught."""

from __future__ import annotations

from typing import ClassVar

from avow.engines import failpoints
from avow.prove.faults.base import Fault
from avow.prove.faults.drivers import KilledAfterClaim


class CanarySwapped(KilledAfterClaim):
    """The acts in the wrong order: a crash after the claim loses records that at-least-once may not lose."""

    def prepare(self) -> None:
        super().prepare()
        self.env[failpoints.CANARY] = "swap"


class _CanarySink(Fault):
    sabotage: ClassVar[str]
    records_least = 24_000  # one in 10,000 of each of two partitions

    def prepare(self) -> None:
        self.env = {failpoints.CANARY: f"{self.sabotage}:10000"}

    def inject(self) -> None:
        """The sink does it, all the time; it needs as many records as that takes."""
        self.scene.workload.burst(self.records_least)

    def fired(self) -> str:
        return f"the sink would {self.sabotage} one record in 10,000"


class CanaryDrops(_CanarySink):
    sabotage = "drop"


class CanaryDoubles(_CanarySink):
    sabotage = "double"
