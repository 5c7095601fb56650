"""Runs one cell after the other on a test cluster: the workload, the scheduled faults, the drain, check and audit.

Owns: the steps of a cell, and which pipeline it runs on. Must not know: how a fault is injected, what makes
a verdict, or which cells there are. Neighbours: ``cells`` (schedule and verdict), ``faults``, ``scenario``, ``check``,
``avow.audit``; ``proof`` hands out the cells.
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
from functools import partial
from pathlib import Path
from signal import SIGKILL
from uuid import uuid4

import psycopg
from confluent_kafka import KafkaException
from pyspark.sql import SparkSession

from avow.audit.auditor import audit
from avow.errors import AvowError
from avow.local import spark
from avow.plan import load_checked
from avow.prove import check
from avow.prove.cells import ENGINES, Cell, CellVerdict, Observation, Step, judge, schedule
from avow.prove.check import Fate
from avow.prove.cluster import ProofCluster
from avow.prove.faults import IMPLEMENTED, CannotRun, Fault
from avow.prove.history import History
from avow.prove.scenario import Scenario
from avow.prove.workload import Workload
from avow.prove.workload_spec import NumberedRecords, WorkloadSpec

PARTITIONS = 2
START_S = 120
RECOVER_S = 60  # a driver that has not moved for so long after the heal is killed, and that is written down
DRAIN_S = 150
STARTS_MAX = 3  # after one fault
SAMPLE_S = 0.5
REPLICATED_S = 60
LIVE_S = 30

Notify = Callable[[Cell, str], None]  # (cell, what it does)
HARNESS_ERRORS = (AvowError, KafkaException, psycopg.Error, OSError)


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    records: int = 2_000  # of a cell at least; the workload goes on while faults do
    minutes: float = 0  # of faults in a cell at least; 0: once, or as often as the fault says
    rate: int = 300  # records a second


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    verdict: CellVerdict
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProofContext:
    """What all cells of a proof share."""

    folder: Path
    options: Options
    history: History
    audit: SharedAudit
    notify: Notify
    keep: bool = False
    own: WorkloadSpec | None = None  # a user's pipeline; canaries are always the harness's own

    def spec(self, cell: Cell) -> WorkloadSpec:
        return self.own if self.own and not cell.canary else NumberedRecords()

    def note(self, cell: Cell, text: str) -> None:
        self.history.add("note", cell.name, text=text)
        self.notify(cell, text)


class SharedAudit:
    """The audit, in this process; of pipelines with a query, on one Spark session that all cells share."""

    def __init__(self) -> None:
        self._session: SparkSession | None = None
        self._lock = threading.Lock()

    def audit(self, file: Path, url: str) -> tuple[str, dict[str, int]]:
        """The verdict, and how many of each anomaly."""
        pipeline = load_checked(file, {**os.environ, "DATABASE_URL": url})
        if not pipeline.by_sql:
            pipeline = pipeline.on_engine("consumer")

        def session() -> SparkSession:
            self._session = self._session or spark.session(pipeline, short=True)
            return self._session

        with self._lock:
            report = audit(pipeline, session, lambda _text: None)
        counts: Counter[str] = Counter()
        for finding in report.findings:
            counts[str(finding.kind)] += finding.count
        return str(report.verdict), dict(counts)

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()


class CellRunner:
    """Runs cells on a cluster. A pipeline that ended a cell without anomalies is reused for its column's next cell."""

    def __init__(self, cluster: ProofCluster, proof: ProofContext) -> None:
        self._cluster, self._proof = cluster, proof
        self._scenario: Scenario | None = None

    @property
    def column(self) -> tuple[str, ...]:
        """Of the pipeline that is kept; empty if there is none."""
        return self._scenario.cell.column if self._scenario else ()

    def run(self, cell: Cell) -> CellResult:
        """One cell, to its verdict."""
        started, proof, options = time.monotonic(), self._proof, self._proof.options
        steps = schedule(cell, options.seed, options.minutes)
        replay = f"{cell.options(options.seed)} --records {options.records}"
        replay += f" --minutes {options.minutes:g}" if options.minutes else ""
        proof.history.add("cell", cell.name, schedule=[asdict(step) for step in steps], replay=replay)
        scenario = self._scenario_for(cell)
        cell_run = CellRun(scenario, steps, proof)
        observed: Observation | None = None
        try:
            observed = cell_run.run()
            verdict, why = judge(cell, observed)
        except CannotRun as error:
            verdict, why = CellVerdict.NOT_RUN, str(error)
        except HARNESS_ERRORS as error:
            verdict, why = CellVerdict.UNKNOWN, f"the harness failed: {str(error).strip() or type(error).__name__}"
        finally:
            cell_run.close()
        scenario.all_held &= verdict in (CellVerdict.HELD, CellVerdict.CAUGHT, CellVerdict.NOT_RUN)
        if not (verdict is CellVerdict.HELD and observed and reusable_after(cell, observed) and scenario.driver.alive):
            self.close()
        result = CellResult(cell, verdict, why, time.monotonic() - started)
        line = {"verdict": verdict, "why": why, "seconds": round(result.seconds, 1), "seed": options.seed}
        proof.history.add("verdict", cell.name, **line, **(asdict(observed) if observed else {}))
        return result

    def _scenario_for(self, cell: Cell) -> Scenario:
        proof, scenario = self._proof, self._scenario
        note = partial(proof.note, cell)
        if scenario and not cell.fault.alone and self.column == cell.column and not scenario.used_up:
            before = scenario.cell.name
            scenario.begin_cell(cell, note)
            note(f"reuses the pipeline of {before}")
            return scenario
        self.close()
        name = f"p-{cell.fault.name}-{uuid4().hex[:6]}"
        folder = proof.folder / "cells" / name
        folder.mkdir(parents=True)
        self._scenario = Scenario(cell, proof.spec(cell), self._cluster, folder, name, proof.options.seed, note)
        return self._scenario

    def close(self) -> None:
        """End the current pipeline. If it held in every cell, its logs add nothing to the history and are removed."""
        scenario, self._scenario = self._scenario, None
        if scenario is None:
            return
        scenario.end()
        keep = self._proof.keep or not scenario.all_held
        for folder in (scenario.temporary, scenario.spark_folder) if keep else (scenario.folder,):
            shutil.rmtree(folder, ignore_errors=True)


def reusable_after(cell: Cell, observed: Observation) -> bool:
    """Whether another cell can be judged on the same table: what it finds there must be its own doing."""
    return not (cell.fault.alone or cell.fault.stop or any(observed.check.values()) or any(observed.audit.values()))


class CellRun:
    """One run of one cell. A scenario that has drivers already comes from the cell before."""

    def __init__(self, scenario: Scenario, steps: tuple[Step, ...], proof: ProofContext) -> None:
        self._scenario, self._cluster, self._cell = scenario, scenario.cluster, scenario.cell
        self._options, self._history, self._audit = proof.options, proof.history, proof.audit
        self._note = scenario.note
        self._steps = steps
        self._faults: list[Fault] = [
            IMPLEMENTED[step.fault](scenario, step.seed, step.hold_s) for step in steps if step.fault
        ]
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def run(self) -> Observation:
        self._cluster.restore()
        if not self._scenario.wait_until(self._cluster.fully_replicated, REPLICATED_S):
            self._note(f"not every replica is in sync after {REPLICATED_S} s")
        self._begin()
        fired = self._do_faults()
        drained, code = self._drain()
        self._end_sampling()
        # Again: some faults are proven only at the end.
        fired = [fault.fired() or before for fault, before in zip(self._faults, fired, strict=True)]
        return self._observe(tuple(fired), drained, code)

    def close(self) -> None:
        self._end_sampling()
        for fault in self._faults:
            fault.close()

    def _begin(self) -> None:
        """A load, a pipeline under it, and its first claim."""
        scenario, faults = self._scenario, self._faults
        for fault in faults:
            fault.prepare()
        fresh = not scenario.drivers
        if fresh:
            faults[0].make_topic(PARTITIONS)
            scenario.make_table()
        scenario.workloads.append(self._workload())
        # Several batches for the load, and few for a backlog.
        batch = max(2_000, *(fault.records_least // 4 for fault in faults))
        self._audit_file = scenario.write_files(batch=batch, declares=faults[0].declares)
        faults[0].before_load()
        before = scenario.claimed()
        self._sampler.start()
        scenario.workload.start()
        driver = scenario.start(env=faults[0].env) if fresh else scenario.driver
        scenario.wait_until(
            lambda: scenario.claimed() > before or not (driver.alive and scenario.workload.alive), START_S
        )
        if not scenario.workload.alive:
            scenario.workload.stop()  # raises the reason
        begun = scenario.claimed() > before or driver.code == -SIGKILL  # a fault may already have fallen
        scenario.require(begun or driver.alive, f"the pipeline ended with {driver.code}: {driver.last_error()}")
        scenario.require(begun, f"the pipeline claimed nothing within {START_S} s")
        self._note("first claims seen" if fresh else "new claims seen")

    def _workload(self) -> Workload:
        scenario, before = self._scenario, self._scenario.workloads[-1:]
        return Workload(
            *(self._cluster.bootstrap, scenario.topic),
            partitions=before[0].partitions if before else PARTITIONS,
            records=self._options.records,
            rate=int(self._options.rate * ENGINES[self._cell.engine].load),
            keyed=self._cell.mode != "append",
            transactions=any(fault.transactions for fault in self._faults),
            first=before[0].next if before else 0,
            value=scenario.spec.value,
            message=self._faults[0].message,
        )

    def _do_faults(self) -> list[str]:
        """Every step of the schedule. Gives the proof that each fault fired."""
        proofs, faults = [], iter(self._faults)
        for step in self._steps:
            if step.fault:
                proofs.append(self._step(step, next(faults)))
            else:
                self._scenario.sleep(step.quiet_s + step.hold_s)
        return proofs

    def _step(self, step: Step, fault: Fault) -> str:
        """One fault, its heal, and the recovery. Gives the proof that it fired."""
        self._scenario.sleep(step.quiet_s)
        self._history.add("fault", self._cell.name, fault=step.fault)
        self._note(f"fault: {step.fault}")
        fault.inject()
        try:
            fault.hold()
            self._history.add("heal", self._cell.name, fault=step.fault)
        finally:
            fault.heal()
        proof = fault.fired()
        self._note(f"{step.fault}: {proof or 'no proof that it fired'}")
        if not self._cell.fault.stop:
            self._recover()
        return proof

    def _recover(self) -> None:
        """Wait until records are claimed again; start the driver if it died, or if it lives and does nothing."""
        scenario = self._scenario
        before = scenario.claimed()
        for _ in range(STARTS_MAX):
            patience_s = RECOVER_S
            if not scenario.driver.alive:
                self._note(f"driver {len(scenario.drivers)} ended with exit code {scenario.driver.code}")
                scenario.start()
                patience_s = START_S  # as any other that starts
            if scenario.wait_for_claims(before, patience_s):
                return
            if scenario.driver.alive:
                self._note(f"driver {len(scenario.drivers)} made no progress within {patience_s} s and is killed")
                scenario.driver.end()
        scenario.require(False, f"the pipeline did not recover; exit code {scenario.driver.code}")

    def _drain(self) -> tuple[bool, int | None]:
        """Everything sent, everything claimed. Or, where a named stop is due, the code it ended with."""
        scenario = self._scenario
        scenario.workload.stop()
        if self._cell.fault.live:
            code = scenario.driver.wait(DRAIN_S)
            self._note(f"the run ended by itself with exit code {code}")
            if self._cell.fault.stop and code != self._cell.fault.stop[0]:
                return False, code
        if self._cell.fault.stop:
            driver = scenario.start("--once")
            code = driver.wait(DRAIN_S)
            self._note(f"restarted, it ended with exit code {code}")
            return False, code
        ended = scenario.wait_until(lambda: self._caught_up() or not scenario.driver.alive, RECOVER_S)
        if ended and scenario.driver.alive:
            scenario.wait_for_handlers()
            self._note("caught up")
            return True, None
        scenario.driver.end()
        code = scenario.start("--once").wait(DRAIN_S)
        self._note(f"drained again, exit code {code}")
        return self._caught_up(), code

    def _caught_up(self) -> bool:
        with suppress(KafkaException):
            return self._scenario.caught_up()
        return False

    def _observe(self, fired: tuple[str, ...], drained: bool, code: int | None) -> Observation:
        scenario, cluster = self._scenario, self._cluster
        sent = scenario.sent()
        stopped = self._cell.fault.stop is not None
        log = {} if stopped else check.read_log(cluster.bootstrap, scenario.topic)
        acknowledged = {record.number for record in sent if record.fate is Fate.ACKNOWLEDGED}
        comparison = check.compare(
            sent,
            scenario.spec.rows(scenario.oracle, sent, log),
            self._cell.mode,
            in_log=None if stopped else set(log.values()),
            stopped_at=scenario.oracle.positions() if stopped else None,
            dead_letters=scenario.oracle.dead_letters(),
        )
        verdict, audited = self._audit.audit(self._audit_file, cluster.url) if self._cell.audited else ("", {})
        counts = dict(comparison.anomalies)
        notes = [f"{kind}: {numbers}" for kind, numbers in comparison.examples.items()]
        if scenario.spec.only_audit_counts:
            notes.append(scenario.spec.only_audit_counts)
            counts |= {kind: audited.get(kind, 0) for kind in ("lost", "duplicated")}
        return Observation(
            fired=fired,
            check=counts,
            audit=audited,
            audit_verdict=verdict,
            records=comparison.records,
            drained=drained,
            exit_code=code,
            kafka_lost=0 if stopped else len(acknowledged - set(log.values())),
            notes=tuple(notes),
            live=self._compare_live(),
            violations=tuple(filter(None, (fault.violation() for fault in self._faults))),
        )

    def _compare_live(self) -> dict[str, int]:
        """Anomalies that a live reader of the output saw during the faults, where the output is a topic."""
        live_reader = self._scenario.live_reader
        if live_reader is None:
            return {}
        committed = check.read_places(self._cluster.bootstrap, self._scenario.oracle.table)
        anomalies = live_reader.anomalies(committed, LIVE_S)
        summary = ", ".join(f"{count:,} {kind}" for kind, count in anomalies.items()) or "each once and in order"
        self._note(f"a live reader of committed records, {len(committed):,} in the end: {summary}")
        return anomalies

    def _sample(self) -> None:
        """Records written over time, for the report's chart."""
        while not self._sampling.wait(SAMPLE_S):
            for driver in self._scenario.drivers[-2:]:
                driver.process_tree()  # remembered, so that none of them is left behind if their parent dies
            rows = self._scenario.oracle.count()
            if rows is not None:
                self._history.add("rows", self._cell.name, rows=rows)

    def _end_sampling(self) -> None:
        self._sampling.set()
        if self._sampler.is_alive():
            self._sampler.join()
