"""Which ranges the next batch has, and which of them a task: from the positions to where committed records end.

Theory of operation
-------------------
The log's stable ends are asked for each batch, in one request for all partitions. Where more is there than a batch may
have, partitions get a share of it by how far they are behind. What is a little behind is read whole; of the others only
as many take their turn as get ranges worth reading: at the end of a range, what was fetched ahead is thrown away. Added
partitions, and new topics of a pattern, are looked for now and then.

A task costs as much as thousands of records do. So a large range has one of its own, and small ones share one.

Owns: ranges. Must not know: how they are delivered. Neighbours: ``driver`` (positions), ``kafka.log`` (ends).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from avow.engines.driver import RunDriver
from avow.errors import SourceError
from avow.kafka.log import TopicPartition
from avow.ledger import OffsetRange

PARTITIONS_EVERY_S = 5.0
WORTH_READING = 20_000  # records
TURNS_MIN = 4  # partitions that are behind, and take their turn in the same batch
TASK_RECORDS = 50_000
TASK_RANGES = 200


class Planner:
    """Of one attempt. ``ends``: nothing is planned beyond these, and no partition is that they do not name."""

    def __init__(self, driver: RunDriver, max_records: int, ends: Mapping[TopicPartition, int] | None) -> None:
        self._driver = driver
        self._max_records = max_records
        self._ends = ends
        self._partitions_at = time.monotonic()
        self._turns: dict[TopicPartition, int] = {}  # the last batch that had records of it
        self._batch = 0

    def next_batch(self) -> dict[TopicPartition, OffsetRange]:
        """What is there to read; empty if nothing is."""
        if self._ends is None:
            self._find_partitions()
        positions = self._driver.positions
        ends = self._stable_ends() if self._ends is None else self._ends
        behind = {tp: ends[tp] - position for tp, position in positions.items() if ends.get(tp, 0) > position}
        in_turn = sorted(behind, key=lambda tp: (self._turns.get(tp, 0), tp))
        counts = shares({tp: behind[tp] for tp in in_turn}, self._max_records)
        self._batch += 1
        self._turns |= dict.fromkeys(counts, self._batch)
        return {
            tp: OffsetRange(tp.topic, tp.partition, positions[tp], positions[tp] + count)
            for tp, count in counts.items()
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
        known = self._driver.topics.partitions(self._driver.log)
        self._driver.adopt_new(known.keys() - self._driver.positions.keys())


def shares(behind: Mapping[TopicPartition, int], max_records: int) -> dict[TopicPartition, int]:
    """How many offsets of each partition a batch has, in all about ``max_records``. ``behind``: those that had none for
    longest come first."""
    if sum(behind.values()) <= max_records:
        return dict(behind)
    fair = max_records // len(behind)
    taken = {tp: count for tp, count in behind.items() if count <= fair}
    room = max_records - sum(taken.values())
    # The others take turns: each has what is worth reading, as long as there is room.
    least = min(WORTH_READING, room // TURNS_MIN)
    in_turn: dict[TopicPartition, int] = {}
    for tp in [tp for tp in behind if tp not in taken]:
        if room <= 0 and len(in_turn) >= TURNS_MIN:
            break
        in_turn[tp] = max(1, min(behind[tp], least, room))
        room -= in_turn[tp]
    # What is left is shared by how far they are behind.
    more = {tp: behind[tp] - count for tp, count in in_turn.items()}
    total = max(1, sum(more.values()))
    return taken | {tp: count + more[tp] * max(0, room) // total for tp, count in in_turn.items()}


def share_out(ranges: Collection[OffsetRange]) -> list[list[OffsetRange]]:
    """The ranges of each task: large ones alone, small ones together, about evenly. Always the same for the same
    ranges: the driver and its tasks ask alike."""
    by_size = sorted(ranges, key=lambda range_: (-len(range_), range_.topic, range_.partition))
    large = [[range_] for range_ in by_size if len(range_) > TASK_RECORDS // 2]
    small = by_size[len(large) :]
    count = max(math.ceil(sum(map(len, small)) / TASK_RECORDS), math.ceil(len(small) / TASK_RANGES))
    shared: list[list[OffsetRange]] = [[] for _ in range(count)]
    records = [0] * count
    for range_ in small:
        free = (number for number in range(count) if len(shared[number]) < TASK_RANGES)
        least = min(free, key=records.__getitem__)
        shared[least].append(range_)
        records[least] += len(range_)
    return large + shared
