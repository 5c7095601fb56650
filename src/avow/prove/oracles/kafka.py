"""A topic, as a reader of committed records finds it; the ledger is the consumer group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Message

from avow.errors import SourceError
from avow.prove.check import Row, read_messages
from avow.prove.oracles.base import Oracle, OracleEnvironment


class KafkaOracle(Oracle):
    def __init__(self, cluster: OracleEnvironment, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(cluster, folder, pipeline, table)
        self._dead_letter_topic = f"{pipeline}.dead-letters"
        self._positions: dict[int, int] = {}  # as last seen

    @property
    def output_topic(self) -> str:
        return self.table

    def sink_config(self) -> dict[str, Any]:
        # Compressed, a request could not be known by what is in it; and what is left open is to end while a cell lasts.
        return {"topic": self.table, "kafka": {"compression.type": "none", "transaction.timeout.ms": 5000}}

    def count(self) -> int | None:
        """How many offsets, which is a few more."""
        with suppress(KafkaException, KeyError):
            return sum(self.cluster.ends(self.table).values())
        return None

    def positions(self) -> dict[int, int]:
        offsets = {number: offset for number, (offset, _) in self._committed().items()}
        # With a topic Kafka deletes its positions: then the last ones that were seen are what is known.
        self._positions = offsets or self._positions
        return self._positions

    def claiming_run(self) -> int:
        return max((json.loads(metadata)["run"] for _, metadata in self._committed().values()), default=0)

    def _committed(self) -> dict[int, tuple[int, str]]:
        return self.cluster.committed(self.pipeline, self.pipeline)

    def numbered_rows(self) -> list[Row]:
        rows = []
        for message in read_messages(self.cluster.bootstrap, self.table):
            value = json.loads(message.value() or b"")
            rows.append(Row(value["n"], value["k"], value["crc"], value["body"], *_origin(message)))
        return rows

    def origins(self, lineage: Sequence[str]) -> list[tuple[int, int]]:  # noqa: ARG002
        return [_origin(message) for message in read_messages(self.cluster.bootstrap, self.table)]

    def dead_letters(self) -> list[tuple[int, int]]:
        # Dead letters have headers; the topic also has records that mark which partitions were started.
        messages = read_messages(self.cluster.bootstrap, self._dead_letter_topic)
        return [_origin(message) for message in messages if message.value() is not None and message.headers()]

    def close(self) -> None:
        for topic in (self.table, self._dead_letter_topic):
            with suppress(SourceError):
                self.cluster.drop_topic(topic)


def _origin(message: Message) -> tuple[int, int]:
    """The record it came from, by its avow-origin header."""
    origin = dict(message.headers() or [])["avow-origin"]
    assert isinstance(origin, bytes)
    _, partition, offset = origin.decode().rsplit("/", 2)
    return int(partition), int(offset)
