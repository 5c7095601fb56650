"""The pipeline that a cell runs on, as faults get it: its file, topic, oracle, drivers and workloads. Plain consumers
have a command line instead of a file.

A pipeline that ended a cell without anomalies may be reused for the next one of its column. Owns: creating these parts
and reading their progress. Must not know: faults or verdicts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from avow import plugins
from avow.engines.session import JAVA_SHORT
from avow.errors import LocalError, SourceError
from avow.guarantee import Guarantee
from avow.local import spark
from avow.prove import plain_consumer
from avow.prove.cells import ENGINES, GROUP_MEMBERS, SPARK_LOCAL, Cell
from avow.prove.check import Sent
from avow.prove.cluster import ProofCluster
from avow.prove.driver_process import DriverProcess
from avow.prove.live_reader import LiveReader
from avow.prove.oracles.base import Oracle
from avow.prove.oracles.postgres import GroupOracle
from avow.prove.workload import Workload
from avow.prove.workload_spec import WorkloadSpec
from avow.sinks import SINKS

POLL_S = 0.25


def fast_start_java() -> dict[str, str]:
    """A driver that lives for seconds should start in seconds: what ``avow run --once`` does by itself."""
    archive = spark.archive()
    return {"driver.extraJavaOptions": f"{JAVA_SHORT} -XX:SharedArchiveFile={archive}" if archive else JAVA_SHORT}


def oracle_class(sink: str) -> type[Oracle]:
    """The oracle of a sink's kind."""
    oracle: type[Oracle] = plugins.load(SINKS[sink].oracle, f"the oracle of {sink!r}")
    return oracle


class Interrupted(Exception):
    """The proof is being ended: nothing more is waited for."""


class Scenario:
    def __init__(
        self,
        cell: Cell,
        spec: WorkloadSpec,
        cluster: ProofCluster,
        folder: Path,
        name: str,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self.spec, self.cluster, self.folder, self.name = spec, cluster, folder, name
        self.topic = name
        self.file = folder / "pipeline.toml"
        self._seed = seed  # decides what the faults leave open
        make = oracle_class(cell.sink) if cell.audited else GroupOracle
        self.oracle = make(cluster, folder, name, name.replace("-", "_"))
        self.temporary = folder / "tmp"  # of the driver
        self.temporary.mkdir(parents=True)
        self.spark_folder = folder / "spark"  # what a killed JVM leaves behind goes with the rest
        self.workloads: list[Workload] = []  # one a cell
        self.drivers: list[DriverProcess] = []
        self.all_held = True  # so far
        self.begin_cell(cell, note)
        engine = ENGINES[cell.engine]
        self.plain = engine.plain  # the drivers are plain consumers
        self.on_spark_cluster = engine.on_spark_cluster  # tasks run on executors, which are no children of the driver
        self.shared = cell.engine in GROUP_MEMBERS  # drivers share the partitions; else one takes all from the others
        self.driver_env: dict[str, str] = {}  # the newest driver's
        topic = self.oracle.output_topic
        self.live_reader = LiveReader(cluster.bootstrap, topic) if topic else None

    def begin_cell(self, cell: Cell, note: Callable[[str], None]) -> None:
        """The next cell begins."""
        self.cell = cell
        self.note = note  # adds to the history

    @property
    def used_up(self) -> bool:
        """Whether another cell should have a pipeline of its own."""
        return len(self.workloads) >= self.oracle.cells_max

    @property
    def workload(self) -> Workload:
        """This cell's."""
        return self.workloads[-1]

    def sent(self) -> list[Sent]:
        """All that was sent to the topic, in this cell and before it."""
        return [record for workload in self.workloads for record in workload.sent()]

    # The pipeline.

    def write_files(self, *, batch: int, declares: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
        """The pipeline's own file, and one for the audit, which it gives: past the proxies, and never on the cluster
        that a fault affects. Plain consumers have no file, and are audited as the equivalent pipeline. ``declares``:
        sections that are added to both."""
        audit, here = self.folder / "audit.toml", replace(self.cell, engine=SPARK_LOCAL[0])
        files: list[tuple[Path, Cell, str, dict[str, str]]] = [(audit, here, self.cluster.bootstrap, {})]
        if not self.plain:
            master = {"master": self.cluster.spark_cluster().url} if self.on_spark_cluster else {}
            files.append((self.file, self.cell, self.cluster.pipeline_brokers, master))
        for path, cell, brokers, master in files:
            text = self.spec.text(cell, self.name, self.oracle, brokers, batch, fast_start_java(), master, declares)
            path.write_text(text, encoding="utf-8")
        return audit

    @property
    def driver(self) -> DriverProcess:
        """The newest."""
        return self.drivers[-1]

    def start(self, *options: str, env: Mapping[str, str] | None = None) -> DriverProcess:
        self.driver_env = {**(env or {}), "SPARK_LOCAL_DIRS": str(self.spark_folder)}
        command = ["run", str(self.file)]
        if self.plain:
            self.driver_env[plain_consumer.TABLE] = self.oracle.table
            rng = random.Random(f"{self._seed}/{self.cell.name}/{len(self.drivers)}")
            kafka = ENGINES[self.cell.engine].source
            command = plain_consumer.command(self.cell.guarantee, self.topic, self.cluster.pipeline_brokers, kafka, rng)
        command += options
        self.drivers.append(self.launch(command, f"run-{len(self.drivers) + 1}", self.driver_env))
        shown = f": avow {' '.join(command)}" if self.plain else ""
        self.note(f"driver {len(self.drivers)} started, pid {self.driver.pid}{shown}")
        return self.driver

    def launch(self, command: list[str], name: str, env: Mapping[str, str] | None = None) -> DriverProcess:
        """An avow command on the pipeline's side of the proxies. ``name``: of its log."""
        env = {"DATABASE_URL": self.cluster.pipeline_url, "TMPDIR": str(self.temporary), **(env or {})}
        return DriverProcess(command, self.folder / f"{name}.log", env)

    def make_table(self) -> None:
        """What a pipeline does by itself."""
        if self.plain:
            plain_consumer.make_table(self.cluster.url, self.oracle.table)

    def end(self) -> None:
        """End its processes and remove its topics; a table stays."""
        for driver in self.drivers:
            driver.end()
        for workload in self.workloads:
            workload.give_up()  # one of a cell that could not go on still sends
        self.oracle.close()
        if self.live_reader is not None:
            self.live_reader.stop()
        # Every topic makes a broker's next start longer. It may be gone, or the brokers may be away.
        with suppress(SourceError):
            self.cluster.drop_topic(self.topic)

    # How far it is.

    def claimed(self) -> int:
        return sum(self.oracle.positions().values())

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self.sleep(POLL_S)
        return True

    def sleep(self, seconds: float) -> None:
        if self.cluster.closing.wait(seconds):
            raise Interrupted

    def wait_for_claims(self, than: int, timeout_s: float = 90) -> bool:
        """Whether the pipeline moves on. A driver that ended cannot."""
        return (
            self.wait_until(lambda: self.claimed() > than or not self.driver.alive, timeout_s) and self.claimed() > than
        )

    def caught_up(self) -> bool:
        ends, positions = self.cluster.ends(self.topic), self.oracle.positions()
        return all(positions.get(number, 0) >= end for number, end in ends.items())

    def wait_for_handlers(self) -> None:
        """Until no more rows arrive: with at-most-once the handler runs after the whole batch is claimed."""
        claims_first = self.plain and self.cell.guarantee is Guarantee.AT_MOST_ONCE
        before: int | None = -1
        while claims_first and before != (now := self.oracle.count()):
            before = now
            self.sleep(1)

    def require(self, met: bool, message: str) -> None:
        if not met:
            raise LocalError(message, advice=f"The driver's logs are in {self.folder}")
