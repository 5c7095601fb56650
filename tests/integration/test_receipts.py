"""Receipts on the real parts: what the ledger of each sink says of records while a pipeline delivers them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException, Message, Producer
from confluent_kafka.cimpl import NewTopic
from tests import into_kafka, into_lake, into_postgres
from tests.fix_pipeline import END_SESSIONS, Scenario, payment

from avow.cli import main
from avow.clients import receipts as receipts_module
from avow.clients.receipts import Answer, Receipt, Receipts, State
from avow.kafka import metadata
from avow.local.cluster import Cluster
from avow.prove.failpoints import VARIABLE

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]
LONG_S = 90.0
BAD = b'{"id": "ten", "account": "a"}'


def sink(s: Scenario, kind: str) -> str:
    made = {"postgres": into_postgres.sink(s), "kafka": into_kafka.sink(f"o-{uuid4().hex[:10]}")}
    return made.get(kind) or into_lake.sink(s, kind)


def states(answers: Collection[Answer]) -> list[State]:
    return [answer.state for answer in answers]


def while_waiting(s: Scenario, path: Path, wait: Callable[[Callable[[object], None]], list[Answer]]) -> list[Answer]:
    """The answers of somebody who began to wait before the pipeline was started."""
    looked, found = threading.Event(), list[list[Answer]]()
    waiter = threading.Thread(target=lambda: found.append(wait(lambda _: looked.set())))
    waiter.start()
    try:
        assert looked.wait(LONG_S), "the first look"
        s.drain(path, "consumer")
    finally:
        waiter.join(LONG_S)
    return found[0]


@pytest.mark.parametrize(
    ("kind", "guarantee"),
    [
        ("postgres", "exactly-once"),
        ("kafka", "at-most-once"),
        ("delta", "at-least-once"),
        ("iceberg", "exactly-once"),
    ],
)
def test_not_yet_then_written_or_dead_lettered(scenario: Make, kind: str, guarantee: str) -> None:
    s = scenario(partitions=2)
    start = f'start = {{ "{s.topic}" = {{ "1" = 3 }} }}'
    source = f'brokers = "{s.cluster.bootstrap}"\ntopics = ["{s.topic}"]\n{start}'
    path = s.file(guarantee, source=source, sink=sink(s, kind))
    values = [payment(n) for n in range(20)]
    values[8] = BAD  # partition 0, offset 4
    s.produce(values)
    good, bad, early = Receipt(s.topic, 0, 9), Receipt(s.topic, 0, 4), Receipt(s.topic, 1, 2)
    beyond, elsewhere, nowhere = Receipt(s.topic, 0, 10), Receipt("other", 0, 0), Receipt(s.topic, 7, 0)
    with Receipts(s.load(path)) as receipts:
        assert states(receipts.look_all([good, beyond, elsewhere])) == [State.NOT_YET, State.UNKNOWN, State.UNKNOWN]
        assert receipts.wait(good, 0.1).state is State.NOT_YET, "nobody runs the pipeline"
        assert receipts.newest() == [Receipt(s.topic, 0, 9), Receipt(s.topic, 1, 9)]

        sent = [good, bad, early, Receipt(s.topic, 1, 9)]
        answers = while_waiting(s, path, lambda watch: receipts.wait_all(sent, LONG_S, watch))
        assert states(answers) == [State.WRITTEN, State.DEAD_LETTERED, State.BEFORE_START, State.WRITTEN]
        assert (answers[1].reason, "id" in answers[1].error) == ("wrong-type", True), answers[1]
        found = receipts.look_all([beyond, nowhere])
        assert states(found) == [State.UNKNOWN, State.UNKNOWN]
        assert "ends at offset 10" in found[0].detail

        s.produce(payment(n) for n in range(20, 24))
        answers = while_waiting(s, path, lambda watch: receipts.wait_up_to(receipts.newest(), LONG_S, watch))
        assert [(one.receipt.offset, one.state, one.dead_letters) for one in answers] == [
            (11, State.DEAD_LETTERED, 1),
            (11, State.WRITTEN, 0),
        ]
        assert receipts.wait(beyond, 0).state is State.WRITTEN, "there is such a record now"


@pytest.mark.parametrize("kind", ["postgres", "delta"])
def test_markers_and_aborted_records_are_no_records(scenario: Make, kind: str) -> None:
    s = scenario(partitions=1)
    settings = {"bootstrap.servers": s.cluster.bootstrap, "transactional.id": uuid4().hex}
    producer = Producer(settings, logger=metadata.QUIET)
    producer.init_transactions(30)
    acknowledged: list[Message] = []
    for n in range(6):
        producer.begin_transaction()
        producer.produce(s.topic, payment(n), partition=0, on_delivery=lambda _, message: acknowledged.append(message))
        producer.flush(30)
        (producer.abort_transaction if n % 3 == 2 else producer.commit_transaction)(30)
    path = s.file(sink=sink(s, kind))
    with Receipts(s.load(path)) as receipts:
        sent = [receipts.receipt(message) for message in acknowledged]
        assert [one.offset for one in sent] == [0, 2, 4, 6, 8, 10]
        answers = while_waiting(s, path, lambda watch: receipts.wait_all(sent, LONG_S, watch))
        written, none = State.WRITTEN, State.NO_RECORD
        assert states(answers) == [written, written, none, written, written, none]
        assert receipts.look(Receipt(s.topic, 0, 1)).state is none, "a marker"
        assert states(receipts.wait_up_to(receipts.newest(), LONG_S)) == [written], "its last offset is a marker's"
        assert sent[0].wait(0).state is written
        assert receipts.receipt(Receipt(s.topic, 0, 2)).wait(0).state is written


def test_skipped_where_the_claims_tell_and_handled_where_they_do_not(scenario: Make) -> None:
    s = scenario(partitions=1)
    transform = 'python = "tests.transforms:even_with_cents"'
    for kind, expected in [
        ("postgres", [State.SKIPPED, State.WRITTEN]),
        ("delta", [State.HANDLED, State.HANDLED]),
    ]:
        path = s.file(sink=sink(s, kind), transform=transform)
        if kind == "postgres":
            s.produce([payment(1)])
            s.drain(path, "consumer")
            s.produce([payment(2)])
        s.drain(path, "consumer")
        with Receipts(s.load(path)) as receipts:
            assert states(receipts.look_all([Receipt(s.topic, 0, 0), Receipt(s.topic, 0, 1)])) == expected
            assert states(receipts.wait_up_to(receipts.newest(), 0)) == [State.HANDLED]


def test_what_at_most_once_has_lost_is_claimed_and_not_written(scenario: Make) -> None:
    s = scenario(partitions=1)
    path = s.file("at-most-once")
    s.produce(payment(n) for n in range(5_000))
    killed = s.run(path, "--engine", "consumer", **{VARIABLE: f"after-claim:1:run:{s.folder}"})
    assert killed.returncode == -9, killed.stderr
    claims = s.rows("SELECT from_offset, read FROM avow.claims WHERE pipeline = %s ORDER BY 1", s.name)
    (lost,) = (start for start, read in claims if not read)
    with Receipts(s.load(path)) as receipts:
        first, gone, last = Receipt(s.topic, 0, 0), Receipt(s.topic, 0, lost), Receipt(s.topic, 0, 4_999)
        assert states(receipts.wait_all([first, gone, last], 0.2)) == [State.WRITTEN, State.CLAIMED, State.NOT_YET]
        # Those who wait outlive their connections.
        ended = s.rows(END_SESSIONS)
        assert ended
        assert receipts.wait(first, LONG_S).state is State.WRITTEN


def test_a_topic_made_again_has_other_records(scenario: Make) -> None:
    """Also for who has asked a moment before."""
    s = scenario(partitions=1)
    path = s.file()
    s.produce([payment(0)])
    s.drain(path, "consumer")
    with Receipts(s.load(path)) as receipts:
        assert receipts.look(Receipt(s.topic, 0, 0)).state is State.WRITTEN
        admin = metadata.admin(s.cluster.bootstrap)
        admin.delete_topics([s.topic], operation_timeout=30)[s.topic].result()
        deadline = time.monotonic() + LONG_S
        while True:
            try:
                admin.create_topics([NewTopic(s.topic, 1, 1)], operation_timeout=30)[s.topic].result()
                break
            except KafkaException:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        s.produce([payment(1)])
        found = receipts.look(Receipt(s.topic, 0, 0))
        assert (found.state, "recreated" in found.detail) == (State.UNKNOWN, True)
        assert receipts.wait(Receipt(s.topic, 0, 0), 1).state is State.UNKNOWN
        assert states(receipts.wait_up_to(receipts.newest(), 0)) == [State.UNKNOWN]


def test_kafka_is_away_and_the_ledger_is_not(scenario: Make, healthy: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share it keep their time, and hear what the ledger knows; so does one who never heard of Kafka."""
    monkeypatch.setattr(receipts_module, "IDS_KEPT_S", 0.1)
    s = scenario(partitions=1)
    path = s.file()
    s.produce([payment(0)])
    s.drain(path, "consumer")
    written, beyond = Receipt(s.topic, 0, 0), Receipt(s.topic, 0, 1)
    with Receipts(s.load(path)) as known, Receipts(s.load(path)) as fresh, ThreadPoolExecutor() as pool:
        assert states(known.look_all([written, beyond])) == [State.WRITTEN, State.UNKNOWN]
        for part in healthy.brokers():
            part.pause()
        began = time.monotonic()
        asked = [pool.submit(by.wait, one, 1.0) for by in (known, fresh) for one in (written, beyond)]
        assert states([one.result() for one in asked]) == [State.WRITTEN, State.NOT_YET] * 2
        assert states(known.wait_up_to([written], 1.0)) == [State.WRITTEN]
        assert time.monotonic() - began < 30, "it took 90 s and more"


def test_the_command(scenario: Make) -> None:
    s = scenario(partitions=2)
    path = s.file()

    def wait(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["wait", str(path), *arguments], env={"DATABASE_URL": s.url, "COLUMNS": "200"})
        return done.exit_code, done.stdout

    def states_of(text: str) -> list[tuple[int, str]]:
        return [(one["offset"], one["state"]) for one in json.loads(text)["answers"]]

    s.produce(payment(n) for n in range(10))
    code, out = wait(f"{s.topic}/0/4", "--timeout", "300ms", "--json")
    assert (code, states_of(out)) == (16, [(4, "not-yet")])
    s.drain(path, "consumer")
    code, out = wait("--all", "--json")
    assert (code, states_of(out)) == (0, [(4, "written")] * 2)
    s.produce([BAD])
    with Receipts(s.load(path)) as receipts:
        since = receipts.positions()
        s.drain(path, "consumer")
        found = receipts.wait_up_to(receipts.newest(), 30, since=since)
        assert states(found) == [State.DEAD_LETTERED, State.WRITTEN], "among those that were waited for"
    code, out = wait(f"{s.topic}/0/5", f"{s.topic}/1/4", "other/0/0", "--json")
    assert (code, states_of(out)) == (15, [(5, "dead-lettered"), (4, "written"), (0, "unknown")])
    assert json.loads(out)["answers"][0]["reason"] == "wrong-type"
    code, out = wait("--all")
    assert (code, "dead letters below offset 6 were not counted" in out) == (0, True), out
    code, out = wait("other/0/0")
    assert (code, "not read by this pipeline" in out) == (17, True), out
    assert wait(f"{s.topic}/1/4")[0] == 0
