"""``avow.Pipeline`` as a notebook or a service uses it; mostly the consumer engine into PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fix_pipeline import SCHEMA, Scenario, payment, session_spark

import avow
from avow.engines.hooks import Hooks
from avow.errors import ConfigError, NotDrained, SinkError
from avow.pipeline import Pipeline
from avow.prove import failpoints

pytestmark = pytest.mark.cluster

Make = Callable[..., Scenario]


def pipeline(s: Scenario, **more: Any) -> Pipeline:
    """The scenario's pipeline, from values."""
    given: dict[str, Any] = {
        "name": s.name,
        "guarantee": avow.Guarantee.EXACTLY_ONCE,
        "engine": "consumer",
        "source": {"brokers": s.cluster.bootstrap, "topics": (s.topic,)},
        "decode": {"format": "json", "schema": SCHEMA},
        "sink": {"kind": "postgres", "url": s.url, "table": s.table},
        "dead_letters": {"max_share": 0.5},
    }
    return Pipeline(**given | more)


# --- declared from values ---------------------------------------------------------------------------------


def test_values_are_checked_like_a_file_and_every_problem_is_named(scenario: Make) -> None:
    s = scenario()
    with pytest.raises(ConfigError) as wrong:
        pipeline(s, guarantee="exactly-twice", batch={"max_record": 1})
    assert "guarantee: 'exactly-twice' is not known, did you mean exactly-once?" in str(wrong.value)
    assert "batch.max_record: is not a known key, did you mean max_records?" in str(wrong.value)
    with pytest.raises(ConfigError, match=r"the consumer engine cannot run transform\.sql"):
        pipeline(s, engine="spark", transform={"sql": "SELECT id FROM records"}).start(engine="consumer")
    with pytest.raises(ConfigError, match="engine: 'flink' is not known"):
        pipeline(s).run(engine="flink")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a lake"):
        pipeline(s).compact()


def test_the_same_pipeline_from_values_and_from_a_file(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = scenario()
    from_file = Pipeline.load(s.file(batch='interval = "2s"'), {"DATABASE_URL": s.url})
    monkeypatch.setenv("SECRET_URL", s.url)
    sink = {"kind": "postgres", "url": "${env:SECRET_URL}", "table": s.table}
    from_values = pipeline(
        s, engine="spark", sink=sink, batch={"interval": timedelta(seconds=2)}, spark={"master": "local[2,4]"}
    )
    assert from_values.config == from_file.config
    assert str(from_values.explain()) == str(from_file.explain())
    assert s.url not in str(from_values.explain())
    assert s.url not in repr(from_values)


# --- run and start -----------------------------------------------------------------------------------------


def test_run_once_says_what_it_came_to(scenario: Make) -> None:
    s = scenario()
    s.produce([payment(n) for n in range(100)] + [b"not json"])
    p = pipeline(s)
    first = p.run(once=True)
    assert (first.read, first.written, first.dead, first.skipped) == (101, 100, 1, 0)
    assert first.drained
    assert len(first.runs) == 1
    assert {tp.partition: position for tp, position in first.positions.items()} == {0: 51, 1: 50}
    s.produce([payment(100)])
    second = p.run(once=True)
    assert (second.read, second.written, second.engine) == (1, 1, "consumer")
    assert second.runs > first.runs
    assert s.ids() == Counter(range(101))
    assert "1 read = 1 written + 0 dead letters + 0 skipped" in str(second)
    nothing = p.run(once=True)
    assert (nothing.read, nothing.drained, nothing.positions) == (0, True, second.positions)


def test_start_runs_in_the_background_until_it_is_stopped(scenario: Make) -> None:
    s = scenario()
    told: list[str] = []
    with pipeline(s).start(on_event=told.append) as run:
        assert run.await_termination(timeout=0.1) is None
        s.produce([payment(n) for n in range(20)])
        s.wait_for_rows(20)
        deadline = time.monotonic() + 30
        while run.progress is None or run.progress.counts.written < 20:
            assert time.monotonic() < deadline, run.progress
            time.sleep(0.05)
        assert run.is_active
    summary = run.await_termination()
    assert summary is not None
    assert (summary.written, summary.drained, run.is_active) == (20, False, False)
    assert any(text.startswith("run ") for text in told)


def test_leaving_the_block_raises_what_the_run_failed_with(scenario: Make) -> None:
    s = scenario()
    s.produce([payment(1)])
    gone = pipeline(s, sink={"kind": "postgres", "url": "postgresql://nobody@127.0.0.1:1/none", "table": "t"})
    with pytest.raises(SinkError), gone.start():
        pass
    with pytest.raises(ZeroDivisionError), pipeline(s).start():  # the block's own failure is not replaced
        raise ZeroDivisionError
    with pytest.raises(NotDrained), pipeline(s).start(once=True) as run:
        run.stop()


def test_ctrl_c_lets_the_batch_end(scenario: Make) -> None:
    s = scenario()
    s.produce([payment(n) for n in range(10)])

    main = threading.get_ident()

    def interrupt() -> None:
        s.wait_for_rows(10)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pipeline(s).run()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert sum(s.positions().values()) == 10


def test_two_pipelines_in_one_process(scenario: Make) -> None:
    one, two = scenario(), scenario()
    with pipeline(one).start() as first, pipeline(two, guarantee="at-least-once").start() as second:
        one.produce([payment(n) for n in range(30)])
        two.produce([payment(n) for n in range(50)])
        one.wait_for_rows(30)
        two.wait_for_rows(50)
    assert one.ids() == Counter(range(30))
    assert two.ids() == Counter(range(50))
    for run, count in ((first, 30), (second, 50)):
        summary = run.await_termination()
        assert summary is not None
        assert summary.written == count


# --- dead letters, receipts --------------------------------------------------------------------------------


def test_dead_letters_are_listed_and_redriven(scenario: Make) -> None:
    s = scenario(1)
    s.produce([payment(0), b'{"id": "one", "account": "a"}', b"{", payment(3)])
    pipeline(s).run(once=True)
    letters = pipeline(s).dead_letters()
    assert {found.reason: found.count for found in letters.counts()} == {"wrong-type": 1, "not-json": 1}
    assert [letter.offset for letter in letters.list()] == [1, 2]
    assert [letter.offset for letter in letters.preview(reason="not-json")] == [2]
    assert letters.list(until=datetime(2000, 1, 1)) == []
    assert len(letters.list(since=datetime(2000, 1, 1, tzinfo=UTC), limit=1)) == 1
    found = letters.get(s.topic, 0, 2)
    assert found is not None
    assert found.value == b"{"
    assert letters.get(s.topic, 0, 0) is None
    s.execute(f'ALTER TABLE "{s.table}" ALTER id TYPE text')
    text = pipeline(s, decode={"format": "json", "schema": SCHEMA.replace("id long", "id string")})
    assert text.dead_letters().redrive(reason="wrong-type").written == 1
    assert [letter.offset for letter in letters.list()] == [2]


def test_receipts_ask_the_same_ledger(scenario: Make) -> None:
    s = scenario(1)
    s.produce([payment(0), b"{"])
    pipeline(s).run(once=True)
    with pipeline(s).receipts() as receipts:
        answers = receipts.wait_all([avow.Receipt(s.topic, 0, 0), avow.Receipt(s.topic, 0, 1)], timeout_s=10)
    assert [str(answer.state) for answer in answers] == ["written", "dead-lettered"]


# --- nothing is left behind ---------------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    """What a run could leave changed in the process around it."""
    return {
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        "streams": [(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in (0, 1, 2)],
        "threads": {thread.name for thread in threading.enumerate()},
        # Not theirs: below the test cluster's PostgreSQL there are the sessions of other tests.
        "children": {child.pid for child in psutil.Process().children()},
        "temporary": sorted(path.name for path in Path(tempfile.gettempdir()).iterdir()),
        "folder": os.getcwd(),  # noqa: PTH109
        "path": list(sys.path),
    }


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """What differs now, as soon as threads that are ending have ended."""
    deadline = time.monotonic() + 10
    while (left := differences(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def differences(before: dict[str, Any]) -> dict[str, Any]:
    now = surroundings()
    before = before | {"threads": before["threads"] & now["threads"]}  # one of an earlier test may end meanwhile
    return {name: [before[name], now[name]] for name in before if before[name] != now[name]}


def test_a_run_leaves_the_process_as_it_was(scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    s = scenario()
    s.produce([payment(n) for n in range(10)] + [b"{"])
    p = pipeline(s)
    before = surroundings()
    p.run(once=True)
    with p.start():
        time.sleep(0.5)
    p.dead_letters().list()
    assert settled(before) == {}


ON_SPARK = """
import json, sys, tempfile
import avow
from pathlib import Path
from tests.integration.test_pipeline_api import settled, surroundings

p = avow.Pipeline.load(sys.argv[1])
before = surroundings()
summary = p.run(once=True)
left = settled(before)
verdict = p.audit().verdict
left |= settled(before)
print(json.dumps([summary.written, verdict, {name: str(differs) for name, differs in left.items()}]))
"""


def test_a_session_of_its_own_leaves_the_process_as_it_was(scenario: Make) -> None:
    """Twice in one process, for a run and for an audit."""
    s = scenario()
    s.produce([payment(n) for n in range(10)])
    temporary = s.folder / "tmp"
    temporary.mkdir()
    root = Path(__file__).parents[2]
    env = {**os.environ, "DATABASE_URL": s.url, "TMPDIR": str(temporary), "PYTHONPATH": f"{root}:{root / 'src'}"}
    command = [sys.executable, "-c", ON_SPARK, str(s.file())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [10, "held", {}]


# --- hooks --------------------------------------------------------------------------------------------------


class Seen(Hooks):
    def __init__(self) -> None:
        self.points: list[str] = []

    def reached(self, point: str, batch: int) -> None:  # noqa: ARG002
        self.points.append(point)


def test_hooks_are_values_and_no_variable_names_one(scenario: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = scenario(1)
    s.produce([payment(0)])
    monkeypatch.setenv(failpoints.VARIABLE, f"mid-write:0:answer:{s.folder}")
    monkeypatch.setenv(failpoints.CANARY, "drop:1")
    seen = Seen()
    with pipeline(s, guarantee="at-least-once").start(once=True, hooks=seen) as run:
        run.await_termination()
    assert seen.points == ["mid-write", "after-write", "after-claim"]
    assert s.ids() == Counter([0]), "a canary would have dropped it"
    s.produce([payment(1)])
    told = subprocess.run(
        [sys.executable, "-m", "avow", "run", str(s.file("at-least-once")), "--once", "--engine", "consumer"],
        env={**os.environ, "DATABASE_URL": s.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert s.ids() == Counter([0, 1])
    assert not list(s.folder.glob("fired-*"))


# --- the caller's Spark session -----------------------------------------------------------------------------


def test_the_callers_session_is_used_as_it_is(scenario: Make) -> None:
    one, two = scenario(), scenario()
    one.produce([payment(n) for n in range(30)])
    two.produce([payment(n) for n in range(50)])
    first, second = pipeline(one, engine="spark"), pipeline(two, engine="spark", spark={"ui.enabled": True})
    session = session_spark(first.config)
    settings = dict(session.conf.getAll)
    told: list[str] = []
    with first.start(once=True, spark=session) as running:
        assert second.run(once=True, spark=session, on_event=told.append).written == 50
        summary = running.await_termination()
    assert summary is not None
    assert (summary.written, summary.engine) == (30, "spark")
    assert one.ids() == Counter(range(30))
    assert first.audit(spark=session).verdict == "held"
    assert dict(session.conf.getAll) == settings
    assert session.range(3).count() == 3, "it was stopped"
    assert "the settings in [spark] are not applied: the Spark session was made by the caller" in told


def test_a_session_that_lacks_something_is_refused_by_name(scenario: Make) -> None:
    s = scenario()
    p = pipeline(s, engine="spark", transform={"sql": "SELECT id FROM records"})
    session = session_spark(p.config).newSession()
    session.conf.set("spark.sql.session.timeZone", "Europe/Zurich")
    with pytest.raises(ConfigError, match=r"spark\.sql\.session\.timeZone = 'Europe/Zurich'"):
        p.run(once=True, spark=session)


def test_a_path_is_taken_as_its_text(scenario: Make) -> None:
    s = scenario(1)
    s.produce([payment(0)])
    lake = pipeline(s, sink={"kind": "delta", "path": s.folder / "lake"})
    assert lake.run(once=True).written == 1
    assert lake.orphans() == []
    assert lake.compact().files_after == 1


# --- the docs -----------------------------------------------------------------------------------------------


def test_the_examples_of_the_docs_run(
    scenario: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s = scenario()
    good = [json.dumps({"id": n, "account": "a", "amount": n / 4}).encode() for n in range(20)]
    s.produce([*good, b'{"id": "one", "account": "a"}'])
    monkeypatch.setenv("DATABASE_URL", s.url)
    text = (Path(__file__).parents[2] / "docs" / "API.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, Any] = {}
    for block in map(s.fitted, blocks):
        if "spark=spark" in block:
            scope["spark"] = session_spark(scope["payments"].config)
        exec(block, scope)  # our own documentation
        if "summary" in block and "spark" not in block:
            assert (scope["summary"].written, scope["summary"].dead) == (20, 1)
    assert s.ids() == Counter(range(20))
    assert scope["report"].verdict == "held"
    assert "wrong-type 1" in capsys.readouterr().out
