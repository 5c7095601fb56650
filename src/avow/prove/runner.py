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
from queue import Empty, SimpleQueue
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
from avow.prove.form import Form, Numbered
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


@dataclass(frozen=True, slots=True)
class Proof:
    """What all cells of a proof share."""

    folder: Path
    options: Options
    history: History
    judges: Judges
    tell: Tell
    keep: bool = False
    own: Form | None = None  # a user's pipeline; canaries are always the harness's own

    def form(self, cell: Cell) -> Form:
        return self.own if self.own and not cell.canary else Numbered()

    def note(self, cell: Cell, text: str) -> None:
        self.history.add("note", cell.name, text=text)
        self.tell(cell, text)

    def told(self, cell: Cell, verdict: Verdict, why: str, seconds: float = 0, seen: Seen | None = None) -> Outcome:
        details: dict[str, Any] = asdict(seen) if seen else {}
        told = {"verdict": verdict, "why": why, "seconds": round(seconds, 1), "seed": self.options.seed}
        self.history.add("verdict", cell.name, **told, **details)
        return Outcome(cell, verdict, why, seconds)


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
    cells: Iterable[Cell],
    folder: Path,
    options: Options,
    *,
    tell: Tell,
    jobs: int = 1,
    keep: bool = False,
    own: Form | None = None,
) -> Iterator[Outcome]:
    """Play cells, on ``jobs`` clusters side by side. Outcomes come as they are reached."""
    listed = list(cells)
    if not listed:
        return
    waiting: SimpleQueue[Cell] = SimpleQueue()
    for cell in listed:
        waiting.put(cell)
    done: SimpleQueue[Outcome | BaseException] = SimpleQueue()
    proof = Proof(folder, options, History(folder), Judges(), tell, keep, own)
    proof.history.add("proof", seed=options.seed, options=asdict(options), versions=versions())
    sites: list[Site] = []

    def work(number: int) -> None:
        try:
            with _site(folder / f"cluster-{number}") as site:
                sites.append(site)
                turns = _Turns(waiting)
                with ThreadPoolExecutor(CELLS_AT_ONCE) as pool:
                    for _ in range(CELLS_AT_ONCE):
                        pool.submit(_play_all, turns, site, proof, done)
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
            with suppress(Empty):
                while True:
                    waiting.get_nowait()
            for site in sites:
                site.closing.set()
    proof.judges.close()
    proof.history.close()


# One cell is drained and judged while the next one starts: neither minds the other, and both mostly wait.
CELLS_AT_ONCE = 2


class _Turns:
    """Who may hurt a cluster. A cell takes its turn to start and to do its faults, and passes it on before the drain;
    the next one starts meanwhile, and does no harm before the one before it is judged."""

    def __init__(self, waiting: SimpleQueue[Cell]) -> None:
        self._waiting = waiting
        self._lock = threading.Lock()
        self._last = threading.Event()
        self._last.set()

    def take(self) -> tuple[Cell, _Turn] | None:
        self._lock.acquire()
        try:
            cell = self._waiting.get_nowait()
        except Empty:
            self._lock.release()
            return None
        turn = _Turn(self._lock, self._last)
        self._last = turn.judged
        return cell, turn


class _Turn:
    def __init__(self, lock: threading.Lock, before: threading.Event) -> None:
        self._lock: threading.Lock | None = lock
        self._before = before
        self.judged = threading.Event()

    def begin_harm(self) -> None:
        self._before.wait()

    def end_harm(self) -> None:
        lock, self._lock = self._lock, None
        if lock:
            lock.release()

    def end(self) -> None:
        self.end_harm()
        self.judged.set()


def _play_all(turns: _Turns, site: Site, proof: Proof, done: SimpleQueue[Outcome | BaseException]) -> None:
    while taken := turns.take():
        cell, turn = taken
        try:
            done.put(play(cell, site, proof, turn))
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            done.put(error)
            return
        finally:
            turn.end()


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


def play(cell: Cell, site: Site, proof: Proof, turn: _Turn) -> Outcome:
    """One cell, from an empty topic to its verdict."""
    started = time.monotonic()
    steps = schedule(cell, proof.options.seed, proof.options.minutes)
    replay = f"{cell.options(proof.options.seed)} --records {proof.options.records}"
    replay += f" --minutes {proof.options.minutes:g}" if proof.options.minutes else ""
    proof.history.add("cell", cell.name, schedule=[asdict(step) for step in steps], replay=replay)
    if cell.fault.missing:
        return proof.told(cell, Verdict.NOT_RUN, cell.fault.missing)
    name = f"p-{cell.fault.name}-{uuid4().hex[:6]}"
    place = proof.folder / "cells" / name
    place.mkdir(parents=True)
    scene = Scene(cell, proof.form(cell), site, place, name, lambda text: proof.note(cell, text))
    played = _Played(scene, steps, proof, turn)
    seen: Seen | None = None
    try:
        seen = played.play()
        verdict, why = judge(cell, seen)
    except CannotRun as error:
        verdict, why = Verdict.NOT_RUN, str(error)
    except NOT_THE_FAULT as error:
        verdict, why = Verdict.UNKNOWN, f"the harness could not go on: {str(error).strip() or type(error).__name__}"
    finally:
        scene.end()
        played.close()
    if verdict in (Verdict.HELD, Verdict.CAUGHT, Verdict.NOT_RUN) and not proof.keep:
        shutil.rmtree(place, ignore_errors=True)  # its logs say nothing that the history does not
    return proof.told(cell, verdict, why, time.monotonic() - started, seen)


class _Played:
    """The acts of one cell."""

    def __init__(self, scene: Scene, steps: tuple[Step, ...], proof: Proof, turn: _Turn) -> None:
        self._scene, self._site, self._cell = scene, scene.site, scene.cell
        self._options, self._history, self._judges = proof.options, proof.history, proof.judges
        self._steps, self._turn = steps, turn
        self._faults: list[Fault | None] = [
            BUILT[step.fault](scene, step.seed, step.hold_s) if step.fault else None for step in steps
        ]
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def play(self) -> Seen:
        self._site.mend()
        self._begin()
        self._turn.begin_harm()
        fired = self._do_faults()
        self._turn.end_harm()
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
        scene.workload = Workload(
            *(self._site.bootstrap, scene.topic),
            partitions=PARTITIONS,
            records=self._options.records,
            rate=self._options.rate,
            keyed=cell.mode != "append",
            transactions=any(fault.transactions for fault in faults),
            value=scene.form.value,
        )
        # Several batches for the load, and few for a backlog.
        batch = max(1_000, *(fault.records_least // 4 for fault in faults))
        scene.write_file(self._site.pipeline_brokers, batch=batch)
        self._audit_file = scene.write_file(self._site.bootstrap, batch=batch)
        self._sampler.start()
        scene.workload.start()
        driver = scene.start(env=faults[0].env)
        scene.until(lambda: bool(scene.rows()) or not (driver.alive and scene.workload.alive), START_S)
        if not scene.workload.alive:
            scene.workload.stop()  # says why
        begun = bool(scene.rows()) or driver.code == -SIGKILL  # a fault may already have fallen
        scene.require(begun, f"the pipeline wrote nothing within {START_S} s; exit code {driver.code}")
        self._note("first rows are there")

    def _do_faults(self) -> list[str]:
        """Every step of the schedule. Gives the proof that each fault fired."""
        proofs = []
        for step, fault in zip(self._steps, self._faults, strict=True):
            if fault is None:
                self._scene.sleep(step.quiet_s + step.hold_s)
            else:
                proofs.append(self._step(step, fault))
        return proofs

    def _step(self, step: Step, fault: Fault) -> str:
        """One fault, its heal, and the recovery. Gives the proof that it fired."""
        self._scene.sleep(step.quiet_s)
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
        sent = scene.workload.sent()
        stopped = self._cell.fault.stop is not None
        log = {} if stopped else check.read_log(site.bootstrap, scene.topic)
        acknowledged = {one.number for one in sent if one.fate is Fate.ACKNOWLEDGED}
        found = check.compare(
            sent,
            scene.form.rows(scene.target, sent, log),
            self._cell.mode,
            in_log=None if stopped else set(log.values()),
            until=scene.positions() if stopped else None,
            dead=scene.target.dead(),
        )
        verdict, audited = self._judges.audit(self._audit_file, site.url)
        checked, notes = dict(found.anomalies), [f"{kind}: {numbers}" for kind, numbers in found.examples.items()]
        if scene.form.left_to_audit:
            notes.append(scene.form.left_to_audit)
            for kind in ("lost", "duplicated"):
                checked[kind] = audited.get(kind, 0)
        return Seen(
            fired=fired,
            check=checked,
            audit=audited,
            audit_verdict=verdict,
            records=found.records,
            drained=drained,
            exit_code=code,
            kafka_lost=0 if stopped else len(acknowledged - set(log.values())),
            notes=tuple(notes),
        )

    def _note(self, text: str) -> None:
        self._scene.note(text)

    def _sample(self) -> None:
        """Records written over time, for the report's chart."""
        while not self._sampling.wait(SAMPLE_S):
            for driver in self._scene.drivers:
                driver.family()  # remembered, so that none of them is left behind if their parent dies
            rows = self._scene.rows()
            if rows is not None:
                self._history.add("rows", self._cell.name, rows=rows)

    def _end_sampling(self) -> None:
        self._sampling.set()
        if self._sampler.is_alive():
            self._sampler.join()
