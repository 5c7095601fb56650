"""What reading and producing cost, by the client and by avow-native: ``python -m bench.stages [RECORDS] [BROKERS]``.

Each topic is read in turns by both, in one process, and then written to another topic, in a transaction, as the Kafka
sink does it. The best turn of each is printed: thousand records per CPU-second and microseconds per record, of the
thread that reads or writes, of all threads (librdkafka's fetch, compress and check), and by the clock. Without BROKERS
a cluster is started for it, and stopped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic

from avow import native
from avow.kafka import metadata
from avow.kafka.connect import flushed
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.local.cluster import Cluster
from avow.plan import load_checked
from avow.settings import PipelineConfig, Source
from avow.sinks.kafka.clients import EVER_MS, PRODUCING, TopicLimits
from avow.sinks.kafka.messages import RecordMapper, refuse_unfit
from avow.sinks.kafka.produce import send_all
from bench.decode import record

TURNS = 3
Headers = list[tuple[str, str | bytes | None]]
HEADERS: Headers = [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-01"), ("n", b"1")]


@dataclass(frozen=True)
class Cost:
    """Of one turn, in seconds."""

    thread: float
    process: float
    clock: float


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
    if native.library() is None:
        raise SystemExit(f"there is nothing to compare: {native.why_not()}")
    with brokers() as bootstrap:
        for name, headers in (("no headers", None), ("two headers", HEADERS)):
            topic = new_topic(bootstrap)
            fill(bootstrap, topic, records, headers)
            size = f"{records:,} records of {len(record(records))} bytes, {name}"
            compare(f"reading {size}", records, partial(read, bootstrap, topic, records))
            batches = list(reading(bootstrap, topic, records))
            for origin in (True, False):
                what = f"producing {size}, {'with' if origin else 'without'} origin"
                compare(what, records, partial(produce, bootstrap, copying(bootstrap, topic, origin), batches))


def new_topic(bootstrap: str) -> str:
    topic = f"stages-{uuid4().hex[:8]}"
    admin = metadata.admin(bootstrap)  # kept: its answers end with it
    admin.create_topics([NewTopic(topic, 1)], operation_timeout=30)[topic].result()
    return topic


@contextmanager
def brokers() -> Iterator[str]:
    if len(sys.argv) > 2:
        yield sys.argv[2]
        return
    with tempfile.TemporaryDirectory(prefix="avow-bench-") as folder:
        cluster = Cluster(Path(folder))
        cluster.up(brokers=1, postgres=False)
        try:
            yield cluster.bootstrap
        finally:
            cluster.down()


def fill(bootstrap: str, topic: str, records: int, headers: Headers | None) -> None:
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 50, "queue.buffering.max.messages": 200_000}
    producer = Producer(settings, logger=metadata.QUIET)
    for number in range(records):
        while True:
            try:
                producer.produce(topic, record(number), b"%d" % number, partition=0, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(120) == 0


def compare(what: str, records: int, turn: Callable[[], Cost]) -> None:
    best: dict[bool, Cost] = {}
    for _ in range(TURNS):
        for natively in (False, True):
            native.allow(natively)
            cost = turn()
            if natively not in best or cost.thread < best[natively].thread:
                best[natively] = cost
    native.allow(True)
    print(what)
    for natively, cost in best.items():
        parts = {"its thread": cost.thread, "all threads": cost.process, "clock": cost.clock}
        figures = [f"{part} {records / s / 1e3:6.0f} k/s {s / records * 1e6:5.2f} us" for part, s in parts.items()]
        print(f"  {'avow-native' if natively else 'the client':12}", "   ".join(figures), flush=True)


def read(bootstrap: str, topic: str, records: int) -> Cost:
    source = Source.model_validate({"brokers": bootstrap, "topics": [topic]})
    with closing(Reader(source, "stages")) as reader:
        assert sum(batch.num_rows for batch in reader.read(OffsetRange(topic, 0, 0, 10))) == 10  # connected
        begun = clocks()
        count = sum(batch.num_rows for batch in reader.read(OffsetRange(topic, 0, 0, records)))
        cost = since(begun)
    assert count == records
    return cost


def reading(bootstrap: str, topic: str, records: int) -> Iterator[pa.RecordBatch]:
    source = Source.model_validate({"brokers": bootstrap, "topics": [topic]})
    with closing(Reader(source, "stages")) as reader:
        yield from reader.read(OffsetRange(topic, 0, 0, records))


def copying(bootstrap: str, topic: str, origin: bool) -> PipelineConfig:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(
            f'name = "stages"\nguarantee = "exactly-once"\n[decode]\nformat = "raw"\n'
            f'[source]\nbrokers = "{bootstrap}"\ntopics = ["{topic}"]\n'
            f'[sink]\nkind = "kafka"\ntopic = "{new_topic(bootstrap)}"\norigin = {str(origin).lower()}\n'
        )
        file.flush()
        return load_checked(Path(file.name))


def produce(bootstrap: str, pipeline: PipelineConfig, batches: list[pa.RecordBatch]) -> Cost:
    """Batches as the reader gives them, until all of them are acknowledged in an open transaction."""
    mapper, limits = RecordMapper(pipeline), TopicLimits(1, 1_000_000, EVER_MS, EVER_MS)
    rows = [as_rows(batch, pipeline) for batch in batches]
    producer = Producer(
        PRODUCING | {"bootstrap.servers": bootstrap, "transactional.id": uuid4().hex}, logger=metadata.QUIET
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    begun = clocks()
    for batch in rows:
        messages = mapper.messages(batch)
        refuse_unfit(messages, dict.fromkeys(messages.topics, limits))
        assert not messages.refused
        send_all(producer, messages, dict.fromkeys(messages.topics, 0), in_transaction=True)
    assert flushed(producer, 120) == 0
    cost = since(begun)
    producer.abort_transaction(60)
    return cost


def as_rows(batch: pa.RecordBatch, pipeline: PipelineConfig) -> pa.RecordBatch:
    """What a record's own row is when nothing is decoded."""
    parts = {name: batch.column(name) for name in batch.schema.names} | {"tombstone": batch.column("value").is_null()}
    lineage = dict(zip(("topic", "partition", "offset", "timestamp"), pipeline.sink.lineage, strict=True))
    return pa.RecordBatch.from_pydict({name: parts[part] for part, name in (lineage | pipeline.carried).items()})


def since(begun: tuple[float, float, float]) -> Cost:
    return Cost(*(now - then for then, now in zip(begun, clocks(), strict=True)))


def clocks() -> tuple[float, float, float]:
    return time.thread_time(), time.process_time(), time.perf_counter()


if __name__ == "__main__":
    main()
