"""avow-native against the client's messages: the same records of a real cluster give the same batches, bit for bit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from uuid import uuid4

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Producer

from avow import native
from avow.errors import SourceError
from avow.kafka import metadata
from avow.kafka import reader as module
from avow.kafka.admin import Admin
from avow.kafka.batches import COLUMNS
from avow.kafka.connect import Connection
from avow.kafka.fetch import MessagesFetch, NativeFetch
from avow.kafka.group_batches import BatchMember, fetch_limits
from avow.kafka.metadata import TopicPartition
from avow.kafka.reader import SILENCE_S, Reader
from avow.ledger import OffsetRange
from avow.local.cluster import Cluster
from avow.prove import raw_producer
from avow.prove.raw_producer import RawRecord
from avow.settings import Source

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}"),
]

MakeTopic = Callable[..., str]
# Topics that take records of any time and large ones, and keep them.
ANY = {"message_timestamp_after_max_ms": str(2**63 - 1), "retention_ms": "-1", "max_message_bytes": "4000000"}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    yield
    native.allow(True)


def read(cluster: Cluster, topic: str, start: int, until: int, *, natively: bool) -> list[pa.RecordBatch]:
    native.allow(natively)
    source = Source.model_validate({"brokers": cluster.bootstrap, "topics": [topic]})
    with closing(Reader(source, "readers")) as reader:
        batches = []
        for batch in reader.read(OffsetRange(topic, 0, start, until)):
            assert isinstance(reader._fetch, NativeFetch if natively else MessagesFetch)
            batches.append(batch)
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == COLUMNS
    return batches


def as_bytes(batches: list[pa.RecordBatch]) -> bytes:
    """Every buffer, as it is sent elsewhere. Where a batch ends is a matter of time: together they are one."""
    whole = pa.Table.from_batches(batches, COLUMNS).combine_chunks().to_batches()
    return b"".join(batch.serialize().to_pybytes() for batch in whole)


def same(cluster: Cluster, topic: str, start: int, until: int) -> int:
    """How many records both have read of the range."""
    expected = read(cluster, topic, start, until, natively=False)
    found = read(cluster, topic, start, until, natively=True)
    assert as_bytes(found) == as_bytes(expected), (topic, start, until)
    if len(found) == len(expected) == 1:  # also the buffers that nobody sends, such as a bitmap of all ones
        for ours, theirs in zip(found[0].columns, expected[0].columns, strict=True):
            assert [buffer is None for buffer in ours.buffers()] == [buffer is None for buffer in theirs.buffers()]
    return sum(batch.num_rows for batch in found)


def some_bytes(chance: random.Random, most: int) -> bytes | None:
    size = chance.choice([0, 1, 7, 100, most])
    return None if chance.random() < 0.2 else chance.randbytes(chance.randint(0, size))


def some_headers(chance: random.Random) -> tuple[tuple[bytes, bytes | None], ...]:
    if chance.random() < 0.4:
        return ()
    names = [b"", b"a", b"a", "é\U0001f600".encode(), b"n" * 3_000, b"\xff", b"ok\xc3", b"\xed\xa0\x80", b"\xc0\x80"]
    weights = [1, 20, 20, 5, 1, 1, 1, 1, 1]
    chosen = chance.choices(names, weights, k=chance.choice([1, 2, 3, 30]))
    return tuple((name, some_bytes(chance, 2_000)) for name in chosen)


def test_random_records(cluster: Cluster, make_topic: MakeTopic) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    topic = make_topic(1, **ANY)
    stamps = [-1, 0, 1, 2**31, 1_700_000_000_000, 2**53, 2**63 - 1]
    records = [
        RawRecord(some_bytes(chance, 3_000), some_bytes(chance, 500), some_headers(chance), chance.choice(stamps))
        for _ in range(1_500)
    ]
    records += [RawRecord(bytes(3_000_000), bytes(900_000)), RawRecord(b""), RawRecord(None)]
    raw_producer.produce(cluster.bootstrap, topic, records)
    assert same(cluster, topic, 0, len(records)) == len(records), seed
    for _ in range(20):
        start = chance.randrange(len(records))
        until = chance.randint(start + 1, min(start + 40, len(records)))
        assert same(cluster, topic, start, until) == until - start, seed


@pytest.mark.parametrize(
    "record",
    [
        RawRecord(None),
        RawRecord(b""),
        RawRecord(b"v", b""),
        RawRecord(None, b"k"),
        RawRecord(b"v", None, ((b"h", None),)),
        RawRecord(b"v", None, ((b"h", b""),)),
        RawRecord(b"v", None, ((b"", b"x"),)),
        RawRecord(b"v", None, ((b"\xff", None),)),
        RawRecord(b"v", None, ((b"\xff", b"1"), (b"a", b"2"), (b"\xfe", b"3"))),
    ],
    ids=repr,
)
def test_a_kind_of_record_alone_and_nine_times(cluster: Cluster, make_topic: MakeTopic, record: RawRecord) -> None:
    """A column that is all null, has no bytes, or has a bitmap of a byte and a bit."""
    topic = make_topic(1)
    raw_producer.produce(cluster.bootstrap, topic, [record] * 9)
    assert same(cluster, topic, 0, 1) == 1
    assert same(cluster, topic, 0, 9) == 9


def test_transactions_in_every_range(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid4().hex}, logger=metadata.QUIET
    )
    producer.init_transactions(30)
    for number in range(6):
        producer.begin_transaction()
        for n in range(2):
            producer.produce(topic, b"%d-%d" % (number, n), partition=0, headers=[("n", b"%d" % n)])
        assert producer.flush(30) == 0
        producer.abort_transaction(30) if number % 2 else producer.commit_transaction(30)
    ends = 6 * 3
    counts = {
        (start, until): same(cluster, topic, start, until) for start in (0, 2, 3, 5) for until in (6, 9, 11, ends)
    }
    assert counts[0, ends] == 6
    assert counts[3, 6] == 0


def test_gaps_of_compaction(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(1, cleanup_policy="compact", segment_ms="500", min_cleanable_dirty_ratio="0.01")
    now = round(time.time() * 1000)  # records say when a segment is old enough
    produced = [RawRecord(b"%d" % n, b"k%d" % (n % 7), timestamp_ms=now + n) for n in range(50)]
    raw_producer.produce(cluster.bootstrap, topic, produced)
    count, deadline = 50, time.monotonic() + 90
    while sum(batch.num_rows for batch in read(cluster, topic, 0, 50, natively=True)) == 50:
        assert time.monotonic() < deadline, "not compacted in time"
        time.sleep(1)
        later = RawRecord(b"", b"l", timestamp_ms=round(time.time() * 1000))
        raw_producer.produce(cluster.bootstrap, topic, [later])  # a segment is only closed by the next record
        count += 1
    for start, until in ((0, 50), (0, 20), (3, 50), (40, 50), (0, count)):
        same(cluster, topic, start, until)


def test_many_records(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    fill(cluster, topic, 100_000)
    assert same(cluster, topic, 0, 100_000) == 100_000
    assert same(cluster, topic, 99_999, 100_000) == 1


def fill(cluster: Cluster, topic: str, count: int) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap, "queue.buffering.max.messages": 200_000, "linger.ms": 50}
    producer = Producer(settings, logger=metadata.QUIET)
    for n in range(count):
        headers: list[tuple[str, str | bytes | None]] | None = [("a", b"%d" % n), ("b", None)] if n % 3 else None
        producer.produce(topic, b"%d" % n * (n % 40), b"k%d" % n if n % 5 else None, partition=0, headers=headers)
        producer.poll(0)
    assert producer.flush(60) == 0


def test_memory_is_given_back(cluster: Cluster, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ranges that are read to their end, ranges that are left early, and ranges that fail."""
    monkeypatch.setattr(module, "BATCH_RECORDS", 2_000)
    topic = make_topic(1)
    fill(cluster, topic, 30_000)
    process = psutil.Process(os.getpid())
    source = Source.model_validate({"brokers": cluster.bootstrap, "topics": [topic]})
    sizes = []
    with closing(Reader(source, "readers")) as reader:
        for number in range(120):
            for batch in reader.read(OffsetRange(topic, 0, 0, 30_000)):
                if number % 4 == 1 and batch.column("offset")[0].as_py() > 5_000:
                    break
            if number % 4 == 2:
                monkeypatch.setattr(reader, "_silence_s", 0.1)
                with pytest.raises(SourceError, match="nothing came"):
                    list(reader.read(OffsetRange(topic, 0, 29_000, 30_001)))
                monkeypatch.setattr(reader, "_silence_s", SILENCE_S)
            sizes.append(process.memory_info().rss)
    grown = max(sizes[90:]) - max(sizes[20:50])
    assert grown < 8 * 1024 * 1024, [size >> 20 for size in sizes]


def gather(cluster: Cluster, topic: str, ends: dict[int, int], *, natively: bool) -> dict[int, list[pa.RecordBatch]]:
    """Every partition of the topic, by a member of a group of its own. On the way it loses all of them, and reads what
    it has not passed on once more."""
    native.allow(natively)
    tps = {TopicPartition(topic, number): end for number, end in ends.items()}
    positions = dict.fromkeys(tps, 0)
    batches: dict[int, list[pa.RecordBatch]] = {number: [] for number in ends}
    member = BatchMember(
        Connection(cluster.bootstrap, group=uuid4().hex),
        on_assign=lambda ours: {tp: positions[tp] for tp in ours},
        on_revoke=lambda _gone, _lost: None,
        on_event=lambda _: None,
        defaults=fetch_limits(len(ends)),
    )
    with closing(member):
        assert member.is_native is natively
        member.subscribe([topic])
        deadline, rounds = time.monotonic() + 60, 0
        while positions != tps:
            assert time.monotonic() < deadline, positions
            member.gather(700, 1_000_000, 0.1)
            member.gather_more(300, 1_000_000)
            rounds += member.count > 0
            if rounds % 5 == 3:  # what is at hand goes
                ours = member._client.assignment()
                member._on_revoke(member._client, ours)
                assert member.count == 0
                member._on_assign(member._client, ours)
                rounds += 1
                continue
            if rounds % 10 == 1:  # and so it does if another run has delivered it, or has to
                member.rewind(positions)
                assert (member.count, member.size, member.partitions_gathered) == (0, 0, 0)
                rounds += 1
                continue
            for tp, part in member.cut().items():
                if part.records is not None:
                    assert part.records.column("offset")[0].as_py() >= positions[tp]
                    batches[tp.partition].append(part.records)
                positions[tp] = part.until
            assert (member.count, member.size, member.partitions_gathered) == (0, 0, 0)
    return batches


def test_a_member_gathers_the_same_in_both_ways_and_leaves_no_file_open(
    cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    fill(cluster, topic, 4_000)
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid4().hex}, logger=metadata.QUIET
    )
    producer.init_transactions(30)
    for number in range(6):  # markers, and what was aborted, behind the last record
        producer.begin_transaction()
        for count in range(50):
            producer.produce(topic, b"%d" % count, partition=1 + number % 2)
        assert producer.flush(30) == 0
        if number % 3:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    with Admin(Connection(cluster.bootstrap)) as admin:
        tps = [TopicPartition(topic, number) for number in range(3)]
        ends = {tp.partition: end for tp, end in admin.end_offsets(tps, committed=True).items()}
    expected = gather(cluster, topic, ends, natively=False)
    files = []
    for _ in range(4):
        found = gather(cluster, topic, ends, natively=True)
        files.append(psutil.Process().num_fds())
        for number in ends:
            assert as_bytes(found[number]) == as_bytes(expected[number]), number
    assert sum(batch.num_rows for batch in found[1]) + sum(batch.num_rows for batch in found[2]) == 100
    assert files[-1] <= files[0], files
