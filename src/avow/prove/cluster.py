"""The test cluster that cells run on: a local cluster with proxies in front of the brokers and of PostgreSQL, and a
Spark cluster where a cell needs one.

The pipeline connects to everything through proxies, and so do the brokers to each other. The workload, the checks and
the audit connect directly: what they see must not depend on the fault. Owns: the cluster's folder and the proxies. Must
not know: pipelines or faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
from confluent_kafka import Consumer, KafkaException, TopicPartition

from avow.errors import SourceError
from avow.kafka.admin import Admin
from avow.kafka.committed import committed, reader
from avow.kafka.connect import Connection
from avow.kafka.metadata import QUIET, Partition
from avow.local.broker import Broker, Doors
from avow.local.cluster import Cluster, PortPicker
from avow.local.part import ClusterPart
from avow.local.postgres import Postgres
from avow.local.standalone import Standalone
from avow.prove.proxy import Proxy

BROKERS = 3


class ProofCluster:
    """A cluster in ``folder`` with its proxies. ``start`` takes about ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.local = Cluster(folder)
        self._folder = folder
        self._spark: Standalone | None = None
        self.clients: dict[int, Proxy] = {}  # broker number -> the proxy between it and the pipeline
        self.peers: dict[int, Proxy] = {}  # broker number -> the proxy between it and the other brokers
        self._proxies: list[Proxy] = []  # all of them
        self._pick = PortPicker()
        self._reader: Consumer | None = None  # kept: each has threads and connections of its own
        self._reading = threading.Lock()
        self.closing = threading.Event()  # set at shutdown: every wait is abandoned

    def start(self) -> ProofCluster:
        doors = tuple(Doors(*(self._pick.free() for _ in range(4))) for _ in range(BROKERS))
        for number, door in enumerate(doors, 1):
            self.clients[number] = self._proxy(door.client_at, door.client)
            self.peers[number] = self._proxy(door.peer_at, door.peer)
        self.local.up(doors=doors)
        self.database = self._proxy(self._pick.free(), self.postgres.port)  # in front of PostgreSQL
        return self

    def _proxy(self, port: int, target: int) -> Proxy:
        self._proxies.append(Proxy(port, target).start())
        return self._proxies[-1]

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        for proxy in self._proxies:
            proxy.heal()
        try:
            if self._spark is not None:
                self._spark.down()
            if self.local.exists:
                for part in self.local.parts():
                    part.resume()
                self.local.down()
        finally:
            for proxy in self._proxies:
                proxy.stop()

    def spark_cluster(self) -> Standalone:
        """A Spark cluster of one master and two workers, started on first use."""
        if self._spark is None:
            self._spark = Standalone(self._folder / "spark", workers=2, cores=2, memory="2g")
            self._spark.up()
        return self._spark

    def parts(self) -> list[ClusterPart]:
        """Every process of it."""
        return [*self.local.parts(), *(self._spark.parts if self._spark else [])]

    @property
    def postgres(self) -> Postgres:
        server = self.local.postgres()
        assert server is not None
        return server

    @property
    def url(self) -> str:
        """PostgreSQL, past the proxy."""
        return self.postgres.url

    @property
    def bootstrap(self) -> str:
        """The brokers, past the proxies."""
        return self.local.bootstrap

    @property
    def pipeline_url(self) -> str:
        return self.url.replace(f":{self.postgres.port}/", f":{self.database.port}/")

    @property
    def pipeline_brokers(self) -> str:
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.clients.values())

    def broker(self, number: int) -> Broker:
        return self.local.brokers()[number - 1]

    def restore(self) -> None:
        """Everything up and reachable again, whatever a fault left behind."""
        for proxy in self._proxies:
            proxy.heal()
        for part in self.parts():
            part.resume()
        self.local.up()
        if self._spark is not None:
            self._spark.up()

    def admin(self, timeout_s: float = 30) -> Admin:
        return Admin(Connection(self.bootstrap), timeout_s=timeout_s)

    def make_topic(self, name: str, partitions: int) -> bool:
        """False if it exists already."""
        return self.admin().create_topic(name, partitions)

    def drop_topic(self, name: str) -> None:
        self.admin(10).delete_topic(name)

    def fully_replicated(self) -> bool:
        """Whether every replica is in sync: a fault on top of another could leave none that is."""
        with suppress(SourceError):
            return not any(partition.under_replicated for partition in self.admin(5).cluster().partitions)
        return False

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        return tuple(p for p in self.admin(5).cluster().partitions if p.topic == topic)

    def ends(self, topic: str) -> dict[int, int]:
        """The end of each partition, as a committed reader sees it."""
        with self._reading:
            if self._reader is None:
                self._reader = Consumer(
                    {"bootstrap.servers": self.bootstrap, "group.id": "prove", "isolation.level": "read_committed"},
                    logger=QUIET,
                )
            reader = self._reader
            numbers = sorted(reader.list_topics(topic, timeout=10).topics[topic].partitions)
            return {n: reader.get_watermark_offsets(TopicPartition(topic, n), timeout=10)[1] for n in numbers}

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str]]:
        """The group's positions with their metadata; none while nobody answers."""
        with suppress(KafkaException), closing(reader(Connection(self.bootstrap), group)) as consumer:
            return {
                tp.partition: (tp.offset, tp.metadata or "{}") for tp in committed(consumer, 10) if tp.topic == topic
            }
        return {}

    def is_port_of(self, number: int) -> Callable[[int], bool]:
        """Whether a port is one that a broker connects from. Looked up in the broker's own process."""
        pid = self.broker(number).pid

        def matches(port: int) -> bool:
            with suppress(psutil.NoSuchProcess):
                if pid is not None:
                    connections = psutil.Process(pid).net_connections("tcp")
                    return any(connection.laddr.port == port for connection in connections)
            return False

        return matches
