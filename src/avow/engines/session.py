"""The Spark session of a run: its settings, the JVM it starts, the executors it needs, and whether it is still there.

Owns: everything about Spark that is so before the first batch, and its end. Must not know: what a run does with it. Its
neighbours are ``spark`` (the run) and ``avow.local.spark`` (the class archive).
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from avow import __version__
from avow.arrow import binaries
from avow.engines import failpoints
from avow.engines.causes import cause_line
from avow.engines.task import python_transform
from avow.errors import ConfigError
from avow.settings import PipelineConfig, revealed

CONNECT_TIMEOUT_S = 5
EXECUTORS_EXPECTED_S = 15

# A driver that is its own executor needs no other address.
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

# Java options of the driver: quiet, and for a short run, quick to start. The optimising compiler costs seconds at the
# start, and gives them back to a run that goes on for long, or to a query over a million records or so. What the JVM
# itself warns of goes to Spark's log: its standard output is ours, and there are answers for machines on it.
_LOG4J = Path(__file__).with_name("log4j2.properties")
_QUIET = f"-Xlog:disable -Xlog:all=warning:stderr -Dlog4j2.configurationFile={_LOG4J}"
JAVA = f"{_QUIET} -XX:+UseParallelGC"
JAVA_SHORT = f"{_QUIET} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"

_ESCAPES = {c: f"\\{c}" for c in "\\ =:#!"} | {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}

EXECUTORS_ADVICE = (
    "Tasks need the driver's Python, with the same avow and what it depends on: install them at the same path on every "
    "machine, or send them with spark.archives and spark.pyspark.python. See docs/CLUSTER.md."
)


def spark_settings(pipeline: PipelineConfig, *, short: bool, archive: Path | None = None) -> dict[str, str]:
    """The user's settings over ours. ``short``: a run that ends soon wants to start soon. ``archive``: Java's classes,
    kept ready in a file."""
    given = revealed(pipeline.spark)
    master = given.get("spark.master", f"local[{max(2, os.cpu_count() or 2)},4]")
    settings = {
        "spark.master": master,
        "spark.app.name": f"avow {pipeline.name}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
        # A second attempt beside the first would be safe (the ledger judges it), and for nothing.
        "spark.speculation": "false",
        "spark.python.daemon.module": "avow.engines.daemon",
    }
    java = JAVA_SHORT if short else JAVA
    # Of the driver's JVM: whatever the master, it is a child of this process, on this machine.
    settings["spark.driver.extraJavaOptions"] = f"{java} -XX:SharedArchiveFile={archive}" if archive else java
    if is_local(master):
        settings |= LOOPBACK
    else:
        # Executors have another environment than ours, so a test's wish goes along.
        settings |= {f"spark.executorEnv.{name}": value for name, value in failpoints.declared().items()}
    return settings | given


def is_local(master: str) -> bool:
    return master.startswith("local")


def spark_session(pipeline: PipelineConfig, *, short: bool, archive: Path | None = None) -> SparkSession:
    settings = spark_settings(pipeline, short=short, archive=archive)
    # The workers must run this very Python, with this very package, unless the file says where theirs is. Started from
    # Python, pyspark looks at the variable alone.
    python = settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    _reach_master(settings["spark.master"])
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    log = _spark_log()
    # py4j's first call imports it, and with it pandas, for a second: better now, while the JVM starts.
    threading.Thread(target=importlib.import_module, args=["pyspark.testing.utils"], daemon=True).start()
    try:
        with _standard_error_to(log):
            _start_jvm(settings)
            session = builder.getOrCreate()
    except (PySparkException, Py4JError, RuntimeError) as error:
        raise ConfigError(
            f"Spark does not start: {cause_line(error)}",
            advice=f"Check [spark]; `avow doctor` checks Java. Spark's own log: {log}",
        ) from error
    # Of a run that ends in good order nobody wants it; after a kill -9 it stays.
    atexit.register(_remove_log)
    if not is_local(settings["spark.master"]):
        _send_transform(session, pipeline)
    return session


def _start_jvm(settings: Mapping[str, str]) -> None:
    """With the settings in a file that only we can read, for as long as the JVM starts. By itself, pyspark puts them
    into the command line, which everybody on the machine can read."""
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="avow-spark-") as folder:  # mode 0700
        path = Path(folder, "spark.properties")
        path.write_text("".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in settings.items()), "utf-8")
        words = ["--properties-file", str(path), "--load-spark-defaults"]
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{shlex.join(words)} {before or 'pyspark-shell'}"
        try:
            SparkContext._ensure_initialized()
        finally:
            del os.environ["PYSPARK_SUBMIT_ARGS"]
            if before is not None:
                os.environ["PYSPARK_SUBMIT_ARGS"] = before


def _escaped(text: str) -> str:
    """For a properties file, as Java reads it."""
    return "".join(_ESCAPES.get(c, c) for c in text)


@cache
def _spark_log() -> Path:
    """What this process's JVM says. A new file that only we can read, under a name that nobody can guess."""
    handle, path = tempfile.mkstemp(prefix="avow-spark-", suffix=".log")
    os.close(handle)
    return Path(path)


def keep_log() -> Path:
    """Where it is, also after an orderly end: it says why Spark is gone."""
    atexit.unregister(_remove_log)
    return _spark_log()


def _remove_log() -> None:
    _spark_log().unlink(missing_ok=True)


def _send_transform(spark: SparkSession, pipeline: PipelineConfig) -> None:
    """A transform that is one file goes to the executors. A package must be there, or come by spark.submit.pyFiles."""
    if python_transform(pipeline) is None:
        return
    assert pipeline.transform is not None
    assert pipeline.transform.python is not None
    found = find_spec(pipeline.transform.python.partition(":")[0])
    if found and found.has_location and "." not in found.name and not found.submodule_search_locations:
        spark.sparkContext.addPyFile(str(found.origin))


def _reach_master(master: str) -> None:
    """Is there a standalone master? Spark itself would ask for a minute, and then not say so."""
    if not master.startswith("spark://"):
        return
    problem = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            return
        except (OSError, ValueError) as error:
            problem = str(error)
    raise ConfigError(
        f"no Spark master answers at {master}: {problem}",
        advice="Check spark.master and that the master runs; its own page shows the address.",
    )


@contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """What a JVM that is started meanwhile prints goes to a file: it writes pages, and a person reads our lines."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers while the driver still prepares: they are the first batch's slow part.

    Whatever goes wrong here goes wrong in the first batch as well, and is told there.
    """

    def one_job() -> None:
        with suppress(PySparkException, Py4JError):
            _ask_executor(spark)

    threading.Thread(target=one_job, name="warm-up", daemon=True).start()


def _ask_executor(spark: SparkSession) -> str:
    """The version of avow where tasks run."""
    (answer,) = spark.range(1, numPartitions=1).mapInArrow(_tell_version, "version string").collect()
    return str(answer.version)


def _tell_version(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in rows:  # one row
        yield pa.RecordBatch.from_arrays([binaries(__version__.encode()).cast(pa.string())], ["version"])


def meet_executors(spark: SparkSession, stop: threading.Event, tell: Callable[[str], None]) -> None:
    """One small task on the cluster, before anything is claimed: does it give executors, and have they this avow?

    Spark waits for executors without end and without a word, and a missing package would look like a failure that may
    pass.
    """
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            answer.set_result(_ask_executor(spark))
        except (PySparkException, Py4JError) as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="executors", daemon=True).start()
    late_at = time.monotonic() + EXECUTORS_EXPECTED_S
    while not stop.is_set():
        try:
            version = answer.result(timeout=0.2)
            break
        except TimeoutError:
            if time.monotonic() > late_at:
                tell("waiting for executors: the cluster has given none yet, see the master's page")
                late_at = math.inf
        except (PySparkException, Py4JError) as error:
            raise ConfigError(f"the executors cannot run avow: {_cause(error)}", advice=EXECUTORS_ADVICE) from error
    else:
        return
    if version != __version__:
        raise ConfigError(f"the executors have avow {version}, the driver has {__version__}", advice=EXECUTORS_ADVICE)


def _cause(error: BaseException) -> str:
    """Why a Python worker did not come up: what it said itself, if it said anything."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if "No module named" in line or "Cannot run program" in line]
    return said[-1] if said else cause_line(error)


def has_ended(spark: SparkSession) -> bool:
    """Whether the application is over, by the master's will or with its JVM. No attempt on it can succeed, and each
    would fence whoever took over meanwhile."""
    try:
        return bool(spark._jsc.sc().isStopped())
    except (Py4JError, OSError):
        return True
