"""Brokers: killed, by what they are to the topic or the cluster, or paused until the others miss them."""

from __future__ import annotations

import re
from abc import abstractmethod
from contextlib import suppress

import psutil

from avow.errors import SourceError
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection
from avow.kafka.metadata import Partition
from avow.prove.faults.base import Fault


class BrokersKilled(Fault):
    """kill -9 of some brokers; they are started again at the heal."""

    @abstractmethod
    def targets(self) -> list[int]:
        """The brokers to kill."""

    def aftermath(self) -> str:
        """What the rest of the cluster did about it; nothing if it did not notice."""
        return "gone"

    def inject(self) -> None:
        self._numbers = self.targets()
        self._pids = [self.cluster.broker(number).pid for number in self._numbers]
        for number in self._numbers:
            self.cluster.broker(number).kill()
        self._gone = all(pid and not psutil.pid_exists(pid) for pid in self._pids)
        self._aftermath = ""

    def hold(self) -> None:
        super().hold()
        self.scenario.wait_until(lambda: bool(self._observe()), 20)

    def _observe(self) -> str:
        with suppress(SourceError):
            self._aftermath = self.aftermath()
        return self._aftermath

    def heal(self) -> None:
        self.cluster.local.up()

    def fired(self) -> str:
        if not (self._gone and self._aftermath):
            return ""
        names = ", ".join(f"broker-{n} (pid {pid})" for n, pid in zip(self._numbers, self._pids, strict=True))
        return f"{names} died of SIGKILL; {self._aftermath}"


class _PartitionLeaderKilled(BrokersKilled):
    """The leader of one partition: another broker must become that."""

    @abstractmethod
    def partition(self) -> Partition:
        """The partition as it is now."""

    @abstractmethod
    def succession(self, broker: int) -> str:
        """That the broker leads the partition."""

    def targets(self) -> list[int]:
        return [self.partition().leader]

    def aftermath(self) -> str:
        now = self.partition().leader
        return "" if now in (-1, *self._numbers) else self.succession(now)


class LeaderKilled(_PartitionLeaderKilled):
    def targets(self) -> list[int]:
        self._partition = self.rng.choice(self.cluster.partitions(self.scenario.topic)).partition
        return super().targets()

    def partition(self) -> Partition:
        return self.cluster.partitions(self.scenario.topic)[self._partition]

    def succession(self, broker: int) -> str:
        return f"partition {self._partition} is led by broker-{broker}"


class _CoordinatorKilled(_PartitionLeaderKilled):
    """The coordinator of one producer's transactions."""

    transactional_id: str

    def partition(self) -> Partition:
        states = self.cluster.partitions("__transaction_state")
        return states[coordinating_partition(self.transactional_id, len(states))]


class CoordinatorKilled(_CoordinatorKilled):
    """Of the upstream producer's, while they commit and abort."""

    transactions = True

    def targets(self) -> list[int]:
        self._aborted = self.scenario.workload.aborted
        self.transactional_id = self.scenario.workload.transactional_id
        return super().targets()

    def succession(self, broker: int) -> str:
        return f"broker-{broker} coordinates in its place"

    def fired(self) -> str:
        """Also: transactions really went on after it."""
        aborted = self.scenario.workload.aborted - self._aborted
        return f"{super().fired()}; {aborted} transactions were aborted since" if super().fired() and aborted else ""


class SinkCoordinatorKilled(_CoordinatorKilled):
    """Of the sink's for one input partition."""

    def targets(self) -> list[int]:
        partition = self.rng.choice(self.cluster.partitions(self.scenario.topic)).partition
        self.transactional_id = f"{self.scenario.name}/{self.scenario.topic}/{partition}"
        return super().targets()

    def succession(self, broker: int) -> str:
        return f"broker-{broker} coordinates {self.transactional_id}"


def coordinating_partition(transactional_id: str, partitions: int) -> int:
    """Which partition of ``__transaction_state`` keeps the account: Java's hash of the name. Its leader is the
    coordinator."""
    hashed = 0
    for byte in transactional_id.encode("ascii"):
        hashed = (31 * hashed + byte) & 0xFFFFFFFF
    signed = hashed - 2**32 if hashed >= 2**31 else hashed
    return (0 if signed == -(2**31) else abs(signed)) % partitions


class ControllerKilled(BrokersKilled):
    def targets(self) -> list[int]:
        self._epoch, number = self._newest()
        return [number]

    def aftermath(self) -> str:
        epoch, number = self._newest()
        return f"broker-{number} became the controller, epoch {epoch}" if epoch > self._epoch else ""

    def _newest(self) -> tuple[int, int]:
        """(epoch, broker): from the logs. Under KRaft, Kafka's metadata names any broker as the controller."""
        became = re.compile(r"Becoming the active controller at epoch (\d+)")
        return max(
            (int(epoch), broker.number)
            for broker in self.cluster.local.brokers()
            for epoch in became.findall(broker.log.read_text(errors="replace"))
        )


class AllBrokersKilled(BrokersKilled):
    def targets(self) -> list[int]:
        return [broker.number for broker in self.cluster.local.brokers()]


class BrokerPaused(Fault):
    def inject(self) -> None:
        self._number = self.rng.choice(self.cluster.partitions(self.scenario.topic)).leader
        self.cluster.broker(self._number).pause()

    def hold(self) -> None:
        super().hold()
        if self.scenario.wait_until(self._missing, 15):
            self.proof = f"broker-{self._number} missed its heartbeats and was fenced"

    def _missing(self) -> bool:
        with suppress(SourceError):
            others = ",".join(b.address for b in self.cluster.local.brokers() if b.number != self._number)
            return self._number not in Admin(Connection(others), timeout_s=2).cluster().brokers
        return False

    def heal(self) -> None:
        self.cluster.broker(self._number).resume()
        self.cluster.local.start(f"broker-{self._number}")
