"""One Kafka node: broker and KRaft controller in one JVM, from Apache Kafka's own jars.

Owns a node's settings and its storage format. The cluster decides ports and the order of things.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

from avow.errors import LocalError
from avow.local import jars, java
from avow.local.class_archive import ClassArchive
from avow.local.part import ClusterPart

LOG4J = """\
rootLogger.level = INFO
rootLogger.appenderRef.out.ref = OUT
appender.out.type = Console
appender.out.name = OUT
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %m (%c{1})%n
"""


@cache
def runtime() -> tuple[str | Path, ...]:
    """How every node's command begins. Finds Java, and fetches or verifies the jars, once."""
    classpath = ":".join(map(str, jars.classpath("kafka")))
    # A small heap, one collector thread and the first compiler only: three of these share two cores with Spark.
    # Measured there, to ready: 15 core-seconds for the three instead of 23; 1.5M records produced: 12 instead of 32.
    options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    # A start costs 3 core-seconds instead of 8. What Java says of an archive is nothing for a log.
    if archive := class_archive().made():
        options += [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable", "-Xlog:all=error:stderr"]
    return (java.find().path, *options, "-cp", classpath)


def class_archive() -> ClassArchive:
    """Of the classes that a node loads."""
    paths = [jar.path for jar in jars.locked("kafka")]
    return ClassArchive("Kafka", "avow.local.broker", jars.repository(), paths)


@dataclass(frozen=True, slots=True)
class Doors:
    """Two more listeners of a broker, each announced at another port, where a proxy stands: that is how a proof comes
    between a broker and the pipeline, or between two brokers."""

    client: int  # where it listens for the pipeline
    client_at: int  # the port advertised to the pipeline
    peer: int  # where it listens for the other brokers
    peer_at: int


class Broker(ClusterPart):
    """A combined node. ``voters`` is the whole controller quorum: id -> controller port."""

    def __init__(
        self, number: int, folder: Path, port: int, voters: dict[int, int], doors: Doors | None = None
    ) -> None:
        super().__init__(f"broker-{number}", folder, port)
        self.number = number
        self._voters = voters
        self._doors = doors
        self.data = folder / "data"
        self._config = folder / "server.properties"
        self._log4j = folder / "log4j2.properties"

    def command(self) -> list[str | Path]:
        return [*runtime(), f"-Dlog4j2.configurationFile={self._log4j}", "kafka.Kafka", self._config]

    def prepare(self) -> None:
        """Write the settings. Ports may have changed since the last start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log4j.write_text(LOG4J)
        self._config.write_text("".join(f"{key}={value}\n" for key, value in self.settings().items()))

    def settings(self) -> dict[str, object]:
        brokers = len(self._voters)
        copies = min(3, brokers)
        in_sync = max(1, copies - 1)  # one node may be away, no acknowledged record with it
        return {
            "process.roles": "broker,controller",
            "node.id": self.number,
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{port}" for n, port in self._voters.items()),
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{self._voters[self.number]}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.data,
            "default.replication.factor": copies,
            "min.insync.replicas": in_sync,
            "num.partitions": 3,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": 12,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync,
            "transaction.state.log.num.partitions": 12,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": in_sync,
            "group.initial.rebalance.delay.ms": 0,
            # Leaders go back to their own nodes soon after a restart, rather than in five minutes.
            "leader.imbalance.check.interval.seconds": 10,
            # A dead node is noticed in 6 s rather than 9.
            "broker.session.timeout.ms": 6000,
            "broker.heartbeat.interval.ms": 1000,
            **self._door_settings(),
        }

    def _door_settings(self) -> dict[str, object]:
        doors = self._doors
        if doors is None:
            return {}
        controller = f"CONTROLLER://127.0.0.1:{self._voters[self.number]}"
        names = ("PLAINTEXT", "CLIENT", "PEER")
        listen = dict(zip(names, (self.port, doors.client, doors.peer), strict=True))
        advertised = dict(zip(names, (self.port, doors.client_at, doors.peer_at), strict=True))
        return {
            "listeners": ",".join([*(f"{n}://127.0.0.1:{p}" for n, p in listen.items()), controller]),
            "advertised.listeners": ",".join(f"{n}://127.0.0.1:{p}" for n, p in advertised.items()),
            "listener.security.protocol.map": ",".join(f"{n}:PLAINTEXT" for n in (*names, "CONTROLLER")),
            "inter.broker.listener.name": "PEER",
            # A replica that hears nothing is out of sync after 4 s rather than 30, so that a proof can wait for it.
            "replica.lag.time.max.ms": 4000,
            # And it must not die waiting: a fetch through a cut is given up soon.
            "replica.socket.timeout.ms": 3000,
        }

    @property
    def formatted(self) -> bool:
        return (self.data / "meta.properties").exists()

    def format(self, cluster_id: str) -> None:
        """Kafka's own storage format, in a JVM of its own (about a second)."""
        tool = [*runtime(), f"-Dlog4j2.configurationFile={self._log4j}", "kafka.tools.StorageTool"]
        command = [*tool, "format", "--cluster-id", cluster_id, "--config", self._config]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LocalError(f"formatting the Kafka storage in {self.data} failed:\n{done.stdout}{done.stderr}")

    def format_like(self, other: Broker) -> None:
        """Take another node's fresh format, with our own node and directory id: a JVM start less per node."""
        making = self.folder / "data.new"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        shutil.copy(other.data / "bootstrap.checkpoint", making)
        own = {"node.id": str(self.number), "directory.id": kafka_uuid()}
        lines = (other.data / "meta.properties").read_text().splitlines()
        pairs = [line.split("=", 1) for line in lines if "=" in line]
        (making / "meta.properties").write_text("".join(f"{k}={own.get(k, v)}\n" for k, v in pairs))
        making.rename(self.data)


def kafka_uuid() -> str:
    """An id in the form Kafka prints: 16 random bytes in URL-safe base 64. It must not start with a dash."""
    while (text := urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _train(archive: Path) -> None:
    """In a process of its own: one node does what nodes do, then its JVM writes its archive."""
    from confluent_kafka import Producer
    from confluent_kafka.cimpl import NewTopic

    from avow.kafka import metadata
    from avow.local.cluster import PortPicker

    class Training(Broker):
        def command(self) -> list[str | Path]:
            java, *rest = super().command()
            return [java, f"-XX:ArchiveClassesAtExit={archive}", *rest]

    ports = PortPicker()
    ready_s = 120  # a request waits so long for the node to come up
    with tempfile.TemporaryDirectory(prefix="avow-kafka-") as folder:
        broker = Training(1, Path(folder, "broker-1"), ports.free(), {1: ports.free()})
        broker.prepare()
        broker.format(kafka_uuid())
        broker.start()
        try:
            client = metadata.admin(broker.address)
            client.create_topics([NewTopic("t", 1)], request_timeout=ready_s)["t"].result(ready_s)
            producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "t"}, logger=metadata.QUIET)
            producer.init_transactions(30)
            producer.begin_transaction()
            producer.produce("t", b"value")
            producer.commit_transaction(30)
        finally:
            broker.stop()


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
