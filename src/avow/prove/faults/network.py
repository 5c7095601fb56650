"""The network: what proxies do between the pipeline and the brokers, and between brokers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple

from avow.errors import SourceError
from avow.prove.faults.base import Fault
from avow.prove.proxy import Counts, Proxy, Way


class NetworkFault(Fault):
    """Something that proxies do. ``fired`` looks at what they counted."""

    def proxies(self) -> list[Proxy]:
        return list(self.site.clients.values())

    def counted(self) -> Counts:
        return _sum(proxy.counts for proxy in self.proxies())

    def inject(self) -> None:
        self._before = self.counted()
        self.harm()

    @abstractmethod
    def harm(self) -> None:
        """Do it."""

    def heal(self) -> None:
        self._after = self.counted()
        for proxy in self.proxies():
            proxy.heal()

    def did(self, count: str) -> int:
        return int(getattr(self._after, count) - getattr(self._before, count))


def _sum(counts: Iterable[Counts]) -> Counts:
    columns = zip(*(astuple(one) for one in counts), strict=True)
    return Counts(*(sum(column) for column in columns))


class CutFromBrokers(NetworkFault):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.cut()

    def fired(self) -> str:
        cut, refused = self.did("cut"), self.did("refused")
        return f"{cut} connections to brokers cut, {refused} new ones refused" if cut and refused else ""


class BrokersOneWay(NetworkFault):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.hold(Way.DOWN)

    def fired(self) -> str:
        held = self.did("held_bytes")
        return f"{held:,} bytes of the brokers' answers held back" if held else ""


class BrokersSlow(NetworkFault):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.delay(0.2)

    def fired(self) -> str:
        return f"{self.did('delayed'):,} chunks came 200 ms late" if self.did("delayed") else ""


class _BrokersApart(NetworkFault):
    """Brokers are cut from each other. The controller still hears all of them: a grey failure, not a dead node."""

    _shrank = ""

    def proxies(self) -> list[Proxy]:
        return [*self.site.peers.values(), *self.site.clients.values()]

    def hold(self) -> None:
        super().hold()
        self.scene.until(self._look, 15)

    def _look(self) -> bool:
        with suppress(SourceError):
            for partition in self.site.partitions(self.scene.topic):
                if partition.under_replicated:
                    self._shrank = f"partition {partition.partition} has {partition.in_sync} in sync"
        return bool(self._shrank)

    def heal(self) -> None:
        super().heal()
        # Whole again before the next fault: two at once could leave no replica that is in sync.
        self.scene.until(lambda: not any(p.under_replicated for p in self.site.partitions(self.scene.topic)), 30)

    def fired(self) -> str:
        cut = self.did("cut") + self.did("refused")
        return f"{cut} connections cut or refused; {self._shrank}" if cut and self._shrank else ""


class BrokerCutOff(_BrokersApart):
    def harm(self) -> None:
        number = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        own = self.site.comes_from(number)
        for other, proxy in self.site.peers.items():
            proxy.cut(None if other == number else own)
        self.site.clients[number].cut()


class BrokersCutApart(_BrokersApart):
    def harm(self) -> None:
        one = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        other = self.chance.choice([number for number in self.site.peers if number != one])
        self.site.peers[one].cut(self.site.comes_from(other))
        self.site.peers[other].cut(self.site.comes_from(one))
