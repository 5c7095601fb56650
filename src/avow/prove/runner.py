"""Plays cells: the pipeline as a real process, its workload, the faults of its schedule, the drain, two judges.

Owns: the order of things in a cell, and of cells in a proof. Must not know: how a fault is done, or what makes a
verdict. Neighbours: ``cells`` (schedule and verdict), ``faults``, ``scene``, ``check``, ``avow.audit``.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from signal import SIGKILL
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import KafkaException
from pyspark.sql import SparkSession

from avow.audit.auditor import audit
from avow.errors import AvowError
from avow.local import jars, java, spark
from avow.plan import load_checked
from avow.prove import check
from avow.prove.cells import Cell, Seen, Step, Verdict, judge, schedule
from avow.prove.check import Fate
from avow.prove.faults import BUILT, CannotRun, Fault
from avow.prove.history import History
from avow.prove.scene import Scene
from avow.prove.site import Site
from avow.prove.workload import Workload

PARTITIONS = 2
START_S = 120
RECOVER_S = 60  # a driver that has not moved for so long after the heal is killed, and that is written down
DRAIN_S = 150
STARTS_MAX = 3  # after one fault
SAMPLE_S = 0.5

Tell = Callable[[Cell, str], None]  # (cell, what it does)
NOT_THE_FAULT = (AvowError, KafkaException, psycopg.Error, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    records: int = 2_000  # of a cell at least; the workload goes on while faults do
    minutes: float = 0  # of faults in a cell at least; 0: once, or as often as the fault says
    rate: int = 300  # records a second


@dataclass(frozen=True, slots=True)
class Outcome:
    cell: Cell
    verdict: Verdict
    why: str
    seconds: float = 0


class Judges:
    """The audit, on a Spark of its own that all cells share: one JVM less to wait for in each."""

    def __init__(self) -> None:
        self._session: SparkSession | None = None
        self._lock = threading.Lock()

    def audit(self, file: Path, url: str) -> tuple[str, dict[str, int]]:
        """The verdict, and how many of each anomaly."""
        pipeline = load_checked(file, {"DATABASE_URL": url})

        def session() -> SparkSession:
            self._session = self._session or spark.session(pipeline, short=True)
            return self._session

        with self._lock:
            report = audit(pipeline, session, lambda _text: None)
        found: Counter[str] = Counter()
        for finding in report.findings:
            found[str(finding.kind)] += finding.count
        return str(report.verdict), dict(found)

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()


def prove(
    cells: Iterable[Cell], folder: Path, options: Options, *, jobs: int = 1, keep: bool = False, tell: Tell
) -> Iterator[Outcome]:
    """Play cells, ``jobs`` at a time, each on a cluster of its own. Outcomes come as they are reached."""
    history = History(folder)
    history.add("proof", seed=options.seed, options=asdict(options), versions=versions())
    waiting: SimpleQueue[Cell] = SimpleQueue()
    listed = list(cells)
    for cell in listed:
        waiting.put(cell)
    done: SimpleQueue[Outcome | BaseException] = SimpleQueue()
    judges = Judges()

    def work(number: int) -> None:
        try:
            with _site(folder / f"cluster-{number}") as site:
                while not waiting.empty():
                    done.put(play(waiting.get(), site, folder, options, history, judges, tell, keep))
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            done.put(error)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for number in range(1, jobs + 1):
                pool.submit(work, number)
            for _ in listed:
                outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            while not waiting.empty():
                waiting.get()
    judges.close()
    history.close()


@contextmanager
def _site(folder: Path) -> Iterator[Site]:
    # In a short folder of its own: PostgreSQL as nobody has to get there, and evidence needs no broker's data.
    scratch = Path(tempfile.mkdtemp(prefix="avow-prove-"))
    site = Site(scratch)
    try:
        yield site.start()
    finally:
        site.stop()
        for part in site.cluster.parts():
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                shutil.copy(part.log, folder / f"{part.name}.log")
        shutil.rmtree(scratch, ignore_errors=True)


def versions() -> dict[str, str]:
    packages = ("avow", "pyspark", "pyarrow", "confluent-kafka", "psycopg", "adbc-driver-postgresql")
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "java": java.find().version,
        "kafka": jars.KAFKA_VERSION,
        **{name: version(name) for name in packages},
    }


def play(
    cell: Cell,
    site: Site,
    folder: Path,
    options: Options,
    history: History,
    judges: Judges,
    tell: Tell,
    keep: bool = False,
) -> Outcome:
    """One cell, from an empty topic to its verdict."""
    started = time.monotonic()
    steps = schedule(cell, options.seed, options.minutes)
    history.add("cell", cell.name, schedule=[asdict(step) for step in steps], replay=cell.options(options.seed))
    if cell.fault.missing:
        return _told(cell, history, Verdict.NOT_RUN, cell.fault.missing, 0, options)
    name = f"p-{cell.fault.name}-{uuid4().hex[:6]}"
    place = folder / "cells" / name
    place.mkdir(parents=True)

    def note(text: str) -> None:
        history.add("note", cell.name, text=text)
        tell(cell, text)

    scene = Scene(cell, site, place, name, note)
    played = _Played(scene, steps, options, history, judges)
    seen: Seen | None = None
    try:
        site.mend()
        seen = played.play()
        verdict, why = judge(cell, seen)
    except CannotRun as error:
        verdict, why = Verdict.NOT_RUN, str(error)
    except NOT_THE_FAULT as error:
        verdict, why = Verdict.UNKNOWN, f"the harness could not go on: {str(error).strip() or type(error).__name__}"
    finally:
        scene.end()
        played.close()
    if verdict in (Verdict.HELD, Verdict.CAUGHT, Verdict.NOT_RUN) and not keep:
        shutil.rmtree(place, ignore_errors=True)  # its logs say nothing that the history does not
    return _told(cell, history, verdict, why, time.monotonic() - started, options, seen)


def _told(
    cell: Cell,
    history: History,
    verdict: Verdict,
    why: str,
    seconds: float,
    options: Options,
    seen: Seen | None = None,
) -> Outcome:
    details: dict[str, Any] = asdict(seen) if seen else {}
    history.add("verdict", cell.name, verdict=verdict, why=why, seconds=round(seconds, 1), seed=options.seed, **details)
    return Outcome(cell, verdict, why, seconds)


class _Played:
    """The acts of one cell."""

    def __init__(
        self, scene: Scene, steps: tuple[Step, ...], options: Options, history: History, judges: Judges
    ) -> None:
        self._scene, self._site, self._cell = scene, scene.site, scene.cell
        self._options, self._history, self._judges = options, history, judges
        self._steps = steps
        self._faults: list[Fault | None] = [
            BUILT[step.fault](scene, step.seed, step.hold_s) if step.fault else None for step in steps
        ]
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def play(self) -> Seen:
        self._begin()
        fired = [self._step(step, fault) for step, fault in zip(self._steps, self._faults, strict=True) if fault]
        drained, code = self._drain()
        self._end_sampling()
        # Asked again: some proof is there only at the end.
        fired = [fault.fired() or before for fault, before in zip(filter(None, self._faults), fired, strict=True)]
        return self._look(tuple(fired), drained, code)

    def close(self) -> None:
        self._end_sampling()
        for fault in filter(None, self._faults):
            fault.close()

    def _begin(self) -> None:
        scene, cell = self._scene, self._cell
        faults = [fault for fault in self._faults if fault]
        for fault in faults:
            fault.prepare()
        faults[0].make_topic(PARTITIONS)
        least = max(fault.records_least for fault in faults)
        records = max(self._options.records, least)
        scene.workload = Workload(
            *(self._site.bootstrap, scene.topic),
            partitions=PARTITIONS,
            records=records,
            rate=max(self._options.rate, least // 3),
            keyed=cell.mode != "append",
            transactions=any(fault.transactions for fault in faults),
        )
        batch = max(200, records // 4)
        scene.write_file(self._site.pipeline_brokers, batch=batch)
        self._audit_file = scene.write_file(self._site.bootstrap, batch=batch)
        self._sampler.start()
        scene.workload.start()
        driver = scene.start(env=faults[0].env)
        scene.until(lambda: bool(scene.rows()) or not driver.alive, START_S)
        begun = bool(scene.rows()) or driver.code == -SIGKILL  # a fault may already have fallen
        scene.require(begun, f"the pipeline wrote nothing within {START_S} s; exit code {driver.code}")
        self._note("first rows are there")

    def _step(self, step: Step, fault: Fault) -> str:
        """One fault, its heal, and the recovery. Gives the proof that it fired."""
        time.sleep(step.quiet_s)
        self._history.add("fault", self._cell.name, fault=step.fault)
        self._scene.note(f"fault: {step.fault}")
        with fault:
            fault.hold()
            self._history.add("heal", self._cell.name, fault=step.fault)
        proof = fault.fired()
        self._note(f"{step.fault}: {proof or 'no proof that it fired'}")
        if not self._cell.fault.stop:
            self._recover()
        return proof

    def _recover(self) -> None:
        """Wait until records are claimed again; start the driver if it died, or if it lives and does nothing."""
        scene = self._scene
        before = scene.claimed()
        for _ in range(STARTS_MAX):
            if not scene.driver.alive:
                self._note(f"driver {len(scene.drivers)} ended with {scene.driver.code}")
                scene.start()
            if scene.until_claimed_more(before, RECOVER_S):
                return
            if scene.driver.alive:
                self._note(f"driver {len(scene.drivers)} did not move within {RECOVER_S} s and is killed")
                scene.driver.end()
        scene.require(False, f"the pipeline does not get going again; exit code {scene.driver.code}")

    def _drain(self) -> tuple[bool, int | None]:
        """Everything sent, everything claimed. Or, where a named stop is due, the code it ended with."""
        scene = self._scene
        scene.workload.stop()
        if self._cell.fault.stop:
            driver = scene.start("--once")
            code = driver.wait(DRAIN_S)
            self._note(f"started again, it ended with {code}")
            return False, code
        if scene.until(lambda: self._caught_up() or not scene.driver.alive, RECOVER_S) and scene.driver.alive:
            code = scene.driver.stop()
            self._note(f"caught up; asked to stop, the driver ended with {code}")
            return True, code
        scene.driver.end()
        code = scene.start("--once").wait(DRAIN_S)
        self._note(f"drained once more, with exit code {code}")
        return self._caught_up(), code

    def _caught_up(self) -> bool:
        with suppress(KafkaException):
            return self._scene.caught_up()
        return False

    def _look(self, fired: tuple[str, ...], drained: bool, code: int | None) -> Seen:
        scene, site = self._scene, self._site
        site.mend()
        sent = scene.workload.sent()
        stopped = self._cell.fault.stop is not None
        log = None if stopped else check.read_log(site.bootstrap, scene.topic)
        acknowledged = {one.number for one in sent if one.fate is Fate.ACKNOWLEDGED}
        found = check.compare(
            sent,
            check.read_rows(site.url, scene.table),
            self._cell.mode,
            in_log=None if log is None else set(log),
            until=scene.positions() if stopped else None,
            dead=check.read_dead(site.url, scene.name),
        )
        verdict, audited = self._judges.audit(self._audit_file, site.url)
        return Seen(
            fired=fired,
            check=found.anomalies,
            audit=audited,
            audit_verdict=verdict,
            records=found.records,
            drained=drained,
            exit_code=code,
            kafka_lost=0 if log is None else len(acknowledged - log.keys()),
            notes=tuple(f"{kind}: {numbers}" for kind, numbers in found.examples.items()),
        )

    def _note(self, text: str) -> None:
        self._scene.note(text)

    def _sample(self) -> None:
        """Records written over time, for the report's chart."""
        while not self._sampling.wait(SAMPLE_S):
            rows = self._scene.rows()
            if rows is not None:
                self._history.add("rows", self._cell.name, rows=rows)

    def _end_sampling(self) -> None:
        self._sampling.set()
        if self._sampler.is_alive():
            self._sampler.join()
