"""``avow run`` as a person uses it, killed with kill -9 at named points and at random times.

Each guarantee both ways: the forbidden anomaly never appears, the permitted one is made to happen. Read back with
psycopg and a plain consumer, not with our own audit.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence

import psutil
import pytest
from _pytest.mark import ParameterSet
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]
from tests.fix_pipeline import Scenario, payment

from avow.kafka import metadata

pytestmark = pytest.mark.cluster

RECORDS = 6_000
FAST = 'max_records = 1000\ninterval = "100ms"'  # many batches, one soon after another
BATCHES_BEFORE_THE_CRASH = 1

Make = Callable[..., Scenario]


def crash_and_finish(scenario: Scenario, guarantee: str, point: str, who: str) -> None:
    """Run until the failpoint kills, then run again to the end."""
    scenario.produce(payment(n) for n in range(RECORDS))
    path = scenario.file(guarantee)
    fail = f"{point}:{BATCHES_BEFORE_THE_CRASH}:{who}:{scenario.folder}"
    first = scenario.run(path, AVOW_FAILPOINT=fail)
    assert (scenario.folder / f"fired-{point}").exists(), first.stderr
    if who == "run":
        assert first.returncode == -signal.SIGKILL
        scenario.drain(path)
    else:  # Spark tries the task again by itself
        assert first.returncode == 0, first.stderr
    assert sum(scenario.positions().values()) == RECORDS, "claimed to the end"


def killed(*quick: tuple[str, str], points: Sequence[str]) -> list[ParameterSet]:
    """Every point and who is killed there; all but these in `make test-all` alone."""
    every = itertools.product(points, ["run", "worker"])
    return [pytest.param(*one, marks=[] if one in quick else [pytest.mark.long]) for one in every]


@pytest.mark.parametrize(
    ("point", "who"),
    killed(("mid-write", "run"), points=["after-claim-write", "mid-write"]),
)
def test_exactly_once_neither_loses_nor_doubles(scenario: Make, point: str, who: str) -> None:
    s = scenario()
    crash_and_finish(s, "exactly-once", point, who)
    assert s.ids() == dict.fromkeys(range(RECORDS), 1)


@pytest.mark.long  # `make test` has it without Spark: test_consumer.py, test_kill_9
@pytest.mark.parametrize(("point", "who"), killed(("after-claim", "run"), points=["after-claim", "mid-write"]))
def test_at_most_once_loses_and_never_doubles(scenario: Make, point: str, who: str) -> None:
    s = scenario()
    crash_and_finish(s, "at-most-once", point, who)
    found = s.ids()
    assert max(found.values()) == 1, "never doubled"
    assert 0 < len(found) < RECORDS, "the claimed range that was not written is lost"


@pytest.mark.long  # `make test` has it on a cluster, test_standalone.py, and without Spark
@pytest.mark.parametrize(("point", "who"), killed(("after-write", "worker"), points=["after-write"]))
def test_at_least_once_doubles_and_never_loses(scenario: Make, point: str, who: str) -> None:
    s = scenario()
    crash_and_finish(s, "at-least-once", point, who)
    found = s.ids()
    assert set(found) == set(range(RECORDS)), "never lost"
    assert max(found.values()) == 2, "the range that was written and not claimed is there twice"
    assert sum(found.values()) > RECORDS


@pytest.mark.long
def test_killed_at_random_times_with_bad_records_among_the_good(scenario: Make) -> None:
    chance = random.Random(11)
    s = scenario(partitions=3)
    values = [b"{bad" if n % 500 == 7 else payment(n) for n in range(30_000)]
    good = [n for n in range(30_000) if n % 500 != 7]
    s.produce(values)
    path = s.file(batch="max_records = 3000")
    for target in (1, 8_000, 16_000):
        child = s.start(path)
        s.wait_for_rows(target)
        time.sleep(chance.random())
        s.kill(child)
    s.drain(path)
    assert s.ids() == dict.fromkeys(good, 1)
    dead = s.rows("SELECT count(*), min(reason), max(reason) FROM avow.dead_letters WHERE pipeline = %s", s.name)
    assert dead == [(60, "not-json", "not-json")]
    read, written, buried = s.rows(
        "SELECT sum(read), sum(written), sum(dead) FROM avow.ledger WHERE pipeline = %s", s.name
    )[0]
    assert (read, written, buried) == (30_000, 29_940, 60)
    contiguous = s.rows(
        "SELECT count(*) FROM (SELECT from_offset, lag(until_offset, 1, 0::bigint) OVER"
        " (PARTITION BY partition ORDER BY from_offset) AS before FROM avow.claims WHERE pipeline = %s) c"
        " WHERE from_offset <> before",
        s.name,
    )
    assert contiguous == [(0,)], "claims have neither gap nor overlap"


@pytest.mark.long
def test_two_drivers_at_once_one_is_superseded_and_nothing_is_doubled(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(20_000))
    path = s.file(batch=FAST)
    first = s.start(path)
    s.wait_for_rows(1)
    second = s.start(path, "--once")
    _, errors = second.communicate(timeout=180)
    assert second.returncode == 0, errors
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 13, errors
    assert "superseded by run 2" in errors
    assert s.ids() == dict.fromkeys(range(20_000), 1)


@pytest.mark.long  # `make test` stops a member of the consumer engine
def test_a_stopped_zombie_wakes_up_and_does_no_harm(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(20_000))
    path = s.file(batch=FAST)
    zombie = s.start(path)
    s.wait_for_rows(1)
    family = [psutil.Process(zombie.pid), *psutil.Process(zombie.pid).children(recursive=True)]
    for process in family:
        process.send_signal(signal.SIGSTOP)
    s.drain(path)
    assert s.ids() == dict.fromkeys(range(20_000), 1)
    for process in family:
        process.send_signal(signal.SIGCONT)
    _, errors = zombie.communicate(timeout=120)
    assert zombie.returncode == 13, errors
    assert s.ids() == dict.fromkeys(range(20_000), 1)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_signal_ends_after_the_current_batch_with_exit_code_0(scenario: Make, number: signal.Signals) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(2_000))
    temporary = s.folder / "tmp"
    temporary.mkdir()
    child = s.start(s.file(), TMPDIR=str(temporary))
    s.wait_for_rows(2_000)
    if number == signal.SIGINT:
        os.killpg(child.pid, number)  # to the JVM too, as a terminal does
    else:
        child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert "stopping after the current batch" in errors
    assert s.ids() == dict.fromkeys(range(2_000), 1)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("avow-spark-")] == []


def test_postgres_and_a_broker_killed_in_mid_run(scenario: Make, healthy: object) -> None:
    assert healthy
    s = scenario()
    s.produce(payment(n) for n in range(30_000))
    child = s.start(s.file(batch=FAST))
    s.wait_for_rows(1)
    s.cluster.part("postgres").kill()
    time.sleep(1)
    s.cluster.start("postgres")
    before = s.rows(f'SELECT count(*) FROM "{s.table}"')[0][0]
    s.wait_for_rows(before + 2_000)
    s.cluster.part("broker-2").kill()
    s.wait_for_rows(30_000, timeout_s=180)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert "trying again from the ledger" in errors
    assert s.ids() == dict.fromkeys(range(30_000), 1)


def test_a_run_ends_at_once_when_its_jvm_is_killed(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(2_000))
    path = s.file(batch="max_records = 100")
    child = s.start(path)
    s.wait_for_rows(1)
    (jvm,) = (one for one in psutil.Process(child.pid).children(recursive=True) if one.name() == "java")
    jvm.kill()
    # It must not try again on a session that is dead: each try would fence whoever took over meanwhile.
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1, errors
    assert "Spark has ended" in errors
    assert list(s.folder.glob("avow-spark-*.log")), "kept, because the message names it"
    s.drain(path)
    assert s.ids() == dict.fromkeys(range(2_000), 1)


@pytest.mark.long
def test_partitions_added_while_running(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce(payment(n) for n in range(100))
    child = s.start(
        s.file(
            source=f'brokers = "{s.cluster.bootstrap}"\ntopics = ["{s.topic}"]\nkafka."metadata.max.age.ms" = "1000"'
        )
    )
    s.wait_for_rows(100)
    client = metadata.admin(s.cluster.bootstrap)
    client.create_partitions([NewPartitions(s.topic, 3)])[s.topic].result()
    time.sleep(1)
    s.partitions = 3
    s.produce(payment(n) for n in range(100, 400))
    s.wait_for_rows(400)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert s.ids() == dict.fromkeys(range(400), 1)
    assert s.positions() == {0: 200, 1: 100, 2: 100}
