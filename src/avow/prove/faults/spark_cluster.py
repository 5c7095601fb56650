"""A Spark cluster: executors, a worker, the master. The driver lives elsewhere, and lives on."""

from __future__ import annotations

from abc import abstractmethod

import psutil

from avow.local.part import ClusterPart
from avow.local.standalone import Standalone
from avow.prove.driver_process import kill_process
from avow.prove.faults.base import WAIT_S, Fault


def killed_executors(spark_cluster: Standalone) -> int:
    """How many executors the workers have seen die of SIGKILL, by their own logs."""
    return sum(worker.log.read_text(errors="replace").count("exitStatus 137") for worker in spark_cluster.workers)


class ExecutorKilled(Fault):
    """The JVM alone: its Python workers must go by themselves, and Spark must start another."""

    _killed: int | None = None  # the pid, once it is gone
    _next: int | None = None

    def inject(self) -> None:
        self.scenario.wait_until(lambda: bool(self._executors()) or not self.scenario.driver.alive, WAIT_S)
        self._before = self._executors()
        if self._before:
            victim = self.rng.choice([self._before[pid] for pid in sorted(self._before)])
            self._killed = victim.pid if kill_process(victim) else None

    def _executors(self) -> dict[int, psutil.Process]:
        return {
            executor.pid: executor for worker in self.cluster.spark_cluster().workers for executor in worker.executors()
        }

    def heal(self) -> None:
        """Not ours to do: the master gives the application a new one."""
        self.scenario.wait_until(lambda: bool(self._fresh()) or not self.scenario.driver.alive, WAIT_S)
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
    def targets(self) -> ClusterPart:
        """The process to kill."""

    def inject(self) -> None:
        self._part = self.targets()
        self._pid = self._part.pid
        self._part.kill()
        self._gone = bool(self._pid) and not psutil.pid_exists(self._pid or 0)

    def heal(self) -> None:
        self.cluster.spark_cluster().up()

    def fired(self) -> str:
        return f"Spark's {self._part.name}, pid {self._pid}, died of SIGKILL{self.more()}" if self._gone else ""

    def more(self) -> str:
        return ""


class SparkWorkerKilled(_DaemonKilled):
    """A machine of the cluster: its executors notice, and end."""

    def targets(self) -> ClusterPart:
        spark_cluster = self.cluster.spark_cluster()
        self.scenario.wait_until(lambda: any(worker.executors() for worker in spark_cluster.workers), WAIT_S)
        busy = [worker for worker in spark_cluster.workers if worker.executors()]
        victim = self.rng.choice(busy or spark_cluster.workers)
        self._executors = [executor.pid for executor in victim.executors()]
        return victim

    def more(self) -> str:
        return f", and with it its executors {self._executors}" if self._executors else ""


class SparkMasterKilled(_DaemonKilled):
    """Executors work on without it; the new one learns of them from the old one's folder."""

    def targets(self) -> ClusterPart:
        return self.cluster.spark_cluster().master
