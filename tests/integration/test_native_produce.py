"""avow-native against the client's own produce: what arrives in topics of a real cluster is the same, bit for bit."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from tests.kafka_stage import Read, Stage, read

from avow import native
from avow.kafka import metadata
from avow.kafka.admin import Admin
from avow.kafka.batches import headers_column
from avow.kafka.connect import Connection
from avow.ledger import Counts
from avow.local.cluster import Cluster
from avow.prove import raw_producer
from avow.prove.raw_producer import RawRecord
from avow.sinks.kafka.clients import PRODUCING
from avow.sinks.kafka.messages import Messages, Origins
from avow.sinks.kafka.produce import send_all

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}"),
]

MakeTopic = Callable[..., str]
# Topics that take records of any time and large ones, and keep them.
ANY = {"message_timestamp_after_max_ms": str(2**63 - 1), "retention_ms": "-1", "max_message_bytes": "4000000"}


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The error of each call of the library, 0 where there was none."""
    from avow_native.produce import Produce

    produce, errors = Produce.produce, list[int]()

    def spied(self: Produce, *given: Any) -> Any:
        sent = produce(self, *given)
        errors.append(sent.error)
        return sent

    monkeypatch.setattr(Produce, "produce", spied)
    yield errors
    native.allow(True)


def begun(cluster: Cluster, **settings: Any) -> Producer:
    """A producer with a transaction that is open."""
    own = {"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid4().hex, "message.max.bytes": 8_000_000}
    producer = Producer(PRODUCING | own | settings, logger=metadata.QUIET)
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer


def sent(cluster: Cluster, messages: Messages, unkeyed: list[int], *, natively: bool, **settings: Any) -> None:
    native.allow(natively)
    producer = begun(cluster, **settings)
    send_all(producer, messages, dict(zip(messages.topics, unkeyed, strict=True)), in_transaction=True)
    assert producer.flush(60) == 0
    producer.commit_transaction(30)


def found(cluster: Cluster, topic: str, *, timed: bool = True) -> list[Read]:
    """Without what is another in each topic."""
    records = [replace(record, topic="") for record in read(cluster.bootstrap, topic)]
    return records if timed else [replace(record, timestamp_ms=0) for record in records]


def some_bytes(chance: random.Random, most: int) -> bytes | None:
    size = chance.choice([0, 1, 7, 100, most])
    return None if chance.random() < 0.2 else chance.randbytes(chance.randint(0, size))


def some_headers(chance: random.Random) -> list[tuple[str, bytes | None]] | None:
    if chance.random() < 0.4:
        return chance.choice([None, []])
    names = ["", "a", "a", "é\U0001f600", "n" * 3_000, "nul\0ends it", "avow-origin"]
    return [(name, some_bytes(chance, 2_000)) for name in chance.choices(names, k=chance.choice([1, 2, 3, 30]))]


def random_messages(chance: random.Random, count: int, topics: list[str], **ours: Any) -> Messages:
    """Columns that begin somewhere in their buffers, some of whose rows are refused."""
    cut, whole = chance.randint(0, 20), count + 20
    keys, values = ([some_bytes(chance, most) for _ in range(whole)] for most in (500, 3_000))
    keys[cut + 1], values[cut + 1] = bytes(900_000), bytes(3_000_000)
    key_column, value_column = (pa.array(column, pa.binary()).slice(cut, count) for column in (keys, values))
    headers = headers_column([some_headers(chance) for _ in range(whole)]).slice(cut, count)
    stamps = chance.choices([1, 2**31, 1_700_000_000_000, 2**53, 2**63 - 1], k=count)
    refused = dict.fromkeys(chance.sample(range(2, count), count // 10), "")
    routes = np.array([-1 if row in refused and row % 2 else chance.randrange(len(topics)) for row in range(count)])
    return Messages(
        topics,
        routes.astype(np.int32),
        key_column,
        value_column,
        headers,
        np.array(stamps),
        refused=refused,
        **ours,
    )


@pytest.mark.parametrize("marked", [True, False])
def test_random_records(cluster: Cluster, make_topic: MakeTopic, errors: list[int], marked: bool) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    topics = {natively: [make_topic(3, **ANY) for _ in range(3)] for natively in (False, True)}
    offsets = np.array(sorted([0, 9, 10, 2**63 - 1, *chance.sample(range(2**40), 700)]))
    origins = Origins("in.put-/7/", offsets) if marked else None
    messages = random_messages(chance, len(offsets), topics[True], origins=origins)
    for natively in (False, True):
        # One record in a batch: timestamps so far apart do not fit into one.
        given = replace(messages, topics=topics[natively])
        sent(cluster, given, [0, 1, 2], natively=natively, **{"batch.num.messages": 1})
    assert errors == [0]
    count = 0
    for expected, ours in zip(*topics.values(), strict=True):
        records = found(cluster, ours)
        assert records == found(cluster, expected), seed
        count += len(records)
    assert count == len(offsets) - len(messages.refused)


@pytest.mark.parametrize(
    "record",
    [
        RawRecord(None),
        RawRecord(b""),
        RawRecord(b"v", b""),
        RawRecord(None, b"k"),
        RawRecord(b"v", None, ((b"h", None),)),
        RawRecord(b"v", b"k", ((b"h", b""), (b"", b"x"), (b"h", None))),
    ],
    ids=repr,
)
def test_a_kind_of_record_alone_and_nine_times(
    cluster: Cluster, make_topic: MakeTopic, errors: list[int], record: RawRecord
) -> None:
    """A column that is all null, or has no bytes; and the producer's own time."""
    headers = [(name.decode(), value) for name, value in record.headers]
    for count in (1, 9):
        keys, values = (pa.array([part] * count, pa.binary()) for part in (record.key, record.value))
        routes, stamps = np.zeros(count, np.int32), np.zeros(count, np.int64)
        messages = Messages([""], routes, keys, values, headers_column([headers] * count), stamps)
        topics = [make_topic(2), make_topic(2)]
        for topic, natively in zip(topics, (False, True), strict=True):
            sent(cluster, replace(messages, topics=[topic]), [1], natively=natively)
        records = [found(cluster, topic, timed=False) for topic in topics]
        assert records[0] == records[1]
        assert [(one.key, one.value, one.headers) for one in records[1]] == [
            (record.key, record.value, headers)
        ] * count
        assert all(one.timestamp_ms > 1_700_000_000_000 for one in read(cluster.bootstrap, topics[1]))
    assert errors == [0, 0]


@pytest.fixture
def stages(cluster: Cluster, make_topic: MakeTopic, tmp_path: Path) -> tuple[Stage, Stage]:
    """Two pipelines from one topic, each into a topic of its own, which takes no large records."""
    source = make_topic(1, **ANY)
    made = []
    with Admin(Connection(cluster.bootstrap)) as admin:
        for _ in range(2):
            target = make_topic(3, retention_ms="-1")
            admin.create_topic(f"{target}-b", 3, 1, {"retention.ms": "-1"})
            made.append(Stage(cluster.bootstrap, tmp_path, f"p-{uuid4().hex[:10]}", source, target))
    return made[0], made[1]


PLAIN = 'format = "raw"', "", ""
ROUTED = (
    'format = "json"\nschema = "id long not null, amount double, to string"',
    'topic = "{target}{{to}}"\nroutes = ["{target}", "{target}-b"]',
    '[transform]\npython = "tests.transforms:with_a_header"',
)


@pytest.mark.parametrize("kind", [PLAIN, ROUTED], ids=["raw", "transformed and routed"])
def test_a_pipeline_delivers_the_same(
    cluster: Cluster, stages: tuple[Stage, Stage], errors: list[int], kind: tuple[str, str, str]
) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    decode, sink, more = kind
    rows = [{"id": n, "amount": n / 4, "to": chance.choice(["", "-b", "-c", None])} for n in range(1_500)]
    names = [b"a", b"a", b"avow-origin", "é".encode()]
    records = [
        RawRecord(
            json.dumps(row).encode(),
            some_bytes(chance, 50),
            tuple((name, some_bytes(chance, 50)) for name in chance.choices(names, k=chance.choice([0, 0, 2]))),
            chance.choice([-1, 1, 1_700_000_000_000 + number]),
        )
        for number, row in enumerate(rows)
    ]
    records[100:102] = [
        RawRecord(None, b"100"),
        RawRecord(os.urandom(2_000_000), b"101", ((b"h", os.urandom(50_000)),)),
    ]
    raw_producer.produce(cluster.bootstrap, stages[0].source, records)
    out: list[list[list[Read]]] = []
    counts: list[Counts] = []
    for stage, natively in zip(stages, (False, True), strict=True):
        native.allow(natively)
        pipeline = stage.pipeline(sink=sink.format(target=stage.target), decode=decode, more=more)
        counts.append(stage.deliver(pipeline, stage.started(pipeline), 0, len(records)).counts)
        topics = [stage.target, *([f"{stage.target}-b"] if sink else [])]
        out.append([found(cluster, topic) for topic in topics])
        for read_records in out[-1]:  # a record without a timestamp got the producer's
            read_records[:] = [
                replace(one, timestamp_ms=0) if one.timestamp_ms > 1_700_000_010_000 else one for one in read_records
            ]
    assert out[0] == out[1], seed
    assert counts[0] == counts[1]
    assert sum(map(len, out[1])) == counts[1].written
    assert len(errors) == 2, "batches of 1,000 records"


def test_a_full_queue_is_waited_for(stages: tuple[Stage, Stage], errors: list[int]) -> None:
    stage = stages[0]
    stage.produce([b"%d" % number for number in range(5_000)], keys=[b"k%d" % (n % 7) for n in range(5_000)])
    pipeline = stage.pipeline("exactly-once", '[sink.kafka]\n"queue.buffering.max.messages" = 100\n"linger.ms" = 0')
    stage.deliver(pipeline, stage.started(pipeline), 0, 5_000)
    assert errors.count(KafkaError._QUEUE_FULL) >= 40
    records = stage.out()
    assert sorted(int(one.value or b"") for one in records) == list(range(5_000))
    for key in {one.key for one in records}:
        values = [int(one.value or b"") for one in records if one.key == key]
        assert values == sorted(values)


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_where_a_failed_delivery_must_be_heard_of_the_client_produces(
    stages: tuple[Stage, Stage], errors: list[int], guarantee: str
) -> None:
    stage = stages[0]
    stage.produce([b"v"] * 10)
    pipeline = stage.pipeline(guarantee)
    assert stage.deliver(pipeline, stage.started(pipeline), 0, 10).counts.written == 10
    assert errors == []


def one_to(topic: str, value: bytes = b"v") -> Messages:
    values, none = pa.array([value], pa.binary()), pa.nulls(1, pa.binary())
    return Messages([topic], np.zeros(1, np.int32), none, values, headers_column([None]), np.zeros(1, np.int64))


@pytest.mark.parametrize("natively", [False, True])
def test_a_failed_delivery_makes_the_commit_fail(
    cluster: Cluster, make_topic: MakeTopic, errors: list[int], natively: bool
) -> None:
    native.allow(natively)
    topic = make_topic(1)
    producer = begun(cluster)
    send_all(producer, one_to(topic), {topic: 0}, in_transaction=True)
    send_all(producer, one_to(topic, os.urandom(2_000_000)), {topic: 0}, in_transaction=True)
    assert producer.flush(60) == 0
    with pytest.raises(KafkaException) as error:
        producer.commit_transaction(30)
    assert error.value.args[0].txn_requires_abort()
    assert errors == [0, 0] * natively
    producer.abort_transaction(30)
    assert read(cluster.bootstrap, topic) == []


@pytest.mark.parametrize("natively", [False, True])
def test_a_partition_that_is_not_there(
    cluster: Cluster, make_topic: MakeTopic, errors: list[int], natively: bool
) -> None:
    native.allow(natively)
    topic = make_topic(1)
    producer = begun(cluster)
    producer.list_topics(topic, timeout=30)
    send_all(producer, one_to(topic), {topic: 0}, in_transaction=True)
    assert producer.flush(60) == 0
    with pytest.raises(KafkaException) as error:
        send_all(producer, one_to(topic), {topic: 7}, in_transaction=True)
    assert error.value.args[0].code() == KafkaError._UNKNOWN_PARTITION
    assert errors == [0, KafkaError._UNKNOWN_PARTITION] * natively
    producer.abort_transaction(30)


@pytest.mark.long
def test_memory_is_given_back(cluster: Cluster, make_topic: MakeTopic, errors: list[int]) -> None:
    """Also where a record is not taken, and where what is in the queue is thrown away."""
    topic = make_topic(1)
    count = 2_000
    parts = pa.array([b"%d" % n * 20 for n in range(count)], pa.binary())
    headers = headers_column([[("a", b"%d" % n), ("b", None)] for n in range(count)])
    origins = Origins("in/0/", np.arange(count))
    routes, stamps = np.zeros(count, np.int32), np.ones(count, np.int64)
    messages = Messages([topic], routes, parts, parts, headers, stamps, origins=origins)
    producer, process = begun(cluster), psutil.Process()
    send = partial(send_all, producer, unkeyed={topic: 7}, in_transaction=True)
    keyless = replace(messages, keys=pa.nulls(count, pa.binary()))
    producer.list_topics(topic, timeout=30)
    sizes = []
    for number in range(90):
        send(messages)
        with pytest.raises(KafkaException):
            send(keyless)
        if number % 3 == 0:
            producer.purge()
        assert producer.flush(60) == 0
        producer.abort_transaction(30)
        producer.begin_transaction()
        sizes.append(process.memory_info().rss)
    assert set(errors) == {0, KafkaError._UNKNOWN_PARTITION}
    grown = max(sizes[70:]) - max(sizes[20:40])
    assert grown < 8 * 1024 * 1024, [size >> 20 for size in sizes]
