"""Ranges read from the real cluster: all that is visible in them, in order, as it stands in the log, and an end.

Every test reads by the client's messages and by avow-native, which must give the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as Theirs

from avow import native
from avow.errors import SourceError
from avow.kafka import metadata
from avow.kafka import reader as module
from avow.kafka.batches import COLUMNS
from avow.kafka.fetch import MessagesFetch, NativeFetch, RangesFetch, open_fetch
from avow.kafka.log import Log, LogRecord, TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.local.cluster import Cluster
from avow.settings import Source

pytestmark = pytest.mark.cluster

MakeTopic = Callable[..., str]


@pytest.fixture(params=["messages", "native"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How records are taken: nothing here may be read in the other way without anybody noticing."""
    path: str = request.param
    if path == "native" and native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    wanted, opened = {"messages": MessagesFetch, "native": NativeFetch}[path], []

    def checked(*given: Any) -> RangesFetch:
        opened.append(open_fetch(*given))
        return opened[-1]

    monkeypatch.setattr(module, "open_fetch", checked)
    native.allow(path == "native")
    yield path
    native.allow(True)
    assert all(isinstance(fetch, wanted) for fetch in opened)


@pytest.fixture
def open_reader(cluster: Cluster) -> Iterator[Callable[..., Reader]]:
    opened: list[Reader] = []

    def make(*topics: str, brokers: str = cluster.bootstrap, silence_s: float = 30) -> Reader:
        source = Source.model_validate({"brokers": brokers, "topics": topics})
        opened.append(Reader(source, "readers", silence_s=silence_s))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def produce(cluster: Cluster, topic: str, values: list[bytes | None], partition: int = 0, **record: Any) -> None:
    settings = {
        "bootstrap.servers": cluster.bootstrap,
        "message.max.bytes": 5_000_000,
        "queue.buffering.max.messages": 200_000,
    }
    producer = Producer(settings, logger=metadata.QUIET)
    for value in values:
        producer.produce(topic, value, partition=partition, **record)
        producer.poll(0)
    assert producer.flush(60) == 0


def transaction(cluster: Cluster, topic: str, values: list[bytes], *, commit: bool) -> None:
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid4().hex}, logger=metadata.QUIET
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)


def read(reader: Reader, topic: str, start: int, until: int, partition: int = 0) -> list[tuple[int, bytes | None]]:
    batches = list(reader.read(OffsetRange(topic, partition, start, until)))
    assert all(batch.schema == COLUMNS and batch.num_rows for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    return [(row["offset"], row["value"]) for batch in batches for row in batch.to_pylist()]


def test_ranges_of_several_partitions_one_after_another(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(3)
    for partition in range(3):
        produce(cluster, topic, [b"%d-%d" % (partition, n) for n in range(1_000)], partition)
    reader = open_reader(topic)
    # In an order in which what was fetched ahead for one range must not come into the next.
    for start, until in pairwise([0, 1, 400, 401, 1_000]):
        for partition in (2, 0, 1, 0):
            wanted = [(n, b"%d-%d" % (partition, n)) for n in range(start, until)]
            assert read(reader, topic, start, until, partition) == wanted


def test_a_range_that_is_left_early_is_not_in_the_next(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_RECORDS", 10)
    monkeypatch.setattr(module, "TAKE_RECORDS", 10)
    topic = make_topic(2)
    produce(cluster, topic, [b"%d" % n for n in range(100)])
    reader = open_reader(topic)
    half = reader.read(OffsetRange(topic, 0, 0, 100))
    assert next(half).num_rows == 10
    half.close()
    assert read(reader, topic, 5, 8) == [(n, b"%d" % n) for n in range(5, 8)]


def test_transactions_and_their_markers(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    transaction(cluster, topic, [b"a", b"b"], commit=True)  # 0 1, marker 2
    transaction(cluster, topic, [b"c", b"d", b"e"], commit=False)  # 3 4 5, marker 6
    transaction(cluster, topic, [b"f"], commit=True)  # 7, marker 8
    transaction(cluster, topic, [b"g"], commit=False)  # 9, marker 10
    reader = open_reader(topic)
    assert read(reader, topic, 0, 11) == [(0, b"a"), (1, b"b"), (7, b"f")]
    assert read(reader, topic, 0, 3) == [(0, b"a"), (1, b"b")], "ends on a marker, with more behind it"
    assert read(reader, topic, 2, 7) == [], "markers and aborted records only, with more behind them"
    assert read(reader, topic, 8, 11) == [], "the same at the end of the log"


def gathered(
    reader: Reader, ranges: list[OffsetRange], most_bytes: int = 10**8
) -> dict[OffsetRange, list[tuple[int, bytes | None]]]:
    wanted = {TopicPartition(range_.topic, range_.partition): range_ for range_ in ranges}
    found = {}
    for tp, batch in reader.gather(wanted, most_bytes).items():
        rows = [] if batch is None else batch.to_pylist()
        assert all((row["topic"], row["partition"]) == (tp.topic, tp.partition) for row in rows)
        found[wanted[tp]] = [(row["offset"], row["value"]) for row in rows]
    return found


def test_ranges_of_several_partitions_at_the_same_time(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic, other = make_topic(3), make_topic(1)
    for partition in range(3):
        produce(cluster, topic, [b"%d-%d" % (partition, n) for n in range(1_000)], partition)
    transaction(cluster, other, [b"a", b"b"], commit=False)  # 0 1, marker 2
    reader = open_reader(topic, other)
    for start, until in pairwise([0, 1, 400, 401, 1_000]):
        ranges = [OffsetRange(topic, partition, start, until) for partition in (2, 0, 1)]
        expected = {range_: [(n, b"%d-%d" % (range_.partition, n)) for n in range(start, until)] for range_ in ranges}
        assert gathered(reader, ranges) == expected
        nothing = OffsetRange(other, 0, 0, 3)
        assert gathered(reader, [*ranges, nothing]) == expected | {nothing: []}, "aborted records and a marker"
    assert read(reader, topic, 5, 7, 1) == [(5, b"1-5"), (6, b"1-6")], "and one by itself after that"


def test_what_is_too_large_to_be_read_at_the_same_time_is_left_out(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKE_RECORDS", 100)
    topic = make_topic(2)
    produce(cluster, topic, [b"small"])
    produce(cluster, topic, [bytes(10_000)] * 1_000, partition=1)
    reader = open_reader(topic)
    small, large = OffsetRange(topic, 0, 0, 1), OffsetRange(topic, 1, 0, 1_000)
    found = gathered(reader, [small, large], 1_000_000)
    assert large not in found
    assert found in ({small: [(0, b"small")]}, {}), "which comes first is a matter of time"
    assert len(read(reader, topic, 0, 1_000, 1)) == 1_000


def test_one_of_several_that_does_not_come_is_an_error_in_time(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(2)
    produce(cluster, topic, [b"x"])
    with pytest.raises(SourceError, match=rf"{topic}/1 .*nothing came for 1 s at offset 0"):
        gathered(open_reader(topic, silence_s=1), [OffsetRange(topic, 0, 0, 1), OffsetRange(topic, 1, 0, 1)])


def test_records_are_what_the_log_says_of_them(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    headers: list[tuple[str, bytes | None]] = [("a", b"\x00\xff"), ("a", b"twice"), ("none", None), ("é<script>", b"")]
    produce(cluster, topic, [None], key=b"tombstone", timestamp=1_700_000_000_123)
    produce(cluster, topic, [b""], key=b"")
    produce(cluster, topic, [b"\xff\x00 any"], headers=headers)
    produce(cluster, topic, [b"last"], headers=[])
    (batch,) = open_reader(topic).read(OffsetRange(topic, 0, 0, 4))
    with Log(Source.model_validate({"brokers": cluster.bootstrap, "topics": [topic]}), "readers") as log:
        known = log.records(TopicPartition(topic, 0), range(4))
    found = [
        LogRecord(
            row["offset"],
            round(row["timestamp"].timestamp() * 1000),
            row["key"],
            row["value"],
            [(pair["key"], pair["value"]) for pair in row["headers"] or []],
        )
        for row in batch.to_pylist()
    ]
    assert found == known
    assert found[2].headers == headers
    assert batch.column("topic").to_pylist() == [topic] * 4
    assert batch.column("partition").to_pylist() == [0] * 4


def test_batches_are_bounded_in_records(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    produce(cluster, topic, [b"x"] * 120_000)
    sizes = [batch.num_rows for batch in open_reader(topic).read(OffsetRange(topic, 0, 0, 120_000))]
    assert sum(sizes) == 120_000
    assert max(sizes) <= module.BATCH_RECORDS + module.TAKE_RECORDS
    assert len(sizes) <= 4


def test_batches_are_bounded_in_bytes(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKE_RECORDS", 2)
    topic = make_topic(1, max_message_bytes="5000000")
    value = bytes(4_000_000)
    produce(cluster, topic, [value] * 12)
    batches: list[pa.RecordBatch] = list(open_reader(topic).read(OffsetRange(topic, 0, 0, 12)))
    for batch in batches[:-1]:
        assert module.BATCH_BYTES <= batch.num_rows * len(value) < module.BATCH_BYTES + 2 * len(value)
    assert sum(batch.num_rows for batch in batches) == 12
    assert all(row["value"] == value for batch in batches for row in batch.to_pylist())


def test_what_retention_took_is_an_error(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    produce(cluster, topic, [b"%d" % n for n in range(10)])
    admin = metadata.admin(cluster.bootstrap)  # kept: its answers end with it
    for answer in admin.delete_records([Theirs(topic, 0, 5)]).values():
        answer.result(30)
    reader = open_reader(topic)
    with pytest.raises(SourceError, match=f"{topic}.*[Oo]ffset out of range"):
        read(reader, topic, 3, 10)
    assert read(reader, topic, 5, 10) == [(n, b"%d" % n) for n in range(5, 10)], "the reader is as good as before"


def test_records_that_do_not_come_are_an_error_in_time(
    make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    with pytest.raises(SourceError, match="nothing came for 1 s at offset 0"):
        read(open_reader(topic, silence_s=1), topic, 0, 1)
    with pytest.raises(SourceError, match="nothing came for 1 s"):
        read(open_reader(topic, brokers="127.0.0.1:9", silence_s=1), topic, 0, 1)


@pytest.mark.parametrize("path", [pytest.param("messages", marks=pytest.mark.long), "native"], indirect=True)
def test_a_topic_that_is_deleted_meanwhile_is_an_error(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader]
) -> None:
    topic = make_topic(1)
    produce(cluster, topic, [b"%d" % n for n in range(10)])
    reader = open_reader(topic, silence_s=15)
    assert len(read(reader, topic, 0, 10)) == 10
    admin = metadata.admin(cluster.bootstrap)  # kept: its answers end with it
    for answer in admin.delete_topics([topic], operation_timeout=30).values():
        answer.result(30)
    with pytest.raises(SourceError, match=topic):
        read(reader, topic, 5, 20)


def test_a_reader_is_closed_in_the_middle_of_a_range(
    cluster: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_RECORDS", 10)
    monkeypatch.setattr(module, "TAKE_RECORDS", 10)
    topic = make_topic(1)
    produce(cluster, topic, [b"%d" % n for n in range(1_000)])
    reader = open_reader(topic)
    half = reader.read(OffsetRange(topic, 0, 0, 1_000))
    batch = next(half)
    reader.close()
    half.close()
    assert batch.column("value").to_pylist() == [b"%d" % n for n in range(10)], "what was read outlives its reader"


@pytest.mark.parametrize("path", [pytest.param("messages", marks=pytest.mark.long), "native"], indirect=True)
def test_a_leader_that_dies_is_waited_for(
    healthy: Cluster, make_topic: MakeTopic, open_reader: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_RECORDS", 1_000)
    monkeypatch.setattr(module, "TAKE_RECORDS", 1_000)
    topic = make_topic(1)
    # More than is fetched ahead.
    produce(healthy, topic, [b"%06d" % n + bytes(10_000) for n in range(8_000)])
    batches = open_reader(topic, silence_s=60).read(OffsetRange(topic, 0, 0, 8_000))
    first = next(batches)
    described = metadata.admin(healthy.bootstrap).list_topics(topic, 30).topics[topic]
    leader = next(broker for broker in healthy.brokers() if broker.number == described.partitions[0].leader)
    leader.kill()
    values = [value[:6] for batch in [first, *batches] for value in batch.column("value").to_pylist()]
    assert values == [b"%06d" % n for n in range(8_000)]
