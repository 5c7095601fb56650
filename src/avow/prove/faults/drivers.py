"""The driver and the processes that it started: killed at a named point or at random, doubled, made a zombie."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from signal import SIGKILL
from typing import ClassVar

import psutil

from avow.guarantee import Guarantee
from avow.prove.driver import Driver, await_gone
from avow.prove.faults.base import WAIT_S, AtFailpoint, Fault
from avow.prove.faults.sparks import killed_executors
from avow.prove.scene import Scene
from avow.sinks import SINKS

SHARED_S = 5  # for one that woke among others to do what it had begun


class KilledAt(AtFailpoint):
    """kill -9 of the run by itself, at a named point between its acts; on a cluster, of the executor that was there."""

    act: ClassVar[str]

    @property
    def point(self) -> str:
        # In one atomic act there is no point between the two: the nearest is right after its COMMIT.
        return "after-claim-write" if self.scene.cell.guarantee is Guarantee.EXACTLY_ONCE else f"after-{self.act}"

    @property
    def in_executor(self) -> bool:
        """On a cluster, unless the acts are the driver's."""
        return self.scene.on_cluster and not SINKS[self.scene.cell.sink].commits_per_batch

    @property
    def who(self) -> str:
        return "executor" if self.in_executor else "run"

    def prepare(self) -> None:
        super().prepare()
        self._killed_before = killed_executors(self.site.sparks()) if self.in_executor else 0

    def fired(self) -> str:
        if not self.struck:
            return ""
        if self.in_executor:
            killed = killed_executors(self.site.sparks()) - self._killed_before
            return f"an executor died of SIGKILL at {self.point}, its worker says" if killed else ""
        return f"pid {self._driver.pid} died of SIGKILL at {self.point}" if self._driver.code == -SIGKILL else ""


class KilledAfterClaim(KilledAt):
    act = "claim"


class KilledAfterWrite(KilledAt):
    act = "write"


class KilledInMidWrite(KilledAt):
    """In the middle of a task, whoever has the acts."""

    point = "mid-write"

    @property
    def in_executor(self) -> bool:
        return self.scene.on_cluster


class KilledBeforeCommit(KilledAt):
    """Every task has written its files, and no commit has taken them in."""

    point = "staged"


class KilledAtRandom(Fault):
    """The driver with all it started, or the Python driver alone: then its JVM and tasks live on for a moment."""

    def inject(self) -> None:
        self._driver = self.scene.driver
        self._alone = self.chance.random() < 0.5
        if self._alone:
            self._driver.kill_alone()
        else:
            self._driver.kill()

    def hold(self) -> None:
        """None: the sooner the next driver starts, the more of the last may still be alive."""

    def fired(self) -> str:
        if self._driver.code != -SIGKILL:
            return ""
        return f"driver {self._driver.pid} {'alone' if self._alone else 'and all it started'} died of SIGKILL"


def begun(driver: Driver) -> bool:
    """Whether it has partitions of its own."""
    return driver.says(r"run \d+ of |reading \d+ more partitions")


def end(driver: Driver, scene: Scene) -> None:
    """One that is superseded ends by itself. One that shares the partitions need not: it may join the others."""
    driver.wait(SHARED_S if scene.shared else 60)
    if scene.shared:
        driver.stop()


class GroupRebalance(Fault):
    """Another member joins, partitions move to it, and one of the two is killed in the middle of what it does."""

    _shared, _killed, _went_on = False, 0, False

    def inject(self) -> None:
        first, second = self.scene.driver, self.scene.start()
        self.scene.until(lambda: begun(second) or not (first.alive and second.alive), WAIT_S)
        self._shared = first.alive and begun(second)
        self.scene.until_claimed_more(self.scene.claimed())
        victim, other = self.chance.sample([first, second], 2)
        victim.kill()
        self._killed = victim.pid if victim.code == -SIGKILL else 0
        self._other = other

    def heal(self) -> None:
        """The other alone goes on: it is the pipeline's driver from now on."""
        self.scene.drivers.remove(self._other)
        self.scene.drivers.append(self._other)
        self._went_on = self.scene.until_claimed_more(self.scene.claimed())

    def fired(self) -> str:
        if not (self._shared and self._killed and self._went_on):
            return ""
        return f"two members shared the partitions, pid {self._killed} died of SIGKILL, pid {self._other.pid} went on"


class Zombie(Fault):
    """The driver and all it started stand still, a second driver takes over, then the first wakes up. On a cluster its
    executors do not stand still: they are zombies at work."""

    def inject(self) -> None:
        self._first = self.scene.driver
        self._was_paused = self._first.pause()
        before = self.scene.witness.claiming_run()
        second = self.scene.start()
        if self.scene.shared:  # those who share partitions may share a run's number, and the first does stand still
            self.scene.until(lambda: begun(second) or not second.alive, WAIT_S)
            self._moved = self.scene.until_claimed_more(self.scene.claimed())
            return
        # Not any claim: on a cluster, tasks of the first go on while their driver stands still.
        self.scene.until(lambda: self.scene.witness.claiming_run() > before or not second.alive, WAIT_S)
        self._moved = self.scene.witness.claiming_run() > before

    def heal(self) -> None:
        self._first.resume()
        end(self._first, self.scene)

    def fired(self) -> str:
        if not (self._was_paused and self._moved):
            return ""
        return f"pid {self._first.pid} stood still while another claimed; woken, it ended with {self._first.code}"


class TwoDrivers(Fault):
    more: ClassVar[int] = 1

    def inject(self) -> None:
        first = self.scene.driver
        self._drivers = [first, *(self.scene.start() for _ in range(self.more))]
        self._alive = all(driver.alive for driver in self._drivers)
        self.scene.until_claimed_more(self.scene.claimed())

    def heal(self) -> None:
        for driver in self._drivers[:-1] if self.scene.shared else self._drivers[:1]:
            end(driver, self.scene)

    def fired(self) -> str:
        if not self._alive:
            return ""
        return f"{len(self._drivers)} drivers were alive at once; the first ended with {self._drivers[0].code}"


class ThreeDrivers(TwoDrivers):
    """And one of them is killed, whoever is ahead by then."""

    more = 2
    _killed = ""

    def inject(self) -> None:
        super().inject()
        victim = self.chance.choice([driver for driver in self._drivers if driver.alive] or self._drivers)
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
        """Whom it hits."""

    def inject(self) -> None:
        self.scene.until(lambda: bool(self.victims()) or not self.scene.driver.alive, WAIT_S)
        found = self.victims()
        if found:
            victim = self.chance.choice(sorted(found, key=lambda one: one.pid))
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(SIGKILL)
                self._killed = victim.pid if await_gone(victim) else None

    def fired(self) -> str:
        return f"pid {self._killed} of the driver's {self.what} died of SIGKILL" if self._killed else ""


class WorkerKilled(_ProcessKilled):
    what = "Python workers"

    def victims(self) -> list[psutil.Process]:
        return self.scene.driver.workers()


class JvmKilled(_ProcessKilled):
    what = "processes, the JVM,"

    def victims(self) -> list[psutil.Process]:
        jvm = self.scene.driver.jvm()
        return [jvm] if jvm else []
