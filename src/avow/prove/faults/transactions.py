"""Faults of a sink that writes in Kafka transactions: their coordinator, their acknowledgements, their time-out.

Owns: how these faults are injected. Must not know: verdicts.
"""

from __future__ import annotations

import re
from signal import SIGCONT

from avow.prove.driver_process import signal, stopped
from avow.prove.faults.base import AtFailpoint
from avow.prove.faults.brokers import BrokersKilled, coordinating_partition
from avow.prove.faults.network import ReplyLost
from avow.prove.proxy import LostReply

# What a coordinator logs when it aborts one.
ROLLED_BACK = r"rollback of ongoing transaction for transactionalId ({}/\S+) due to timeout"

# The header that every record to the output carries. Requests of these pipelines are not compressed.
IN_REQUEST = b"avow-origin"


class ProduceReplyLost(ReplyLost):
    """A broker takes records, and its answer never arrives: the producer cannot know."""

    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.lose_replies(LostReply(IN_REQUEST, IN_REQUEST, self.scenario.oracle.table.encode(), times=2))

    def fired(self) -> str:
        lost = self.counted("lost_replies")
        return f"{lost} produce acknowledgements were dropped before they reached the task" if lost else ""


class TransactionTimesOut(AtFailpoint):
    """A worker is stopped in mid-write until Kafka has aborted its transaction; then it continues."""

    point = "mid-write"
    who = "stop"
    _aborted = ""

    def prepare(self) -> None:
        super().prepare()
        # Log lines from before belong to other transactions.
        self._said = {broker: broker.log.stat().st_size for broker in self.cluster.local.brokers()}

    def _observe(self) -> str:
        """The coordinator's log line, and which process was stopped at the time."""
        paused = [process.pid for process in self._driver.process_tree() if stopped(process)]
        for broker, before in self._said.items():
            log = broker.log.read_bytes()[before:].decode(errors="replace")
            match = re.search(ROLLED_BACK.format(re.escape(self.scenario.name)), log)
            if paused and match:
                self._aborted = (
                    f"{broker.name} aborted the transaction of {match[1]} for its time-out, while its worker, pid "
                    f"{paused[0]}, was stopped in mid-write"
                )
        return self._aborted

    def heal(self) -> None:
        signal(self._driver.process_tree(), SIGCONT)

    def fired(self) -> str:
        return self._aborted or self._observe()


class SinkCoordinatorKilled(BrokersKilled):
    """The broker that coordinates the sink's transactions of one input partition."""

    def targets(self) -> list[int]:
        partition = self.rng.choice(self.cluster.partitions(self.scenario.topic)).partition
        self._id = f"{self.scenario.name}/{self.scenario.topic}/{partition}"
        return [self._coordinator()]

    def _coordinator(self) -> int:
        states = self.cluster.partitions("__transaction_state")
        number = coordinating_partition(self._id, len(states))
        return next(state.leader for state in states if state.partition == number)

    def aftermath(self) -> str:
        now = self._coordinator()
        return f"broker-{now} coordinates {self._id}" if now not in (-1, *self._numbers) else ""
