"""The network: what proxies do between the pipeline and its servers, and between brokers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import ClassVar

from avow.errors import SourceError
from avow.prove.faults.base import Fault
from avow.prove.proxy import Direction, LostReply, Proxy

# The header that every record to an output topic carries. Requests of these pipelines are not compressed.
IN_REQUEST = b"avow-origin"


class NetworkFault(Fault):
    """Something that proxies do, and count."""

    needs: ClassVar[tuple[str, ...]]  # what they must have counted, by the names in ``ProxyCounts``
    evidence: ClassVar[str]  # the proof, with the counts to be filled in

    def proxies(self) -> list[Proxy]:
        return list(self.cluster.clients.values())

    def total_counts(self) -> Counter[str]:
        total = Counter[str]()
        for proxy in self.proxies():
            total.update(asdict(proxy.counts))
        return total

    def inject(self) -> None:
        self._before = self.total_counts()
        self.apply()

    @abstractmethod
    def apply(self) -> None:
        """Do it."""

    def heal(self) -> None:
        self.counts = self.total_counts()
        self.counts.subtract(self._before)
        for proxy in self.proxies():
            proxy.heal()

    def fired(self) -> str:
        return self.evidence.format_map(self.counts) if all(self.counts[name] for name in self.needs) else ""


class CutFromBrokers(NetworkFault):
    needs = ("cut", "refused")
    evidence = "{cut} connections to brokers cut, {refused} new ones refused"

    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.cut()


class BrokersOneWay(NetworkFault):
    needs = ("held_bytes",)
    evidence = "{held_bytes:,} bytes of the brokers' responses were held back"

    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.hold(Direction.DOWN)


class BrokersSlow(NetworkFault):
    needs = ("delayed",)
    evidence = "{delayed:,} chunks were delayed by 200 ms"

    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.delay(0.2)


class ReplyLost(NetworkFault):
    """A server handles a request, and its answer is lost: the client cannot know the outcome."""

    needs = ("lost_replies",)

    def hold(self) -> None:
        before = self._before["lost_replies"]
        self.scenario.wait_until(lambda: self.total_counts()["lost_replies"] > before, 30)
        super().hold()


class ProduceReplyLost(ReplyLost):
    """A broker takes records, and its answer never arrives: the producer cannot know."""

    evidence = "{lost_replies} produce acknowledgements were dropped before they reached the task"

    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.lose_replies(LostReply(IN_REQUEST, IN_REQUEST, self.scenario.oracle.table.encode(), times=2))


class _BrokersApart(NetworkFault):
    """Brokers are cut from each other. The controller still reaches all of them: a grey failure, not a dead node."""

    _shrank = ""

    def proxies(self) -> list[Proxy]:
        return [*self.cluster.peers.values(), *self.cluster.clients.values()]

    def hold(self) -> None:
        super().hold()
        self.scenario.wait_until(self._observe, 15)

    def _observe(self) -> bool:
        with suppress(SourceError):
            for partition in self.cluster.partitions(self.scenario.topic):
                if partition.under_replicated:
                    self._shrank = f"partition {partition.partition} has {partition.in_sync} in sync"
        return bool(self._shrank)

    def heal(self) -> None:
        super().heal()
        # Whole again before the next fault: two at once could leave no replica that is in sync.
        self.scenario.wait_until(
            lambda: not any(p.under_replicated for p in self.cluster.partitions(self.scenario.topic)), 30
        )

    def fired(self) -> str:
        cut = self.counts["cut"] + self.counts["refused"]
        return f"{cut} connections cut or refused; {self._shrank}" if cut and self._shrank else ""


class BrokerCutOff(_BrokersApart):
    def apply(self) -> None:
        number = self.rng.choice(self.cluster.partitions(self.scenario.topic)).leader
        from_broker = self.cluster.is_port_of(number)
        for other, proxy in self.cluster.peers.items():
            proxy.cut(None if other == number else from_broker)
        self.cluster.clients[number].cut()


class BrokersCutApart(_BrokersApart):
    def apply(self) -> None:
        first = self.rng.choice(self.cluster.partitions(self.scenario.topic)).leader
        second = self.rng.choice([number for number in self.cluster.peers if number != first])
        self.cluster.peers[first].cut(self.cluster.is_port_of(second))
        self.cluster.peers[second].cut(self.cluster.is_port_of(first))
