"""A sink without an engine: records that are made here, not read from Kafka, go through the real decoder and acts.

Owns: what a driver and its tasks do, batch by batch (``Runner``), and one pipeline to do it with (``SinkBench``).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from avow import sinks
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.engines.task import (
    BatchWork,
    Confirm,
    RangeReport,
    can_join,
    commit_task_outputs,
    confirmed,
    decoded,
    deliver,
    deliver_joined,
)
from avow.kafka.batches import HEADERS
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.base import CommittingSink, DriverSink, StagingSink

TOPIC = "records"
SCHEMA = "id long not null, account string not null, amount double, tags array<string>"
# A schema with every type.
EVERY = (
    "a boolean, b byte, c short, d int, e long, f float, g double, h string, i binary, j date, k timestamp,"
    " l timestamp_ntz, m decimal(12,3), n array<struct<x: int, y: array<string>>>, o map<string,long>,"
    " p struct<q: double, r: struct<s: string>>"
)
Records = Mapping[int, Sequence[bytes | None]]  # partition -> values from the range's first offset on


def record(number: int, **more: Any) -> bytes:
    return json.dumps({"id": number, "account": f"acc-{number % 7}", "amount": number / 4, **more}).encode()


def every(number: int) -> bytes:
    return json.dumps(
        {
            **{"a": True, "b": -128, "c": 32767, "d": number, "e": 2**63 - 1, "f": 0.5, "g": -0.1, "h": "x\0é𝄞" * 20},
            **{"i": "AP8=", "j": "0001-01-01", "k": "9999-12-31T23:59:59.999999Z", "l": "2026-01-31T12:00:00.000001"},
            **{"m": 123456789.125, "n": [{"x": 1, "y": ["a", None]}, None], "o": {"k": 1, "l": None}},
            "p": {"q": 1.5, "r": {"s": "deep"}},
        }
    ).encode()


def batch(values: Sequence[bytes | None], partition: int, start: int, keys: Sequence[bytes | None]) -> pa.RecordBatch:
    """Records as an engine hands them to a task."""
    count = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([TOPIC] * count, pa.string()),
            "partition": pa.array([partition] * count, pa.int32()),
            "offset": pa.array(range(start, start + count), pa.int64()),
            "timestamp": pa.array([1_700_000_000_000 + n for n in range(start, start + count)]).cast(
                pa.timestamp("ms", "UTC")
            ),
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.nulls(count, HEADERS),
        }
    )


def _within(made: pa.RecordBatch, todo: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Those of the records that are still to be read, as a reader gives them."""
    first = made.column("offset")[0].as_py() if made.num_rows else todo.start
    if todo.start < first + made.num_rows:
        yield made.slice(todo.start - first, len(todo))


class SinkBench(ABC):
    """One pipeline into a sink, and a reader of what is in it that shares nothing with the sink's code."""

    brokers = "localhost:1"  # nothing is read from there

    def __init__(self, folder: Path, *, joined: bool = False) -> None:
        """``joined``: all partitions of a batch are in the same acts, where the pipeline allows it."""
        self.folder, self.joined = folder, joined
        self.name = f"p-{uuid4().hex[:8]}"
        self.table = f"t_{uuid4().hex[:8]}"
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def section(self) -> str:
        """The lines of ``[sink]``, without mode and key."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """All rows by their columns' names, ordered by partition and offset. Nested values as Python has them."""

    @abstractmethod
    def dead_letters(self) -> list[tuple[int, int, str]]:
        """Partition, offset and reason of all dead letters, ascending."""

    def settled(self, store: DriverSink) -> None:  # noqa: B027
        """Called before the ledger is read: waits until a commit that was answered shows, if the sink takes a moment
        for that."""

    def pipeline(
        self, guarantee: str = "exactly-once", *lines: str, schema: str = SCHEMA, more: str = ""
    ) -> PipelineConfig:
        """``lines``: of [sink]; ``more``: other sections."""
        file = self.folder / f"{self.name}.toml"
        file.write_text(
            f'name = "{self.name}"\nguarantee = "{guarantee}"\n'
            f'[source]\nbrokers = "{self.brokers}"\ntopics = ["{TOPIC}"]\n'
            f'[decode]\nformat = "json"\nschema = "{schema}"\n[dead_letters]\nmax_share = 1.0\n'
            f"[sink]\n{self.sink(*lines)}\n{more}\n"
        )
        return load_checked(file, {})

    def sink(self, *lines: str) -> str:
        return "\n".join([self.section(), *lines])

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows())

    def run(self, pipeline: PipelineConfig | None = None, partitions: int = 2, **more: Any) -> Runner:
        pipeline = pipeline or self.pipeline()
        joined = self.joined and can_join(pipeline)
        return Runner(pipeline, partitions, joined=joined, settled=self.settled, **more)


@dataclass
class Runner(AbstractContextManager["Runner"]):
    """One run: what the driver does, without an engine. Tasks run here too, one after the other."""

    pipeline: PipelineConfig
    partitions: int = 2
    number: int = 0
    batches: int = 0
    reports: list[RangeReport] = field(default_factory=list)
    joined: bool = False  # all partitions of a batch in the same acts
    member: Sequence[int] | None = None  # of those who share the partitions: which it is given
    hooks: Hooks = NO_HOOKS
    confirm: Confirm = confirmed
    settled: Callable[[DriverSink], None] = lambda _: None

    def __post_init__(self) -> None:
        self.store = sinks.driver_sink(self.pipeline)
        with ExitStack() as opened:
            opened.callback(self.store.close)  # unless all goes well
            self.store.prepare()
            self.store.prepare_table(self.pipeline.decode.columns.fields, rest=False)
            given = [TopicPartition(TOPIC, n) for n in (range(self.partitions) if self.member is None else self.member)]
            self.begin(given, shared=self.member is not None)
            opened.pop_all()

    def begin(self, given: Sequence[TopicPartition], *, shared: bool) -> None:
        self.number = self.store.open_run(given if shared else None)
        self.store.adopt({tp: Entry(0, "id", self.number) for tp in given})

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def close_now(self) -> None:
        self.store.close()

    def entries(self) -> dict[TopicPartition, Entry]:
        self.settled(self.store)
        return self.store.entries()

    def position(self, partition: int = 0) -> int:
        return self.entries()[TopicPartition(TOPIC, partition)].position

    def counts(self) -> Counts:
        return sum((entry.counts for entry in self.entries().values()), Counts())

    def stage(
        self,
        records: Records,
        *,
        starts: Mapping[int, int] | None = None,
        keys: Mapping[int, Sequence[bytes | None]] | None = None,
    ) -> tuple[BatchWork, list[object]]:
        """The tasks of a batch: all of it where tasks act, or what the driver still has to commit. ``starts``: the
        first offset of each partition's records, where that is not its position."""
        starts, keys = starts or {}, keys or {}
        at = {p: starts[p] if p in starts else self.position(p) for p in records}
        ranges = {
            TopicPartition(TOPIC, p): OffsetRange(TOPIC, p, at[p], at[p] + len(values)) for p, values in records.items()
        }
        context = self.store.task_context()
        work = BatchWork(self.pipeline, self.number, self.batches, ranges, context, hooks=self.hooks)
        self.batches += 1
        made = {
            one: batch(values, one.partition, one.start, keys.get(one.partition, [None] * len(values)))
            for one, values in zip(ranges.values(), records.values(), strict=True)
        }
        if self.joined:
            sink = sinks.task_sink(self.pipeline, self.number, work.task_context)
            assert not isinstance(sink, StagingSink)
            deliver_joined(
                {one: some if some.num_rows else None for one, some in made.items()}, work, sink, self.confirm
            )
            return work, []
        staged = []
        for planned, some in made.items():
            sink = sinks.task_sink(self.pipeline, self.number, work.task_context)
            report = deliver(decoded(partial(_within, some), self.pipeline), planned, work, sink, self.confirm)
            self.reports.append(report)
            staged += [report.task_output] if report.task_output is not None else []
        return work, staged

    def commit(self, work: BatchWork, staged: list[object]) -> None:
        if staged:
            assert isinstance(self.store, CommittingSink)
            commit_task_outputs(staged, work, self.store)

    def deliver(self, records: Records, **more: Any) -> None:
        self.commit(*self.stage(records, **more))


# Transforms of the contract's pipelines.


def unchanged(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def raising(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Fails for every record."""
    if rows.num_rows:
        raise ZeroDivisionError("no record is good enough")
    return rows


def fails_on_13(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Fails where it meets one record, however many are with it."""
    if 13 in rows.column("id").to_pylist():
        raise ZeroDivisionError("thirteen")
    return rows
