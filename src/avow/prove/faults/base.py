"""The base class of faults: inject, hold, heal, and the proof that the fault happened.

Owns: the life cycle of a fault. Must not know: any one of them.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from avow.prove import failpoints
from avow.prove.cells import FAULTS
from avow.prove.scenario import Scenario

WAIT_S = 90


class CannotRun(Exception):
    """This machine cannot do the fault. The cell is not run, and this says why."""


IMPLEMENTED: dict[str, type[Fault]] = {}  # by the name of its row in ``cells.FAULTS``


class Fault(ABC):
    """Base class. ``seed`` decides every choice that the fault makes; ``hold_s`` is how long it lasts.

    A class implements the row of the matrix that is spelled like it: ``KilledAfterClaim`` is "killed-after-claim"."""

    transactions: ClassVar[bool] = False  # whether the workload is to be in transactions
    declares: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # sections added to the pipeline file
    records_least: int = 0
    proof: str = ""  # that it happened, as soon as that is known; where it must be worked out, ``fired`` does that

    def __init_subclass__(cls) -> None:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__.removesuffix("Fault")).lower()
        if name in FAULTS:
            IMPLEMENTED[name] = cls

    def __init__(self, scenario: Scenario, seed: int, hold_s: float) -> None:
        self.scenario = scenario
        self.cluster = scenario.cluster
        self.hold_s = hold_s
        self.rng = random.Random(seed)
        self.env: dict[str, str] = {}  # of the driver under the fault

    def prepare(self) -> None:
        """Before the topic is there and the first driver starts."""
        return None

    def make_topic(self, partitions: int) -> None:
        self.cluster.make_topic(self.scenario.topic, partitions)

    def before_load(self) -> None:
        """The topic and the pipeline's file are there, and no record was sent yet."""
        return None

    def message(self, number: int, key: int) -> dict[str, Any]:
        """Producer arguments that replace the workload's own for this record; empty: none."""
        del number, key
        return {}

    @abstractmethod
    def inject(self) -> None:
        """Inject the fault."""

    def hold(self) -> None:
        self.scenario.sleep(self.hold_s)

    def heal(self) -> None:
        """Nothing by default: what died is started again by the runner."""
        return None

    def close(self) -> None:
        """After the verdict: remove what the fault created."""
        return None

    def fired(self) -> str:
        """The proof that it happened, or nothing."""
        return self.proof

    def violation(self) -> str:
        """A violation that neither check nor audit can see in the sink; empty if there was none."""
        return ""


class AtFailpoint(Fault):
    """A failpoint: the run kills or stops itself once, at a named point. The driver is started with it in its
    environment."""

    point: str
    who: str  # the target, as ``prove.failpoints`` names it

    def prepare(self) -> None:
        folder = Path(self.scenario.folder, f"failpoint-{self.rng.randrange(10**9)}").absolute()
        folder.mkdir()
        self._mark = folder / f"fired-{self.point}"
        self.env = {failpoints.VARIABLE: f"{self.point}:1:{self.who}:{folder}"}

    def inject(self) -> None:
        self._driver = self.scenario.driver
        if not self.env.items() <= self.scenario.driver_env.items():  # the running driver has no failpoint
            self._driver.stop()
            self._driver = self.scenario.start(env=self.env)
        self.scenario.wait_until(lambda: bool(self.fired()) or not self._driver.alive, WAIT_S)

    @property
    def hit(self) -> bool:
        return self._mark.exists()
