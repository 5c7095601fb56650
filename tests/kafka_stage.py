"""A Kafka pipeline without Spark: records of a real topic as tasks get them, delivered by the real task function.

The reader here (a plain consumer) shares no code with the sink. As a program it delivers one range and dies where it is
told to: ``python -m tests.kafka_stage FILE PARTITION START UNTIL RUN WHERE``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from avow.engines.task import BatchWork, RangeReport, decoded, deliver
from avow.kafka import log, metadata
from avow.kafka.batches import headers_column
from avow.kafka.log import Log
from avow.ledger import Entry, OffsetRange
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.base import TaskSink
from avow.sinks.kafka.clients import KafkaClients
from avow.sinks.kafka.driver import KafkaDriver
from avow.sinks.kafka.task import KafkaTask

HEADERS = list[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Read:
    """One record of a topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: HEADERS

    @property
    def origin(self) -> str:
        (found,) = [value for name, value in self.headers if name == "avow-origin"]
        assert found is not None
        return found.decode()


def read(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Read]:
    """Everything in a topic, partition by partition."""
    admin = metadata.admin(bootstrap)
    partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions

    def ends_of(level: IsolationLevel) -> dict[int, int]:
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = admin.list_offsets({TopicPartition(topic, n): latest for n in partitions}, isolation_level=level)
        return {where.partition: answer.result(10).offset for where, answer in asked.items()}

    ends = ends_of(IsolationLevel.READ_UNCOMMITTED)
    deadline = time.monotonic() + 20
    # A commit is answered a moment before readers see it.
    while isolation == "read_committed" and any(
        end < ends[n] for n, end in ends_of(IsolationLevel.READ_COMMITTED).items()
    ):
        assert time.monotonic() < deadline, "a transaction stays open"
        time.sleep(0.05)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": isolation,
            # A leader that is new may not know its end yet, and say of any offset that it is not there.
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        },
        logger=metadata.QUIET,
    )
    left = {n for n, end in ends.items() if end}
    consumer.assign([TopicPartition(topic, n, 0) for n in left])
    found: list[Read] = []
    while left:
        message = consumer.poll(20)
        assert message is not None, "nothing for 20 s"
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            left.discard(message.partition() or 0)
        else:
            found.append(as_read(message))
    consumer.close()
    return sorted(found, key=lambda one: (one.partition, one.offset))


def as_read(message: Message) -> Read:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    key, value, headers = message.key(), message.value(), list(message.headers() or [])
    return Read(topic, partition, offset, message.timestamp()[1], key, value, headers)  # type: ignore[arg-type]


def batch(records: Iterable[Read]) -> pa.RecordBatch:
    """Records as a task gets them."""
    rows = list(records)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([row.topic for row in rows], pa.string()),
            pa.array([row.partition for row in rows], pa.int32()),
            pa.array([row.offset for row in rows], pa.int64()),
            pa.array([row.timestamp_ms * 1000 for row in rows], pa.int64()).cast(pa.timestamp("us", "UTC")),
            pa.array([row.key for row in rows], pa.binary()),
            pa.array([row.value for row in rows], pa.binary()),
            headers_column([row.headers for row in rows]),
        ],
        names=["topic", "partition", "offset", "timestamp", "key", "value", "headers"],
    )


@dataclass
class Stage:
    """One pipeline from a topic into a topic."""

    bootstrap: str
    folder: Path
    name: str
    source: str
    target: str

    def file(
        self, guarantee: str = "exactly-once", sink: str = "", decode: str = 'format = "raw"', more: str = ""
    ) -> Path:
        path = self.folder / f"{self.name}.toml"
        topic = "" if sink.startswith("topic =") else f'topic = "{self.target}"\n'
        path.write_text(
            f'name = "{self.name}"\nguarantee = "{guarantee}"\n'
            f'[source]\nbrokers = "{self.bootstrap}"\ntopics = ["{self.source}"]\n'
            f"[decode]\n{decode}\n[dead_letters]\nmax_share = 0.5\n{more}\n"
            f'[sink]\nkind = "kafka"\n{topic}{sink}\n'
        )
        return path

    def pipeline(self, *file: str, **named: str) -> PipelineConfig:
        return load_checked(self.file(*file, **named))

    def produce(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        headers: Any = None,
        partition: int = 0,
        timestamp_ms: int = 1_700_000_000_000,
    ) -> None:
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "message.max.bytes": 30_000_000}, logger=metadata.QUIET
        )
        for number, value in enumerate(values):
            key = keys[number] if keys else None
            producer.produce(self.source, value, key, partition, headers=headers or [], timestamp=timestamp_ms + number)
        assert producer.flush(60) == 0

    def started(self, pipeline: PipelineConfig, start: int = 0) -> int:
        """What a run does before its first batch. Gives its number."""
        with KafkaDriver(pipeline) as store:
            store.prepare()
            store.prepare_table(pipeline.decode.columns.fields, rest=False)
            run = store.open_run()
            known = store.entries()
            with Log(pipeline.source, pipeline.name) as there:
                ids = there.partitions()
            store.adopt({where: Entry(start, ids[where], run) for where in ids if where not in known})
        return run

    def entries(self, pipeline: PipelineConfig) -> dict[int, Entry]:
        with KafkaDriver(pipeline) as store:
            return {where.partition: entry for where, entry in store.entries().items()}

    def deliver(self, pipeline: PipelineConfig, run: int, start: int, until: int, partition: int = 0) -> RangeReport:
        """One range, as a task does it."""
        return delivered(pipeline, run, OffsetRange(self.source, partition, start, until), KafkaTask(pipeline, run))

    def out(self, isolation: str = "read_committed") -> list[Read]:
        return read(self.bootstrap, self.target, isolation)

    def child(
        self, path: Path, run: int, start: int, until: int, where: str, partition: int = 0
    ) -> subprocess.Popen[str]:
        """The same in a process of its own, which dies at ``where``."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.kafka_stage", str(path), *map(str, (partition, start, until, run, where))],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def source_records(pipeline: PipelineConfig, planned: OffsetRange) -> pa.RecordBatch:
    found = [
        one
        for one in read(pipeline.source.brokers, planned.topic)
        if one.partition == planned.partition and planned.start <= one.offset < planned.until
    ]
    return batch(found)


def delivered(pipeline: PipelineConfig, run: int, planned: OffsetRange, sink: TaskSink) -> RangeReport:
    work = BatchWork(pipeline, run, 0, {log.TopicPartition(planned.topic, planned.partition): planned})

    def records(todo: OffsetRange) -> Iterator[pa.RecordBatch]:
        found = source_records(pipeline, todo)
        yield from (found.slice(at, 1000) for at in range(0, found.num_rows, 1000))

    return deliver(decoded(records, pipeline), planned, work, sink)


def main(file: str, partition: str, start: str, until: str, run: str, where: str) -> None:
    """Deliver one range and die at ``where``: before, in (all sent), claimed (offsets sent too), between (two acts),
    after; or stop there and go on when continued: stop-in."""
    pipeline = load_checked(Path(file))
    planned = OffsetRange(pipeline.source.topics[0], int(partition), int(start), int(until))
    task = KafkaTask(pipeline, int(run))

    def die() -> None:
        print(where, flush=True)
        if where.startswith("stop-"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    add_dead_letters, entries, send = task.add_dead_letters, task.entries, KafkaClients.send
    entered_before: list[bool] = []

    def entered(*given, **named):  # type: ignore[no-untyped-def]
        found = entries(*given, **named)
        if where == "before" or (where == "between" and entered_before):
            die()
        entered_before.append(True)
        return found

    def buried(letters):  # type: ignore[no-untyped-def]
        add_dead_letters(letters)
        if where.endswith("in"):
            task._producer.flush(10)
            die()

    def sent(*given):  # type: ignore[no-untyped-def]
        send(*given)
        if where == "claimed":
            task._producer.flush(10)
            die()

    task.entries, task.add_dead_letters, KafkaClients.send = entered, buried, sent  # type: ignore[method-assign]
    delivered(pipeline, int(run), planned, task)
    if where == "after":
        die()


if __name__ == "__main__":
    main(*sys.argv[1:])
