"""The Spark engine: Structured Streaming plans offset ranges, each task brings one range into the sink.

Theory of operation
-------------------
A run starts from the ledger, never from a checkpoint: it takes a run number, fences older runs, asks
``ledger.plan_start`` about every partition, and hands Spark the positions as ``startingOffsets``. Spark's checkpoint is
a temporary folder, thrown away with the attempt. For each micro-batch the planned ranges are read from the checkpoint's
offset log and passed into the tasks; one task is one partition's range (no ``minPartitions``), so order and claims are
per task. A range in which no record is visible (markers, aborted records) reaches no task; the driver claims it. After
each batch the positions are told to the Kafka group, for lag tools.

A failure that may pass (a broker, the database, a worker) ends the attempt, and another starts from the ledger, with
back-off and a bound. A named stop ends the run.

Owns: the driver's side of a run. Must not know: how a sink writes. Neighbours: ``task`` (what a task does), ``ledger``.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import math
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from avow import __version__, ledger, sinks
from avow.arrow import binaries
from avow.engines import failpoints, sql
from avow.engines.progress import Observer, Progress
from avow.engines.task import Preparing, Work, commit_staged, decoded, deliver, python_transform
from avow.errors import (
    AvowError,
    ConfigError,
    LogTruncated,
    ProtocolViolation,
    RetentionLoss,
    SourceError,
    Superseded,
    TooManyDeadLetters,
    TopicRecreated,
)
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.schema import Field
from avow.settings import Pipeline, revealed
from avow.sinks.base import CommittingSink, DriverSink

ATTEMPTS_WITHOUT_PROGRESS = 8
BACK_OFF_S = (0.5, 1, 2, 5, 10, 20, 30)
LAG_EVERY_S = 1.0
CONNECT_TIMEOUT_S = 5
EXECUTORS_EXPECTED_S = 15
SILENT = Observer()

# A driver that is its own executor needs no other address.
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

# Java options of the driver: quiet, and for a short run, quick to start. The optimising compiler costs seconds at the
# start and gives them back after a million records or so (measured with bench/postgres.py).
_QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
JAVA = f"{_QUIET} -XX:+UseParallelGC"
JAVA_SHORT = f"{_QUIET} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SHORT_BELOW = 1_000_000  # records that a run has to drain

# What ends a run for good. Anything else may pass, and is tried again.
STOPS: dict[str, type[AvowError]] = {
    stop.__name__: stop
    for stop in (
        ConfigError,
        LogTruncated,
        ProtocolViolation,
        RetentionLoss,
        Superseded,
        TooManyDeadLetters,
        TopicRecreated,
    )
}

# A record's columns, as the tasks get them. Headers go as JSON text: over a nested column Spark 4.1 recounts its whole
# batch for every row it adds (measured: 6 thousand records/s instead of hundreds).
RECORDS = (
    *("topic", "partition", "offset", "timestamp", "key", "value"),
    "CASE WHEN size(headers) > 0 THEN to_json(transform(headers, h -> struct(h.key AS k, base64(h.value) AS v))) END"
    " AS headers",
)

# Spark asks the broker twice for the log's ends at every poll, so polls should bring much. A user's own settings win.
FETCH = {"max.poll.records": "50000", "max.partition.fetch.bytes": str(8 * 1024 * 1024)}

EXECUTORS_ADVICE = (
    "Tasks need the driver's Python, with the same avow and what it depends on: install them at the same path on every "
    "machine, or send them with spark.archives and spark.pyspark.python. See docs/CLUSTER.md."
)

REPORT = "topic string, partition int, stop string, message string, advice string, staged binary"
_REPORT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32())]
    + [(name, pa.string()) for name in ("stop", "message", "advice")]
    + [("staged", pa.binary())]
)


class _StopAsked(Exception):
    """Raised into Spark to end the query between two batches."""


def spark_settings(pipeline: Pipeline, jars: list[Path], *, short: bool, archive: Path | None = None) -> dict[str, str]:
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
        # Kafka's consumers are kept for the next batch and let go soon after: the defaults keep data for minutes.
        "spark.kafka.consumer.cache.timeout": "30s",
        "spark.kafka.consumer.fetchedData.cache.timeout": "30s",
    }
    java = JAVA_SHORT if short else JAVA
    settings |= driver_settings(jars, f"{java} -XX:SharedArchiveFile={archive}" if archive else java)
    if _is_local(master):
        settings |= LOOPBACK
    else:
        # Executors fetch them from the driver. Theirs is another environment than ours, so a test's wish goes along.
        settings["spark.jars"] = ",".join(map(str, jars))
        settings |= {f"spark.executorEnv.{name}": value for name, value in failpoints.declared().items()}
    # Jars of the user's own come to ours, they do not take their place.
    for key, separator in (("spark.jars", ","), ("spark.driver.extraClassPath", ":")):
        if key in given and key in settings:
            given = given | {key: f"{settings[key]}{separator}{given[key]}"}
    return settings | given


def _is_local(master: str) -> bool:
    return master.startswith("local")


def driver_settings(jars: list[Path], java_options: str) -> dict[str, str]:
    """The driver's JVM. Whatever the master, it is a child of this process, on this machine."""
    return {
        # On the class path, not in spark.jars: only what is loaded from there can be kept ready in an archive.
        "spark.driver.extraClassPath": ":".join(map(str, jars)),
        "spark.driver.extraJavaOptions": java_options,
    }


def spark_session(pipeline: Pipeline, jars: list[Path], *, short: bool, archive: Path | None = None) -> SparkSession:
    settings = spark_settings(pipeline, jars, short=short, archive=archive)
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
            session = builder.getOrCreate()
    except (PySparkException, Py4JError, RuntimeError) as error:
        raise ConfigError(
            f"Spark does not start: {_first_line(error)}",
            advice=f"Check [spark]; `avow doctor` checks Java. Spark's own log: {log}",
        ) from error
    # Of a run that ends in good order nobody wants it; after a kill -9 it stays.
    atexit.register(_remove_log)
    if not _is_local(settings["spark.master"]):
        _send_transform(session, pipeline)
    return session


def _spark_log() -> Path:
    """What this process's JVM says."""
    return Path(tempfile.gettempdir(), f"avow-spark-{os.getpid()}.log")


def _remove_log() -> None:
    _spark_log().unlink(missing_ok=True)


def _send_transform(spark: SparkSession, pipeline: Pipeline) -> None:
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


class Run:
    """One execution of a pipeline.

    ``spark`` gives the session, once all that needs none has been checked; it is told whether the run will be short.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spark: Callable[[bool], SparkSession],
        *,
        once: bool = False,
        observer: Observer = SILENT,
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._once = once
        self._observer = observer
        self._stop = threading.Event()
        self._batch_running = threading.Lock()

    def stop(self) -> None:
        """Ask the run to end after the current batch. Safe to call from a signal handler."""
        self._stop.set()

    def execute(self) -> None:
        """Run until drained, stopped, or ended by a named stop."""
        os.environ[failpoints.DRIVER] = str(os.getpid())
        pipeline = self._pipeline
        # What needs no JVM is asked before one starts: a wrong password or a missing topic is told at once.
        python_transform(pipeline)
        with sinks.driver_sink(pipeline) as store, Log(pipeline.source, pipeline.name) as log:
            store.prepare()
            known = log.partitions()
            spark = self._spark(self._once and _backlog(store, log, known) < SHORT_BELOW)
            if _is_local(spark.conf.get("spark.master") or ""):
                _warm_up(spark)
            else:
                _meet_executors(spark, self._stop, self._observer.event)
            columns = sink_fields(spark, pipeline)
            if store.prepare_table(columns[0], rest=columns[1]):
                self._observer.event(f"made {pipeline.sink.target}")
        self._attempts(spark, columns)

    def _attempts(self, spark: SparkSession, columns: Columns) -> None:
        failures = 0
        while not self._stop.is_set():
            progressed = False
            try:
                # Opening one may fail as well: the database that ended the last attempt may not be back yet.
                attempt = _Attempt(
                    self._pipeline, spark, columns, self._stop, self._batch_running, self._observer, self._once
                )
                try:
                    attempt.execute()
                    return
                finally:
                    progressed = attempt.batches > 0
                    attempt.close()
            except tuple(STOPS.values()):
                raise
            except (AvowError, PySparkException, Py4JError, OSError) as error:
                if _has_ended(spark):
                    atexit.unregister(_remove_log)
                    raise AvowError(
                        f"Spark has ended, and the run with it: {_first_line(error)}",
                        advice="The ledger is whole: start again. If it happens again, Spark's own log "
                        f"({_spark_log()}), the master's page or the kernel's log (out of memory: raise [spark] "
                        "driver.memory) say why.",
                    ) from error
                failures = 1 if progressed else failures + 1
                if failures > ATTEMPTS_WITHOUT_PROGRESS:
                    raise _last_word(error, failures) from error
                pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
                self._observer.event(f"failed ({_first_line(error)}); trying again from the ledger in {pause:g} s")
                self._stop.wait(pause)


def _backlog(store: DriverSink, log: Log, known: Iterable[TopicPartition]) -> int:
    """About how many records there are to drain. Nothing rests on it but how Java is started."""
    positions = {where: entry.position for where, entry in store.entries().items()}
    earliest = log.declared_start("earliest", known)
    return sum(end - positions.get(where, earliest[where]) for where, end in log.stable_ends(known).items())


def _warm_up(spark: SparkSession) -> None:
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
        yield pa.RecordBatch.from_arrays([_text(__version__)], ["version"])


def _meet_executors(spark: SparkSession, stop: threading.Event, tell: Callable[[str], None]) -> None:
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
    return said[-1] if said else _first_line(error)


def _has_ended(spark: SparkSession) -> bool:
    """Whether the application is over, by the master's will or with its JVM. No attempt on it can succeed, and each
    would fence whoever took over meanwhile."""
    try:
        return bool(spark._jsc.sc().isStopped())
    except (Py4JError, OSError):
        return True


def _last_word(error: Exception, failures: int) -> AvowError:
    kind = type(error) if isinstance(error, AvowError) else SourceError
    return kind(
        f"gave up after {failures} attempts without progress: {_first_line(error)}",
        advice=getattr(error, "advice", "") or "The ledger is whole: start again when the cause is mended.",
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, Py4JJavaError):
        # The first line of these names a call of py4j's own; Java's words begin with a colon.
        lines = [line.removeprefix(": ") for line in lines if line.startswith(": ")] or lines
    return (lines[0] if lines else type(error).__name__)[:300]


Columns = tuple[tuple[Field, ...], bool]


def sink_fields(spark: SparkSession, pipeline: Pipeline) -> Columns:
    """The payload's columns in the sink, after the transform, and whether unknown fields are kept beside them."""
    if pipeline.transform is not None:
        return sql.output_fields(spark, pipeline), False
    rest = pipeline.decode.unknown_fields == "keep" and pipeline.decode.format == "json"
    return pipeline.decode.columns.fields, rest


class _Attempt:
    """From the ledger to the first failure."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        columns: Columns,
        stop: threading.Event,
        batch_running: threading.Lock,
        observer: Observer,
        once: bool,
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._columns = columns
        self._stop = stop
        self._batch_running = batch_running
        self._observer = observer
        self._once = once
        self._store = sinks.driver_sink(pipeline)
        self._log = Log(pipeline.source, pipeline.name)
        self._checkpoint = Path(tempfile.mkdtemp(prefix="avow-checkpoint-"))
        self._query: StreamingQuery | None = None
        self._failure: BaseException | None = None
        self._positions: dict[TopicPartition, int] = {}  # where the next planned range starts
        self._told_lag_at = 0.0
        self._lag: tuple[int, float | None] = (0, None)
        self.batches = 0

    def close(self) -> None:
        if self._query is not None:
            with suppress(PySparkException, Py4JError, OSError):  # the JVM may be gone
                self._query.stop()
        self._store.close()
        self._log.close()
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    def execute(self) -> None:
        self._store.prepare_table(self._columns[0], rest=self._columns[1])  # it may have been altered meanwhile
        self._run = self._store.open_run()
        self._positions = self._start()
        self._observer.event(
            f"run {self._run} of {self._pipeline.name}: {self._pipeline.guarantee}, "
            f"{len(self._positions)} partitions, from the ledger"
        )
        self._tell_group()
        self._query = self._start_query()
        try:
            while not self._query.awaitTermination(1):
                # Between two batches nothing is in flight; inside one, the batch ends first.
                if self._stop.is_set() and self._batch_running.acquire(blocking=False):
                    self._batch_running.release()
                    return
        except StreamingQueryException:
            # Spark tells of our own exception as text; the exception itself says more.
            if self._failure is None:
                raise
            if not isinstance(self._failure, _StopAsked):
                raise self._failure from None

    def _start(self) -> dict[TopicPartition, int]:
        """Ask the rules about every partition, and write first positions before anything is read."""
        source = self._pipeline.source
        known = self._log.partitions()
        entries: dict[TopicPartition, Entry | None] = dict(self._store.entries())
        views = self._log.view({where: entries.get(where) for where in known})
        declared = self._log.declared_start(source.start, [where for where in known if not entries.get(where)])
        starts = {
            where: ledger.plan_start(
                entries.get(where), views[where], declared.get(where, 0), skip_lost=source.on_data_loss == "skip"
            )
            for where in known
        }
        self._store.adopt(
            {w: Entry(start.position, known[w], self._run) for w, start in starts.items() if start.adopted}
        )
        for start in starts.values():
            if start.given_up:
                lost = len(start.given_up)
                self._store.claim(start.given_up, self._run, -1, Counts(read=lost, skipped=lost))
                self._observer.event(f"retention-loss: {start.given_up} is claimed as skipped, as declared")
        return {where: start.position for where, start in starts.items()}

    def _start_query(self) -> StreamingQuery:
        source, batch = self._pipeline.source, self._pipeline.batch
        starting: dict[str, dict[str, int]] = {}
        for where, position in self._positions.items():
            starting.setdefault(where.topic, {})[str(where.partition)] = position
        reader = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", source.brokers)
            .option("startingOffsets", json.dumps(starting))
            .option("failOnDataLoss", "true")
            .option("includeHeaders", "true")
            .option("maxOffsetsPerTrigger", str(batch.max_records))
        )
        for key, value in (FETCH | revealed(source.kafka)).items():
            reader = reader.option(f"kafka.{key}", value)
        reader = reader.option("kafka.isolation.level", "read_committed")
        if source.topics_pattern is not None:
            reader = reader.option("subscribePattern", source.topics_pattern)
        else:
            reader = reader.option("subscribe", ",".join(source.topics))
        interval_ms = max(1, round(batch.interval.total_seconds() * 1000))
        writer = (
            reader.load()
            .selectExpr(*RECORDS)
            .writeStream.foreachBatch(self._on_batch)
            .option("checkpointLocation", self._checkpoint.as_uri())
        )
        when = {"availableNow": True} if self._once else {"processingTime": f"{interval_ms} milliseconds"}
        return writer.trigger(**when).start()

    def _on_batch(self, frame: DataFrame, batch: int) -> None:
        with self._batch_running:
            try:
                if self._stop.is_set():
                    raise _StopAsked
                self._deliver_batch(frame, batch)
            except BaseException as error:
                self._failure = error
                raise

    def _deliver_batch(self, frame: DataFrame, batch: int) -> None:
        started = time.monotonic()
        ranges = self._planned(batch)
        if not ranges:
            return
        work = Work(self._pipeline, self._run, batch, ranges, self._store.brief())
        seen, staged = set(), []
        for report in work_frame(frame, work).collect():
            if report.stop is not None:
                raise STOPS[report.stop](report.message, advice=report.advice)
            seen.add(TopicPartition(report.topic, report.partition))
            staged += [bytes(report.staged)] if report.staged is not None else []
        if staged:
            assert isinstance(self._store, CommittingSink)
            commit_staged(staged, work, self._store)
        for where, planned in ranges.items():
            if where not in seen:  # nothing visible in it: no task has claimed it
                self._store.claim(planned, self._run, batch)
            self._positions[where] = planned.until
        self.batches += 1
        self._tell_group()
        self._tell_progress(batch, sum(map(len, ranges.values())), time.monotonic() - started)

    def _planned(self, batch: int) -> dict[TopicPartition, OffsetRange]:
        """The batch's ranges, from Spark's own offset log: each ends where it says, and starts where the last ended."""
        lines = (self._checkpoint / "offsets" / str(batch)).read_text().splitlines()
        ends = {
            TopicPartition(topic, int(partition)): end
            for topic, partitions in json.loads(lines[-1]).items()
            for partition, end in partitions.items()
        }
        self._adopt_new(ends.keys() - self._positions.keys())
        return {
            where: OffsetRange(where.topic, where.partition, self._positions[where], end)
            for where, end in ends.items()
            if end > self._positions[where]
        }

    def _adopt_new(self, found: set[TopicPartition]) -> None:
        """Partitions added while running: Spark reads them from their earliest offset, and so does the ledger."""
        if not found:
            return
        known = self._log.partitions()
        earliest = self._log.declared_start("earliest", found)
        entries = self._store.entries()
        fresh = {where: Entry(earliest[where], known[where], self._run) for where in found if where not in entries}
        self._store.adopt(fresh)
        for where in sorted(found):
            self._positions[where] = entries[where].position if where in entries else earliest[where]
            self._observer.event(f"partition added: {where.topic}/{where.partition}")

    def _tell_group(self) -> None:
        """Let lag tools see the positions. It is a courtesy: the truth is in the ledger."""
        try:
            self._log.tell(self._positions)
        except SourceError as error:
            self._observer.event(f"the group could not be told its positions: {_first_line(error)}")

    def _tell_progress(self, batch: int, records: int, seconds: float) -> None:
        now = time.monotonic()
        if now - self._told_lag_at > LAG_EVERY_S:
            with suppress(SourceError):
                self._lag = self._measure_lag()
            self._told_lag_at = now
        counts = sum((entry.counts for entry in self._store.entries().values()), ledger.NOTHING)
        self._observer.progress(Progress(self._run, batch, records, seconds, counts, *self._lag))

    def _measure_lag(self) -> tuple[int, float | None]:
        """In records, and in seconds: the age of the oldest record that is not claimed."""
        ends = self._log.stable_ends(self._positions)
        behind = {where: position for where, position in self._positions.items() if position < ends[where]}
        records = sum(ends[where] - position for where, position in behind.items())
        stamps = [stamp for stamp in self._log.timestamps_at(behind).values() if stamp is not None]
        return records, time.time() - min(stamps) / 1000 if stamps else None


def work_frame(frame: DataFrame, work: Work) -> DataFrame:
    """The job of one batch: each task delivers its range and reports."""
    if work.by_sql:
        return sql.decode_frame(frame, work).mapInArrow(lambda rows: _write_task(iter(rows), work), REPORT)
    return frame.mapInArrow(lambda records: _decode_and_write_task(iter(records), work), REPORT)


def _decode_and_write_task(batches: Iterator[pa.RecordBatch], work: Work) -> Iterator[pa.RecordBatch]:
    """In a Python worker: records in, a report out."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return
    where = TopicPartition(first.column("topic")[0].as_py(), first.column("partition")[0].as_py())
    records = itertools.chain([first], filled)
    yield _reported(where, work, decoded(records, work.pipeline, work.ranges[where]))
    for _ in records:  # a replay leaves its records unread, and Spark wants them read
        pass


def _write_task(batches: Iterator[pa.RecordBatch], work: Work) -> Iterator[pa.RecordBatch]:
    """In a Python worker behind the query: its rows in, a report out."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    rows = itertools.chain([first] if first is not None else [], filled)
    if first is not None:
        topic, partition = (first.column(name)[0].as_py() for name in work.pipeline.sink.lineage[:2])
        where, note = TopicPartition(topic, partition), None
    else:
        # Every record was left out or is dead. The note tells of them; without one there was none.
        note = sql.take_note(work)
        if note is None:
            return
        where = note.where
    yield _reported(where, work, sql.prepared(rows, work, note))
    for _ in rows:
        pass
    sql.take_note(work)  # a replay has not taken it


def _reported(where: TopicPartition, work: Work, prepare: Preparing) -> pa.RecordBatch:
    """Deliver one range. A named stop is told and not raised: Spark would try again what must not be tried again."""
    # From bytes and not from Python values: those would import pandas, half a second for a worker's first task.
    columns = [_text(where.topic), pa.Array.from_buffers(pa.int32(), 1, [None, _bytes(where.partition)])]
    try:
        sink = sinks.task_sink(work.pipeline, work.run, work.brief)
        report = deliver(prepare, work.ranges[where], work, sink)
        told = [pa.nulls(1, pa.string())] * 3
        told.append(pa.nulls(1, pa.binary()) if report.staged is None else binaries(report.staged))
    except tuple(STOPS.values()) as stop:
        told = [_text(type(stop).__name__), _text(str(stop)), _text(stop.advice), pa.nulls(1, pa.binary())]
    return pa.RecordBatch.from_arrays([*columns, *told], schema=_REPORT)


def _text(value: str) -> pa.Array:
    data = value.encode()
    return pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, len(data))), pa.py_buffer(data))


def _bytes(value: int) -> pa.Buffer:
    return pa.py_buffer(struct.pack("<i", value))
