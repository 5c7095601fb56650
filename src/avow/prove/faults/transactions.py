"""Faults that concern a sink of Kafka transactions: their coordinator, their acknowledgements, their time-out.

Owns: how this harm is done. Must not know: verdicts.
"""

from __future__ import annotations

from pathlib import Path
from signal import SIGCONT

from avow.engines import failpoints
from avow.prove.driver import signal
from avow.prove.faults.base import WAIT_S, Fault
from avow.prove.faults.brokers import BrokersKilled, coordinating_partition
from avow.prove.faults.network import NetworkFault
from avow.prove.proxy import LostReply

# The header that every record to the output carries. Requests of these pipelines are not compressed.
IN_REQUEST = b"avow-origin"


class ProduceReplyLost(NetworkFault):
    """A broker takes records, and its answer never arrives: the producer cannot know."""

    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.lose_replies(LostReply(IN_REQUEST, IN_REQUEST, self.scene.table.encode(), times=2))

    def hold(self) -> None:
        before = self._before.lost_replies
        self.scene.until(lambda: self.counted().lost_replies > before, 30)
        super().hold()

    def fired(self) -> str:
        lost = self.did("lost_replies")
        return f"brokers answered {lost} times that records were written, and the task never heard it" if lost else ""


class TransactionTimesOut(Fault):
    """A worker stands still in the middle of its write, until Kafka has aborted its transaction; then it goes on."""

    def prepare(self) -> None:
        self._folder = Path(self.scene.folder, f"failpoint-{self.chance.randrange(10**9)}")
        self._folder.mkdir()
        self.env = {failpoints.VARIABLE: f"mid-write:1:stop:{self._folder}"}

    def inject(self) -> None:
        self._driver = self.scene.driver
        if not self.scene.driver_has(self.env):
            self._driver.stop()
            self._driver = self.scene.start(env=self.env)
        self.scene.until(lambda: (self._folder / "fired-mid-write").exists() or not self._driver.alive, WAIT_S)

    def heal(self) -> None:
        signal(self._driver.family(), SIGCONT)

    def fired(self) -> str:
        if not (self._folder / "fired-mid-write").exists():
            return ""
        return f"a worker of pid {self._driver.pid} stood still in mid-write for {self.hold_s:g} s"


class SinkCoordinatorKilled(BrokersKilled):
    """The broker that coordinates the sink's transactions of one input partition."""

    def chosen(self) -> list[int]:
        partition = self.chance.choice(self.site.partitions(self.scene.topic)).partition
        self._id = f"{self.scene.name}/{self.scene.topic}/{partition}"
        return [self._coordinator()]

    def _coordinator(self) -> int:
        states = self.site.partitions("__transaction_state")
        number = coordinating_partition(self._id, len(states))
        return next(one.leader for one in states if one.partition == number)

    def aftermath(self) -> str:
        now = self._coordinator()
        return f"broker-{now} coordinates {self._id}" if now not in (-1, *self._numbers) else ""
