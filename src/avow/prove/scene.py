"""A pipeline that cells are played on: its file, topic, witness, drivers and workloads. What a fault is handed.
Or plain consumers in its place, who have a command line for a file.

A pipeline that came out of a cell clean may go on into the next one of its column. Owns: making these parts and asking
them how far they are. Must not know: faults or verdicts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from avow import plugins
from avow.engines.session import JAVA_SHORT
from avow.errors import LocalError
from avow.guarantee import Guarantee
from avow.local import spark
from avow.prove import plain
from avow.prove.cells import ENGINES, HERE, SHARING, Cell
from avow.prove.check import Sent
from avow.prove.driver import Driver
from avow.prove.follower import Follower
from avow.prove.form import Form
from avow.prove.site import Site
from avow.prove.witnesses.base import Witness
from avow.prove.witnesses.postgres import GroupWitness
from avow.prove.workload import Workload
from avow.sinks import SINKS

POLL_S = 0.25


def quick_java() -> dict[str, str]:
    """A driver that lives for seconds should start in seconds: what ``avow run --once`` does by itself."""
    archive = spark.archive()
    return {"driver.extraJavaOptions": f"{JAVA_SHORT} -XX:SharedArchiveFile={archive}" if archive else JAVA_SHORT}


def witness_of(sink: str) -> type[Witness]:
    """Who reads a sink of this kind back."""
    found: type[Witness] = plugins.load(SINKS[sink].witness, f"the witness of {sink!r}")
    return found


class Interrupted(Exception):
    """The proof is being ended: nothing more is waited for."""


class Scene:
    def __init__(
        self, cell: Cell, form: Form, site: Site, folder: Path, name: str, seed: int, note: Callable[[str], None]
    ) -> None:
        self.form, self.site, self.folder, self.name = form, site, folder, name
        self.topic = name
        self._seed = seed  # decides what the faults leave open
        make = witness_of(cell.sink) if cell.audited else GroupWitness
        self.witness = make(site, folder, name, name.replace("-", "_"))
        self.temporary = folder / "tmp"  # of the driver
        self.temporary.mkdir(parents=True)
        self.spark_folder = folder / "spark"  # what a killed JVM leaves behind goes with the rest
        self.workloads: list[Workload] = []  # one a cell
        self.drivers: list[Driver] = []
        self.all_held = True  # so far
        self.enter(cell, note)
        self._env: dict[str, str] = {}  # the newest driver's
        topic = self.witness.output_topic
        self.follower = Follower(site.bootstrap, topic) if topic else None

    def enter(self, cell: Cell, note: Callable[[str], None]) -> None:
        """The next cell begins."""
        self.cell = cell
        self.note = note  # tells the history

    @property
    def worn(self) -> bool:
        """Whether another cell should have a pipeline of its own."""
        return len(self.workloads) >= self.witness.cells_max

    @property
    def on_cluster(self) -> bool:
        """Whether tasks run on executors, which are no children of the driver."""
        return ENGINES[self.cell.engine].cluster

    @property
    def shared(self) -> bool:
        """Whether several drivers share out the partitions, instead of one taking all from the others."""
        return self.cell.engine in SHARING

    @property
    def plain(self) -> bool:
        """Whether the drivers are plain consumers."""
        return ENGINES[self.cell.engine].plain

    @property
    def workload(self) -> Workload:
        """This cell's."""
        return self.workloads[-1]

    def sent(self) -> list[Sent]:
        """All that was sent to the topic, in this cell and before it."""
        return [one for workload in self.workloads for one in workload.sent()]

    # The pipeline.

    def write_files(self, *, batch: int, declares: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
        """The pipeline's own file, and one for the audit, which it gives: past the proxies, and never on the cluster
        that a fault hurts. Plain consumers have none, and are audited as the pipeline that would have done the same.
        ``declares``: what both say besides."""
        master = {"master": self.site.sparks().url} if self.on_cluster else {}
        names = (self.name, self.witness)
        if not self.plain:
            text = self.form.text(
                self.cell, *names, self.site.pipeline_brokers, batch, quick_java(), master, declares=declares
            )
            self.file.write_text(text, encoding="utf-8")
        path = self.folder / "audit.toml"
        here = replace(self.cell, engine=HERE[0])
        text = self.form.text(here, *names, self.site.bootstrap, batch, quick_java(), declares=declares)
        path.write_text(text, encoding="utf-8")
        return path

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.toml"

    @property
    def driver(self) -> Driver:
        """The newest."""
        return self.drivers[-1]

    def start(self, *options: str, env: Mapping[str, str] | None = None) -> Driver:
        log = self.folder / f"run-{len(self.drivers) + 1}.log"
        given = {"DATABASE_URL": self.site.pipeline_url, "TMPDIR": str(self.temporary), **(env or {})}
        given["SPARK_LOCAL_DIRS"] = str(self.spark_folder)
        command = ["run", str(self.file)]
        if self.plain:
            given[plain.TABLE] = self.witness.table
            chance = random.Random(f"{self._seed}/{self.cell.name}/{len(self.drivers)}")
            kafka = ENGINES[self.cell.engine].source
            command = plain.command(self.cell.guarantee, self.topic, self.site.pipeline_brokers, kafka, chance)
        self._env = given
        self.drivers.append(Driver([*command, *options], log, given))
        terms = f": avow {' '.join([*command, *options])}" if self.plain else ""
        self.note(f"driver {len(self.drivers)} started, pid {self.driver.pid}{terms}")
        return self.driver

    def make_table(self) -> None:
        """What a pipeline does by itself."""
        if self.plain:
            plain.make_table(self.site.url, self.witness.table)

    def driver_has(self, env: Mapping[str, str]) -> bool:
        """Whether the newest driver was started with these settings."""
        return env.items() <= self._env.items()

    def end(self) -> None:
        """Nothing of it is left on the site, but for a table."""
        for driver in self.drivers:
            driver.end()
        for workload in self.workloads:
            workload.give_up()  # one of a cell that could not go on still sends
        self.witness.close()
        if self.follower is not None:
            self.follower.stop()
        # Every topic makes a broker's next start longer. It may be gone, or the brokers may be away.
        with suppress(KafkaException):
            self.site.drop_topic(self.topic)

    # How far it is.

    def claimed(self) -> int:
        return sum(self.witness.positions().values())

    def until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self.sleep(POLL_S)
        return True

    def sleep(self, seconds: float) -> None:
        if self.site.closing.wait(seconds):
            raise Interrupted

    def until_claimed_more(self, than: int, timeout_s: float = 90) -> bool:
        """Whether the pipeline moves on. A driver that ended cannot."""
        return self.until(lambda: self.claimed() > than or not self.driver.alive, timeout_s) and self.claimed() > than

    def caught_up(self) -> bool:
        ends, positions = self.site.ends(self.topic), self.witness.positions()
        return all(positions.get(number, 0) >= end for number, end in ends.items())

    def wait_for_handlers(self) -> None:
        """Until rows come no more: who claims a batch first hands it out, record by record, when all is claimed."""
        claims_first = self.plain and self.cell.guarantee is Guarantee.AT_MOST_ONCE
        before: int | None = -1
        while claims_first and before != (now := self.witness.count()):
            before = now
            self.sleep(1)

    def require(self, met: bool, what: str) -> None:
        if not met:
            raise LocalError(what, advice=f"The driver's logs are in {self.folder}")
