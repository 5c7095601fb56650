"""Spark's own processes: Python workers, the driver's JVM, executors, and the daemons of a Spark cluster."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import psutil

from avow.local.part import ClusterPart
from avow.local.standalone import Standalone
from avow.prove.driver_process import kill_process
from avow.prove.faults.base import WAIT_S, Fault


def killed_executors(spark_cluster: Standalone) -> int:
    """How many executors the workers have seen die of SIGKILL, by their own logs."""
    return sum(worker.log.read_text(errors="replace").count("exitStatus 137") for worker in spark_cluster.workers)


class _ProcessKilled(Fault):
    """kill -9 of one process. The driver lives on."""

    evidence: ClassVar[str]  # the proof, with the pid to be filled in

    @abstractmethod
    def victims(self) -> list[psutil.Process]:
        """The processes to choose from."""

    def inject(self) -> None:
        self.scenario.wait_until(lambda: bool(self.victims()) or not self.scenario.driver.alive, WAIT_S)
        victims = sorted(self.victims(), key=lambda process: process.pid)
        self.before = {process.pid for process in victims}
        if victims:
            victim = self.rng.choice(victims)
            if kill_process(victim):
                self.proof = self.evidence.format(victim.pid)


class WorkerKilled(_ProcessKilled):
    evidence = "pid {} of the driver's Python workers died of SIGKILL"

    def victims(self) -> list[psutil.Process]:
        return self.scenario.driver.workers()


class JvmKilled(_ProcessKilled):
    evidence = "pid {} of the driver's processes, the JVM, died of SIGKILL"

    def victims(self) -> list[psutil.Process]:
        jvm = self.scenario.driver.jvm()
        return [jvm] if jvm else []


class ExecutorKilled(_ProcessKilled):
    """The JVM alone: its Python workers must go by themselves, and Spark must start another."""

    evidence = "executor {} died of SIGKILL"

    def victims(self) -> list[psutil.Process]:
        return [executor for worker in self.cluster.spark_cluster().workers for executor in worker.executors()]

    def heal(self) -> None:
        """Not ours to do: the master gives the application a new one."""
        self.scenario.wait_until(lambda: bool(self._fresh()) or not self.scenario.driver.alive, WAIT_S)
        if self.proof and (fresh := self._fresh()):
            self.proof += f"; executor {min(fresh)} took its place"

    def _fresh(self) -> set[int]:
        return {process.pid for process in self.victims()} - self.before


class _DaemonKilled(Fault):
    """kill -9 of one part of the cluster; it is started again at the heal."""

    more = ""  # what died with it

    @abstractmethod
    def target(self) -> ClusterPart:
        """The process to kill."""

    def inject(self) -> None:
        part = self.target()
        pid = part.pid
        part.kill()
        if pid and not psutil.pid_exists(pid):
            self.proof = f"Spark's {part.name}, pid {pid}, died of SIGKILL{self.more}"

    def heal(self) -> None:
        self.cluster.spark_cluster().up()


class SparkWorkerKilled(_DaemonKilled):
    """A machine of the cluster: its executors notice, and end."""

    def target(self) -> ClusterPart:
        workers = self.cluster.spark_cluster().workers
        self.scenario.wait_until(lambda: any(worker.executors() for worker in workers), WAIT_S)
        victim = self.rng.choice([worker for worker in workers if worker.executors()] or workers)
        if executors := [executor.pid for executor in victim.executors()]:
            self.more = f", and with it its executors {executors}"
        return victim


class SparkMasterKilled(_DaemonKilled):
    """Executors work on without it; the new one learns of them from the old one's folder."""

    def target(self) -> ClusterPart:
        return self.cluster.spark_cluster().master
