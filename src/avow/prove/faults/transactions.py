"""Faults that concern a sink of Kafka transactions: their coordinator, their acknowledgements, their time-out.

Owns: how this harm is done. Must not know: verdicts.
"""

from __future__ import annotations

import re
from signal import SIGCONT

from avow.prove.driver import signal, stopped
from avow.prove.faults.base import AtFailpoint
from avow.prove.faults.brokers import BrokersKilled, coordinating_partition
from avow.prove.faults.network import NetworkFault
from avow.prove.proxy import LostReply

# What a coordinator says when it has ended one.
ROLLED_BACK = r"rollback of ongoing transaction for transactionalId ({}/\S+) due to timeout"

# The header that every record to the output carries. Requests of these pipelines are not compressed.
IN_REQUEST = b"avow-origin"


class ProduceReplyLost(NetworkFault):
    """A broker takes records, and its answer never arrives: the producer cannot know."""

    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.lose_replies(LostReply(IN_REQUEST, IN_REQUEST, self.scene.witness.table.encode(), times=2))

    def hold(self) -> None:
        before = self._before.lost_replies
        self.scene.until(lambda: self.counted().lost_replies > before, 30)
        super().hold()

    def fired(self) -> str:
        lost = self.did("lost_replies")
        return f"brokers answered {lost} times that records were written, and the task never heard it" if lost else ""


class TransactionTimesOut(AtFailpoint):
    """A worker stands still in the middle of its write, until Kafka has aborted its transaction; then it goes on."""

    point = "mid-write"
    who = "stop"
    _aborted = ""

    def prepare(self) -> None:
        super().prepare()
        # Nothing that the brokers have said before is of this transaction.
        self._said = {broker: broker.log.stat().st_size for broker in self.site.cluster.brokers()}

    def _look(self) -> str:
        """The coordinator's own words, and who stood still meanwhile."""
        still = [one.pid for one in self._driver.family() if stopped(one)]
        for broker, before in self._said.items():
            log = broker.log.read_bytes()[before:].decode(errors="replace")
            found = re.search(ROLLED_BACK.format(re.escape(self.scene.name)), log)
            if still and found:
                self._aborted = (
                    f"{broker.name} aborted the transaction of {found[1]} for its time-out, while its worker, pid "
                    f"{still[0]}, stood still in mid-write"
                )
        return self._aborted

    def heal(self) -> None:
        signal(self._driver.family(), SIGCONT)

    def fired(self) -> str:
        return self._aborted or self._look()


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
