"""Failpoints: hooks that kill a pipeline under test at a named point, or make it break its guarantee.

Only ``avow.prove.hooked`` makes them, from the environment of the process that it starts: ``avow run`` cannot.

``AVOW_FAILPOINT=NAME:BATCH:WHO:FOLDER`` kills with SIGKILL at point NAME of the first batch not below BATCH, once
(FOLDER remembers that it fired): WHO is ``worker`` (this process alone), ``executor`` (this process and all above it,
up to the executor's JVM) or ``run`` (the same, up to the driver, where that is above). ``stop`` is this process alone
with SIGSTOP; the fault continues it later. With ``answer`` nothing is killed: what was done stays done, and an
error takes the place of its answer.

``AVOW_CANARY=swap`` takes the acts in the wrong order, ``drop:N`` and ``double:N`` do that to one row in N: a proof
shows with these that it would catch a pipeline that breaks its guarantee.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import TYPE_CHECKING, Self

import psutil

from avow.engines.hooks import Hooks
from avow.guarantee import Act

if TYPE_CHECKING:  # a command that only names a failpoint need not wait for Arrow
    import pyarrow as pa

VARIABLE = "AVOW_FAILPOINT"
CANARY = "AVOW_CANARY"

SENT_WITHIN_S = 0.5  # before a process is stopped: what it gave to a client has left, and a transaction has begun


@dataclass(frozen=True, slots=True)
class FaultHooks(Hooks):
    """The failpoint and canary of the environment, in any process of the run."""

    failpoint: str = ""
    canary: str = ""
    driver: int = 0  # its pid

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        """For a run whose driver is this process."""
        return cls(env.get(VARIABLE, ""), env.get(CANARY, ""), os.getpid())

    def reached(self, point: str, batch: int) -> None:
        if not self.failpoint:
            return
        name, first, target, folder = self.failpoint.split(":", 3)
        if name != point or batch < int(first):
            return
        try:
            Path(folder, f"fired-{point}").touch(exist_ok=False)
        except FileExistsError:
            return
        if target == "answer":
            raise OSError("the answer was lost, injected by a failpoint")
        if target == "stop":
            time.sleep(SENT_WITHIN_S)
            os.kill(os.getpid(), SIGSTOP)
            return
        for process in self._ancestors(target):
            process.send_signal(SIGKILL)
        os.kill(os.getpid(), SIGKILL)

    def _ancestors(self, target: str) -> list[psutil.Process]:
        """The ancestors to kill as well; none if the target is not an ancestor."""
        chain = []
        for process in psutil.Process().parents() if target != "worker" else []:
            chain.append(process)
            if process.name() == "java" if target == "executor" else process.pid == self.driver:
                return chain
        return []

    def order(self, steps: tuple[frozenset[Act], ...]) -> tuple[frozenset[Act], ...]:
        return steps[::-1] if self.canary == "swap" else steps

    def copies(self, offset: int) -> int:
        """How often a record's row is to be written: once, unless a canary drops or doubles one in so many."""
        action, _, every = self.canary.partition(":")
        return 1 if action not in ("drop", "double") or (offset + 1) % int(every) else {"drop": 0, "double": 2}[action]

    def rows(self, rows: pa.RecordBatch, offset_column: str) -> pa.RecordBatch:
        if not self.canary:
            return rows
        offsets = rows.column(offset_column).to_pylist()
        return rows.take([row for row, offset in enumerate(offsets) for _ in range(self.copies(offset))])
