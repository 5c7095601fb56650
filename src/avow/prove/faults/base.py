"""What every fault is: harm, heal, and the proof that it happened.

Owns: the order of a fault's life. Must not know: any one of them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from avow.prove import failpoints
from avow.prove.scene import Scene

WAIT_S = 90


class CannotRun(Exception):
    """This machine cannot do the fault. The cell is not run, and this says why."""


class Fault(ABC):
    """Base of all. ``seed`` decides what is open; ``hold_s`` is how long it lasts."""

    transactions: ClassVar[bool] = False  # whether the workload is to be in transactions
    declares: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})  # what the pipeline file says besides
    records_least: int = 0

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

    def before_load(self) -> None:
        """The topic and the pipeline's file are there, and no record was sent yet."""
        return None

    def message(self, number: int, key: int) -> dict[str, Any]:
        """What the workload sends under this number, as the producer's arguments; empty: what it sends anyway."""
        del number, key
        return {}

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

    def violation(self) -> str:
        """What the pipeline did that the judges cannot see in the sink, and must not do; empty if it did not."""
        return ""

    def __enter__(self) -> Self:
        self.inject()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()


class AtFailpoint(Fault):
    """What the run does to itself at a named point of its work, once: a driver is armed for it."""

    @property
    @abstractmethod
    def point(self) -> str: ...

    @property
    @abstractmethod
    def who(self) -> str:
        """Whom it strikes, in the words of ``prove.failpoints``."""

    def prepare(self) -> None:
        folder = Path(self.scene.folder, f"failpoint-{self.chance.randrange(10**9)}").absolute()
        folder.mkdir()
        self._mark = folder / f"fired-{self.point}"
        self.env = {failpoints.VARIABLE: f"{self.point}:1:{self.who}:{folder}"}

    def inject(self) -> None:
        self._driver = self.scene.driver
        if not self.scene.driver_has(self.env):  # the driver that runs is not armed
            self._driver.stop()
            self._driver = self.scene.start(env=self.env)
        self.scene.until(lambda: bool(self.fired()) or not self._driver.alive, WAIT_S)

    @property
    def struck(self) -> bool:
        return self._mark.exists()
