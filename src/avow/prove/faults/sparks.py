"""A Spark cluster: executors, a worker, the master. The driver lives elsewhere, and lives on."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from signal import SIGKILL

import psutil

from avow.local.part import Part
from avow.local.standalone import Standalone
from avow.prove.driver import await_gone
from avow.prove.faults.base import WAIT_S, Fault


def killed_executors(sparks: Standalone) -> int:
    """How many executors the workers have seen die of SIGKILL, by their own logs."""
    return sum(worker.log.read_text(errors="replace").count("exitStatus 137") for worker in sparks.workers)


class ExecutorKilled(Fault):
    """The JVM alone: its Python workers must go by themselves, and Spark must start another."""

    _killed: int | None = None  # the pid, once it is gone
    _next: int | None = None

    def inject(self) -> None:
        self.scene.until(lambda: bool(self._executors()) or not self.scene.driver.alive, WAIT_S)
        self._before = self._executors()
        if self._before:
            victim = self.chance.choice([self._before[pid] for pid in sorted(self._before)])
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(SIGKILL)
                self._killed = victim.pid if await_gone(victim) else None

    def _executors(self) -> dict[int, psutil.Process]:
        return {one.pid: one for worker in self.site.sparks().workers for one in worker.executors()}

    def heal(self) -> None:
        """Not ours to do: the master gives the application a new one."""
        self.scene.until(lambda: bool(self._fresh()) or not self.scene.driver.alive, WAIT_S)
        self._next = next(iter(self._fresh()), None)

    def _fresh(self) -> list[int]:
        return sorted(self._executors().keys() - self._before.keys())

    def fired(self) -> str:
        if not self._killed:
            return ""
        after = f"; executor {self._next} took its place" if self._next else ""
        return f"executor {self._killed} died of SIGKILL{after}"


class _DaemonKilled(Fault):
    """kill -9 of one part of the cluster; it is started again at the heal."""

    @abstractmethod
    def chosen(self) -> Part:
        """Whom it hits."""

    def inject(self) -> None:
        self._part = self.chosen()
        self._pid = self._part.pid
        self._part.kill()
        self._gone = bool(self._pid) and not psutil.pid_exists(self._pid or 0)

    def heal(self) -> None:
        self.site.sparks().up()

    def fired(self) -> str:
        return f"Spark's {self._part.name}, pid {self._pid}, died of SIGKILL{self.more()}" if self._gone else ""

    def more(self) -> str:
        return ""


class SparkWorkerKilled(_DaemonKilled):
    """A machine of the cluster: its executors notice, and end."""

    def chosen(self) -> Part:
        sparks = self.site.sparks()
        self.scene.until(lambda: any(worker.executors() for worker in sparks.workers), WAIT_S)
        busy = [worker for worker in sparks.workers if worker.executors()]
        victim = self.chance.choice(busy or sparks.workers)
        self._executors = [one.pid for one in victim.executors()]
        return victim

    def more(self) -> str:
        return f", and with it its executors {self._executors}" if self._executors else ""


class SparkMasterKilled(_DaemonKilled):
    """Executors work on without it; the new one learns of them from the old one's folder."""

    def chosen(self) -> Part:
        return self.site.sparks().master
