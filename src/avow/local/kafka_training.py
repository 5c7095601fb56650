"""``python -m avow.local.kafka_training PATH``: one node does what nodes do, then its JVM writes a class archive."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic

from avow.kafka import metadata
from avow.local.broker import Broker, kafka_uuid
from avow.local.cluster import PortPicker

READY_S = 120  # a request waits so long for the node to come up


class _Training(Broker):
    def __init__(self, folder: Path, archive: Path) -> None:
        ports = PortPicker()
        super().__init__(1, folder, ports.free(), {1: ports.free()})
        self._archive = archive

    def command(self) -> list[str | Path]:
        java, *rest = super().command()
        return [java, f"-XX:ArchiveClassesAtExit={self._archive}", *rest]


def train(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="avow-kafka-") as folder:
        broker = _Training(Path(folder, "broker-1"), archive)
        broker.prepare()
        broker.format(kafka_uuid())
        broker.start()
        try:
            client = metadata.admin(broker.address)
            client.create_topics([NewTopic("t", 1)], request_timeout=READY_S)["t"].result(READY_S)
            producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "t"}, logger=metadata.QUIET)
            producer.init_transactions(30)
            producer.begin_transaction()
            producer.produce("t", b"value")
            producer.commit_transaction(30)
        finally:
            broker.stop()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
