"""The Kafka sink on a real cluster, without Spark: each guarantee, replays, zombies, kills, and what readers see."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.fix_cluster import needs
from tests.kafka_stage import Read, Stage, as_read, delivered, read

from avow.audit.auditor import _Audit
from avow.engines.redrive import redrive
from avow.errors import ConfigError, PositionBehind, PositionMoved, SinkError, Superseded, TopicRecreated
from avow.kafka import admin as kafka_admin
from avow.kafka import log, metadata
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection
from avow.ledger import Counts, Entry, OffsetRange
from avow.local.cluster import Cluster
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, Selection
from avow.sinks.kafka import clients as kafka_clients
from avow.sinks.kafka import entries as kafka_entries
from avow.sinks.kafka.audit import KafkaAuditReader
from avow.sinks.kafka.config import dead_letter_topic
from avow.sinks.kafka.dead_letters import KafkaDeadLetters
from avow.sinks.kafka.driver import KafkaDriver
from avow.sinks.kafka.task import KafkaTask

pytestmark = pytest.mark.cluster

GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
Make = Callable[..., Stage]


# The tests' records have old timestamps, and sinks keep them: retention would take them at its next round.
KEPT = {"retention.ms": "-1"}


@pytest.fixture
def stage(cluster: Cluster, tmp_path: Path, make_topic: Callable[..., str], request: pytest.FixtureRequest) -> Make:
    replicas = 3 if needs(request.node, "alone") else 1

    def make(partitions: int = 1, out_partitions: int = 3, **config: str) -> Stage:
        target = f"o-{uuid4().hex[:12]}"
        admin = metadata.admin(cluster.bootstrap)
        config = KEPT | {name.replace("_", "."): value for name, value in config.items()}
        admin.create_topics([NewTopic(target, out_partitions, replicas, config=config)], operation_timeout=30)[
            target
        ].result()
        return Stage(
            cluster.bootstrap, tmp_path, f"p-{uuid4().hex[:10]}", make_topic(partitions, retention_ms="-1"), target
        )

    return make


def values(count: int, start: int = 0) -> list[bytes]:
    return [b"value %d" % number for number in range(start, start + count)]


def origins(found: list[Read]) -> list[int]:
    return sorted(int(one.origin.rpartition("/")[2]) for one in found)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_records_pass_through_untouched(stage: Make, guarantee: str) -> None:
    s = stage()
    keys: list[bytes | None] = [b"k%d" % (n % 7) for n in range(200)]
    keys[3], keys[4] = None, b""
    given: list[bytes | None] = [*values(200)]
    given[5], given[6] = None, b"\x00\xff\xfe not text"
    headers = [("trace", b"\x01\x02"), ("trace", b"again"), ("empty", b""), ("none", None)]
    s.produce(given, keys=keys, headers=headers)
    pipeline = s.pipeline(guarantee)
    run = s.started(pipeline)
    report = s.deliver(pipeline, run, 0, 200)
    assert report.counts == Counts(200, 200, 0, 0)
    found = {int(one.origin.rpartition("/")[2]): one for one in s.out()}
    assert sorted(found) == list(range(200))
    for offset, one in found.items():
        assert (one.key, one.value, one.timestamp_ms) == (keys[offset], given[offset], 1_700_000_000_000 + offset)
        assert one.headers == [*headers, ("avow-origin", f"{s.source}/0/{offset}".encode())]
    entry = s.entries(pipeline)[0]
    assert (entry.position, entry.run, entry.counts) == (200, run, Counts(200, 200, 0, 0))
    assert entry.last is not None
    assert entry.last.offset == 199
    # Order by key: offsets of one key ascend within the one partition that has it.
    for key in {*keys} - {None}:
        mine = [one for one in found.values() if one.key == key]
        assert len({one.partition for one in mine}) == 1
        by_place = sorted(mine, key=lambda one: one.offset)
        assert [one.timestamp_ms for one in by_place] == sorted(one.timestamp_ms for one in mine)


def test_replay_overlap_and_gap(stage: Make) -> None:
    s = stage()
    s.produce(values(100))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 50)
    assert not s.deliver(pipeline, run, 0, 50).done, "a replay has nothing to do"
    assert s.deliver(pipeline, run, 30, 80).done == OffsetRange(s.source, 0, 50, 80)
    with pytest.raises(PositionBehind, match="would skip"):
        s.deliver(pipeline, run, 90, 100)
    s.deliver(pipeline, run, 80, 100)
    assert origins(s.out()) == list(range(100))
    assert s.entries(pipeline)[0].counts == Counts(100, 100, 0, 0)


@pytest.mark.parametrize("where", ["before", "in", "claimed", "after"])
def test_kill_9_around_the_transaction(stage: Make, where: str) -> None:
    s = stage()
    s.produce(values(3000))
    path = s.file()
    pipeline = s.pipeline()
    run = s.started(pipeline)
    child = s.child(path, run, 0, 2000, where)
    out, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    assert out.strip() == where
    assert s.entries(pipeline)[0].position == (2000 if where == "after" else 0)
    # The next attempt need not wait for the time-out of what was left open.
    started = time.monotonic()
    s.deliver(pipeline, run, 0, 2000)
    s.deliver(pipeline, run, 2000, 3000)
    assert time.monotonic() - started < 30
    assert origins(s.out()) == list(range(3000))
    if where in ("in", "claimed"):
        assert len(s.out("read_uncommitted")) > 3000, "the aborted records are there, and invisible"


@pytest.mark.parametrize(("guarantee", "times"), [("at-least-once", 2), ("at-most-once", 0)])
def test_killed_between_two_acts_the_weaker_words_show_what_they_permit(
    stage: Make, guarantee: str, times: int
) -> None:
    s = stage()
    s.produce(values(500))
    path = s.file(guarantee)
    pipeline = s.pipeline(guarantee)
    run = s.started(pipeline)
    child = s.child(path, run, 0, 500, "between")
    _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    s.deliver(pipeline, run, 0, 500)
    assert origins(s.out()) == sorted([*range(500)] * times)


def test_a_zombie_is_fenced(stage: Make) -> None:
    s = stage()
    s.produce(values(1000))
    path = s.file()
    pipeline = s.pipeline()
    run = s.started(pipeline)
    zombie = s.child(path, run, 0, 1000, "stop-in")
    assert zombie.stdout is not None
    assert zombie.stdout.readline().strip() == "stop-in"
    newer = s.started(pipeline)
    assert newer == run + 1
    s.deliver(pipeline, newer, 0, 1000)
    os.kill(zombie.pid, signal.SIGCONT)
    _, err = zombie.communicate(timeout=60)
    assert zombie.returncode == 1
    assert "fenced" in err
    assert origins(s.out()) == list(range(1000))
    # Of the same run as well: another attempt of the same task.
    with pytest.raises(Superseded):
        s.deliver(pipeline, run, 0, 1000)


def test_a_kept_producer_that_was_fenced_is_noticed_at_once(stage: Make) -> None:
    """Two workers take turns, and one of them dies: nobody may find out at the end of a batch."""
    s = stage()
    s.produce(values(60))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    workers = [kafka_clients.KafkaClients(pipeline) for _ in range(2)]
    for turn in range(6):
        planned = OffsetRange(s.source, 0, turn * 10, turn * 10 + 10)
        delivered(pipeline, run, planned, KafkaTask(pipeline, run, workers[turn % 2]))
        s.child(s.file(), run, planned.start, planned.until, "before").communicate(timeout=60)
    assert origins(s.out()) == list(range(60))
    for worker in workers:
        worker.close()


def test_workers_that_take_turns_do_not_wait_for_one_another(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Spark any worker may have a partition's next range. A producer that has claimed nothing is waited for."""
    s = stage()
    s.produce(values(60))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    turn, pauses = 0, list[int]()
    monkeypatch.setattr(kafka_clients, "give_way", lambda: pauses.append(turn))
    workers = [kafka_clients.KafkaClients(pipeline) for _ in range(2)]
    for turn in range(4):
        planned = OffsetRange(s.source, 0, turn * 10, turn * 10 + 10)
        delivered(pipeline, run, planned, KafkaTask(pipeline, run, workers[turn % 2]))
    assert pauses == []
    workers[0].new_producer(log.TopicPartition(s.source, 0))  # as a redrive does, that is not done
    for turn in range(4, 6):
        planned = OffsetRange(s.source, 0, turn * 10, turn * 10 + 10)
        delivered(pipeline, run, planned, KafkaTask(pipeline, run, workers[1]))
    assert pauses == [4]
    assert origins(s.out()) == list(range(60))
    for worker in workers:
        worker.close()


@pytest.mark.long
def test_a_redrive_gets_through_beside_workers_that_take_turns(stage: Make) -> None:
    """They deliver without a pause, and fence the redrive as often as it has fenced them."""
    s = stage()
    given = [json.dumps({"id": n}).encode() for n in range(3_000)]
    for bad in range(10):
        given[bad] = b'{"id": "text"}'
    s.produce(given)
    pipeline = s.pipeline(decode='format = "json"\nschema = "id long not null"')
    run = s.started(pipeline)
    workers = [kafka_clients.KafkaClients(pipeline) for _ in range(2)]

    def deliver(turn: int) -> None:
        planned = OffsetRange(s.source, 0, turn * 10, turn * 10 + 10)
        with suppress(PositionMoved, SinkError):  # the run's next attempt
            delivered(pipeline, run, planned, KafkaTask(pipeline, run, workers[turn % 2]))
            return
        deliver(turn)

    deliver(0)
    corrected = s.pipeline(decode='format = "json"\nschema = "id string not null"')
    with ThreadPoolExecutor() as pool:
        done = pool.submit(redrive, corrected, Selection(), lambda: pytest.fail("no Spark is needed"))
        turn = 1
        while not done.done() and turn < 300:
            deliver(turn)
            turn += 1
        assert turn < 300, "the redrive waited for the end of the run"
        assert done.result().written == 10
    found = origins(s.out())
    assert sorted(found) == list(range(turn * 10))
    for worker in workers:
        worker.close()


def test_the_producers_of_a_dozen_partitions_are_kept(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage(partitions=12)
    pipeline = s.pipeline()
    s.started(pipeline)
    made: list[log.TopicPartition] = []
    fresh = kafka_clients.KafkaClients.new_producer

    def counted(self: kafka_clients.KafkaClients, where: log.TopicPartition) -> kafka_clients.PartitionProducer:
        made.append(where)
        return fresh(self, where)

    monkeypatch.setattr(kafka_clients.KafkaClients, "new_producer", counted)
    worker = kafka_clients.KafkaClients(pipeline)
    partitions = [log.TopicPartition(s.source, number) for number in range(12)]
    for where in partitions * 3:
        worker.begin_transaction(where).client.abort_transaction(30)
    assert made == partitions
    worker.close()


def test_positions_settle_one_by_one(stage: Make) -> None:
    """Two writers of whom one or the other is always about to claim: both are never at rest together."""
    s = stage(partitions=3)
    pipeline = s.pipeline()
    s.started(pipeline)
    writers, reader = kafka_clients.KafkaClients(pipeline), kafka_clients.KafkaClients(pipeline)
    first, second, third = (log.TopicPartition(s.source, number) for number in range(3))
    enough = threading.Event()

    def open_one(where: log.TopicPartition) -> kafka_clients.PartitionProducer:
        producing = writers.begin_transaction(where)
        assert producing.last is not None
        writers.send(producing, where, producing.last)
        return producing

    def take_turns() -> None:
        busy, next_ = open_one(first), second
        while not enough.wait(0.2):
            other = open_one(next_)
            busy.client.commit_transaction(30)
            busy, next_ = other, first if next_ == second else second
        busy.client.commit_transaction(30)

    working = threading.Thread(target=take_turns)
    working.start()
    try:
        found, left = reader.positions(30)
        assert (sorted(found), left) == ([first, second, third], [])
    finally:
        enough.set()
        working.join()
    # One that stays open keeps only its own position back, and what another topic has in the group matters to nobody.
    hanging = open_one(third)
    elsewhere = TopicPartition(s.target, 0, 1)
    hanging.client.send_offsets_to_transaction([elsewhere], writers._reader().consumer_group_metadata(), 30)
    started = time.monotonic()
    found, left = reader.positions(3)
    assert (sorted(found), left) == ([first, second], [third])
    assert 3 <= time.monotonic() - started < 30
    with KafkaDriver(pipeline) as store:
        assert sorted(store.stored_entries()) == [first, second, third]
    hanging.client.abort_transaction(30)
    writers.close()
    reader.close()


@pytest.mark.long  # it waits for every time-out of a producer, twice
def test_the_coordinator_of_the_ledger_dies_and_stays_dead(stage: Make, healthy: Cluster) -> None:
    """librdkafka's producer would wait for it to come back, beyond every time-out, and each partition has its own."""
    s = stage(partitions=2)
    for partition in range(2):
        s.produce(values(20), partition=partition)
    pipeline = s.pipeline()
    run = s.started(pipeline)
    worker = kafka_clients.KafkaClients(pipeline)

    def handed_over(start: int) -> None:
        for partition in range(2):
            planned = OffsetRange(s.source, partition, start, start + 10)
            deadline = time.monotonic() + 120
            while True:
                try:
                    delivered(pipeline, run, planned, KafkaTask(pipeline, run, worker))
                    break
                except SinkError:  # as an engine does, which goes on from the ledger
                    assert time.monotonic() < deadline
                    time.sleep(0.5)

    handed_over(0)
    admin = metadata.admin(healthy.bootstrap)
    coordinator = admin.describe_consumer_groups([s.name])[s.name].result(30).coordinator.id
    healthy.part(f"broker-{coordinator}").kill()
    handed_over(10)
    assert origins(s.out()) == sorted([*range(20), *range(20)])
    worker.close()


@pytest.mark.long  # the same requests are asked of the same admin in test_kafka_log.py
def test_a_question_outlives_the_broker_that_was_in_charge(stage: Make, healthy: Cluster) -> None:
    """librdkafka's admin client waits for it to come back; a run that starts right then would fail."""
    s = stage(out_partitions=3)
    with closing(kafka_clients.KafkaClients(s.pipeline())) as asking:
        healthy.part(f"broker-{asking.admin.cluster().controller}").kill()
        assert asking.limits(s.target).partitions == 3


def test_a_transaction_that_timed_out_is_named_and_done_again(stage: Make) -> None:
    s = stage()
    s.produce(values(100))
    pipeline = s.pipeline("exactly-once", '[sink.kafka]\n"transaction.timeout.ms" = 2000')
    run = s.started(pipeline)
    task = KafkaTask(pipeline, run)
    wrote = task.add_dead_letters

    def slowly(dead_letters: list[DeadLetter]) -> None:
        wrote(dead_letters)
        task._producer.flush(10)
        time.sleep(14)  # the coordinator looks every ten seconds

    task.add_dead_letters = slowly  # type: ignore[method-assign]
    with pytest.raises(SinkError, match=r"aborted by Kafka after its transaction.timeout.ms of 2000"):
        delivered(pipeline, run, OffsetRange(s.source, 0, 0, 100), task)
    assert s.out() == []
    s.deliver(pipeline, run, 0, 100)
    assert origins(s.out()) == list(range(100))


def test_a_reader_of_committed_records_sees_each_once_and_in_order_while_writers_die(stage: Make) -> None:
    s = stage(out_partitions=2)
    s.produce(values(2500), keys=[b"k%d" % (n % 50) for n in range(2500)])
    path = s.file()
    pipeline = s.pipeline()
    run = s.started(pipeline)
    seen: list[Read] = []
    enough = threading.Event()

    def follow() -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": s.bootstrap,
                "group.id": "follow",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            },
            logger=metadata.QUIET,
        )
        consumer.assign([TopicPartition(s.target, n, 0) for n in range(2)])
        while not enough.is_set():
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                seen.append(as_read(message))
        consumer.close()

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        for turn, where in enumerate(("in", "claimed", "after", "before", "in")):
            child = s.child(path, run, turn * 500, turn * 500 + 500, where)
            child.communicate(timeout=60)
            s.deliver(pipeline, run, turn * 500, turn * 500 + 500)
        deadline = time.monotonic() + 20
        while len(seen) < 2500 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
    finally:
        enough.set()
        reader.join()
    assert origins(seen) == list(range(2500))
    for key in {one.key for one in seen}:
        mine = [int(one.origin.rpartition("/")[2]) for one in seen if one.key == key]
        assert mine == sorted(mine)


def test_dead_letters_are_in_the_same_transaction_and_can_be_redriven_once(stage: Make) -> None:
    s = stage()
    given = [json.dumps({"id": n}).encode() for n in range(20)]
    given[3], given[7] = b"{", b'{"id": "seven"}'
    s.produce(given, keys=[b"%d" % n for n in range(20)], headers=[("h", b"\xff")])
    decode = 'format = "json"\nschema = "id long not null"'
    pipeline = s.pipeline(decode=decode)
    run = s.started(pipeline)
    assert s.deliver(pipeline, run, 0, 20).counts == Counts(20, 18, 2, 0)
    assert {one.value for one in s.out()} == {*given} - {given[3], given[7]}, "bytes untouched"
    with KafkaDeadLetters(pipeline) as letters:
        assert [(reason, count) for reason, count, _ in letters.by_reason(Selection())] == [
            ("not-json", 1),
            ("wrong-type", 1),
        ]
        found = letters.select(Selection(), 10)
        assert [(one.offset, one.key, one.value, one.headers) for one in found] == [
            (3, b"3", given[3], [("h", b"\xff")]),
            (7, b"7", given[7], [("h", b"\xff")]),
        ]
        assert letters.select(Selection(reason="wrong-type", from_offset=7, until_offset=8), 10) == found[1:]
    # The schema was wrong, not the record.
    mended = s.pipeline(decode='format = "json"\nschema = "id string not null"')
    for expected in (1, 0):
        done = redrive(mended, Selection(reason="wrong-type"), lambda: pytest.fail("no Spark is needed"))
        assert (done.written, done.still_dead) == (expected, 0)
    assert origins(s.out()) == [n for n in range(20) if n != 3]
    assert s.entries(pipeline)[0].counts == Counts(20, 19, 1, 0)
    with KafkaDeadLetters(pipeline) as letters:
        assert [one.offset for one in letters.select(Selection(), 10)] == [3]


def test_what_the_topic_would_refuse_is_a_dead_letter(stage: Make) -> None:
    s = stage(max_message_bytes="4000")
    given = values(50)
    given[10] = os.urandom(5000)
    s.produce(given)
    s.produce([b"from far ahead"], timestamp_ms=int(time.time() * 1000) + 59 * 60_000 + 55_000)
    pipeline = s.pipeline()
    run = s.started(pipeline)
    assert s.deliver(pipeline, run, 0, 51).counts == Counts(51, 49, 2, 0)
    with KafkaDeadLetters(pipeline) as letters:
        large, ahead = letters.select(Selection(), 10)
    assert (large.offset, large.reason, large.value) == (10, "refused-by-sink", given[10])
    assert "max.message.bytes is 4,000" in large.detail
    assert "message.timestamp.after.max.ms" in ahead.detail


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_dead_letter_that_is_too_large_for_its_topic_is_shortened_and_redriven_from_the_source(
    stage: Make, cluster: Cluster, guarantee: str
) -> None:
    s = stage()
    admin = metadata.admin(cluster.bootstrap)
    name = f"{s.name}.dead-letters"
    config = {"cleanup.policy": "compact", "max.message.bytes": "20000"}
    admin.create_topics([NewTopic(name, 1, 1, config=config)], operation_timeout=30)[name].result()
    large = os.urandom(200_000)
    given = [b'{"id": 0}', large, b"x", large + b"2"]
    s.produce(given, keys=[b"a", b"k" * 30_000, b"b", b"c"], headers=[("h", b"\xff")])
    pipeline = s.pipeline(guarantee, decode='format = "json"\nschema = "id long not null"')
    assert s.deliver(pipeline, s.started(pipeline), 0, 4).counts == Counts(4, 1, 3, 0)
    with KafkaDeadLetters(pipeline) as letters:
        found = letters.select(Selection(), 10)
    assert [(one.offset, one.full_bytes) for one in found] == [(1, 200_000), (2, None), (3, 200_001)]
    assert found[0].value == large[: len(found[0].value or b"")]
    # The record is read from its topic again, as long as it is there.
    for asked in admin.delete_records([TopicPartition(s.source, 0, 3)]).values():
        asked.result(30)
    mended = s.pipeline(guarantee, decode='format = "raw"')
    done = redrive(mended, Selection(), lambda: pytest.fail("no Spark is needed"))
    assert (done.written, done.still_dead) == (2, 1)
    assert {one.value for one in s.out()} == {given[0], given[2], given[3]}
    with KafkaDeadLetters(pipeline) as letters:
        assert [one.offset for one in letters.select(Selection(), 10)] == [1]


def test_a_dead_letter_topic_that_takes_next_to_nothing_is_refused(stage: Make, cluster: Cluster) -> None:
    s = stage()
    name = f"{s.name}.dead-letters"
    config = {"cleanup.policy": "compact", "max.message.bytes": "1000"}
    admin = metadata.admin(cluster.bootstrap)
    admin.create_topics([NewTopic(name, 1, 1, config=config)], operation_timeout=30)[name].result()
    with pytest.raises(ConfigError, match=f"the dead-letter topic {name} has max.message.bytes = 1000"):
        s.started(s.pipeline())


@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_a_record_without_a_key_is_no_poison_for_a_compacted_topic(stage: Make, guarantee: str) -> None:
    s = stage(cleanup_policy="compact")
    s.produce(values(4), keys=[b"a", None, b"", b"b"])
    pipeline = s.pipeline(guarantee)
    assert s.deliver(pipeline, s.started(pipeline), 0, 4).counts == Counts(4, 3, 1, 0)
    assert origins(s.out()) == [0, 2, 3]
    with KafkaDeadLetters(pipeline) as letters:
        (letter,) = letters.select(Selection(), 10)
    assert (letter.offset, letter.value) == (1, b"value 1")
    assert "it has no key, and a compacted topic takes none without" in letter.detail


def test_to_look_makes_no_topic(stage: Make, cluster: Cluster) -> None:
    s = stage()
    s.target = f"o-{uuid4().hex[:12]}"
    pipeline = s.pipeline()
    with KafkaAuditReader(pipeline) as reading:
        assert reading.known() == {}
    with KafkaDeadLetters(pipeline) as letters:
        assert letters.select(Selection(), 10) == []
    there = metadata.admin(cluster.bootstrap).list_topics(timeout=10).topics
    assert not {s.target, dead_letter_topic(pipeline)} & there.keys()


def test_a_dead_letter_topic_that_lets_letters_go_is_refused(stage: Make, cluster: Cluster) -> None:
    s = stage()
    pipeline = s.pipeline()
    name = dead_letter_topic(pipeline)
    admin = metadata.admin(cluster.bootstrap)
    admin.create_topics([NewTopic(name, 1, 1)], operation_timeout=30)[name].result()
    with KafkaDriver(pipeline) as store, pytest.raises(ConfigError, match=r"has cleanup.policy = delete") as refused:
        store.prepare()
    assert f"--entity-name {name} --add-config cleanup.policy=compact" in refused.value.advice


def test_a_dead_letter_topic_has_one_pipeline(stage: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s, other = stage(), stage()
    s.produce([b"{"])
    shared = f'dead_letter_topic = "{s.name}.dead"'
    first, second = (one.pipeline(sink=shared, decode='format = "json"\nschema = "id long"') for one in (s, other))
    s.deliver(first, s.started(first), 0, 1)
    owned = f"the dead-letter topic {s.name}.dead belongs to pipeline {s.name}, which reads {s.source}/0"
    with pytest.raises(ConfigError, match=owned) as refused:
        other.started(second)
    assert f"{other.name}.dead-letters" in refused.value.advice
    with KafkaDeadLetters(second) as letters, pytest.raises(ConfigError, match=owned):
        letters.select(Selection(), 10)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=owned), KafkaAuditReader(second):
        pass
    assert not list(tmp_path.glob("avow-audit-*")), "an audit that cannot begin leaves nothing behind"
    # What was begun before topics had an owner is still known.
    producer = Producer({"bootstrap.servers": s.bootstrap}, logger=metadata.QUIET)
    producer.produce(f"{s.name}.dead", b'{"topic_id": "x", "start": 3}', f"avow-began/{other.source}/0")
    assert producer.flush(30) == 0
    with KafkaAuditReader(first) as reading:
        assert reading.known()[log.TopicPartition(other.source, 0)].start == 3
        assert reading.dead_letters(log.TopicPartition(s.source, 0)).tolist() == [0]


def test_a_leader_that_does_not_answer_is_no_empty_partition(
    stage: Make, healthy: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage()

    class Hasty(AdminClient):
        """Gives up on the brokers before whoever waits for it does."""

        def list_offsets(self, *given: Any, **named: Any) -> Any:
            return super().list_offsets(*given, **named | {"request_timeout": 1})

    monkeypatch.setattr(kafka_admin, "AdminClient", Hasty)
    partitions = [log.TopicPartition(s.target, number) for number in range(3)]
    with Admin(Connection(s.bootstrap, error=SinkError), timeout_s=3) as admin:
        assert admin.end_offsets(partitions) == dict.fromkeys(partitions, 0)
        for broker in healthy.brokers():
            broker.pause()
        with pytest.raises(SinkError, match="no answer within 3 s"):
            admin.end_offsets(partitions)


def test_a_record_of_twenty_megabytes(stage: Make, cluster: Cluster) -> None:
    s = stage(max_message_bytes="30000000")
    admin = metadata.admin(cluster.bootstrap)
    name = f"t-{uuid4().hex[:12]}"
    admin.create_topics([NewTopic(name, 1, 1, config=KEPT | {"max.message.bytes": "30000000"})])[name].result()
    s.source = name
    given = [b"small", os.urandom(20_000_000), b"small too"]
    s.produce(given)
    pipeline = s.pipeline()
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 3)
    assert [one.value for one in s.out()] == given


@pytest.mark.parametrize("audit", [False, True], ids=["dead letters", "audit"])
def test_the_end_of_a_partition_below_the_wanted_end_is_not_the_end(stage: Make, audit: bool) -> None:
    """As a leader says it that has not heard of all records yet: they come a moment later."""
    s = stage(out_partitions=1)
    producer = Producer({"bootstrap.servers": s.bootstrap}, logger=metadata.QUIET)

    def produce(numbers: range) -> None:
        for number in numbers:
            producer.produce(s.target, b"%d" % number, partition=0)
        assert producer.flush(30) == 0

    class Ahead(kafka_clients.KafkaClients):
        def settled_ends(self, topic: str) -> dict[int, int]:  # noqa: ARG002
            return {0: 8}

    produce(range(5))
    clients = Ahead(s.pipeline())
    later = threading.Timer(3, produce, [range(5, 10)])
    later.start()
    ends = {log.TopicPartition(s.target, 0): 8}
    records = clients.records_between({}, ends) if audit else clients.committed_records(s.target)
    assert [one.value() for one in records] == [b"%d" % number for number in range(8)]
    later.join()
    clients.close()


def test_routes_are_declared(stage: Make, cluster: Cluster) -> None:
    s = stage()
    a, b = f"{s.target}-a", f"{s.target}-b"
    rows = [{"id": n, "to": to} for n, to in enumerate(["a", "b", "a", "c", None, "../x"])]
    s.produce([json.dumps(row).encode() for row in rows])
    pipeline = s.pipeline(
        sink=f'topic = "{s.target}-{{to}}"\nroutes = ["{a}", "{b}"]',
        decode='format = "json"\nschema = "id long not null, to string"',
    )
    run = s.started(pipeline)
    assert s.deliver(pipeline, run, 0, 6).counts == Counts(6, 3, 3, 0)
    assert origins(read(s.bootstrap, a)) == [0, 2]
    assert origins(read(s.bootstrap, b)) == [1]
    there = metadata.admin(cluster.bootstrap).list_topics(timeout=10).topics
    assert f"{s.target}-c" not in there
    with KafkaDeadLetters(pipeline) as letters:
        assert all("sink.routes" in one.detail for one in letters.select(Selection(), 10))


def test_a_mirror_over_a_pattern_does_not_read_its_own_output(stage: Make, cluster: Cluster) -> None:
    s = stage()
    admin = metadata.admin(cluster.bootstrap)
    first, second = f"{s.name}-in-1", f"{s.name}-in-2"
    mirror = 'topic = "copy.{_kafka_topic}"'

    def declared(pattern: str, sink: str) -> PipelineConfig:
        path = s.file(sink=sink)
        path.write_text(path.read_text().replace(f'topics = ["{s.source}"]', f"topics_pattern = '{pattern}'"))
        return load_checked(path)

    admin.create_topics([NewTopic(first, 2, 2, config=KEPT)], operation_timeout=30)[first].result()
    reads_itself = declared(f".*{s.name}-in-.*", mirror)
    with (
        KafkaDriver(reads_itself) as store,
        pytest.raises(ConfigError, match=f"copy.{first} matches source.topics_pattern"),
    ):
        store.prepare()
    with pytest.raises(ConfigError, match=r"'.*-in-copy' is also read by this pipeline"):
        declared(f"{s.name}.*", f'topic = "{s.name}-in-copy"')
    # A topic that comes later gets its output when its first position is written, as the others have theirs.
    pipeline = declared(f"{s.name}-in-.*", mirror)
    with KafkaDriver(pipeline) as store:
        store.prepare()
        store.prepare_table(pipeline.decode.columns.fields, rest=False)
        run = store.open_run()
        admin.create_topics([NewTopic(second, 3, 1, config=KEPT)], operation_timeout=30)[second].result()
        store.adopt({log.TopicPartition(second, 0): Entry(0, "id", run)})
    made: defaultdict[str, list[int]] = defaultdict(list)
    for one in metadata.view(admin).partitions:
        made[one.topic].append(len(one.replicas))
    assert (made[f"copy.{first}"], made[f"copy.{second}"]) == ([2, 2], [2, 2, 2])
    assert made[dead_letter_topic(pipeline)] == [2], "replicated as the source's topic with the most replicas is"


def test_switches(stage: Make) -> None:
    s = stage()
    s.produce([b"v"], keys=[b"k"], headers=[("h", b"1")])
    pipeline = s.pipeline(sink='origin = false\nheaders = "drop"\ntimestamps = "now"')
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 1)
    (one,) = s.out()
    assert (one.headers, one.value, one.key) == ([], b"v", b"k")
    assert abs(one.timestamp_ms / 1000 - time.time()) < 60


def test_a_foreign_member_is_named(stage: Make) -> None:
    s = stage()
    s.produce(values(1))
    pipeline = s.pipeline()
    s.started(pipeline)
    consumer = Consumer(
        {"bootstrap.servers": s.bootstrap, "group.id": s.name, "client.id": "somebody", "session.timeout.ms": 6000},
        logger=metadata.QUIET,
    )
    consumer.subscribe([s.source])
    deadline = time.monotonic() + 30
    while not consumer.assignment() and time.monotonic() < deadline:
        consumer.poll(0.2)
    try:
        with KafkaDriver(pipeline) as store, pytest.raises(ConfigError, match=r"somebody at 127\.0\.0\.1"):
            store.prepare()
        # One that came after the run began, and commits.
        consumer.commit(offsets=[TopicPartition(s.source, 0, 1)], asynchronous=False)
        named = r"another client committed offset .* to it; its members now: somebody at 127\.0\.0\.1"
        with KafkaDriver(pipeline) as store, pytest.raises(ConfigError, match=named):
            store.stored_entries()
    finally:
        consumer.close()
    with KafkaDriver(pipeline) as store:
        store.prepare()


def test_an_offset_that_somebody_else_committed_is_no_position(stage: Make) -> None:
    s = stage()
    s.produce(values(10))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    admin = metadata.admin(s.bootstrap)
    wrong = ConsumerGroupTopicPartitions(s.name, [TopicPartition(s.source, 0, 7)])
    admin.alter_consumer_group_offsets([wrong])[s.name].result()
    with pytest.raises(ConfigError, match=r"but another client committed offset .* to it; it has no members now"):
        s.deliver(pipeline, run, 0, 10)
    with KafkaDriver(pipeline) as store, pytest.raises(ConfigError, match="but another client committed offset"):
        store.open_run()
    assert s.out() == []


def test_two_runs_that_start_at_once(stage: Make) -> None:
    s = stage(partitions=2)
    s.produce(values(10))
    pipeline = s.pipeline()
    first = s.started(pipeline)
    second = s.started(pipeline)
    assert (first, second) == (1, 2)
    with pytest.raises(Superseded):
        s.deliver(pipeline, first, 0, 10)
    s.deliver(pipeline, second, 0, 10)
    assert origins(s.out()) == list(range(10))


def test_aborted_input_is_not_passed_on(stage: Make) -> None:
    s = stage()
    producer = Producer({"bootstrap.servers": s.bootstrap, "transactional.id": f"up-{s.name}"}, logger=metadata.QUIET)
    producer.init_transactions(30)
    for turn in range(9):
        producer.begin_transaction()
        for number in range(10):
            producer.produce(s.source, b"%s %d" % (b"bad" if turn % 3 == 2 else b"good", number), partition=0)
        if turn % 3 == 2:
            producer.flush(30)
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    pipeline = s.pipeline()
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 99)  # 90 records and 9 markers
    found = s.out()
    assert len(found) == 60
    assert all(one.value is not None and one.value.startswith(b"good") for one in found)
    assert s.entries(pipeline)[0].position == 99


def audited_offsets(reading: KafkaAuditReader, where: log.TopicPartition) -> list[int]:
    batches = reading.rows(where, ["_kafka_offset"], 0)
    return [offset for found in batches for offset in found.column("_kafka_offset").to_pylist()]


def test_an_audit_leaves_aside_what_is_claimed_while_it_looks(stage: Make) -> None:
    s = stage()
    given = [json.dumps({"id": n}).encode() for n in range(30)]
    given[25] = b"{"
    s.produce(given)
    pipeline = s.pipeline(decode='format = "json"\nschema = "id long not null"')
    where, run = log.TopicPartition(s.source, 0), s.started(pipeline)
    s.deliver(pipeline, run, 0, 10)

    class Meanwhile(KafkaAuditReader):
        """The pipeline claims more after the ledger was read, and before the output is."""

        def _output_ends(self) -> dict[str, dict[int, int]]:
            s.deliver(pipeline, run, 10, 30)
            return super()._output_ends()

    with Meanwhile(pipeline) as reading:
        assert reading.known()[where].entry.position == 10
        assert audited_offsets(reading, where) == list(range(10))
        assert reading.dead_letters(where).tolist() == []
    with KafkaAuditReader(pipeline) as after:
        assert after.known()[where].entry.position == 30
        assert audited_offsets(after, where) == [n for n in range(30) if n != 25]
        assert after.dead_letters(where).tolist() == [25]


def test_an_audit_sees_what_no_claim_covers(stage: Make) -> None:
    s = stage()
    s.produce(values(500))
    # What the child leaves open is waited for.
    file = ("at-least-once", '[sink.kafka]\n"transaction.timeout.ms" = 2000')
    path, pipeline = s.file(*file), s.pipeline(*file)
    child = s.child(path, s.started(pipeline), 0, 500, "between")
    child.communicate(timeout=60)
    where = log.TopicPartition(s.source, 0)
    with KafkaAuditReader(pipeline) as reading:
        assert reading.known()[where].entry.position == 0
        assert audited_offsets(reading, where) == list(range(500))


def test_an_audit_names_who_holds_a_transaction_open(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage()
    s.produce(values(5))
    pipeline = s.pipeline("exactly-once", '[sink.kafka]\n"transaction.timeout.ms" = 1000')
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 5)

    def opened(topic: str) -> Producer:
        producer = Producer(
            {"bootstrap.servers": s.bootstrap, "transactional.id": f"other-{topic}"}, logger=metadata.QUIET
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.flush(30)
        return producer

    upstream = opened(s.source)
    with KafkaAuditReader(pipeline) as reading, log.Log(pipeline.source, s.name) as there:
        auditing = _Audit(pipeline, lambda: pytest.fail("no Spark is needed"), lambda _: None, reading, there)
        auditing.known = reading.known()
        auditing.examine_partitions()
        (examined,) = auditing.examined.values()
    assert "a transaction is open at offset 5, and 1 offsets from there on wait" in examined.notes[0]
    assert f"It was opened by transactional.id other-{s.source} (producer " in examined.notes[0]
    upstream.abort_transaction(30)
    monkeypatch.setattr(kafka_clients, "ENDS_S", 1)
    aside = opened(s.target)
    hanging = (
        f"hanging-transaction: .* {s.target}/0 and does not end: from offset .*, by transactional.id other-{s.target}"
    )
    with pytest.raises(SinkError, match=hanging):
        KafkaAuditReader(pipeline)
    aside.abort_transaction(30)
    # And in the ledger, where the id is the pipeline's own.
    worker = kafka_clients.KafkaClients(pipeline)
    worker.timeout_ms = 60_000  # else Kafka might end it meanwhile
    where = log.TopicPartition(s.source, 0)
    producing = worker.begin_transaction(where)
    assert producing.last is not None
    worker.send(producing, where, producing.last)
    with (
        KafkaDriver(pipeline) as store,
        pytest.raises(SinkError, match=f"hanging-transaction: .* transactional.id there is {s.name}/{s.source}/0"),
    ):
        store.stored_entries(stable=True)
    producing.client.abort_transaction(30)
    worker.close()


# Java's own partitioner, by its published vectors (org.apache.kafka.common.utils.UtilsTest).
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def test_keys_land_where_java_puts_them(stage: Make) -> None:
    s = stage(out_partitions=7)
    s.produce(values(len(MURMUR2)), keys=[*MURMUR2])
    pipeline = s.pipeline()
    s.deliver(pipeline, s.started(pipeline), 0, len(MURMUR2))
    assert {one.key: one.partition for one in s.out()} == {k: (h & 0x7FFFFFFF) % 7 for k, h in MURMUR2.items()}


def test_a_python_transform_gives_json_with_the_records_own_key_and_headers(stage: Make) -> None:
    s = stage()
    given: list[bytes | None] = [json.dumps({"id": n, "amount": n / 4}).encode() for n in range(10)]
    s.produce(given, keys=[b"\xff%d" % n for n in range(10)], headers=[("h", b"\x00")])
    pipeline = s.pipeline(
        decode='format = "json"\nschema = "id long not null, amount double"',
        more='[transform]\npython = "tests.transforms:with_a_header"',
    )
    run = s.started(pipeline)
    assert s.deliver(pipeline, run, 0, 10).counts == Counts(10, 5, 0, 5)
    found = {one.key: one for one in s.out()}
    assert found.keys() == {b"\xff%d" % n for n in range(0, 10, 2)}
    assert json.loads(found[b"\xff4"].value or b"") == {"id": 4, "amount": 1.0, "cents": 100}
    assert found[b"\xff4"].headers[:2] == [("h", b"\x00"), ("cents", b"100")]


def test_an_output_on_another_cluster(stage: Make) -> None:
    """The same brokers under another address stand for another cluster: positions and records are two acts."""
    s = stage()
    s.produce(values(50))
    elsewhere = ",".join(reversed(s.bootstrap.split(",")))
    assert elsewhere != s.bootstrap
    with pytest.raises(ConfigError, match="a Kafka transaction cannot span clusters"):
        s.pipeline("exactly-once", f'brokers = "{elsewhere}"')
    pipeline = s.pipeline("at-least-once", f'brokers = "{elsewhere}"')
    run = s.started(pipeline)
    assert s.deliver(pipeline, run, 0, 30).counts == Counts(30, 30, 0, 0)
    assert s.deliver(pipeline, run, 0, 50).done == OffsetRange(s.source, 0, 30, 50)
    assert origins(s.out()) == list(range(50))


def test_a_position_that_kafka_forgot_is_not_begun_anew(stage: Make, cluster: Cluster) -> None:
    s = stage()
    s.produce(values(10))
    pipeline = s.pipeline()
    s.deliver(pipeline, s.started(pipeline), 0, 10)
    admin = metadata.admin(cluster.bootstrap)
    admin.delete_consumer_groups([s.name])[s.name].result()  # as after offsets.retention.minutes
    with pytest.raises(ConfigError, match="is gone from the consumer group"):
        s.started(pipeline)
    # With the topic its positions go too, at once.
    admin.delete_topics([s.source], operation_timeout=30)[s.source].result()
    time.sleep(1)
    admin.create_topics([NewTopic(s.source, 1, 1, config=KEPT)], operation_timeout=30)[s.source].result()
    with pytest.raises(TopicRecreated):
        s.started(pipeline)
    assert origins(s.out()) == list(range(10))


@pytest.fixture
def make_again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Deletes a topic, and makes another one of its name."""

    def make(s: Stage, name: str, *, create: bool = True, **config: str) -> None:
        admin = metadata.admin(s.bootstrap)
        admin.delete_topics([name], operation_timeout=30)[name].result()
        time.sleep(1)  # else a broker may still know the one before
        monkeypatch.setattr(kafka_clients, "NEWS_S", 0.2)  # so that nobody waits for one of the old id
        if create:
            config = KEPT | {key.replace("_", "."): value for key, value in config.items()}
            admin.create_topics([NewTopic(name, 3, 1, config=config)], operation_timeout=30)[name].result()
            time.sleep(0.5)

    return make


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_an_output_topic_that_is_made_again_in_mid_run_stops_it(
    stage: Make, make_again: Callable[..., None], guarantee: str
) -> None:
    s = stage()
    s.produce(values(30))
    pipeline = s.pipeline(guarantee)
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 10)
    s.deliver(pipeline, run, 10, 20)
    make_again(s, s.target)
    with pytest.raises(TopicRecreated, match=f"topic-recreated: output topic {s.target} had id .{{8}}"):
        s.deliver(pipeline, run, 20, 30)
    assert s.entries(pipeline)[0].position == 20, "not even at-most-once claims what has nowhere to go"
    # Nor does the next run begin.
    with pytest.raises(TopicRecreated, match=s.target):
        s.started(pipeline)


def test_an_output_topic_that_is_gone_is_not_made_anew(stage: Make, make_again: Callable[..., None]) -> None:
    s = stage()
    s.produce(values(10))
    pipeline = s.pipeline()
    s.deliver(pipeline, s.started(pipeline), 0, 10)
    make_again(s, s.target, create=False)
    with pytest.raises(TopicRecreated, match=f"output topic {s.target} had id .* but no longer exists"):
        s.started(pipeline)
    assert s.target not in metadata.admin(s.bootstrap).list_topics(timeout=10).topics
    assert s.entries(pipeline)[0].run == 1, "and nobody is fenced"


@pytest.mark.parametrize("create", [True, False])
def test_a_dead_letter_topic_that_is_made_again_stops_a_run(
    stage: Make, make_again: Callable[..., None], create: bool
) -> None:
    s = stage()
    s.produce(values(20))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    s.deliver(pipeline, run, 0, 10)
    make_again(s, dead_letter_topic(pipeline), create=create, cleanup_policy="compact")
    named = f"dead-letter topic {dead_letter_topic(pipeline)} had id"
    with pytest.raises(TopicRecreated, match=named):
        s.deliver(pipeline, run, 10, 20)
    with pytest.raises(TopicRecreated, match=named):
        s.started(pipeline)
    assert s.entries(pipeline)[0].position == 10


def test_a_ledger_of_an_earlier_version_learns_its_topics_at_the_next_start(
    stage: Make, make_again: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage()
    s.produce(values(20))
    pipeline = s.pipeline()
    with monkeypatch.context() as earlier:
        written = kafka_entries.serialize

        def without_topics(kept: kafka_entries.StoredEntry) -> str:
            return json.dumps({key: value for key, value in json.loads(written(kept)).items() if key != "topics"})

        earlier.setattr(kafka_entries, "serialize", without_topics)
        s.deliver(pipeline, s.started(pipeline), 0, 10)
    run = s.started(pipeline)
    s.deliver(pipeline, run, 10, 20)
    assert origins(s.out()) == list(range(20))
    make_again(s, s.target)
    with pytest.raises(TopicRecreated):
        s.started(pipeline)


def test_another_output_topic_is_refused(stage: Make) -> None:
    """The positions say what is in the topic that was written to: in another one, all before them would be missing."""
    s = stage(max_message_bytes="20000")
    s.produce([*values(9), os.urandom(30_000)])  # the last is a dead letter: too large for the output topic
    before = s.pipeline()
    run = s.started(before)
    s.deliver(before, run, 0, 10)
    other = f"{s.target}-renamed"
    renamed = s.pipeline(sink=f'topic = "{other}"')
    said = f"pipeline {s.name} has delivered into topic {s.target}, but sink.topic is now {other}"
    with pytest.raises(ConfigError, match=said) as refused:
        s.started(renamed)
    assert f"Set sink.topic to {s.target}" in refused.value.advice
    assert f'start = {{ "{s.source}" = {{ "0" = 10 }} }}' in refused.value.advice
    admin = metadata.admin(s.bootstrap)
    assert other not in admin.list_topics(timeout=10).topics, "it is not made"
    assert s.entries(before)[0].run == run, "and nobody is fenced"
    admin.create_topics([NewTopic(other, 1, 1)], operation_timeout=30)[other].result()
    with pytest.raises(ConfigError, match=said):
        redrive(renamed, Selection(), lambda: pytest.fail("no Spark"))
    # A route that is added goes on.
    decode = 'format = "json"\nschema = "to string"'
    s.started(s.pipeline(sink=f'topic = "{s.target}{{to}}"\nroutes = ["{s.target}", "{other}"]', decode=decode))
    both = f"has delivered into topics {s.target}, {other}, but sink.topic is now {other}-2"
    with pytest.raises(ConfigError, match=both):
        s.started(s.pipeline(sink=f'topic = "{s.target}{{to}}"\nroutes = ["{other}-2"]', decode=decode))
    admin.delete_topics([other], operation_timeout=30)[other].result()


def test_a_group_that_is_deleted_before_the_first_claim(stage: Make, cluster: Cluster) -> None:
    """It is nobody's bug: the run says what was done to it, and the next start where to begin."""
    s = stage()
    s.produce(values(10))
    pipeline = s.pipeline()
    run = s.started(pipeline)
    admin = metadata.admin(cluster.bootstrap)
    admin.delete_consumer_groups([s.name])[s.name].result()
    with pytest.raises(ConfigError, match="the group or its offsets were deleted") as stopped:
        s.deliver(pipeline, run, 0, 10)
    assert "Start the pipeline again" in stopped.value.advice
    with pytest.raises(ConfigError, match="is gone from the consumer group") as refused:
        s.started(pipeline)
    assert f"If the output has no record of {s.source}/0, its start is 0" in refused.value.advice
    assert s.out() == []
