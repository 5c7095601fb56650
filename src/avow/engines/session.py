"""The Spark session of a run: the caller's or one of our own, its settings, its JVM, and whether it is still there.

A session that somebody else made is used as it is: it is neither changed nor stopped. It may be one of Spark Connect
(``is_connect``): then there is no JVM on this side, and nothing here may ask for one. One of our own leaves nothing
behind in the process: the environment is restored as soon as the JVM runs, and the JVM, its log and its folders go with
the last run that uses it (``SparkLease``).

Owns: everything about Spark that is so before the first batch, and its end. Must not know: what a run does with it. Its
neighbours are ``spark`` (the run) and ``avow.local.spark`` (the class archive).
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession, is_remote

from avow import __version__
from avow.arrow import binaries
from avow.engines.causes import cause_line
from avow.engines.task import python_transform
from avow.errors import ConfigError
from avow.settings import PipelineConfig, unwrap_secrets

# What a call to Spark raises. An environment with Spark Connect alone (pyspark-client) has no py4j.
SPARK_ERRORS: tuple[type[Exception], ...] = (PySparkException,)
with suppress(ModuleNotFoundError):
    from py4j.protocol import Py4JError

    SPARK_ERRORS = (PySparkException, Py4JError)
NOT_STARTED: tuple[type[Exception], ...] = (*SPARK_ERRORS, RuntimeError)
NOT_THERE: tuple[type[Exception], ...] = (*SPARK_ERRORS, OSError)

CONNECT_TIMEOUT_S = 5
SERVER_LOST_S = 15  # of a Connect server that cannot be reached, until it counts as gone
SERVER_ASKED_EVERY_S = 5
EXECUTORS_EXPECTED_S = 15
JVM_ENDS_S = 10

# What pyspark reads from the environment when it starts, or writes there; all of it is restored at once.
PYSPARK_VARIABLES = ("PYSPARK_PYTHON", "PYSPARK_SUBMIT_ARGS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")

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
    given = unwrap_secrets(pipeline.spark)
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
    return settings | given


def is_local(master: str) -> bool:
    return master.startswith("local")


@dataclass(slots=True)
class _Started:
    """A session that we made, with what has to go when it ends."""

    session: SparkSession
    gateway: Any  # to the JVM, if that is ours too; else None
    log: Path  # what the JVM says
    paths: list[str]  # that pyspark has put into sys.path
    keep_log: bool = False
    users: int = 1  # whoever has made it


_lock = threading.RLock()
_started: _Started | None = None  # a process has one Spark application at a time


class SparkLease:
    """The Spark session of one run, audit or redrive, found when it is first asked for: the caller's, one that is
    active in this process, or one of our own, which ends with its last user."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        make: Callable[[bool], SparkSession],
        given: SparkSession | None = None,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._pipeline = pipeline
        self._make = make
        self._given = given
        self._on_event = on_event
        self._session: SparkSession | None = None
        self._own: _Started | None = None

    def close(self) -> None:
        with _lock:
            own, self._own, self._session = self._own, None, None
            if own is not None:
                own.users -= 1
                if not own.users:
                    _end(own)

    def __call__(self, short: bool = True) -> SparkSession:
        with _lock:
            if self._session is None:
                self._session = self._foreign() or self._ours(short)
            return self._session

    def _foreign(self) -> SparkSession | None:
        session = self._given or (_active() if _started is None else None)
        if session is not None:
            if self._pipeline.spark:
                self._on_event("the settings in [spark] are not applied: the Spark session was made by the caller")
            check_session(session, self._pipeline)
        return session

    def _ours(self, short: bool) -> SparkSession:
        if _started is not None and has_ended(_started.session):
            _end(_started)
        if _started is None:
            self._make(short)
        else:
            _started.users += 1
            if self._pipeline.spark:
                self._on_event("the settings in [spark] are not applied: the Spark session is shared with another run")
        self._own = _started
        assert self._own is not None
        return self._own.session


def is_connect(spark: SparkSession) -> bool:
    """Whether it is a session of Spark Connect: a client without a JVM, whose driver is a server."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _active() -> SparkSession | None:
    """The session that this process has already."""
    if not is_remote():
        from pyspark import SparkContext

        if SparkContext._active_spark_context is None:
            return None
    return SparkSession.builder.getOrCreate()


def check_session(spark: SparkSession, pipeline: PipelineConfig) -> None:
    """Whether a session that is not ours has what a run needs."""
    if has_ended(spark):  # asked first: a client of Spark Connect tries for ten minutes before it says so
        raise ConfigError(
            "the Spark session has ended, or its Connect server cannot be reached", advice="Make a new session."
        )
    zone = spark.conf.get("spark.sql.session.timeZone")
    if pipeline.by_sql and zone not in ("UTC", "Etc/UTC", "Z", "GMT"):
        raise ConfigError(
            f"the Spark session has spark.sql.session.timeZone = {zone!r}, and transform.sql needs UTC: a pipeline "
            "must give the same rows wherever it runs",
            advice='Call spark.conf.set("spark.sql.session.timeZone", "UTC"), or pass spark.newSession() with it set.',
        )
    if is_local(spark.conf.get("spark.master") or ""):  # a cluster's executors are asked by the run
        meet_executors(spark, threading.Event(), lambda _: None)


def spark_session(pipeline: PipelineConfig, *, short: bool, archive: Path | None = None) -> SparkSession:
    """A session of our own."""
    settings = spark_settings(pipeline, short=short, archive=archive) | _submitted(pipeline)
    _reach_master(settings["spark.master"])
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    handle, path = tempfile.mkstemp(prefix="avow-spark-", suffix=".log")  # only we can read it
    os.close(handle)
    log = Path(path)
    # py4j's first call imports it, and with it pandas, for a second: better now, while the JVM starts.
    threading.Thread(target=importlib.import_module, args=["pyspark.testing.utils"], daemon=True).start()
    gateway, path_before = None, list(sys.path)
    try:
        with _process_restored():
            # The workers must run this very Python, with this very package, unless the file says where theirs is.
            # Started from Python, pyspark looks at the variable alone.
            os.environ["PYSPARK_PYTHON"] = (
                settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
            )
            gateway = _start_jvm(settings, log)
            session = builder.getOrCreate()
    except NOT_STARTED as error:
        _end_jvm(gateway)
        raise ConfigError(
            f"Spark does not start: {cause_line(error)}",
            advice=f"Check [spark]; `avow doctor` checks Java. Spark's own log: {log}",
        ) from error
    global _started
    _started = _Started(session, gateway, log, [entry for entry in sys.path if entry not in path_before])
    atexit.register(_remove_log)  # a run that ends in good order needs no log; after a kill -9 it stays
    if not is_local(settings["spark.master"]):
        _send_transform(session, pipeline)
    return session


def _submitted(pipeline: PipelineConfig) -> dict[str, str]:
    """Under spark-submit, its own settings: they go before ours, and the user's in ``[spark]`` before them."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return {key: value for key, value in SparkConf().getAll() if key not in unwrap_secrets(pipeline.spark)}


@contextmanager
def _process_restored() -> Iterator[None]:
    """Around the start of Spark: environment and signal handlers are afterwards as they were before."""
    before = {name: os.environ.get(name) for name in PYSPARK_VARIABLES}
    on_interrupt = signal.getsignal(signal.SIGINT)  # pyspark's own would cancel the batch that is to end first
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if threading.current_thread() is threading.main_thread() and on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)


def _start_jvm(settings: Mapping[str, str], log: Path) -> Any:
    """Start it, unless this process has one (then None): with what it prints in the log, and with the settings in a
    file that only we can read, for as long as it starts. By itself, pyspark puts them into the command line, which
    everybody on the machine can read."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return None
    with tempfile.TemporaryDirectory(prefix="avow-spark-") as folder, log.open("ab") as output:  # mode 0700
        path = Path(folder, "spark.properties")
        path.write_text("".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in settings.items()), "utf-8")
        words = ["--properties-file", str(path), "--load-spark-defaults"]
        submit = os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{shlex.join(words)} {submit}"
        gateway = launch_gateway(None, {"stdout": output, "stderr": output})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)
    return gateway if gateway.proc is not None else None  # under spark-submit, the JVM was there before us


def _end(own: _Started) -> None:
    """Stop the session. If its JVM is ours, that ends too, with its folders and the threads that talk to it."""
    global _started
    with suppress(*NOT_THERE):  # the JVM may be gone already
        own.session.stop()
    _end_jvm(own.gateway)
    sys.path[:] = [entry for entry in sys.path if entry not in own.paths]
    if _started is own:
        _remove_log()
        atexit.unregister(_remove_log)
        _started = None


def _end_jvm(gateway: Any) -> None:
    if gateway is None:
        return
    from pyspark import SparkContext

    with suppress(*NOT_THERE):
        gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(JVM_ENDS_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None


def _escaped(text: str) -> str:
    """For a properties file, as Java reads it."""
    return "".join(_ESCAPES.get(c, c) for c in text)


def keep_log() -> str:
    """Where it is, also after an orderly end: it says why Spark is gone."""
    if _started is None:
        return "where the session's driver writes it"
    _started.keep_log = True
    return str(_started.log)


def _remove_log() -> None:
    if _started is not None and not _started.keep_log:
        _started.log.unlink(missing_ok=True)


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


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers while the driver still prepares: they are the first batch's slow part.

    Whatever goes wrong here goes wrong in the first batch as well, and is reported there.
    """

    def one_job() -> None:
        with suppress(*SPARK_ERRORS):
            _ask_executor(spark)

    threading.Thread(target=one_job, name="warm-up", daemon=True).start()


def _ask_executor(spark: SparkSession) -> str:
    """The version of avow where tasks run."""
    (answer,) = spark.range(1, numPartitions=1).mapInArrow(_report_version, "version string").collect()
    return str(answer.version)


def _report_version(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in rows:  # one row
        yield pa.RecordBatch.from_arrays([binaries(__version__.encode()).cast(pa.string())], ["version"])


def meet_executors(spark: SparkSession, stop: threading.Event, on_event: Callable[[str], None]) -> None:
    """One small task on the cluster, before anything is claimed: does it give executors, and have they this avow?

    Spark waits for executors without end and without a word, and a missing package would look like a failure that may
    pass.
    """
    answer = _in_thread(lambda: _ask_executor(spark), "executors")
    late_at = time.monotonic() + EXECUTORS_EXPECTED_S
    while not stop.is_set():
        try:
            version = answer.result(timeout=0.2)
            break
        except TimeoutError:
            if time.monotonic() > late_at:
                on_event("waiting for executors: the cluster has given none yet, see the master's page")
                late_at = math.inf
        except SPARK_ERRORS as error:
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


def collect(frame: DataFrame) -> list[Row]:
    """``frame.collect()``. If a Connect server is gone its client would try for ten minutes more: this raises within
    some seconds."""
    spark = frame.sparkSession
    if not is_connect(spark):
        return frame.collect()
    answer = _in_thread(frame.collect, "connect-job")
    while not wait([answer], SERVER_ASKED_EVERY_S).done:
        if not _reachable(spark):
            raise ServerGone(f"the Spark Connect server at {_client(spark).host} cannot be reached")
    rows: list[Row] = answer.result()
    return rows


class ServerGone(OSError):
    """Of a Connect server."""


def has_ended(spark: SparkSession) -> bool:
    """Whether the application is over, by the master's will or with its JVM; over Spark Connect, whether the server is
    gone or has forgotten the session. No attempt on it can succeed, and each would fence whoever took over
    meanwhile."""
    try:
        if not is_connect(spark):
            return bool(spark._jsc.sc().isStopped())
        if _client(spark).is_closed or not _reachable(spark):
            return True
        spark.conf.get("spark.app.name")  # a server that was started anew refuses what it does not know
        return False
    except NOT_THERE:
        return True


def _client(spark: SparkSession) -> Any:
    """Of Spark Connect: what talks to the server."""
    session: Any = spark
    return session.client


def _reachable(spark: SparkSession) -> bool:
    """Whether the connection to a Connect server is there, or can be made again."""
    grpc: Any = importlib.import_module("grpc")  # a dependency of Spark Connect alone
    ready = grpc.channel_ready_future(_client(spark)._channel)
    try:
        ready.result(timeout=SERVER_LOST_S)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        ready.cancel()


def _in_thread(call: Callable[[], Any], name: str) -> Future[Any]:
    """Called by a thread that nobody waits for at the end of the process."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised to whoever asks for the result
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
