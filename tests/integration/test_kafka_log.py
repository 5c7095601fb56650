"""What a run asks of Kafka's log, on the real cluster: every answer that a start, a lag or an audit rests on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as Theirs
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)
from kafka import KafkaConsumer
from tests.fix_cluster import positions_of

from avow.errors import ConfigError, LogTruncated, RetentionLoss, SourceError, TopicRecreated
from avow.kafka import metadata
from avow.kafka.log import Log, LogRecord, TopicPartition, fingerprint
from avow.ledger import Entry, Fingerprint, OffsetRange, Start, plan_start
from avow.local.cluster import Cluster
from avow.settings import Source
from avow.settings.values import FromEnv

pytestmark = pytest.mark.cluster

MakeTopic = Callable[..., str]
KEPT = {"retention_ms": "-1"}  # for records with old timestamps: retention could come between
NOWHERE = "127.0.0.1:9"  # discard: nothing listens there


@pytest.fixture
def group() -> str:
    return f"g-{uuid4().hex[:12]}"


@pytest.fixture
def open_log(cluster: Cluster, group: str) -> Iterator[Callable[..., Log]]:
    """Opens the log of some topics, or of a pattern."""
    opened: list[Log] = []

    def make(*topics: str, timeout_s: float = 30, **source: object) -> Log:
        given = {"brokers": cluster.bootstrap, "topics": topics, **source}
        opened.append(Log(Source.model_validate(given), group, timeout_s=timeout_s))
        return opened[-1]

    yield make
    for log in opened:
        log.close()


def produce(cluster: Cluster, topic: str, *values: bytes | None, partition: int = 0, **record: Any) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap}, logger=metadata.QUIET)
    for value in values:
        producer.produce(topic, value, partition=partition, **record)
    assert producer.flush(30) == 0


@pytest.fixture
def transactions(cluster: Cluster) -> Iterator[Producer]:
    """A transactional producer; what a test leaves open is aborted."""
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": uuid4().hex}, logger=metadata.QUIET
    )
    producer.init_transactions(30)
    yield producer
    producer.abort_transaction(30)


def begin(producer: Producer, topic: str, *values: bytes) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0


def entry(position: int, topic_id: str, last: Fingerprint | None = None) -> Entry:
    return Entry(position, topic_id, run=1, last=last)


def anything_at(offset: int) -> Fingerprint:
    """A fingerprint of no record that is there: only its offset is asked for."""
    return Fingerprint(offset, timestamp_ms=0, crc32=0)


def eventually(check: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.1)


# The fingerprint


def test_the_fingerprint_is_what_ledgers_already_hold() -> None:
    # Pinned: another encoding would make every stored fingerprint a truncated log.
    assert fingerprint(7, 1_700_000_000_000, b"key", b"value") == Fingerprint(7, 1_700_000_000_000, 431749220)


def test_the_fingerprint_tells_none_from_empty_and_key_from_value() -> None:
    records = [(None, None), (b"", None), (None, b""), (b"", b""), (b"ab", b"c"), (b"a", b"bc"), (None, b"abc")]
    assert len({fingerprint(0, 0, key, value).crc32 for key, value in records}) == len(records)


# Which partitions there are


def test_every_partition_of_every_declared_topic_with_its_topics_id(
    make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    one, two = make_topic(2), make_topic(3)
    found = open_log(one, two).partitions()
    assert set(found) == {TopicPartition(one, n) for n in range(2)} | {TopicPartition(two, n) for n in range(3)}
    assert list(found) == sorted(found)
    ids = {topic: {found[p] for p in found if p.topic == topic} for topic in (one, two)}
    assert len(ids[one]) == len(ids[two]) == 1
    assert ids[one] != ids[two]


def test_ids_are_written_as_kafka_writes_them(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topics = [make_topic() for _ in range(8)]  # an id holds one of the letters in question every other time
    for partition, topic_id in open_log(*topics).partitions().items():
        (kept,) = (
            path
            for broker in cluster.brokers()
            for path in broker.folder.glob(f"**/{partition.topic}-0/partition.metadata")
        )
        assert f"topic_id: {topic_id}" in kept.read_text().splitlines()


def test_a_pattern_matches_whole_names(cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]) -> None:
    inner = make_topic()
    client = metadata.admin(cluster.bootstrap)
    client.create_topics([NewTopic(f"{inner}-more", 1, 1)], operation_timeout=30)[f"{inner}-more"].result(30)
    assert {p.topic for p in open_log(topics_pattern=inner[:-1] + ".").partitions()} == {inner}
    assert {p.topic for p in open_log(topics_pattern=inner[:-1] + ".*").partitions()} == {inner, f"{inner}-more"}


def test_a_pattern_never_matches_internal_topics(
    alone: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic()
    open_log(topic).commit_offsets({TopicPartition(topic, 0): 0})
    assert "__consumer_offsets" in metadata.admin(alone.bootstrap).list_topics(timeout=30).topics
    found = {p.topic for p in open_log(topics_pattern=".*").partitions()}
    assert topic in found
    assert not {name for name in found if name.startswith("__")}


def test_a_pattern_without_a_match_is_named(open_log: Callable[..., Log]) -> None:
    with pytest.raises(SourceError, match=r"no topic at .* matches source\.topics_pattern = 'none-such-\.\*'"):
        open_log(topics_pattern="none-such-.*").partitions()


def test_a_missing_topic_is_named_and_not_made(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    missing = f"missing-{uuid4().hex}"
    with pytest.raises(SourceError, match=f"topic {missing} does not exist at {cluster.bootstrap}") as caught:
        open_log(make_topic(), missing).partitions()
    assert "Create" in caught.value.advice
    assert missing not in metadata.admin(cluster.bootstrap).list_topics(timeout=30).topics


# Where they begin and end


def test_offsets_of_empty_and_filled_partitions(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(2)
    produce(cluster, topic, b"a", b"b", b"c", partition=1)
    empty, filled = TopicPartition(topic, 0), TopicPartition(topic, 1)
    log = open_log(topic)
    assert log.offsets([empty, filled]) == {empty: (0, 0), filled: (0, 3)}
    assert log.stable_ends([empty, filled]) == {empty: 0, filled: 3}
    assert log.offsets([]) == {}


def test_retention_raises_the_earliest_offset_and_is_told_as_loss(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic()
    produce(cluster, topic, *[b"x"] * 10)
    log, there = open_log(topic), TopicPartition(topic, 0)
    topic_id = log.partitions()[there]
    client = metadata.admin(cluster.bootstrap)
    deleted = client.delete_records([Theirs(topic, 0, 6)])
    assert [future.result(30).low_watermark for future in deleted.values()] == [6]

    behind = entry(4, topic_id, anything_at(3))
    view = log.view({there: behind})[there]

    assert (view.earliest, view.end, view.found) == (6, 10, None)
    with pytest.raises(RetentionLoss, match=r"\[4, 6\)"):
        plan_start(behind, view, declared=0)
    assert plan_start(behind, view, 0, skip_lost=True).given_up == OffsetRange(topic, 0, 4, 6)
    assert log.declared_start("earliest", [there]) == {there: 6}


def test_declared_starts(cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]) -> None:
    topic = make_topic(3, **KEPT)
    zero, one, empty = (TopicPartition(topic, n) for n in range(3))
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    noon_ms = int(noon.timestamp()) * 1000
    for partition, times_ms in ((0, (-1, 0, 1)), (1, (-3, -2, -1))):
        for shift_ms in times_ms:
            produce(cluster, topic, b"x", partition=partition, timestamp=noon_ms + shift_ms)
    log, all_three = open_log(topic), [zero, one, empty]
    assert log.declared_start("earliest", all_three) == {zero: 0, one: 0, empty: 0}
    assert log.declared_start("latest", all_three) == {zero: 3, one: 3, empty: 0}
    assert log.declared_start(noon, all_three) == {zero: 1, one: 3, empty: 0}, "a time after the last is the end"
    just_after = noon.replace(microsecond=1)
    assert log.declared_start(just_after, all_three) == {zero: 2, one: 3, empty: 0}, "a record at noon is older"
    explicit = {topic: {0: 2, 2: 17}, "another": {1: 1}}
    assert log.declared_start(explicit, all_three) == {zero: 2, one: 0, empty: 17}


# Transactions


def test_an_open_transaction_parts_the_stable_end_from_the_end(
    make_topic: MakeTopic, open_log: Callable[..., Log], transactions: Producer
) -> None:
    topic = make_topic()
    there, log = TopicPartition(topic, 0), open_log(topic)
    begin(transactions, topic, b"0")
    transactions.commit_transaction(30)  # its marker is offset 1
    begin(transactions, topic, b"2", b"3", b"4")

    assert log.offsets([there]) == {there: (0, 5)}
    assert log.stable_ends([there]) == {there: 2}
    assert log.declared_start("latest", [there]) == {there: 2}, "or the transaction would be read in half"
    assert log.declared_start(datetime(2100, 1, 1, tzinfo=UTC), [there]) == {there: 2}
    assert log.declared_start(datetime.now(UTC).replace(year=2001), [there]) == {there: 0}
    assert log.timestamps_at({there: 2}) == {there: None}, "nothing committed is waiting"

    transactions.abort_transaction(30)
    eventually(lambda: log.stable_ends([there]) == {there: 6})
    assert log.timestamps_at({there: 2}) == {there: None}, "aborted records and their marker are no lag"
    transactions.begin_transaction()


def test_a_position_after_a_marker_is_judged_by_the_record_before(
    make_topic: MakeTopic, open_log: Callable[..., Log], transactions: Producer
) -> None:
    topic = make_topic()
    there, log = TopicPartition(topic, 0), open_log(topic)
    begin(transactions, topic, b"0", b"1")
    transactions.commit_transaction(30)
    begin(transactions, topic, b"aborted")
    transactions.abort_transaction(30)
    transactions.begin_transaction()
    eventually(lambda: log.stable_ends([there]) == {there: 5})
    topic_id = log.partitions()[there]

    def found(offset: int) -> Fingerprint | None:
        return log.view({there: entry(5, topic_id, anything_at(offset))})[there].found

    last = found(1)
    assert last is not None
    assert last == fingerprint(1, last.timestamp_ms, None, b"1")
    assert found(2) is None, "a commit marker is no record"
    assert found(4) is None, "an abort marker at the log's very end is none either"
    replaced = found(3)
    assert replaced is not None, "a record that replaced ours counts, committed or not"
    assert replaced.crc32 == fingerprint(3, 0, None, b"aborted").crc32
    claimed = entry(5, topic_id, last)
    assert plan_start(claimed, log.view({there: claimed})[there], declared=0) == Start(5)


# What stands where


def test_a_view_has_the_fingerprint_of_every_partitions_own_record(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(4, **KEPT)
    records = {0: (b"k", b"v"), 1: (None, b""), 2: (b"", None)}
    for partition, (key, value) in records.items():
        produce(cluster, topic, b"before", partition=partition)
        produce(cluster, topic, value, partition=partition, key=key, timestamp=1_000 + partition)
        produce(cluster, topic, *[b"after"] * 5, partition=partition)
    log = open_log(topic)
    ids = log.partitions()
    entries: dict[TopicPartition, Entry | None] = {p: entry(2, ids[p], anything_at(1)) for p in ids if p.partition < 3}
    empty = TopicPartition(topic, 3)

    views = log.view(entries | {empty: None})

    assert {p.partition: view.found for p, view in views.items()} == {
        n: fingerprint(1, 1_000 + n, *records[n]) for n in records
    } | {3: None}
    assert {(view.topic, view.topic_id) for view in views.values()} == {(topic, ids[empty])}
    assert (views[empty].earliest, views[empty].end) == (0, 0)
    assert plan_start(None, views[empty], declared=0) == Start(0, adopted=True)
    # The same handle is asked again, and not one record further.
    assert log.view(entries) == {p: views[p] for p in entries}


def test_a_large_record_is_found_beside_others(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(8, **KEPT)
    large = bytes(900_000)
    for partition in range(8):
        produce(cluster, topic, large, partition=partition, timestamp=5)
    log = open_log(topic)
    views = log.view({p: entry(1, topic_id, anything_at(0)) for p, topic_id in log.partitions().items()})
    assert {view.found for view in views.values()} == {fingerprint(0, 5, None, large)}


def test_another_record_at_the_last_offset_is_a_truncated_log(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(**KEPT)
    produce(cluster, topic, b"now here", b"grown", timestamp=1_000)
    there, log = TopicPartition(topic, 0), open_log(topic)
    topic_id = log.partitions()[there]

    def start(claimed: Entry) -> Start:
        return plan_start(claimed, log.view({there: claimed})[there], declared=0)

    assert start(entry(1, topic_id, fingerprint(0, 1_000, None, b"now here"))) == Start(1)
    for other in (fingerprint(0, 1_000, None, b"was here"), fingerprint(0, 999, None, b"now here")):
        with pytest.raises(LogTruncated, match="at offset 0 is not the one"):
            start(entry(1, topic_id, other))
    with pytest.raises(LogTruncated, match="its log ends at 2"):
        start(entry(3, topic_id, anything_at(2)))


@pytest.fixture
def eager_cleaner(cluster: Cluster) -> Iterator[None]:
    """Compaction starts at once, instead of every 15 s."""
    client = metadata.admin(cluster.bootstrap)

    def alter(operation: AlterConfigOpType) -> None:
        change = ConfigEntry("log.cleaner.backoff.ms", "100", incremental_operation=operation)
        for number in (1, 2, 3):
            resource = ConfigResource("BROKER", str(number), incremental_configs=[change])
            client.incremental_alter_configs([resource])[resource].result(30)

    alter(AlterConfigOpType.SET)
    yield
    alter(AlterConfigOpType.DELETE)


@pytest.mark.usefixtures("eager_cleaner")
def test_a_record_that_was_compacted_away_is_not_mistaken_for_the_next(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01")
    there, log = TopicPartition(topic, 0), open_log(topic)
    topic_id = log.partitions()[there]
    produce(cluster, topic, b"kept", key=b"a", timestamp=1_000)
    produce(cluster, topic, b"old", key=b"b", timestamp=2_000)
    produce(cluster, topic, b"new", key=b"b", timestamp=3_000)

    def found(offset: int) -> Fingerprint | None:
        return log.view({there: entry(offset + 1, topic_id, anything_at(offset))})[there].found

    assert found(1) == fingerprint(1, 2_000, b"b", b"old")

    def compacted() -> bool:
        produce(cluster, topic, b"", key=b"c")  # rolls the segment: the active one is never compacted
        return found(1) is None

    eventually(compacted)
    assert found(0) == fingerprint(0, 1_000, b"a", b"kept")
    assert found(2) == fingerprint(2, 3_000, b"b", b"new")
    assert log.offsets([there])[there][0] == 0, "compaction leaves the earliest offset"
    gone = entry(2, topic_id, fingerprint(1, 2_000, b"b", b"old"))
    assert plan_start(gone, log.view({there: gone})[there], declared=0) == Start(2)
    assert log.timestamps_at({there: 1}) == {there: 3_000}, "the next record is what waits"


def test_a_topic_made_again_has_another_id_and_stops_the_run(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic(2, **KEPT)
    produce(cluster, topic, b"x", timestamp=1_000)
    log = open_log(topic)
    before = log.partitions()
    last = fingerprint(0, 1_000, None, b"x")
    claimed = {p: entry(1, topic_id, last) for p, topic_id in before.items()}
    client = metadata.admin(cluster.bootstrap)
    client.delete_topics([topic], operation_timeout=30)[topic].result(30)
    eventually(lambda: topic not in client.list_topics(timeout=30).topics)
    with pytest.raises(SourceError, match=topic):
        log.view(claimed)
    client.create_topics([NewTopic(topic, 1, 1, config={"retention.ms": "-1"})], operation_timeout=30)[topic].result(30)
    produce(cluster, topic, b"x", timestamp=1_000)

    views = log.view(claimed)

    # The first has the same record at the same offset; the second is not there any more.
    for partition in (0, 1):
        there = TopicPartition(topic, partition)
        assert views[there].topic_id not in ("", before[there])
        with pytest.raises(TopicRecreated, match=re.escape(f"now has id {views[there].topic_id}")):
            plan_start(claimed[there], views[there], declared=0)


def test_the_timestamp_of_what_waits(cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]) -> None:
    topic = make_topic(2, **KEPT)
    for timestamp_ms in (1_000, 2_000, 3_000):
        produce(cluster, topic, b"x", timestamp=timestamp_ms)
    one, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    log = open_log(topic)
    assert log.timestamps_at({one: 1, empty: 0}) == {one: 2_000, empty: None}
    assert log.timestamps_at({one: 2}) == {one: 3_000}
    assert log.timestamps_at({one: 3}) == {one: None}


def test_single_records_with_their_bytes(cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]) -> None:
    topic = make_topic(**KEPT)
    produce(cluster, topic, b"0", b"1")
    produce(cluster, topic, b"\xff", key=b"k", timestamp=5, headers=[("h", b"\x00"), ("h", None)])
    there, log = TopicPartition(topic, 0), open_log(topic)
    first, last = log.records(there, [0, 2])
    assert (first.offset, first.key, first.value, first.headers) == (0, None, b"0", [])
    assert last == LogRecord(2, 5, b"k", b"\xff", [("h", b"\x00"), ("h", None)])
    with pytest.raises(SourceError, match=f"no committed record at offset 3 of {topic}/0"):
        log.records(there, [3])


# What the group is told


def test_a_told_position_is_seen_by_others(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log], group: str
) -> None:
    topic = make_topic(3)
    zero, one, never = (TopicPartition(topic, n) for n in range(3))
    log = open_log(topic)
    assert log.committed_offsets([zero, one]) == {zero: None, one: None}
    log.commit_offsets({zero: 7, one: 0})
    log.commit_offsets({zero: 5})  # a sink that was restored: the ledger is the truth, and the group follows it
    assert log.committed_offsets([zero, one, never]) == {zero: 5, one: 0, never: None}
    assert positions_of(cluster, group) == {0: 5, 1: 0}


def test_a_client_that_is_not_librdkafka_goes_on_where_the_group_was_told(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log], group: str
) -> None:
    topic = make_topic()
    produce(cluster, topic, b"0", b"1", b"2", b"3")
    open_log(topic).commit_offsets({TopicPartition(topic, 0): 2})
    settings = {"bootstrap_servers": cluster.bootstrap.split(","), "group_id": group, "consumer_timeout_ms": 60_000}
    with closing(KafkaConsumer(topic, **settings)) as consumer:  # type: ignore[no-untyped-call]
        assert [next(consumer).value for _ in range(2)] == [b"2", b"3"]


def test_a_group_with_members_cannot_be_told(
    cluster: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log], group: str
) -> None:
    topic = make_topic()
    member = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group}, logger=metadata.QUIET)
    try:
        member.subscribe([topic])

        def joined() -> bool:
            member.poll(0.1)
            return bool(member.assignment())

        eventually(joined)
        said = f"could not commit the offsets of {topic}/0 to consumer group {group}"
        with pytest.raises(SourceError, match=said) as told:
            open_log(topic).commit_offsets({TopicPartition(topic, 0): 1})
        assert "stop that consumer" in told.value.advice
    finally:
        member.close()


def test_telling_of_a_partition_that_is_not_there_is_an_error(
    make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic()
    with pytest.raises(SourceError, match="Unknown topic or partition"):
        open_log(topic).commit_offsets({TopicPartition(topic, 0): 1, TopicPartition(topic, 9): 1})


# What goes wrong

Call = Callable[[Log, TopicPartition], object]
CALLS: dict[str, Call] = {
    "partitions": lambda log, _: log.partitions(),
    "offsets": lambda log, there: log.offsets([there]),
    "stable ends": lambda log, there: log.stable_ends([there]),
    "declared start": lambda log, there: log.declared_start(datetime.now(UTC), [there]),
    "view": lambda log, there: log.view({there: entry(1, "id", anything_at(0))}),
    "timestamps": lambda log, there: log.timestamps_at({there: 0}),
    "records": lambda log, there: log._first_records({there: 0}, "read_committed"),
    "commit offsets": lambda log, there: log.commit_offsets({there: 1}),
    "committed offsets": lambda log, there: log.committed_offsets([there]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_cluster_that_is_not_there_is_an_error_in_time(open_log: Callable[..., Log], call: str) -> None:
    log = open_log("t", brokers=NOWHERE, timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(SourceError, match=f"Kafka at {NOWHERE} could not .*no answer within 0.5 s") as caught:
        CALLS[call](log, TopicPartition("t", 0))
    assert time.monotonic() - started < 30
    assert "source.brokers" in caught.value.advice


def test_no_broker_for_a_pattern_is_an_error_in_time(open_log: Callable[..., Log]) -> None:
    started = time.monotonic()
    with pytest.raises(SourceError, match="describe the cluster"):
        open_log(brokers=NOWHERE, topics_pattern=".*", timeout_s=0.5).partitions()
    assert time.monotonic() - started < 30


def test_a_cluster_that_stops_answering_is_an_error_in_time_and_the_handle_survives_it(
    healthy: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log]
) -> None:
    topic = make_topic()
    there = TopicPartition(topic, 0)
    produce(healthy, topic, b"x")
    log = open_log(topic, timeout_s=0.5)
    calls = CALLS.values()
    eventually(lambda: all(works(call, log, there) for call in calls))
    brokers = healthy.brokers()
    for broker in brokers:
        broker.pause()
    try:
        for call in calls:
            started = time.monotonic()
            with pytest.raises(SourceError, match=r"no answer within 0\.5 s"):
                call(log, there)
            assert time.monotonic() - started < 30
    finally:
        for broker in brokers:
            broker.resume()
    eventually(lambda: all(works(call, log, there) for call in calls))


def test_questions_outlive_the_broker_that_was_in_charge(
    healthy: Cluster, make_topic: MakeTopic, open_log: Callable[..., Log], group: str
) -> None:
    topic = make_topic(6)
    for partition in range(6):
        produce(healthy, topic, b"x", partition=partition)
    log = open_log(topic, timeout_s=60)
    partitions = list(log.partitions())
    log.commit_offsets(dict.fromkeys(partitions, 0))
    client = metadata.admin(healthy.bootstrap)
    coordinator = client.describe_consumer_groups([group])[group].result(30).coordinator.id
    assert coordinator in {p.leader for p in metadata.view(client).partitions if p.topic == topic}

    healthy.part(f"broker-{coordinator}").kill()

    log.commit_offsets(dict.fromkeys(partitions, 1))
    assert log.committed_offsets(partitions) == dict.fromkeys(partitions, 1)
    assert log.offsets(partitions) == dict.fromkeys(partitions, (0, 1))
    assert None not in log.timestamps_at(dict.fromkeys(partitions, 0)).values()


def works(call: Call, log: Log, there: TopicPartition) -> bool:
    try:
        call(log, there)
    except SourceError:
        return False
    return True


def test_addresses_from_the_environment_are_shown_as_written(group: str) -> None:
    source = Source.model_validate({"brokers": FromEnv(NOWHERE, "${env:BROKERS}"), "topics": ["t"]})
    with Log(source, group, timeout_s=0.5) as log, pytest.raises(SourceError) as caught:
        log.partitions()
    assert "Kafka at ${env:BROKERS} could not describe topic t: no answer within 0.5 s" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert "127.0.0.1" not in str(caught.value) + caught.value.advice
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max.pol.records": "hunter2"}, "max.pol.records"),
        ({"client.id": "me", "sasl.jaas.config": "module required password=hunter2;"}, "sasl.jaas.config"),
        ({"ssl.truststore.location": "/hunter2.jks"}, "ssl.truststore.location"),
        ({"security.protocol": "hunter2"}, "security.protocol"),
        ({"sasl.mechanism": ""}, "sasl.mechanism"),  # the client calls it sasl.mechanisms
        ({"socket.timeout.ms": "hunter2"}, "socket.timeout.ms"),
        ({"security.protocol": "ssl", "ssl.ca.location": "/hunter2"}, "ssl.ca.location"),
        ({"plugin.library.paths": "/hunter2"}, "plugin.library.paths"),
        ({"stats_cb": "hunter2"}, "stats_cb"),
        ({"default.topic.config": "hunter2"}, "default.topic.config"),
    ],
)
def test_a_setting_the_client_does_not_take_is_named_without_its_value(settings: dict[str, str], named: str) -> None:
    source = Source.model_validate({"brokers": NOWHERE, "topics": ["t"], "kafka": settings})
    with pytest.raises(ConfigError, match=rf"^source\.kafka\.{named}: ") as caught:
        Log(source, "g")
    assert "hunter2" not in str(caught.value) + caught.value.advice
    assert caught.value.__cause__ is None


def test_client_settings_reach_the_client(make_topic: MakeTopic, open_log: Callable[..., Log]) -> None:
    topic = make_topic()
    # Plain brokers cannot answer a TLS handshake; the user's own back-off must not collide with ours.
    kafka = {"security.protocol": "ssl", "reconnect.backoff.ms": "1000"}
    with pytest.raises(SourceError, match=r"no answer within 2 s \(.*SSL") as caught:
        open_log(topic, kafka=kafka, timeout_s=2).partitions()
    assert "security settings" in caught.value.advice
