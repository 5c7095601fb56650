"""Whose fault an exception is, and its root cause in one line, whatever it is wrapped in."""

from __future__ import annotations

from pathlib import Path

import pytest

from avow import errors
from avow.engines.causes import cause_line, trace, translated
from avow.engines.driver import STOPS
from avow.errors import AvowError, ConfigError, RegistryRefused, RegistryUnavailable, SinkError, SourceError
from avow.kafka.connect import redact
from avow.sinks.postgres import tables

FRAME = '  File "/opt/avow/lib/site-packages/avow/{}", line 7, in act\n    do()\n'
JAVA = "\tat org.apache.spark.sql.classic.Dataset.collectToPython(Dataset.scala:2057)\n"


class Captured(Exception):
    """As pyspark has it: what it says, and beside it the stack trace of the JVM."""

    def __init__(self, said: str, stack: str = "") -> None:
        super().__init__(said)
        self._stackTrace = stack


class OverConnect(Exception):
    """As Spark Connect's client has it; the server's stack trace is not always there."""

    def __init__(self, said: str, stack: str | None = None) -> None:
        super().__init__(said)
        self._stacktrace = stack


def in_worker(line: str, *frames: str) -> Captured:
    """As PySpark 4.1 tells of an exception in a Python worker."""
    text = "Traceback (most recent call last):\n" + "".join(map(FRAME.format, frames)) + line + "\n\n"
    return Captured(
        f"\n  An exception was thrown from the Python worker. Please see the stack trace below.\n{text}",
        f"org.apache.spark.SparkException: Job aborted\n{JAVA}Caused by: org.apache.spark.api.python.PythonException: "
        f"{text}{JAVA}\t... 1 more\n",
    )


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (in_worker("ValueError: no such currency"), AvowError, "ValueError: no such currency"),
        (
            in_worker("psycopg.errors.ReadOnlySqlTransaction: read-only", "engines/task.py", "sinks/postgres/task.py"),
            SinkError,
            "ReadOnlySqlTransaction: read-only",
        ),
        (in_worker("OSError: disk full", "engines/task.py", "sinks/delta/table.py"), SinkError, "OSError: disk full"),
        (in_worker("OSError: reset", "sinks/lake/task.py", "kafka/reader.py"), SourceError, "OSError: reset"),
        (in_worker("avow.errors.SinkError: the database is away\nfor now", "engines/spark.py"), SinkError, "the data"),
        (in_worker("avow.errors.ConfigError: source.kafka: no"), ConfigError, "source.kafka: no"),
        (in_worker("avow.errors.RegistryUnavailable: away", "avow/schema_registry.py"), RegistryUnavailable, "away"),
        (in_worker("avow.errors.RegistryRefused: 401", "avow/schema_registry.py"), RegistryRefused, "401"),
        (
            Captured("[PLAN_FAILED] the plan SQLSTATE: 39000 SQLSTATE: XXKST\n=== Query"),
            AvowError,
            "[PLAN_FAILED] ",
        ),
    ],
)
def test_errors_that_spark_reports(error: Captured, kind: type[AvowError], said: str) -> None:
    found = translated(error)
    assert type(found) is kind
    assert str(found).startswith(said)
    assert said in cause_line(error)
    assert "\n" not in cause_line(error)
    assert str(error) in trace(error)


def test_errors_of_this_process(tmp_path: Path) -> None:
    with pytest.raises(AttributeError) as raised:
        tables.full_name(None)  # type: ignore[arg-type]
    assert type(translated(raised.value)) is SinkError, "raised while a function of a sink was running"
    with pytest.raises(TypeError) as other:
        redact(None, "")  # type: ignore[arg-type]
    assert type(translated(other.value)) is SourceError
    with pytest.raises(FileNotFoundError) as nobodys:
        (tmp_path / "absent").read_bytes()
    assert type(translated(nobodys.value)) is AvowError
    ours = SinkError("as it is")
    assert translated(ours) is ours


def test_errors_that_come_by_spark_connect() -> None:
    found = translated(OverConnect(str(in_worker("avow.errors.SinkError: the database is away", "engines/spark.py"))))
    assert type(found) is SinkError
    assert str(found) == "the database is away"
    crashed = OverConnect(
        "Job aborted due to stage failure: Lost task 0.0 in stage 1.0",
        "Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly "
        f"(crashed).\n{JAVA}Caused by: java.net.SocketException: Connection reset\n{JAVA}",
    )
    assert cause_line(crashed).startswith("a Python worker exited unexpectedly: it crashed or was killed")


def test_what_is_a_named_stop_is_one_by_its_own_name() -> None:
    """What a Spark task reports is found in the table by the name of its class."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    stops = {name for name, kind in kinds.items() if issubclass(kind, tuple(STOPS.values()))}
    assert stops == STOPS.keys()
    assert not issubclass(RegistryUnavailable, tuple(STOPS.values())), "it may pass"
