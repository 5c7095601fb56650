"""Plays one cell after the other on a site: the workload, the faults of the schedule, the drain, two judges.

Owns: the order of things in a cell, and which pipeline it is played on. Must not know: how a fault is done, what makes
a verdict, or which cells there are. Neighbours: ``cells`` (schedule and verdict), ``faults``, ``scene``, ``check``,
``avow.audit``; ``runner`` asks for cells to be played.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import KafkaException
from pyspark.sql import SparkSession

from avow.audit.auditor import audit
from avow.errors import AvowError
from avow.local import spark
from avow.plan import load_checked
from avow.prove import check
from avow.prove.cells import ENGINES, Cell, Seen, Step, Verdict, judge, schedule
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
WHOLE_S = 60
LIVE_S = 30

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
        pipeline = load_checked(file, {**os.environ, "DATABASE_URL": url})

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


class Player:
    """Plays cells on one site. A pipeline that came out of a cell clean is kept for the next one of its column."""

    def __init__(self, site: Site, proof: Proof) -> None:
        self._site, self._proof = site, proof
        self._kept: Scene | None = None

    @property
    def column(self) -> tuple[str, ...]:
        """Of the pipeline that is kept; empty if there is none."""
        return self._kept.cell.column if self._kept else ()

    def play(self, cell: Cell) -> Outcome:
        """One cell, to its verdict."""
        started, proof = time.monotonic(), self._proof
        steps = schedule(cell, proof.options.seed, proof.options.minutes)
        replay = f"{cell.options(proof.options.seed)} --records {proof.options.records}"
        replay += f" --minutes {proof.options.minutes:g}" if proof.options.minutes else ""
        proof.history.add("cell", cell.name, schedule=[asdict(step) for step in steps], replay=replay)
        scene = self._scene(cell)
        acts = Acts(scene, steps, proof)
        seen: Seen | None = None
        try:
            seen = acts.play()
            verdict, why = judge(cell, seen)
        except CannotRun as error:
            verdict, why = Verdict.NOT_RUN, str(error)
        except NOT_THE_FAULT as error:
            verdict, why = Verdict.UNKNOWN, f"the harness could not go on: {str(error).strip() or type(error).__name__}"
        finally:
            acts.close()
        scene.all_held &= verdict in (Verdict.HELD, Verdict.CAUGHT, Verdict.NOT_RUN)
        if not (verdict is Verdict.HELD and seen and fit_for_more(cell, seen) and scene.driver.alive):
            self.close()
        return proof.told(cell, verdict, why, time.monotonic() - started, seen)

    def _scene(self, cell: Cell) -> Scene:
        def note(text: str) -> None:
            self._proof.note(cell, text)

        if self._kept and not cell.fault.alone and self._kept.cell.column == cell.column and not self._kept.worn:
            before = self._kept.cell.name
            self._kept.enter(cell, note)
            note(f"goes on with the pipeline of {before}")
            return self._kept
        self.close()
        name = f"p-{cell.fault.name}-{uuid4().hex[:6]}"
        place = self._proof.folder / "cells" / name
        place.mkdir(parents=True)
        self._kept = Scene(cell, self._proof.form(cell), self._site, place, name, self._proof.options.seed, note)
        return self._kept

    def close(self) -> None:
        """End the pipeline that is kept. Of one that held in every cell, logs say nothing that the history does not."""
        scene, self._kept = self._kept, None
        if scene is None:
            return
        scene.end()
        keep = self._proof.keep or not scene.all_held
        for folder in (scene.temporary, scene.spark_folder) if keep else (scene.folder,):
            shutil.rmtree(folder, ignore_errors=True)


def fit_for_more(cell: Cell, seen: Seen) -> bool:
    """Whether another cell can be judged on the same table: what it finds there must be its own doing."""
    return not (cell.fault.alone or cell.fault.stop or any(seen.check.values()) or any(seen.audit.values()))


class Acts:
    """The acts of one cell. A scene that has drivers already comes from the cell before."""

    def __init__(self, scene: Scene, steps: tuple[Step, ...], proof: Proof) -> None:
        self._scene, self._site, self._cell = scene, scene.site, scene.cell
        self._options, self._history, self._judges = proof.options, proof.history, proof.judges
        self._steps = steps
        self._faults: list[Fault | None] = [
            BUILT[step.fault](scene, step.seed, step.hold_s) if step.fault else None for step in steps
        ]
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def play(self) -> Seen:
        self._site.mend()
        if not self._scene.until(self._site.whole, WHOLE_S):
            self._note(f"not every replica is in sync after {WHOLE_S} s")
        self._begin()
        fired = self._do_faults()
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
        """A load, a pipeline under it, and its first claim."""
        scene = self._scene
        faults = [fault for fault in self._faults if fault]
        for fault in faults:
            fault.prepare()
        fresh = not scene.drivers
        if fresh:
            faults[0].make_topic(PARTITIONS)
            scene.make_table()
        scene.workloads.append(self._workload(faults))
        # Several batches for the load, and few for a backlog.
        batch = max(2_000, *(fault.records_least // 4 for fault in faults))
        self._audit_file = scene.write_files(batch=batch, declares=faults[0].declares)
        faults[0].before_load()
        before = scene.claimed()
        self._sampler.start()
        scene.workload.start()
        driver = scene.start(env=faults[0].env) if fresh else scene.driver
        scene.until(lambda: scene.claimed() > before or not (driver.alive and scene.workload.alive), START_S)
        if not scene.workload.alive:
            scene.workload.stop()  # says why
        begun = scene.claimed() > before or driver.code == -SIGKILL  # a fault may already have fallen
        scene.require(begun or driver.alive, f"the pipeline ended with {driver.code}: {driver.last_words()}")
        scene.require(begun, f"the pipeline claimed nothing within {START_S} s")
        self._note("first claims are there" if fresh else "claims go on")

    def _workload(self, faults: list[Fault]) -> Workload:
        scene, before = self._scene, self._scene.workloads[-1:]
        return Workload(
            *(self._site.bootstrap, scene.topic),
            partitions=before[0].partitions if before else PARTITIONS,
            records=self._options.records,
            rate=int(self._options.rate * ENGINES[self._cell.engine].load),
            keyed=self._cell.mode != "append",
            transactions=any(fault.transactions for fault in faults),
            first=before[0].next if before else 0,
            value=scene.form.value,
            message=faults[0].message,
        )

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
            patience_s = RECOVER_S
            if not scene.driver.alive:
                self._note(f"driver {len(scene.drivers)} ended with {scene.driver.code}")
                scene.start()
                patience_s = START_S  # as any other that starts
            if scene.until_claimed_more(before, patience_s):
                return
            if scene.driver.alive:
                self._note(f"driver {len(scene.drivers)} did not move within {patience_s} s and is killed")
                scene.driver.end()
        scene.require(False, f"the pipeline does not get going again; exit code {scene.driver.code}")

    def _drain(self) -> tuple[bool, int | None]:
        """Everything sent, everything claimed. Or, where a named stop is due, the code it ended with."""
        scene = self._scene
        scene.workload.stop()
        if self._cell.fault.live:
            code = scene.driver.wait(DRAIN_S)
            self._note(f"the run ended by itself with {code}")
            if self._cell.fault.stop and code != self._cell.fault.stop[0]:
                return False, code
        if self._cell.fault.stop:
            driver = scene.start("--once")
            code = driver.wait(DRAIN_S)
            self._note(f"started again, it ended with {code}")
            return False, code
        if scene.until(lambda: self._caught_up() or not scene.driver.alive, RECOVER_S) and scene.driver.alive:
            scene.wait_for_handlers()
            self._note("caught up")
            return True, None
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
        sent = scene.sent()
        stopped = self._cell.fault.stop is not None
        log = {} if stopped else check.read_log(site.bootstrap, scene.topic)
        acknowledged = {one.number for one in sent if one.fate is Fate.ACKNOWLEDGED}
        found = check.compare(
            sent,
            scene.form.rows(scene.witness, sent, log),
            self._cell.mode,
            in_log=None if stopped else set(log.values()),
            until=scene.witness.positions() if stopped else None,
            dead=scene.witness.dead(),
        )
        verdict, audited = self._judges.audit(self._audit_file, site.url) if self._cell.audited else ("", {})
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
            live=self._live(),
            violations=tuple(filter(None, (fault.violation() for fault in self._faults if fault))),
        )

    def _live(self) -> dict[str, int]:
        """What was wrong for who read the output while the faults went on, where it is a topic."""
        follower = self._scene.follower
        if follower is None:
            return {}
        there = check.read_places(self._site.bootstrap, self._scene.witness.table)
        wrong = follower.wrong(there, LIVE_S)
        told = ", ".join(f"{count:,} {kind}" for kind, count in wrong.items()) or "each once and in order"
        self._note(f"a live reader of committed records, {len(there):,} in the end: {told}")
        return wrong

    def _note(self, text: str) -> None:
        self._scene.note(text)

    def _sample(self) -> None:
        """Records written over time, for the report's chart."""
        while not self._sampling.wait(SAMPLE_S):
            for driver in self._scene.drivers[-2:]:
                driver.family()  # remembered, so that none of them is left behind if their parent dies
            rows = self._scene.witness.count()
            if rows is not None:
                self._history.add("rows", self._cell.name, rows=rows)

    def _end_sampling(self) -> None:
        self._sampling.set()
        if self._sampler.is_alive():
            self._sampler.join()
