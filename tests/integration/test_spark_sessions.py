"""``avow.Pipeline`` with the Spark session that its caller has: over Spark Connect, under spark-submit, in a notebook;
and the examples in which a user meets them first. Each in a process of its own, as a process has one Spark."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fix_pipeline import Scenario, payment

from avow.engines.session import JAVA_SHORT
from avow.local.spark import archive

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]

EXAMPLES = Path(__file__).parents[2] / "examples"
SUBMIT = Path(sys.executable).with_name("spark-submit")
SQL = """sql = "SELECT *, regexp_replace(account, '\\\\n|{3}', '') AS plain, amount * 100 AS cents FROM records;" """


# What makes Spark start soon, and is nothing that a run rests on.
QUICK = ["--driver-java-options", JAVA_SHORT + (f" -XX:SharedArchiveFile={found}" if (found := archive()) else "")]
QUICK += ["--conf", "spark.ui.enabled=false", "--conf", "spark.python.daemon.module=avow.engines.daemon"]


def environment(s: Scenario) -> dict[str, str]:
    """Of a user who has avow in one environment, for driver and tasks. A Connect server of his own has any free port
    (SPARK_TESTING)."""
    return {
        **os.environ,
        "DATABASE_URL": s.url,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": shlex.join([*QUICK, "pyspark-shell"]),
        "TMPDIR": str(s.folder),
        "SPARK_TESTING": "1",
    }


def ran(s: Scenario, *command: str | Path, timeout_s: float = 240) -> str:
    """What a child printed that ended well."""
    child = subprocess.Popen(
        command, env=environment(s), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    s.children.append(child)
    out, err = child.communicate(timeout=timeout_s)
    assert child.returncode == 0, out[-2000:] + err[-4000:]
    return out


def last_line(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


# --- Spark Connect ------------------------------------------------------------------------------------------

CONNECT = """
import json, sys
from pyspark.sql import SparkSession
import avow

spark = SparkSession.builder.remote("local[2]").config("spark.sql.session.timeZone", "UTC").getOrCreate()
assert type(spark).__module__ == "pyspark.sql.connect.session"
spark.range(7).createOrReplaceTempView("records")  # the user's own
by_sql, again, lenient = (avow.Pipeline.load(path) for path in sys.argv[1:])
settings = dict(spark.conf.getAll)
with by_sql.start(once=True, spark=spark) as running:  # two runs at once, on one topic, each with its query
    found = [again.run(once=True, spark=spark).written, running.await_termination().written]
found += [by_sql.audit(spark=spark).verdict, again.audit().verdict]  # the active session
found.append(lenient.dead_letters().redrive(spark=spark).written)
found.append(lenient.audit(spark=spark).verdict)
spark.conf.set("spark.sql.session.timeZone", "Europe/Zurich")
try:
    by_sql.run(once=True, spark=spark)
except avow.ConfigError as error:
    found.append("spark.sql.session.timeZone = 'Europe/Zurich'" in str(error))
spark.conf.set("spark.sql.session.timeZone", "UTC")
found.append(dict(spark.conf.getAll) == settings)
found.append(spark.table("records").count())
print(json.dumps(found))
spark.stop()
"""


def test_over_spark_connect(scenario: Make) -> None:
    s, again = scenario(), scenario()
    again.topic = s.topic
    s.produce([*(payment(n) for n in range(60)), b'{"id": 60, "account": "a", "more": 1}'])
    first, second = s.file(transform=SQL), again.file(transform='sql = "SELECT * FROM records WHERE id >= 10"')
    lenient = s.folder / "lenient.toml"
    lenient.write_text(first.read_text().replace("[decode]", '[decode]\nunknown_fields = "ignore"'))
    out = ran(s, sys.executable, "-c", CONNECT, first, second, lenient)
    assert last_line(out) == [50, 60, "held", "held", 1, "held", True, True, 7]
    assert s.ids() == Counter(range(61))
    assert s.rows(f'SELECT count(*) FROM "{s.table}" WHERE cents <> id * 25 AND id < 60') == [(0,)]
    assert again.ids() == Counter(range(10, 60))


KILLED = """
import json, sys, time
import psutil
from pyspark.sql import SparkSession
import avow

spark = SparkSession.builder.remote("local[2]").getOrCreate()
(java,) = [one for one in psutil.Process().children() if one.name() == "java"]
p = avow.Pipeline.load(sys.argv[1])
found = []
try:
    with p.start(spark=spark) as running:
        while running.progress is None:
            time.sleep(0.1)
        began = time.monotonic()
        java.kill()
        running.await_termination()
except avow.AvowError as error:
    found += [str(error), time.monotonic() - began]
try:
    p.run(once=True, spark=spark)
except avow.ConfigError as error:
    found.append(str(error))
print(json.dumps(found))
sys.stdout.flush()
import os
os._exit(0)  # the client would go on trying to reach its server
"""


@pytest.mark.long
def test_a_connect_server_that_is_killed_ends_the_run(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(2_000))
    path = s.file(batch="max_records = 100")
    ended, seconds, refused = last_line(ran(s, sys.executable, "-c", KILLED, path))
    assert ended.startswith("Spark has ended, and the run with it")
    assert seconds < 90, "its client alone tries for ten minutes"
    assert "the Spark session has ended" in refused
    s.drain(path)
    assert s.ids() == Counter(range(2_000))


BARE = """
import json, os, sys
from pyspark.sql import SparkSession
import avow

os.environ["PYSPARK_PYTHON"] = sys.argv[2]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
try:
    avow.Pipeline.load(sys.argv[1]).run(once=True, spark=spark)
except avow.ConfigError as error:
    print(json.dumps(str(error)))
spark.stop()
"""


@pytest.mark.long
def test_a_connect_server_whose_workers_lack_avow_is_refused_by_name(scenario: Make) -> None:
    s = scenario()
    s.produce([payment(0)])
    bare = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    script = s.folder / "script.py"
    script.write_text(BARE)
    env = environment(s) | {"PYSPARK_SUBMIT_ARGS": "pyspark-shell"}
    done = subprocess.run(
        [sys.executable, script, s.file(), bare], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_line(done.stdout).startswith("the executors cannot run avow: ")
    assert "No module named 'avow'" in last_line(done.stdout)
    assert s.rows("SELECT to_regclass(%s)", s.table) == [(None,)]


# --- spark-submit, a notebook, a service: the examples -------------------------------------------------------


def test_spark_submit_runs_the_example(scenario: Make) -> None:
    s = scenario()
    s.produce([*(json.dumps({"id": n, "account": "a", "amount": n / 4}).encode() for n in range(50)), b"{"])
    script = s.folder / "payments.py"
    script.write_text(s.fitted((EXAMPLES / "spark-submit/payments.py").read_text()))
    out = ran(s, SUBMIT, "--master", "local[2]", *QUICK, script)
    assert "51 read = 50 written + 1 dead letters + 0 skipped" in out
    assert "held" in out
    assert s.ids() == Counter(range(50))
    assert s.rows(f'SELECT sum(cents) FROM "{s.table}"') == [(sum(range(50)) * 25,)]


NO_SESSION = """
import json, sys
import avow
from pyspark import SparkContext

seen = []
p = avow.Pipeline.load(sys.argv[1])
run = p.start(once=True, on_progress=lambda _: seen.append(SparkContext._active_spark_context.master))
print(json.dumps([run.await_termination().written, p.audit().verdict, seen[0]]))
"""


@pytest.mark.long
def test_under_spark_submit_a_session_of_its_own_is_where_spark_submit_says(scenario: Make) -> None:
    s = scenario()
    s.produce(payment(n) for n in range(50))
    script = s.folder / "script.py"
    script.write_text(NO_SESSION)
    path = s.file(spark='sql.shuffle.partitions = "2"')
    out = ran(s, SUBMIT, "--master", "local[3]", *QUICK, script, path)
    assert last_line(out) == [50, "held", "local[3]"]
    assert s.ids() == Counter(range(50))


@pytest.mark.long
def test_the_notebook_runs_cell_by_cell(scenario: Make) -> None:
    s = scenario()
    s.produce([*(json.dumps({"id": n, "account": "a", "amount": n / 4}).encode() for n in range(50)), b"{"])
    notebook = json.loads((EXAMPLES / "notebook/quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = s.folder / "cells.py"
    script.write_text(s.fitted("\n".join(cells)))
    out = ran(s, sys.executable, script)
    assert "51 read = 50 written + 1 dead letters + 0 skipped" in out
    assert "held" in out
    assert "not-json 1" in out
    assert s.ids() == Counter(range(50))


def test_the_service_runs_until_it_is_told_to_stop(scenario: Make) -> None:
    s = scenario()
    script = s.folder / "payments.py"
    script.write_text(s.fitted((EXAMPLES / "service/payments.py").read_text()))
    s.produce([*(json.dumps({"id": n, "account": "a", "amount": n / 4}).encode() for n in range(50)), b"{"])
    child = subprocess.Popen(
        [sys.executable, script], env=environment(s), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    s.children.append(child)
    s.wait_for_rows(50)
    deadline = time.monotonic() + 30
    while sum(s.positions().values()) < 51:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "50 written + 1 dead letters" in out
    assert "50 written" in err, "progress"
    assert s.ids() == Counter(range(50))
