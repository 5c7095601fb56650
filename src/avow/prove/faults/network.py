"""The network: what proxies do between the pipeline and the brokers, and between brokers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple

from avow.errors import SourceError
from avow.prove.faults.base import Fault
from avow.prove.proxy import Direction, Proxy, ProxyCounts


class NetworkFault(Fault):
    """Something that proxies do. ``fired`` looks at what they counted."""

    def proxies(self) -> list[Proxy]:
        return list(self.cluster.clients.values())

    def total_counts(self) -> ProxyCounts:
        return _sum(proxy.counts for proxy in self.proxies())

    def inject(self) -> None:
        self._before = self.total_counts()
        self.apply()

    @abstractmethod
    def apply(self) -> None:
        """Do it."""

    def heal(self) -> None:
        self._after = self.total_counts()
        for proxy in self.proxies():
            proxy.heal()

    def counted(self, count: str) -> int:
        return int(getattr(self._after, count) - getattr(self._before, count))


def _sum(counts: Iterable[ProxyCounts]) -> ProxyCounts:
    columns = zip(*(astuple(count) for count in counts), strict=True)
    return ProxyCounts(*(sum(column) for column in columns))


class CutFromBrokers(NetworkFault):
    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.cut()

    def fired(self) -> str:
        cut, refused = self.counted("cut"), self.counted("refused")
        return f"{cut} connections to brokers cut, {refused} new ones refused" if cut and refused else ""


class BrokersOneWay(NetworkFault):
    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.hold(Direction.DOWN)

    def fired(self) -> str:
        held = self.counted("held_bytes")
        return f"{held:,} bytes of the brokers' responses were held back" if held else ""


class BrokersSlow(NetworkFault):
    def apply(self) -> None:
        for proxy in self.proxies():
            proxy.delay(0.2)

    def fired(self) -> str:
        return f"{self.counted('delayed'):,} chunks were delayed by 200 ms" if self.counted("delayed") else ""


class ReplyLost(NetworkFault):
    """A server handles a request, and its answer is lost: the client cannot know the outcome."""

    def hold(self) -> None:
        before = self._before.lost_replies
        self.scenario.wait_until(lambda: self.total_counts().lost_replies > before, 30)
        super().hold()


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
        cut = self.counted("cut") + self.counted("refused")
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
