"""Which ranges the next batch has: from the positions to where committed records end, bounded in records.

Theory of operation
-------------------
The log's stable ends are asked for each batch, in one request for all partitions. Where more is there than a batch may
have, each partition gets a share of it by how far it is behind, and at least one offset, so that none starves. Added
partitions, and new topics of a pattern, are looked for now and then.

Owns: ranges. Must not know: how they are delivered. Neighbours: ``driver`` (positions), ``kafka.log`` (ends).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from avow.engines.driver import Driver
from avow.errors import SourceError
from avow.kafka.log import TopicPartition
from avow.ledger import OffsetRange

PARTITIONS_EVERY_S = 5.0


class Planner:
    """Of one attempt. ``ends``: nothing is planned beyond these, and no partition is that they do not name."""

    def __init__(self, driver: Driver, max_records: int, ends: Mapping[TopicPartition, int] | None) -> None:
        self._driver = driver
        self._max_records = max_records
        self._ends = ends
        self._partitions_at = time.monotonic()

    def next_batch(self) -> dict[TopicPartition, OffsetRange]:
        """What is there to read; empty if nothing is."""
        if self._ends is None:
            self._find_partitions()
        positions = self._driver.positions
        ends = self._stable_ends() if self._ends is None else self._ends
        behind = {tp: ends[tp] - position for tp, position in positions.items() if ends.get(tp, 0) > position}
        return {
            tp: OffsetRange(tp.topic, tp.partition, positions[tp], positions[tp] + count)
            for tp, count in shares(behind, self._max_records).items()
        }

    def _stable_ends(self) -> dict[TopicPartition, int]:
        positions = self._driver.positions
        ends = self._driver.log.stable_ends(positions)
        for tp, end in ends.items():
            if end < positions[tp]:
                # The next attempt asks the ledger's rules whether the log was cut or the topic made again.
                raise SourceError(f"{tp} ends at offset {end}, below the position {positions[tp]}")
        return ends

    def _find_partitions(self) -> None:
        if time.monotonic() - self._partitions_at < PARTITIONS_EVERY_S:
            return
        self._partitions_at = time.monotonic()
        self._driver.adopt_new(self._driver.log.partitions().keys() - self._driver.positions.keys())


def shares(behind: Mapping[TopicPartition, int], max_records: int) -> dict[TopicPartition, int]:
    """How many offsets of each partition a batch has: in all about ``max_records``, in proportion, at least one."""
    total = sum(behind.values())
    if total <= max_records:
        return dict(behind)
    return {tp: max(1, count * max_records // total) for tp, count in behind.items()}
