"""``avow run`` on a real Spark standalone cluster: one master, two workers, executors in JVMs of their own.

Executors, workers and the driver are killed with kill -9. Read back with psycopg, not with our own audit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.fix_pipeline import Scenario, payment

from avow.local.cluster import PortPicker
from avow.local.part import PartState
from avow.local.standalone import Standalone

pytestmark = pytest.mark.cluster

RECORDS = 6_000
MANY = 40_000

Make = Callable[..., Scenario]


@pytest.fixture(scope="module")
def sparks() -> Iterator[Standalone]:
    """One cluster for the whole module. A test that hurts it mends it."""
    with tempfile.TemporaryDirectory(prefix="avow-standalone-") as folder, Standalone(Path(folder)) as started:
        yield started


@pytest.fixture
def spark(sparks: Standalone) -> Iterator[Standalone]:
    """The cluster, whole again after the test, whatever it did."""
    yield sparks
    for part in sparks.parts:
        part.resume()
    sparks.up()


def section(spark: Standalone, *more: str) -> str:
    """What a pipeline file says to run there, small and on loopback."""
    lines = [
        f'master = "{spark.url}"',
        'driver.host = "127.0.0.1"',
        'driver.bindAddress = "127.0.0.1"',
        'executor.memory = "512m"',
        "executor.cores = 1",
        'executor.extraJavaOptions = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"',
    ]
    return "\n".join([*lines, *more])


def count(scenario: Scenario) -> int:
    return int(scenario.rows(f'SELECT count(*) FROM "{scenario.table}"')[0][0])


def kill_executor(executor: psutil.Process) -> None:
    """kill -9 of the JVM alone. Its Python workers must go by themselves."""
    family = executor.children(recursive=True)
    assert family, "it has run tasks"
    executor.kill()
    _, alive = psutil.wait_procs([executor, *family], 30)
    assert alive == []


@pytest.mark.long
def test_a_job_that_spark_gives_up_starts_again_from_the_ledger(scenario: Make, spark: Standalone) -> None:
    """By SQL, with bad records. An executor dies in mid-write, and Spark may not try the task again: the run does."""
    s = scenario()
    s.produce(b"{bad" if n % 500 == 7 else payment(n) for n in range(RECORDS))
    query = 'sql = "SELECT *, amount * 100 AS cents FROM records WHERE id % 3 = 0"'
    path = s.file(spark=section(spark, "task.maxFailures = 1"), transform=query)
    done = s.run(path, AVOW_FAILPOINT=f"mid-write:1:executor:{s.folder}")
    assert (s.folder / "fired-mid-write").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    assert "trying again from the ledger" in done.stderr
    assert s.ids() == dict.fromkeys((n for n in range(0, RECORDS, 3) if n % 500 != 7), 1)
    assert s.rows(f'SELECT count(*) FROM "{s.table}" WHERE cents <> id * 25') == [(0,)]
    dead = s.rows("SELECT count(*), min(reason) FROM avow.dead_letters WHERE pipeline = %s", s.name)
    assert dead == [(RECORDS // 500, "not-json")], "they came past the query, in the executors' notes"
    assert sum(s.positions().values()) == RECORDS
    used = [worker for worker in spark.workers if [*(worker.folder / "work").glob("app-*/*/stderr")]]
    assert used == spark.workers, "both had an executor"


API = """
import json, sys
import avow
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(sys.argv[2]).config("spark.sql.session.timeZone", "UTC")
for setting in sys.argv[3:]:
    builder = builder.config(*setting.split("=", 1))
spark = builder.getOrCreate()
p = avow.Pipeline.load(sys.argv[1])
summary = p.run(once=True, spark=spark)
print(json.dumps([spark.sparkContext.master, summary.written, summary.dead, p.audit(spark=spark).verdict]))
spark.stop()
"""


@pytest.mark.long
def test_the_python_api_with_a_session_of_the_caller(scenario: Make, spark: Standalone) -> None:
    s = scenario()
    s.produce(b"{bad" if n % 500 == 7 else payment(n) for n in range(RECORDS))
    path = s.file(transform='sql = "SELECT *, amount * 100 AS cents FROM records"')
    settings = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1", "spark.executor.memory=512m"]
    env = {**os.environ, "DATABASE_URL": s.url, "PYSPARK_PYTHON": sys.executable, "TMPDIR": str(s.folder)}
    command = [sys.executable, "-c", API, str(path), spark.url, *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    bad = RECORDS // 500
    assert json.loads(done.stdout.splitlines()[-1]) == [spark.url, RECORDS - bad, bad, "held"]
    assert s.ids() == dict.fromkeys((n for n in range(RECORDS) if n % 500 != 7), 1)


TRANSFORM = """
import pyarrow as pa
import pyarrow.compute as pc


def even(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.filter(pc.equal(pc.bit_wise_and(rows.column("id"), 1), 0))
"""


def test_at_least_once_doubles_and_never_loses(scenario: Make, spark: Standalone) -> None:
    """An executor dies between write and claim, and Spark gives its task to another. The transform is one file, which
    only the driver's path has: it is sent along."""
    s = scenario(partitions=3)
    (s.folder / "shop_rules.py").write_text(TRANSFORM)
    s.produce(payment(n) for n in range(RECORDS))
    path = s.file("at-least-once", spark=section(spark), transform='python = "shop_rules:even"')
    done = s.run(path, AVOW_FAILPOINT=f"after-write:1:executor:{s.folder}", PYTHONPATH=str(s.folder))
    assert (s.folder / "fired-after-write").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    found = s.ids()
    assert set(found) == set(range(0, RECORDS, 2)), "never lost"
    doubled = sum(found.values()) - len(found)
    print(f"{doubled} records are there twice")
    assert doubled > 0, "the range that was written and not claimed"
    assert max(found.values()) == 2


@pytest.mark.long
def test_an_executor_a_worker_and_the_driver_killed_in_mid_run(scenario: Make, spark: Standalone) -> None:
    s = scenario()
    temporary = s.folder / "tmp"
    temporary.mkdir()
    s.produce(payment(n) for n in range(MANY))
    path = s.file(spark=section(spark), batch="max_records = 1000")
    child = s.start(path, TMPDIR=str(temporary))
    s.wait_for_rows(2_000)
    kill_executor(spark.workers[0].executors()[0])
    s.wait_for_rows(count(s) + 3_000)
    assert spark.workers[1].executors(), "the other one still works"
    spark.workers[1].kill()
    assert spark.workers[1].state is PartState.DOWN
    s.wait_for_rows(count(s) + 3_000)
    s.kill(child)
    assert count(s) < MANY, "in mid-run"
    spark.up()
    done = s.run(s.file(spark=section(spark)))
    assert done.returncode == 0, done.stderr
    assert s.ids() == dict.fromkeys(range(MANY), 1)
    assert sum(s.positions().values()) == MANY


@pytest.mark.long
def test_a_transform_that_executors_lack_is_told_by_name(scenario: Make, spark: Standalone) -> None:
    s = scenario()
    package = s.folder / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rules.py").write_text(TRANSFORM)
    s.produce(payment(n) for n in range(10))
    path = s.file(spark=section(spark), transform='python = "shop.rules:even"')
    done = s.run(path, PYTHONPATH=str(s.folder))
    assert done.returncode == 2, done.stderr
    assert "transform.python: shop.rules:even cannot be had" in done.stderr
    assert sum(s.positions().values()) == 0


@pytest.mark.long
def test_what_is_wrong_with_the_cluster_is_told_before_anything_is_claimed(scenario: Make, spark: Standalone) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(10))
    nobody = f'master = "spark://127.0.0.1:{PortPicker().free()}"'
    done = s.run(s.file(spark=nobody))
    assert done.returncode == 2
    assert "no Spark master answers" in done.stderr
    bare = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    done = s.run(s.file(spark=section(spark, f'pyspark.python = "{bare}"')))
    assert done.returncode == 2, done.stderr
    assert "the executors cannot run avow: " in done.stderr
    assert "No module named 'avow'" in done.stderr
    assert s.rows("SELECT to_regclass(%s)", s.table) == [(None,)]
