"""The producer against real brokers: killed leaders, lost acknowledgements, kill -9 in the middle of a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import Producer as PlainProducer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.fix_pipeline import Scenario, payment

from avow import Producer
from avow.cli import main
from avow.clients.delivery import Delivery, LogPosition, Outcome
from avow.clients.imports import Import
from avow.clients.jsonl import MessageFormat
from avow.errors import SourceError, Superseded
from avow.kafka import metadata
from avow.kafka.connect import Connection
from avow.kafka.headers import CHECKSUM, KEY, SEQUENCE, checksum
from avow.local.broker import Doors
from avow.local.cluster import Cluster, PortPicker
from avow.prove.proxy import LostReply, Proxy

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def eventually(check: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.1)


def read_all(bootstrap: str, topic: str, partitions: int = 1) -> list[Any]:
    """Every committed record of a topic, partition by partition."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": uuid4().hex,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings, logger=metadata.QUIET)
    found: list[Any] = []
    try:
        for number in range(partitions):
            consumer.assign([TopicPartition(topic, number, 0)])
            while True:
                message = consumer.poll(60)
                assert message is not None, "no answer"
                if message.error():
                    break
                found.append(message)
    finally:
        consumer.close()
    return found


def values(bootstrap: str, topic: str, partitions: int = 1) -> Counter[bytes]:
    return Counter(message.value() for message in read_all(bootstrap, topic, partitions))


def avow(*arguments: str | Path, text: str = "") -> Result:
    """The command in this process, which is quicker."""
    return CliRunner().invoke(main, [*map(str, arguments)], input=text)


# What a leader's death does, under each durability.


def test_a_leader_that_dies_before_replication_takes_acknowledged_records_along_unless_all_had_to_have_them(
    healthy: Cluster, tmp_path: Path
) -> None:
    leader, *followers = 1, 2, 3
    topics = {name: f"{name}-{uuid4().hex[:8]}" for name in ("fire", "leader", "all", "idempotent", "transactional")}
    client = metadata.admin(healthy.bootstrap)
    eventually(lambda: not any(p.under_replicated for p in metadata.view(client).partitions))
    made = [NewTopic(topic, 1, replica_assignment=[[leader, *followers]]) for topic in topics.values()]
    short = f"short-{uuid4().hex[:8]}"
    made.append(NewTopic(short, 1, replica_assignment=[[followers[0], leader]], config={"min.insync.replicas": "2"}))
    for future in client.create_topics(made, operation_timeout=30).values():
        future.result()

    def producer(name: str, guarantee: str, durability: str) -> Producer:
        client_id = topics[name]
        return Producer(
            healthy.bootstrap, guarantee=guarantee, durability=durability, client_id=client_id, on_failure=id
        )

    def led_by() -> set[int]:
        with suppress(SourceError):
            return {p.leader for p in metadata.view(client).partitions if p.topic in topics.values()}
        return set()

    eventually(lambda: led_by() == {leader})
    with ExitStack() as open_ones:
        fire = open_ones.enter_context(producer("fire", "at-most-once", "fire-and-forget"))
        one = open_ones.enter_context(producer("leader", "at-most-once", "leader"))
        everyone = open_ones.enter_context(producer("all", "at-least-once", "all"))
        numbered = open_ones.enter_context(producer("idempotent", "exactly-once", "idempotent"))
        atomic = open_ones.enter_context(producer("transactional", "exactly-once", "transactional"))
        for each, name in ((fire, "fire"), (one, "leader"), (everyone, "all"), (numbered, "idempotent")):
            each.send(topics[name], b"before").wait()
        sent: dict[str, list[Delivery]] = {name: [] for name in topics}
        with suppress(SourceError), atomic.transaction():
            sent["transactional"] += [atomic.send(topics["transactional"], b"%d" % n) for n in range(20)]
            for number in followers:
                healthy.part(f"broker-{number}").pause()
            for n in range(20):  # one by one: the first may still go out with a fetch that was waiting
                sent["leader"].append(one.send(topics["leader"], b"%d" % n))
                sent["leader"][-1].wait()
                sent["fire"].append(fire.send(topics["fire"], b"%d" % n))
                sent["fire"][-1].wait()
                sent["all"].append(everyone.send(topics["all"], b"%d" % n))
                sent["idempotent"].append(numbered.send(topics["idempotent"], b"%d" % n))
            healthy.part(f"broker-{leader}").kill()
            for number in followers:
                healthy.part(f"broker-{number}").resume()
            eventually(lambda: led_by() != set() and not led_by() & {leader, -1})
        everyone.flush()
        numbered.flush()
    there = {name: values(healthy.bootstrap, topic) for name, topic in topics.items()}

    assert [each.outcome for each in sent["leader"]] == [Outcome.ACKNOWLEDGED] * 20
    lost = [n for n in range(20) if not there["leader"][b"%d" % n]]
    assert lost, "acknowledged by the leader alone, and gone with it"
    assert [each.outcome for each in sent["fire"]] == [Outcome.UNKNOWN] * 20, "nobody ever answered"
    assert any(not there["fire"][b"%d" % n] for n in range(20))
    for name in ("all", "idempotent"):
        assert [each.outcome for each in sent[name]] == [Outcome.ACKNOWLEDGED] * 20, sent[name][0].error
        assert all(there[name][b"%d" % n] >= 1 for n in range(20)), "what all had to have is there"
    assert set(there["idempotent"].values()) == {1}
    (outcome,) = {each.outcome for each in sent["transactional"]}
    seen = {there["transactional"][b"%d" % n] for n in range(20)}
    due = {Outcome.ACKNOWLEDGED: [{1}], Outcome.FAILED: [{0}], Outcome.UNKNOWN: [{0}, {1}]}
    assert seen in due[outcome]
    for each in (fire, one, everyone, numbered, atomic):
        assert each.totals.adds_up
        assert each.totals.pending == 0
    eventually(lambda: in_sync(client, short) == {followers[0]})
    check_too_few_in_sync(healthy, short, tmp_path)


def in_sync(client: AdminClient, topic: str) -> set[int]:
    with suppress(SourceError):
        return {number for p in metadata.view(client).partitions if p.topic == topic for number in p.in_sync}
    return set()


def check_too_few_in_sync(cluster: Cluster, topic: str, folder: Path) -> None:
    """A topic that needs two replicas, of which one is away."""
    with pytest.raises(SourceError, match=r"1 sent: 0 acknowledged, 1 failed") as error:
        send_without_retries(cluster.bootstrap, topic)
    assert "fewer replicas are in sync than min.insync.replicas; it was not written" in str(error.value)
    assert f"Topic {topic} has 1 of 2 replicas in sync, and min.insync.replicas is 2" in error.value.advice

    lines = folder / "lines.jsonl"
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    explained = avow("produce", topic, "--explain", "--brokers", cluster.bootstrap)
    assert explained.exit_code == 0, explained.stderr
    assert "NOT MET" in explained.stdout
    tried = avow("produce", topic, lines, "--brokers", cluster.bootstrap, "--delivery-timeout", "2")
    assert tried.exit_code == 4, tried.stderr
    assert tried.stdout == "2 sent: 0 acknowledged, 0 failed, 2 unknown\n"
    assert f"{lines}:1: unknown: no acknowledgement came in time" in tried.stderr
    assert "min.insync.replicas is 2" in tried.stderr
    assert values(cluster.bootstrap, topic) == Counter()


def send_without_retries(bootstrap: str, topic: str) -> None:
    with Producer(bootstrap, guarantee="at-most-once", durability="all") as producer:
        producer.send(topic, b"1")


@pytest.fixture
def behind_proxy(tmp_path: Path) -> Iterator[tuple[Cluster, Proxy, str]]:
    """A cluster of one broker, a proxy in front of it, and the address there."""
    pick = PortPicker()
    doors = Doors(*(pick.free() for _ in range(4)))
    proxies = [Proxy(doors.client_at, doors.client).start(), Proxy(doors.peer_at, doors.peer).start()]
    small = Cluster(tmp_path / "cluster")
    try:
        small.up(brokers=1, postgres=False, doors=(doors,))
        yield small, proxies[0], f"127.0.0.1:{doors.client_at}"
    finally:
        if small.exists:
            small.down()
        for proxy in proxies:
            proxy.stop()


def test_a_lost_acknowledgement_doubles_without_idempotence_and_not_with_it(
    behind_proxy: tuple[Cluster, Proxy, str],
) -> None:
    small, proxy, address = behind_proxy
    client = metadata.admin(small.bootstrap)
    found: dict[str, Counter[bytes]] = {}
    ends: dict[str, Outcome] = {}
    pairs = (
        ("at-most-once", "leader"),
        ("at-least-once", "all"),
        ("exactly-once", "idempotent"),
        ("exactly-once", "transactional"),
    )
    for guarantee, durability in pairs:
        topic = f"t-{uuid4().hex[:8]}"
        client.create_topics([NewTopic(topic, 1, 1)], operation_timeout=30)[topic].result()
        producer = Producer(address, guarantee=guarantee, durability=durability, client_id=topic, on_failure=id)

        def send(producer: Producer, topic: str, value: bytes) -> Delivery:
            with producer.transaction() if producer.choice.transactional else nullcontext():
                sending = producer.send(topic, value)
                producer.flush()
            return sending

        with producer:
            send(producer, topic, b"before")
            lost = proxy.counts.lost_replies
            proxy.lose_replies(LostReply(SEQUENCE.encode(), SEQUENCE.encode(), topic.encode(), times=1))
            sending = send(producer, topic, b"payment")
            assert proxy.counts.lost_replies == lost + 1, "the broker answered, and the producer did not hear it"
            proxy.heal()
        found[durability], ends[durability] = values(small.bootstrap, topic), sending.outcome
        assert producer.totals.adds_up
    assert found["leader"] == {b"before": 1, b"payment": 1}, "at-most-once does not send again"
    assert ends["leader"] is Outcome.UNKNOWN
    assert found["all"] == {b"before": 1, b"payment": 2}
    assert found["idempotent"] == found["transactional"] == {b"before": 1, b"payment": 1}
    assert ends["all"] is ends["idempotent"] is ends["transactional"] is Outcome.ACKNOWLEDGED


# Transactions and headers.


def test_a_transaction_is_seen_whole_or_not_at_all_and_the_younger_of_two_namesakes_wins(
    cluster: Cluster, make_topic: Callable[..., str]
) -> None:
    here, there, name = make_topic(), make_topic(), uuid4().hex

    def make() -> Producer:
        return Producer(cluster.bootstrap, guarantee="exactly-once", transactional_id=name)

    def send(producer: Producer, *records: tuple[str, bytes], fail: bool = False) -> list[Delivery]:
        sent: list[Delivery] = []
        with suppress(ZeroDivisionError), producer.transaction():
            sent += [producer.send(topic, value) for topic, value in records]
            _ = 1 // (not fail)
        return sent

    with make() as older:
        kept = send(older, (here, b"kept"), (there, b"kept"))
        assert [each.wait() for each in kept] == [LogPosition(here, 0, 0), LogPosition(there, 0, 0)]
        (gone,) = send(older, (here, b"gone"), fail=True)
        assert (gone.outcome, gone.place) == (Outcome.FAILED, None)
        with pytest.raises(
            SourceError, match=rf"aborted: send 4 to {there}: it is larger than the topic's max.message.bytes"
        ):
            send(older, (here, b"gone too"), (there, b"x" * 2_000_000))
        with make() as younger:
            send(younger, (here, b"younger's"))
        with pytest.raises(Superseded, match="has taken over"):
            send(older, (here, b"late"))
        totals = older.totals
        assert (totals.acknowledged, totals.failed + totals.unknown, totals.pending) == (2, 4, 0)
        assert totals.adds_up
    assert values(cluster.bootstrap, here) == {b"kept": 1, b"younger's": 1}
    assert values(cluster.bootstrap, there) == {b"kept": 1}


def test_a_corrupted_value_is_found_by_its_checksum_through_a_pipeline(scenario: Callable[..., Scenario]) -> None:
    it = scenario(partitions=1)
    with Producer(it.cluster.bootstrap, guarantee="exactly-once", idempotency_key=lambda v: f"k{len(v)}") as producer:
        first = producer.send(it.topic, payment(0), key="acc-0", headers=[("mine", b"1")])
        producer.send(it.topic, payment(1), idempotency_key="given")
    assert first.wait() == LogPosition(it.topic, 0, 0)
    plain = PlainProducer({"bootstrap.servers": it.cluster.bootstrap}, logger=metadata.QUIET)
    plain.produce(it.topic, payment(2).replace(b"acc", b"ACC"), headers=[(CHECKSUM, checksum(payment(2)))])
    plain.produce(it.topic, payment(3))
    assert plain.flush(60) == 0

    it.drain(it.file(), "consumer")

    assert it.ids() == {0: 1, 1: 1, 3: 1}
    letters = it.rows('SELECT "offset", reason, value FROM avow.dead_letters WHERE pipeline = %s', it.name)
    assert [(offset, reason) for offset, reason, _ in letters] == [(2, "corrupted")]
    assert bytes(letters[0][2]) == payment(2).replace(b"acc", b"ACC"), "kept as it came"
    stamped = [dict(message.headers()) for message in read_all(it.cluster.bootstrap, it.topic)[:2]]
    assert [each[KEY] for each in stamped] == [f"k{len(payment(0))}".encode(), b"given"]
    assert [each[SEQUENCE] for each in stamped] == [f"{producer.id}/{n}".encode() for n in range(2)]
    assert stamped[0][CHECKSUM] == checksum(payment(0))
    assert stamped[0]["mine"] == b"1"


# The command.


def test_a_stop_while_the_last_transaction_is_committed_stops_nothing(
    cluster: Cluster, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, lines = make_topic(), tmp_path / "lines.jsonl"
    lines.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    connection = Connection(cluster.bootstrap)
    sending = Import(connection, topic, lines, MessageFormat("lines"), uuid4().hex, lines_per_transaction=2)
    sending.progress = lambda done: sending.stop() if done.lines == 3 else None
    assert (sending.execute().lines, sending.done.stopped) == (3, False)
    again = Import(connection, topic, lines, MessageFormat("lines"), uuid4().hex, lines_per_transaction=2)
    again.progress = lambda done: again.stop() if done.lines == 2 else None
    assert (again.execute().lines, again.done.stopped) == (2, True)


def test_a_file_is_imported_once_over_kills_and_refused_when_it_has_changed(
    cluster: Cluster, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, lines = make_topic(2), tmp_path / "lines.jsonl"
    wanted = [json.dumps({"n": n, "pad": "x" * (n % 50)}) for n in range(2_000)]
    lines.write_text("\n".join(wanted) + "\n")
    command = ["produce", topic, str(lines), "--guarantee", "exactly-once", "--key", "n", "--json"]
    command += ["--brokers", cluster.bootstrap]
    slowly = [sys.executable, "-m", "avow", *command, "--transaction-lines", "1"]
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        child = subprocess.Popen(slowly, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            before = position(cluster, topic, lines)
            eventually(lambda: child.poll() is not None or position(cluster, topic, lines) > before + 20)  # noqa: B023
            assert child.poll() is None, "it was to be ended in the middle"
            child.send_signal(number)
            out, err = child.communicate(timeout=90)
        finally:
            child.kill()
            child.wait()
        if number == signal.SIGINT:
            assert (child.returncode, json.loads(out)["stopped"]) == (1, True), err
            assert json.loads(out)["lines"] == position(cluster, topic, lines), "all that was sent is committed"
    done = avow(*command)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["lines_before"] > 60
    assert told["lines"] == told["lines_before"] + told["acknowledged"] == 2_000
    assert values(cluster.bootstrap, topic, 2) == Counter(line.encode() for line in wanted), "each once"

    with lines.open("a") as file:
        file.write('{"n": "new"}\n\nnot json\n')
    grown = avow(*command)
    assert grown.exit_code == 2
    assert f"{lines}:2003: " in grown.stderr
    assert json.loads(grown.stdout)["acknowledged"] == 1, "what came before the bad line is sent"
    skipped = avow(*command, "--skip-bad")
    assert skipped.exit_code == 0, skipped.stderr
    assert (json.loads(skipped.stdout)["acknowledged"], json.loads(skipped.stdout)["bad"]) == (0, 1)

    lines.write_text(lines.read_text().replace('"n": 7,', '"n": 8,'))
    changed = avow(*command)
    assert changed.exit_code == 2
    assert "has changed: its first 2,003 lines are not those that were sent" in changed.stderr
    assert len(read_all(cluster.bootstrap, topic, 2)) == 2_001


def position(cluster: Cluster, topic: str, path: Path) -> int:
    """The lines that the import has committed."""
    group = {"bootstrap.servers": cluster.bootstrap, "group.id": f"avow-import/{topic}/{path}"}
    consumer = Consumer(group, logger=metadata.QUIET)
    try:
        return max(0, consumer.committed([TopicPartition(topic, 0)], timeout=60)[0].offset)
    except KafkaException:
        return 0
    finally:
        consumer.close()


def test_lines_of_a_stream_are_accounted_for(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    topic = make_topic()
    at = ("--brokers", cluster.bootstrap)
    text = '{"id": 1}\n\n{"id": 2\n{"id": 3}\n'
    stopped = avow("produce", topic, *at, text=text)
    assert stopped.exit_code == 2
    assert "stdin:3: " in stopped.stderr
    assert stopped.stdout == "1 sent: 1 acknowledged, 0 failed, 0 unknown\n"
    skipped = avow("produce", topic, "-", *at, "--skip-bad", "--json", "--idempotency-key", "make", text=text)
    told = json.loads(skipped.stdout)
    assert (told["sent"], told["acknowledged"], told["bad"], told["lines"]) == (2, 2, 1, 4)
    assert skipped.exit_code == 0
    forgotten = avow("produce", topic, *at, "--guarantee", "at-most-once", text='{"id": 4}\n')
    assert forgotten.stdout == "1 sent: 0 acknowledged, 0 failed, 1 unknown\n"
    assert forgotten.exit_code == 0, "nobody answers: that was declared"
    absent = avow("produce", f"{topic}-typo", *at, text=text)
    assert (absent.exit_code, absent.stdout) == (2, "")
    assert f"topic {topic}-typo does not exist" in absent.stderr
    found = read_all(cluster.bootstrap, topic)
    assert [message.value() for message in found] == [b'{"id": 1}', b'{"id": 1}', b'{"id": 3}', b'{"id": 4}']
    assert len({dict(message.headers())[KEY] for message in found[1:3]}) == 2


def test_ctrl_c_flushes_and_reports(healthy: Cluster, make_topic: Callable[..., str]) -> None:
    """Also what nobody acknowledges any more: the brokers stand still."""
    topic = make_topic()
    command = [
        sys.executable,
        "-m",
        "avow",
        "produce",
        topic,
        "--brokers",
        healthy.bootstrap,
        "--delivery-timeout",
        "5",
    ]

    def interrupted(more: str) -> tuple[int, str, str]:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        there = len(read_all(healthy.bootstrap, topic))
        try:
            assert child.stdin
            child.stdin.write('{"id": 1}\n{"id": 2}\n')
            child.stdin.flush()
            eventually(lambda: len(read_all(healthy.bootstrap, topic)) == there + 2)
            if more:
                for broker in healthy.brokers():
                    broker.pause()
                child.stdin.write(more)
                child.stdin.flush()
                time.sleep(1)
            os.kill(child.pid, signal.SIGINT)
            child.wait(timeout=90)  # its standard input is still open: it was waiting for a line
            return child.returncode, *child.communicate()
        finally:
            child.kill()
            child.communicate()

    code, out, err = interrupted("")
    assert (code, out) == (1, "2 sent: 2 acknowledged, 0 failed, 0 unknown\n"), err
    assert "stopped after line 2, before the end" in err
    code, out, err = interrupted('{"id": 3}\n{"id": 4}\n{"id": 5}\n')
    assert (code, out) == (4, "5 sent: 2 acknowledged, 0 failed, 3 unknown\n"), err
    assert "stdin:3: unknown: no acknowledgement came in time" in err


def test_measuring_leaves_nothing_behind_and_touches_nothing(
    cluster: Cluster, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    at = ("--brokers", cluster.bootstrap)
    taken = make_topic()
    refused = avow("produce", taken, "--measure", *at)
    assert refused.exit_code == 2
    assert f"topic {taken} already exists" in refused.stderr
    topic, picture = f"m-{uuid4().hex[:8]}", tmp_path / "trade.svg"
    done = avow("produce", topic, "--measure", "--records", "100", "--out", picture, "--json", *at)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["acks"] for one in told] == ["0", "1", "all", "all", "all"]
    assert all(one["p50_ms"] <= one["p99_ms"] and one["records_per_s"] > 0 for one in told)
    assert picture.read_text().startswith("<svg")
    shown = avow("produce", "--measure", "--records", "100", *at)
    assert [line.split()[0] for line in shown.stdout.splitlines() if "█" in line and " p50 " in line] == [
        one["durability"] for one in told
    ], shown.stdout
    client = metadata.admin(cluster.bootstrap)
    eventually(lambda: topic not in {p.topic for p in metadata.view(client).partitions})
    assert taken in {p.topic for p in metadata.view(client).partitions}


def test_the_example_takes_orders_whole(cluster: Cluster, make_topic: Callable[..., str]) -> None:
    orders, payments = make_topic(), make_topic()
    script = str(ROOT / "examples" / "transactional-producer" / "order.py")
    command = [sys.executable, script, "--brokers", cluster.bootstrap, "--orders", orders, "--payments", payments]
    done = subprocess.run([*command, "--count", "8"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 orders taken, 2 refused; 14 sent: 12 acknowledged, 2 failed, 0 unknown\n"
    taken = [sorted(json.loads(value)["order"] for value in values(cluster.bootstrap, t)) for t in (orders, payments)]
    assert taken == [[0, 1, 2, 4, 5, 6]] * 2
