"""What every fault is: harm, heal, and the proof that it happened.

Owns: the order of a fault's life. Must not know: any one of them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar, Self

from avow.prove.scene import Scene

WAIT_S = 90


class CannotRun(Exception):
    """This machine cannot do the fault. The cell is not run, and this says why."""


class Fault(ABC):
    """Base of all. ``seed`` decides what is open; ``hold_s`` is how long it lasts."""

    transactions: ClassVar[bool] = False  # whether the workload is to be in transactions
    records_least: ClassVar[int] = 0

    def __init__(self, scene: Scene, seed: int, hold_s: float) -> None:
        self.scene = scene
        self.site = scene.site
        self.hold_s = hold_s
        self.chance = random.Random(seed)
        self.env: dict[str, str] = {}  # for the driver that is to be hurt

    def prepare(self) -> None:
        """Before the topic is there and the first driver starts."""
        return None

    def make_topic(self, partitions: int) -> None:
        self.site.make_topic(self.scene.topic, partitions)

    @abstractmethod
    def inject(self) -> None:
        """Do it."""

    def hold(self) -> None:
        self.scene.sleep(self.hold_s)

    def heal(self) -> None:
        """Nothing by default: what died is started again by the runner."""
        return None

    def close(self) -> None:
        """After the verdict: take away what the fault needed."""
        return None

    @abstractmethod
    def fired(self) -> str:
        """The proof that it happened, or nothing."""

    def __enter__(self) -> Self:
        self.inject()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
