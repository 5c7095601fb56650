"""The Python API of a pipeline: declare it, explain it, run it, audit it, inspect and redrive its dead letters.

``avow.Pipeline`` is what the command line and the dashboard call, and what a notebook, a service or a scheduler calls.
It changes nothing in the process that uses it: no environment variable, no signal handler, no standard stream. What it
starts (threads, a JVM, temporary files) ends with the call or the run that started it.

Owns: the public methods and their results. Must not know: how any of it is done, or how it is shown. Neighbours:
``plan``, ``engines``, ``audit`` and ``clients`` below it; ``cli`` and ``dashboard`` above it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from avow import extras, native, sinks
from avow.client_cache import close_clients
from avow.engines.hooks import NO_HOOKS, Hooks
from avow.engines.progress import Observer, Progress
from avow.errors import AvowError, ConfigError
from avow.guarantee import Guarantee
from avow.plan import Plan, declare_checked, load_checked, plan
from avow.settings import PipelineConfig, refused
from avow.settings.values import Refused
from avow.sinks.base import DeadLetter, DeadLetterPreview, Selection

if TYPE_CHECKING:  # each brings Arrow, Kafka's client or Spark with it, which a bad declaration need not wait for
    from pyspark.sql import SparkSession

    from avow.audit.report import AuditReport
    from avow.clients.receipts import Receipts
    from avow.engines.redrive import Redriven
    from avow.engines.session import SparkLease
    from avow.kafka.log import TopicPartition
    from avow.ledger import Entry
    from avow.sinks.lake.config import LakeConfig
    from avow.sinks.lake.maintenance import Compacted, Orphan

LOGGER = logging.getLogger("avow.pipeline")

Engine = Literal["spark", "consumer"]
Table = Mapping[str, Any]  # one section of a pipeline file


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run. The counts are the ledger's, at the end less at the beginning: where several processes share
    the pipeline, or dead letters are redriven meanwhile, that is among them."""

    pipeline: str
    engine: Engine
    drained: bool  # all that was in the topics at the start is claimed; False if the run was stopped
    runs: tuple[int, ...]  # the run numbers that it took in the ledger: one for each attempt or assignment
    read: int  # = written + dead + skipped
    written: int
    dead: int
    skipped: int
    positions: Mapping[TopicPartition, int] = field(repr=False)  # the next offset to claim, at the end
    seconds: float

    def __str__(self) -> str:
        ended = "drained" if self.drained else "stopped"
        return (
            f"{self.pipeline}: {ended} after {self.seconds:.1f} s, {self.read:,} read = {self.written:,} written + "
            f"{self.dead:,} dead letters + {self.skipped:,} skipped"
        )


class PipelineRun:
    """A run in the background. As a context manager it stops the run at the end of the block, waits for the batch in
    progress, and raises what the run failed with."""

    def __init__(self, config: PipelineConfig, *, once: bool, spark: SparkSession | None, observer: Observer) -> None:
        self._config = config
        self._once = once
        self._on_progress = observer.progress
        self._progress: Progress | None = None
        self._runs: list[int] = []
        self._before: Mapping[TopicPartition, Entry] = {}
        self._summary: RunSummary | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        observer = replace(observer, progress=self._keep_progress, began=self._began)
        self._execute, self._stop = _engine(config, once, spark, observer)
        self._thread = threading.Thread(target=self._run, name=f"avow-{config.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._ended.wait()
        self._thread.join()
        if failed is None:
            self.await_termination()

    def stop(self) -> None:
        """Ask the run to end after the batch in progress. Returns at once; safe to call from a signal handler."""
        self._stop()

    @property
    def is_active(self) -> bool:
        return not self._ended.is_set()

    @property
    def progress(self) -> Progress | None:
        """The newest; None before the first batch."""
        return self._progress

    def await_termination(self, timeout: float | None = None) -> RunSummary | None:
        """Wait for the end, for at most so many seconds: None if it still runs then. Raises what the run failed with;
        ``NotDrained`` if it was to drain and was stopped before."""
        if not self._ended.wait(timeout):
            return None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._summary

    def _run(self) -> None:
        began = time.monotonic()
        native.allow(self._config.native)
        try:
            self._execute()
            self._summary = self._summed_up(time.monotonic() - began)
        except AvowError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            from avow.engines.causes import translated

            self._failure = translated(error)
            self._failure.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - the same
            self._failure = error
        finally:
            close_clients()
            self._ended.set()

    def _summed_up(self, seconds: float) -> RunSummary:
        with sinks.driver_sink(self._config) as store:
            after = {tp: held.entry for tp, held in store.ledger_snapshot().items()}
        before = self._before if self._runs else after  # stopped before it began
        return RunSummary(
            pipeline=self._config.name,
            engine=self._config.engine,
            drained=self._once,  # else the engine has raised NotDrained
            runs=tuple(self._runs),
            **{name: _total(after, name) - _total(before, name) for name in ("read", "written", "dead", "skipped")},
            positions={tp: after[tp].position for tp in sorted(after)},
            seconds=seconds,
        )

    def _began(self, run: int, entries: Mapping[TopicPartition, Entry]) -> None:
        if not self._runs:
            self._before = entries
        self._runs.append(run)

    def _keep_progress(self, progress: Progress) -> None:
        self._progress = progress
        self._on_progress(progress)


def _total(entries: Mapping[TopicPartition, Entry], name: str) -> int:
    return sum(getattr(entry.counts, name) for entry in entries.values())


def _engine(
    config: PipelineConfig, once: bool, spark: SparkSession | None, observer: Observer
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The engine's run: how to execute it, and how to ask it to stop."""
    if config.engine == "consumer":
        from avow.engines import consumer

        consuming = consumer.ConsumerRun(config, once=once, observer=observer)
        return consuming.execute, consuming.stop
    with extras.named():
        from avow.engines.spark import SparkRun
    session = _Session(config, spark, observer.event)
    running = SparkRun(config, session, once=once, observer=observer)

    def execute() -> None:
        with session:
            running.execute()

    return execute, running.stop


class _Session:
    """Gives the Spark session when it is first asked for: an audit or a redrive may need none, and then pyspark need
    not even be installed."""

    def __init__(
        self, config: PipelineConfig, given: SparkSession | None, on_event: Callable[[str], None] = LOGGER.info
    ) -> None:
        self._arguments = config, given, on_event
        self._lease: SparkLease | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._lease.close()

    def __call__(self, short: bool = True) -> SparkSession:
        if self._lease is None:
            from avow.local import spark

            self._lease = spark.lease(*self._arguments)
        return self._lease(short)


class SelectionOptions(TypedDict, total=False):
    """A filter of dead letters; keys that are absent match any."""

    reason: str | None
    topic: str | None
    partition: int | None
    from_offset: int | None
    until_offset: int | None
    since: datetime | None  # when it became a dead letter; UTC unless it has a zone
    until: datetime | None


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """How many dead letters have one reason."""

    reason: str
    count: int
    last: datetime  # when the newest of them became one


class DeadLetterQueue:
    """The dead letters of one pipeline."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config

    def counts(self, **which: Unpack[SelectionOptions]) -> Sequence[ReasonCount]:
        """How many dead letters there are, by reason."""
        with sinks.dead_letters(self._config) as reader:
            return [ReasonCount(*row) for row in reader.by_reason(_selection(which))]

    def list(self, *, limit: int = 100, **which: Unpack[SelectionOptions]) -> Sequence[DeadLetter]:
        """The first dead letters by topic, partition and offset, with the whole record."""
        with sinks.dead_letters(self._config) as reader:
            return reader.select(_selection(which), limit)

    def preview(self, *, limit: int = 100, **which: Unpack[SelectionOptions]) -> Sequence[DeadLetterPreview]:
        """The same, with only the beginning of each value."""
        with sinks.dead_letters(self._config) as reader:
            return reader.previews(_selection(which), limit)

    def get(self, topic: str, partition: int, offset: int) -> DeadLetter | None:
        """The dead letter of this record; None if it is not one."""
        matching = self.list(limit=1, topic=topic, partition=partition, from_offset=offset, until_offset=offset + 1)
        return matching[0] if matching else None

    def redrive(
        self,
        *,
        spark: SparkSession | None = None,
        on_progress: Callable[[Redriven], None] = lambda _: None,
        hooks: Hooks = NO_HOOKS,
        **which: Unpack[SelectionOptions],
    ) -> Redriven:
        """Write them into the sink, under the topic, partition and offset of their records. Records that are still bad
        stay dead letters. ``spark`` is needed only if the pipeline has a SQL transform."""
        from avow.engines.redrive import redrive

        try:
            with _Session(self._config, spark) as session:
                return redrive(self._config, _selection(which), session, on_progress, hooks)
        finally:
            close_clients()


def _selection(which: SelectionOptions) -> Selection:
    """Times without a zone are UTC."""
    found = Selection(**which)
    zoned = {
        name: moment.replace(tzinfo=UTC)
        for name in ("since", "until")
        if (moment := getattr(found, name)) is not None and moment.tzinfo is None
    }
    return replace(found, **zoned)


class Pipeline:
    """A pipeline: from Kafka topics into a sink, under a declared guarantee.

    The arguments are the keys of a pipeline file (docs/PIPELINE.md), its sections as mappings. Everything that can be
    checked without I/O is checked here. ``${env:NAME}`` in a string is filled in from the environment, as in a file.
    """

    def __init__(
        self,
        *,
        name: str,
        guarantee: Guarantee | str,
        source: Table,
        decode: Table,
        sink: Table,
        transform: Table | None = None,
        dead_letters: Table | None = None,
        batch: Table | None = None,
        spark: Table | None = None,
        engine: Engine = "spark",
        native: bool = True,
    ) -> None:
        given = {
            "name": name,
            "guarantee": guarantee,
            "engine": engine,
            "native": native,
            "source": source,
            "decode": decode,
            "transform": transform,
            "sink": sink,
            "dead_letters": dead_letters,
            "batch": batch,
            "spark": spark,
        }
        document = {key: _as_in_file(value) for key, value in given.items() if value is not None}
        self._config = declare_checked(document, os.environ)

    @classmethod
    def load(cls, path: Path | str, env: Mapping[str, str] = os.environ, *, native: bool | None = None) -> Self:
        """The pipeline of a file. ``env``: what ``${env:NAME}`` in it is filled in from. ``native`` takes the place of
        the declared one."""
        self = cls.__new__(cls)
        self._config = load_checked(Path(path), env)
        if native is not None:
            self._config = self._config.model_copy(update={"native": native})
        return self

    def __repr__(self) -> str:
        return f"<avow.Pipeline {self.name}: {self._config.guarantee} into {self._config.sink.kind}>"

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def config(self) -> PipelineConfig:
        """What is declared, as one frozen tree."""
        return self._config

    def explain(self) -> Plan:
        """What each step promises, permits and assumes. ``str()`` of it is the text. Touches nothing."""
        return plan(self._config)

    def run(
        self,
        *,
        once: bool = False,
        engine: Engine | None = None,
        spark: SparkSession | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        on_event: Callable[[str], None] = LOGGER.info,
    ) -> RunSummary:
        """Move records until stopped, or with ``once`` until all that is in the topics now is claimed. Ctrl-C lets the
        batch in progress end, then raises KeyboardInterrupt.

        ``engine`` takes the place of the declared one. ``spark``: the caller's session, which is neither changed nor
        stopped; without it, a session that is active in this process, or one of its own for as long as it runs.
        """
        running = self.start(once=once, engine=engine, spark=spark, on_progress=on_progress, on_event=on_event)
        with running:
            summary = running.await_termination()
        assert summary is not None
        return summary

    def start(
        self,
        *,
        once: bool = False,
        engine: Engine | None = None,
        spark: SparkSession | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        on_event: Callable[[str], None] = LOGGER.info,
        hooks: Hooks = NO_HOOKS,
    ) -> PipelineRun:
        """Run in the background. ``on_progress`` and ``on_event`` are called from the run's thread. ``hooks`` are for
        tests: what is done at named points of each batch."""
        observer = Observer(on_progress, on_event, hooks=hooks)
        return PipelineRun(self._on(engine), once=once, spark=spark, observer=observer)

    def audit(
        self, *, spark: SparkSession | None = None, on_progress: Callable[[str], None] = lambda _: None
    ) -> AuditReport:
        """Compare the topics with the sink, its dead letters and its ledger, offset by offset. Changes nothing."""
        from avow.audit.auditor import audit

        native.allow(self._config.native)
        try:
            with _Session(self._config, spark) as session:
                return audit(self._config, session, on_progress)
        finally:
            close_clients()

    def dead_letters(self) -> DeadLetterQueue:
        """Records that the sink could not take."""
        return DeadLetterQueue(self._config)

    def receipts(self) -> Receipts:
        """What became of records that were sent. Close it, or use it as a context manager."""
        from avow.clients.receipts import Receipts

        return Receipts(self._config)

    def orphans(self, *, remove: bool = False) -> Sequence[Orphan]:
        """Files in a lake's folder that a crashed run left behind and no version of the table refers to."""
        from avow.sinks.lake.maintenance import orphans
        from avow.sinks.lake.plugin import lake_tables

        self._lake()
        found = [orphan for part in self._parts() for orphan in orphans(lake_tables(part), self.name)]
        for orphan in found if remove else ():
            orphan.remove()
        return found

    def compact(self) -> Compacted:
        """Merge a lake's small files into files of about ``sink.file_mb``. The pipeline may run meanwhile."""
        from avow.sinks.lake.maintenance import Compacted, compact
        from avow.sinks.lake.plugin import lake_tables

        lake = self._lake()
        done = Compacted(0, 0)
        for part in self._parts():
            rows, _ = lake_tables(part)
            if rows.load():
                done += compact(rows, self.name, lake.file_mb << 20)
            elif not lake.by_topic:
                raise ConfigError(f"table {rows.shown} does not exist", advice="Run the pipeline first.")
        return done

    def _parts(self) -> Sequence[PipelineConfig]:
        """One for each table."""
        from avow.sinks.topics import parts_of

        return [*parts_of(self._config).values()] if self._config.sink.by_topic else [self._config]

    def _lake(self) -> LakeConfig:
        from avow.sinks.lake.config import LakeConfig

        sink = self._config.sink
        if not isinstance(sink, LakeConfig):
            raise ConfigError(
                f"sink.kind = {sink.kind!r} is not a lake", advice="Use a pipeline with a Delta Lake or Iceberg sink."
            )
        return sink

    def _on(self, engine: Engine | None) -> PipelineConfig:
        if engine not in (None, "spark", "consumer"):
            raise ConfigError(f'engine: {engine!r} is not known; use "spark" or "consumer"')
        try:
            return self._config.on_engine(engine) if engine else self._config
        except Refused as error:
            problems = error.problems
        raise refused(problems)


def _as_in_file(value: Any) -> Any:
    """A Python value as TOML would have given it."""
    if isinstance(value, Mapping):
        return {str(key): _as_in_file(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_in_file(item) for item in value]
    return str(value) if isinstance(value, Path | Guarantee) else value
