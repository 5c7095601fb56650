"""Where cells are played: a local cluster of their own, with proxies in front of the brokers and of PostgreSQL; and a
Spark cluster, if one is asked for.

The pipeline gets to everything through proxies, and so do the brokers to each other. The workload, the checks and the
audit do not: what they see must not depend on the fault. Owns: the cluster's folder and the proxies. Must not know:
pipelines or faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from avow.errors import SourceError
from avow.kafka import metadata
from avow.kafka.committed import committed, reader
from avow.local.broker import Broker, Doors
from avow.local.cluster import Cluster, PortPicker
from avow.local.part import Part
from avow.local.postgres import Postgres
from avow.local.standalone import Standalone
from avow.prove.proxy import Proxy

BROKERS = 3


class Site:
    """A cluster in ``folder`` with its proxies. ``start`` takes about ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder)
        self._folder = folder
        self._sparks: Standalone | None = None
        self.clients: dict[int, Proxy] = {}  # broker number -> the proxy between it and the pipeline
        self.peers: dict[int, Proxy] = {}  # broker number -> the proxy between it and the other brokers
        self._database: Proxy | None = None
        self._pick = PortPicker()
        self._reader: Consumer | None = None  # kept: each has threads and connections of its own
        self._reading = threading.Lock()
        self.closing = threading.Event()  # whoever waits for something here gives up

    def start(self) -> Site:
        doors = tuple(Doors(*(self._pick.free() for _ in range(4))) for _ in range(BROKERS))
        for number, door in enumerate(doors, 1):
            self.clients[number] = Proxy(door.client_at, door.client).start()
            self.peers[number] = Proxy(door.peer_at, door.peer).start()
        self.cluster.up(doors=doors)
        self._database = Proxy(self._pick.free(), self.postgres.port).start()
        return self

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        for proxy in self.proxies():
            proxy.heal()
        try:
            if self._sparks is not None:
                self._sparks.down()
            if self.cluster.exists:
                for part in self.cluster.parts():
                    part.resume()
                self.cluster.down()
        finally:
            for proxy in self.proxies():
                proxy.stop()

    def proxies(self) -> Iterator[Proxy]:
        yield from (*self.clients.values(), *self.peers.values(), *([self._database] if self._database else []))

    def sparks(self) -> Standalone:
        """A Spark cluster of one master and two workers, started when it is first asked for."""
        if self._sparks is None:
            self._sparks = Standalone(self._folder / "spark", workers=2, cores=2, memory="2g")
            self._sparks.up()
        return self._sparks

    def parts(self) -> list[Part]:
        """Every process of it."""
        return [*self.cluster.parts(), *(self._sparks.parts if self._sparks else [])]

    @property
    def database(self) -> Proxy:
        """The proxy in front of PostgreSQL."""
        assert self._database is not None
        return self._database

    @property
    def postgres(self) -> Postgres:
        found = self.cluster.postgres()
        assert found is not None
        return found

    @property
    def url(self) -> str:
        """PostgreSQL, past the proxy."""
        return self.postgres.url

    @property
    def bootstrap(self) -> str:
        """The brokers, past the proxies."""
        return self.cluster.bootstrap

    @property
    def pipeline_url(self) -> str:
        return self.url.replace(f":{self.postgres.port}/", f":{self.database.port}/")

    @property
    def pipeline_brokers(self) -> str:
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.clients.values())

    def broker(self, number: int) -> Broker:
        return self.cluster.brokers()[number - 1]

    def mend(self) -> None:
        """Everything up and reachable again, whatever a fault left behind."""
        for proxy in self.proxies():
            proxy.heal()
        for part in self.parts():
            part.resume()
        self.cluster.up()
        if self._sparks is not None:
            self._sparks.up()

    def admin(self) -> AdminClient:
        return metadata.admin(self.bootstrap)

    def make_topic(self, name: str, partitions: int, **config: str) -> None:
        topic = NewTopic(name, partitions, config={key.replace("_", "."): value for key, value in config.items()})
        client = self.admin()  # kept: what it was asked for ends with it
        client.create_topics([topic], operation_timeout=30)[name].result()

    def drop_topic(self, name: str) -> None:
        client = self.admin()
        client.delete_topics([name], operation_timeout=10, request_timeout=10)[name].result()

    def whole(self) -> bool:
        """Whether every replica is in sync: a fault on top of another could leave none that is."""
        with suppress(SourceError):
            return not any(partition.under_replicated for partition in metadata.view(self.admin()).partitions)
        return False

    def partitions(self, topic: str) -> tuple[metadata.Partition, ...]:
        return tuple(p for p in metadata.view(self.admin()).partitions if p.topic == topic)

    def ends(self, topic: str) -> dict[int, int]:
        """The end of each partition, as a committed reader sees it."""
        with self._reading:
            if self._reader is None:
                self._reader = Consumer(
                    {"bootstrap.servers": self.bootstrap, "group.id": "prove", "isolation.level": "read_committed"},
                    logger=metadata.QUIET,
                )
            reader = self._reader
            numbers = sorted(reader.list_topics(topic, timeout=10).topics[topic].partitions)
            return {n: reader.get_watermark_offsets(TopicPartition(topic, n), timeout=10)[1] for n in numbers}

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str]]:
        """The group's positions with their metadata; none while nobody answers."""
        with suppress(KafkaException), closing(reader({"bootstrap.servers": self.bootstrap}, group)) as one:
            return {at.partition: (at.offset, at.metadata or "{}") for at in committed(one, 10) if at.topic == topic}
        return {}

    def comes_from(self, number: int) -> Callable[[int], bool]:
        """Whether a port is one that a broker connects from. Looked up in the broker's own process."""
        pid = self.broker(number).pid

        def ours(port: int) -> bool:
            with suppress(psutil.NoSuchProcess):
                if pid is not None:
                    found = psutil.Process(pid).net_connections("tcp")
                    return any(connection.laddr.port == port for connection in found)
            return False

        return ours
