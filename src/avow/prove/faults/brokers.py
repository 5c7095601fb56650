"""Brokers: killed, by what they are to the topic or the cluster, or paused until the others miss them."""

from __future__ import annotations

import re
from abc import abstractmethod
from contextlib import suppress

import psutil

from avow.errors import SourceError
from avow.kafka import metadata
from avow.prove.faults.base import Fault
from avow.prove.scene import Scene


class BrokersKilled(Fault):
    """kill -9 of some brokers; they are started again at the heal."""

    @abstractmethod
    def chosen(self) -> list[int]:
        """Whom it hits."""

    def aftermath(self) -> str:
        """What the rest of the cluster did about it; nothing if it did not notice."""
        return "gone"

    def inject(self) -> None:
        self._numbers = self.chosen()
        self._pids = [self.site.broker(number).pid for number in self._numbers]
        for number in self._numbers:
            self.site.broker(number).kill()
        self._gone = all(pid and not psutil.pid_exists(pid) for pid in self._pids)
        self._aftermath = ""

    def hold(self) -> None:
        super().hold()
        self.scene.until(lambda: bool(self._look()), 20)

    def _look(self) -> str:
        with suppress(SourceError):
            self._aftermath = self.aftermath()
        return self._aftermath

    def heal(self) -> None:
        self.site.cluster.up()

    def fired(self) -> str:
        if not (self._gone and self._aftermath):
            return ""
        names = ", ".join(f"broker-{n} (pid {pid})" for n, pid in zip(self._numbers, self._pids, strict=True))
        return f"{names} died of SIGKILL; {self._aftermath}"


class LeaderKilled(BrokersKilled):
    def chosen(self) -> list[int]:
        self._partition = self.chance.choice(self.site.partitions(self.scene.topic))
        return [self._partition.leader]

    def aftermath(self) -> str:
        now = self.site.partitions(self.scene.topic)[self._partition.partition].leader
        return (
            f"partition {self._partition.partition} is led by broker-{now}" if now not in (-1, *self._numbers) else ""
        )


class ControllerKilled(BrokersKilled):
    def chosen(self) -> list[int]:
        self._epoch, number = _controller(self.scene)
        return [number]

    def aftermath(self) -> str:
        epoch, number = _controller(self.scene)
        return f"broker-{number} became the controller, epoch {epoch}" if epoch > self._epoch else ""


class CoordinatorKilled(BrokersKilled):
    """The broker that keeps the account of the upstream producer's transactions, while they commit and abort."""

    transactions = True

    def chosen(self) -> list[int]:
        self._aborted = self.scene.workload.aborted
        states = self.site.partitions("__transaction_state")
        self._partition = states[coordinating_partition(self.scene.workload.transactional_id, len(states))]
        return [self._partition.leader]

    def aftermath(self) -> str:
        now = self.site.partitions("__transaction_state")[self._partition.partition].leader
        return f"broker-{now} coordinates in its place" if now not in (-1, *self._numbers) else ""

    def fired(self) -> str:
        """Also: transactions really went on after it."""
        aborted = self.scene.workload.aborted - self._aborted
        return f"{super().fired()}; {aborted} transactions were aborted since" if super().fired() and aborted else ""


def coordinating_partition(transactional_id: str, partitions: int) -> int:
    """Which partition of ``__transaction_state`` keeps the account: Java's hash of the name. Its leader is the
    coordinator."""
    found = 0
    for byte in transactional_id.encode("ascii"):
        found = (31 * found + byte) & 0xFFFFFFFF
    signed = found - 2**32 if found >= 2**31 else found
    return (0 if signed == -(2**31) else abs(signed)) % partitions


def _controller(scene: Scene) -> tuple[int, int]:
    """(epoch, broker): from the logs. What Kafka tells its clients in KRaft is any broker."""
    found = [
        (int(epoch), broker.number)
        for broker in scene.site.cluster.brokers()
        for epoch in re.findall(
            r"Becoming the active controller at epoch (\d+)", broker.log.read_text(errors="replace")
        )
    ]
    return max(found)


class AllBrokersKilled(BrokersKilled):
    def chosen(self) -> list[int]:
        return [broker.number for broker in self.site.cluster.brokers()]


class BrokerPaused(Fault):
    _fenced = False

    def inject(self) -> None:
        self._number = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        self.site.broker(self._number).pause()

    def hold(self) -> None:
        super().hold()
        self._fenced = self.scene.until(self._missing, 15)

    def _missing(self) -> bool:
        with suppress(SourceError):
            others = ",".join(b.address for b in self.site.cluster.brokers() if b.number != self._number)
            return self._number not in metadata.view(metadata.admin(others), timeout_s=2).brokers
        return False

    def heal(self) -> None:
        self.site.broker(self._number).resume()
        self.site.cluster.start(f"broker-{self._number}")

    def fired(self) -> str:
        return f"broker-{self._number} missed its heartbeats, and the others went on without it" if self._fenced else ""
