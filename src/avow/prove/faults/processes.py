"""The driver: killed or stopped at a named point, killed at random, doubled, made a zombie."""

from __future__ import annotations

import re
from signal import SIGCONT, SIGKILL
from typing import ClassVar

from avow.guarantee import Guarantee
from avow.prove.driver_process import DriverProcess, signal, stopped
from avow.prove.faults.base import WAIT_S, AtFailpoint, Fault
from avow.prove.faults.spark import killed_executors
from avow.prove.scenario import Scenario
from avow.sinks import SINKS

# What a coordinator logs when it aborts a transaction.
ROLLED_BACK = r"rollback of ongoing transaction for transactionalId ({}/\S+) due to timeout"

SHARED_S = 5  # for one that woke among others to do what it had begun


class KilledAt(AtFailpoint):
    """kill -9 of the run by itself, at a named point between its acts; on a cluster, of the executor that was there."""

    in_task: ClassVar[bool] = False  # the point is in a task, also where the acts are the driver's

    def prepare(self) -> None:
        acts_in_task = not SINKS[self.scenario.cell.sink].commits_per_batch
        self._in_executor = self.scenario.on_spark_cluster and (acts_in_task or self.in_task)
        self.who = "executor" if self._in_executor else "run"
        super().prepare()
        self._killed_before = killed_executors(self.cluster.spark_cluster()) if self._in_executor else 0

    def fired(self) -> str:
        if not self.hit:
            return ""
        if self._in_executor:
            killed = killed_executors(self.cluster.spark_cluster()) - self._killed_before
            return f"an executor died of SIGKILL at {self.point}, by its worker's log" if killed else ""
        return f"pid {self._driver.pid} died of SIGKILL at {self.point}" if self._driver.code == -SIGKILL else ""


class _KilledAfter(KilledAt):
    act: ClassVar[str]

    def prepare(self) -> None:
        # In one atomic act there is no point between the two: the nearest is right after its COMMIT.
        one_act = self.scenario.cell.guarantee is Guarantee.EXACTLY_ONCE
        self.point = "after-claim-write" if one_act else f"after-{self.act}"
        super().prepare()


class KilledAfterClaim(_KilledAfter):
    act = "claim"


class KilledAfterWrite(_KilledAfter):
    act = "write"


class KilledInMidWrite(KilledAt):
    point = "mid-write"
    in_task = True


class KilledBeforeCommit(KilledAt):
    """Every task has written its files, and no commit has taken them in."""

    point = "staged"


class LakeCommitUnknown(AtFailpoint):
    """A lake's table has the commit, and the driver gets an error in place of the answer."""

    point = "commit-unknown"
    who = "answer"

    def fired(self) -> str:
        return f"a commit of pid {self._driver.pid} succeeded, and its answer was lost" if self.hit else ""


class TransactionTimesOut(AtFailpoint):
    """A worker is stopped in mid-write until Kafka has aborted its transaction; then it continues."""

    point = "mid-write"
    who = "stop"

    def prepare(self) -> None:
        super().prepare()
        # Log lines from before belong to other transactions.
        self._said = {broker: broker.log.stat().st_size for broker in self.cluster.local.brokers()}

    def fired(self) -> str:
        """The coordinator's log line, and which process was stopped at the time."""
        if not self.proof:
            paused = [process.pid for process in self._driver.process_tree() if stopped(process.pid)]
            for broker, before in self._said.items():
                log = broker.log.read_bytes()[before:].decode(errors="replace")
                match = re.search(ROLLED_BACK.format(re.escape(self.scenario.name)), log)
                if paused and match:
                    self.proof = (
                        f"{broker.name} aborted the transaction of {match[1]} for its time-out, while its worker, pid "
                        f"{paused[0]}, was stopped in mid-write"
                    )
        return self.proof

    def heal(self) -> None:
        signal(self._driver.process_tree(), SIGCONT)


class KilledAtRandom(Fault):
    """The driver with all it started, or the Python driver alone: then its JVM and tasks live on for a moment."""

    def inject(self) -> None:
        driver = self.scenario.driver
        if self.rng.random() < 0.5:
            driver.kill_driver_only()
            killed = "alone"
        else:
            driver.kill()
            killed = "and all its child processes"
        if driver.code == -SIGKILL:
            self.proof = f"driver {driver.pid} {killed} died of SIGKILL"

    def hold(self) -> None:
        """None: the sooner the next driver starts, the more of the last may still be alive."""


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

    def inject(self) -> None:
        first, second = self.scenario.driver, self.scenario.start()
        self.scenario.wait_until(lambda: begun(second) or not (first.alive and second.alive), WAIT_S)
        self._shared = first.alive and begun(second)
        self.scenario.wait_for_claims(self.scenario.claimed())
        self._victim, self._other = self.rng.sample([first, second], 2)
        self._victim.kill()

    def heal(self) -> None:
        """The other alone goes on: it is the pipeline's driver from now on."""
        self.scenario.drivers.remove(self._other)
        self.scenario.drivers.append(self._other)
        went_on = self.scenario.wait_for_claims(self.scenario.claimed())
        if self._shared and self._victim.code == -SIGKILL and went_on:
            self.proof = (
                f"two members shared the partitions, pid {self._victim.pid} died of SIGKILL, "
                f"pid {self._other.pid} continued"
            )


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
