"""One cell's pipeline: its file, topic, table, driver and workload. What a fault is handed.

Owns: making these and asking them how far they are. Must not know: faults or verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg

from avow.engines.spark import JAVA_SHORT
from avow.errors import LocalError
from avow.local import spark
from avow.prove.cells import Cell
from avow.prove.driver import Driver
from avow.prove.form import Form
from avow.prove.site import Site
from avow.prove.target import TARGETS
from avow.prove.workload import Workload

POLL_S = 0.25


def quick_java() -> dict[str, str]:
    """A driver that lives for seconds should start in seconds: what ``avow run --once`` does by itself."""
    archive = spark.archive()
    return {"driver.extraJavaOptions": f"{JAVA_SHORT} -XX:SharedArchiveFile={archive}" if archive else JAVA_SHORT}


class Interrupted(Exception):
    """The proof is being ended: nothing more is waited for."""


class Scene:
    def __init__(
        self, cell: Cell, form: Form, site: Site, folder: Path, name: str, note: Callable[[str], None]
    ) -> None:
        self.cell, self.form, self.site, self.folder, self.name = cell, form, site, folder, name
        self.note = note  # tells the history
        self.topic = name
        self.table = name.replace("-", "_")
        self.temporary = folder / "tmp"  # where the driver keeps its checkpoint
        self.temporary.mkdir(parents=True)
        self.workload: Workload  # once the cell has begun
        self.drivers: list[Driver] = []
        self._env: dict[str, str] = {}  # the newest driver's
        self.target = TARGETS[cell.sink](site.url, folder, name, self.table)

    # The pipeline.

    def write_file(self, brokers: str, *, batch: int) -> Path:
        path = self.folder / ("pipeline.toml" if brokers == self.site.pipeline_brokers else "audit.toml")
        text = self.form.text(self.cell, self.name, self.target, brokers, batch, quick_java())
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
        self._env = given
        self.drivers.append(Driver(self.file, log, given, *options))
        self.note(f"driver {len(self.drivers)} started, pid {self.driver.pid}")
        return self.driver

    def driver_has(self, env: Mapping[str, str]) -> bool:
        """Whether the newest driver was started with these settings."""
        return env.items() <= self._env.items()

    def end(self) -> None:
        for driver in self.drivers:
            driver.end()
        self.target.close()

    # How far it is. Asked past the proxies, and while the sink may be down.

    def rows(self) -> int | None:
        """How many rows the table has; None while the sink does not answer."""
        return self.target.count()

    def positions(self) -> dict[int, int]:
        return self.target.positions()

    def claimed(self) -> int:
        return sum(self.positions().values())

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
        ends, positions = self.site.ends(self.topic), self.positions()
        return all(positions.get(number, 0) >= end for number, end in ends.items())

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.site.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def require(self, met: bool, what: str) -> None:
        if not met:
            raise LocalError(what, advice=f"The driver's logs are in {self.folder}")
