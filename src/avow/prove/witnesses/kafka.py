"""A topic, as a reader of committed records finds it; the ledger is the consumer group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, Message

from avow.prove.check import Row, read_messages
from avow.prove.witnesses.base import Around, Witness


class KafkaWitness(Witness):
    def __init__(self, site: Around, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(site, folder, pipeline, table)
        self._letters = f"{pipeline}.dead-letters"
        self._positions: dict[int, int] = {}  # as last seen

    @property
    def output_topic(self) -> str:
        return self.table

    def section(self) -> dict[str, Any]:
        # Compressed, a request could not be known by what is in it; and what is left open is to end while a cell lasts.
        return {"topic": self.table, "kafka": {"compression.type": "none", "transaction.timeout.ms": 5000}}

    def count(self) -> int | None:
        """How many offsets, which is a few more."""
        with suppress(KafkaException, KeyError):
            return sum(self.site.ends(self.table).values())
        return None

    def positions(self) -> dict[int, int]:
        found = {number: offset for number, (offset, _) in self._committed().items()}
        # With a topic Kafka deletes its positions: then the last ones that were seen are what is known.
        self._positions = found or self._positions
        return self._positions

    def claiming_run(self) -> int:
        return max((json.loads(said)["run"] for _, said in self._committed().values()), default=0)

    def _committed(self) -> dict[int, tuple[int, str]]:
        return self.site.committed(self.pipeline, self.pipeline)

    def numbered(self) -> list[Row]:
        rows = []
        for message in read_messages(self.site.bootstrap, self.table):
            said = json.loads(message.value() or b"")
            rows.append(Row(said["n"], said["k"], said["crc"], said["body"], *_origin(message)))
        return rows

    def places(self, lineage: Sequence[str]) -> list[tuple[int, int]]:  # noqa: ARG002
        return [_origin(message) for message in read_messages(self.site.bootstrap, self.table)]

    def dead(self) -> list[tuple[int, int]]:
        # Beside letters, which have headers, the topic says which partitions were begun.
        letters = read_messages(self.site.bootstrap, self._letters)
        return [_origin(letter) for letter in letters if letter.value() is not None and letter.headers()]

    def close(self) -> None:
        for topic in (self.table, self._letters):
            with suppress(KafkaException):
                self.site.drop_topic(topic)


def _origin(message: Message) -> tuple[int, int]:
    """Which record it came from, as its last header says."""
    said = dict(message.headers() or [])["avow-origin"]
    assert isinstance(said, bytes)
    _, partition, offset = said.decode().rsplit("/", 2)
    return int(partition), int(offset)
