"""The driver and the processes that it started: killed at a named point or at random, doubled, made a zombie."""

from __future__ import annotations

from abc import abstractmethod
from signal import SIGKILL
from typing import ClassVar

import psutil

from avow.guarantee import Guarantee
from avow.prove.driver_process import DriverProcess, kill_process
from avow.prove.faults.base import WAIT_S, AtFailpoint, Fault
from avow.prove.faults.spark_cluster import killed_executors
from avow.prove.scenario import Scenario
from avow.sinks import SINKS

SHARED_S = 5  # for one that woke among others to do what it had begun


class KilledAt(AtFailpoint):
    """kill -9 of the run by itself, at a named point between its acts; on a cluster, of the executor that was there."""

    act: ClassVar[str]

    @property
    def point(self) -> str:
        # In one atomic act there is no point between the two: the nearest is right after its COMMIT.
        return "after-claim-write" if self.scenario.cell.guarantee is Guarantee.EXACTLY_ONCE else f"after-{self.act}"

    @property
    def in_executor(self) -> bool:
        """On a cluster, unless the acts are the driver's."""
        return self.scenario.on_spark_cluster and not SINKS[self.scenario.cell.sink].commits_per_batch

    @property
    def who(self) -> str:
        return "executor" if self.in_executor else "run"

    def prepare(self) -> None:
        super().prepare()
        self._killed_before = killed_executors(self.cluster.spark_cluster()) if self.in_executor else 0

    def fired(self) -> str:
        if not self.hit:
            return ""
        if self.in_executor:
            killed = killed_executors(self.cluster.spark_cluster()) - self._killed_before
            return f"an executor died of SIGKILL at {self.point}, by its worker's log" if killed else ""
        return f"pid {self._driver.pid} died of SIGKILL at {self.point}" if self._driver.code == -SIGKILL else ""


class KilledAfterClaim(KilledAt):
    act = "claim"


class KilledAfterWrite(KilledAt):
    act = "write"


class KilledInMidWrite(KilledAt):
    """In the middle of a task, also where the driver commits."""

    point = "mid-write"

    @property
    def in_executor(self) -> bool:
        return self.scenario.on_spark_cluster


class KilledBeforeCommit(KilledAt):
    """Every task has written its files, and no commit has taken them in."""

    point = "staged"


class KilledAtRandom(Fault):
    """The driver with all it started, or the Python driver alone: then its JVM and tasks live on for a moment."""

    def inject(self) -> None:
        self._driver = self.scenario.driver
        self._alone = self.rng.random() < 0.5
        if self._alone:
            self._driver.kill_driver_only()
        else:
            self._driver.kill()

    def hold(self) -> None:
        """None: the sooner the next driver starts, the more of the last may still be alive."""

    def fired(self) -> str:
        if self._driver.code != -SIGKILL:
            return ""
        return f"driver {self._driver.pid} {'alone' if self._alone else 'and all its child processes'} died of SIGKILL"


def begun(driver: DriverProcess) -> bool:
    """Whether it has partitions of its own."""
    return driver.logged(r"run \d+ of |reading \d+ more partitions")


def end(driver: DriverProcess, scenario: Scenario) -> None:
    """One that is superseded ends by itself. One that shares the partitions need not: it may join the others."""
    driver.wait(SHARED_S if scenario.shared else 60)
    if scenario.shared:
        driver.stop()


class GroupRebalance(Fault):
    """Another member joins, partitions move to it, and one of the two is killed in the middle of what it does."""

    _shared, _killed, _went_on = False, 0, False

    def inject(self) -> None:
        first, second = self.scenario.driver, self.scenario.start()
        self.scenario.wait_until(lambda: begun(second) or not (first.alive and second.alive), WAIT_S)
        self._shared = first.alive and begun(second)
        self.scenario.wait_for_claims(self.scenario.claimed())
        victim, survivor = self.rng.sample([first, second], 2)
        victim.kill()
        self._killed = victim.pid if victim.code == -SIGKILL else 0
        self._other = survivor

    def heal(self) -> None:
        """The other alone goes on: it is the pipeline's driver from now on."""
        self.scenario.drivers.remove(self._other)
        self.scenario.drivers.append(self._other)
        self._went_on = self.scenario.wait_for_claims(self.scenario.claimed())

    def fired(self) -> str:
        if not (self._shared and self._killed and self._went_on):
            return ""
        return f"two members shared the partitions, pid {self._killed} died of SIGKILL, pid {self._other.pid} continued"


class Zombie(Fault):
    """The driver and its children are stopped (SIGSTOP), a second driver takes over, then the first continues. On a
    Spark cluster its executors are not stopped: they are zombies at work."""

    def inject(self) -> None:
        self._first = self.scenario.driver
        self._was_paused = self._first.pause()
        before = self.scenario.oracle.claiming_run()
        second = self.scenario.start()
        if self.scenario.shared:  # those who share partitions may share a run's number, and the first does stand still
            self.scenario.wait_until(lambda: begun(second) or not second.alive, WAIT_S)
            self._moved = self.scenario.wait_for_claims(self.scenario.claimed())
            return
        # Not any claim: on a Spark cluster, tasks of the first continue while their driver is stopped.
        self.scenario.wait_until(lambda: self.scenario.oracle.claiming_run() > before or not second.alive, WAIT_S)
        self._moved = self.scenario.oracle.claiming_run() > before

    def heal(self) -> None:
        self._first.resume()
        end(self._first, self.scenario)

    def fired(self) -> str:
        if not (self._was_paused and self._moved):
            return ""
        return (
            f"pid {self._first.pid} was stopped while another claimed; after SIGCONT it ended with {self._first.code}"
        )


class TwoDrivers(Fault):
    more: ClassVar[int] = 1

    def inject(self) -> None:
        first = self.scenario.driver
        self._drivers = [first, *(self.scenario.start() for _ in range(self.more))]
        self._alive = all(driver.alive for driver in self._drivers)
        self.scenario.wait_for_claims(self.scenario.claimed())

    def heal(self) -> None:
        for driver in self._drivers[:-1] if self.scenario.shared else self._drivers[:1]:
            end(driver, self.scenario)

    def fired(self) -> str:
        if not self._alive:
            return ""
        return f"{len(self._drivers)} drivers were alive at once; the first ended with {self._drivers[0].code}"


class ThreeDrivers(TwoDrivers):
    """And one of them is killed, whichever is ahead."""

    more = 2
    _killed = ""

    def inject(self) -> None:
        super().inject()
        victim = self.rng.choice([driver for driver in self._drivers if driver.alive] or self._drivers)
        if victim.alive:
            victim.kill()
            self._killed = f"; pid {victim.pid} died of SIGKILL" if victim.code == -SIGKILL else ""

    def fired(self) -> str:
        return f"{super().fired()}{self._killed}" if super().fired() and self._killed else ""


class _ProcessKilled(Fault):
    """kill -9 of one process that the driver started."""

    what: ClassVar[str]
    _killed: int | None = None  # the pid, once it is gone

    @abstractmethod
    def victims(self) -> list[psutil.Process]:
        """The processes to choose from."""

    def inject(self) -> None:
        self.scenario.wait_until(lambda: bool(self.victims()) or not self.scenario.driver.alive, WAIT_S)
        victims = self.victims()
        if victims:
            victim = self.rng.choice(sorted(victims, key=lambda process: process.pid))
            self._killed = victim.pid if kill_process(victim) else None

    def fired(self) -> str:
        return f"pid {self._killed} of the driver's {self.what} died of SIGKILL" if self._killed else ""


class WorkerKilled(_ProcessKilled):
    what = "Python workers"

    def victims(self) -> list[psutil.Process]:
        return self.scenario.driver.workers()


class JvmKilled(_ProcessKilled):
    what = "processes, the JVM,"

    def victims(self) -> list[psutil.Process]:
        jvm = self.scenario.driver.jvm()
        return [jvm] if jvm else []
