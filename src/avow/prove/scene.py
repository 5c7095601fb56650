"""A pipeline that cells are played on: its file, topic, table, drivers and workloads. What a fault is handed.

A pipeline that came out of a cell clean may go on into the next one of its column. Owns: making these parts and asking
them how far they are. Must not know: faults or verdicts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException
from psycopg import sql

from avow.engines.session import JAVA_SHORT
from avow.errors import LocalError
from avow.local import spark
from avow.prove.cells import ENGINES, HERE, Cell
from avow.prove.check import InTable, InTopic, Sent, Stored
from avow.prove.driver import Driver
from avow.prove.follower import Follower
from avow.prove.form import Form
from avow.prove.site import Site
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
        self.form, self.site, self.folder, self.name = form, site, folder, name
        self.topic = name
        self.table = name.replace("-", "_")  # or the output topic
        self.temporary = folder / "tmp"  # where the driver keeps its checkpoint
        self.temporary.mkdir(parents=True)
        self.spark_folder = folder / "spark"  # what a killed JVM leaves behind goes with the rest
        self.workloads: list[Workload] = []  # one a cell
        self.drivers: list[Driver] = []
        self.all_held = True  # so far
        self.enter(cell, note)
        self._env: dict[str, str] = {}  # the newest driver's
        self._connection: psycopg.Connection | None = None
        self._asking = threading.Lock()
        self._positions: dict[int, int] = {}  # in a group, as last seen
        self.follower = Follower(site.bootstrap, self.table) if cell.sink == "kafka" else None

    def enter(self, cell: Cell, note: Callable[[str], None]) -> None:
        """The next cell begins."""
        self.cell = cell
        self.note = note  # tells the history

    @property
    def on_cluster(self) -> bool:
        """Whether tasks run on executors, which are no children of the driver."""
        return ENGINES[self.cell.engine].cluster

    @property
    def workload(self) -> Workload:
        """This cell's."""
        return self.workloads[-1]

    def sent(self) -> list[Sent]:
        """All that was sent to the topic, in this cell and before it."""
        return [one for workload in self.workloads for one in workload.sent()]

    # The pipeline.

    def write_files(self, *, batch: int) -> Path:
        """The pipeline's own file, and one for the audit, which it gives: past the proxies, and never on the cluster
        that a fault hurts."""
        master = {"master": self.site.sparks().url} if self.on_cluster else {}
        names = (self.name, self.table)
        self.file.write_text(
            self.form.text(self.cell, *names, self.site.pipeline_brokers, batch, quick_java(), master), encoding="utf-8"
        )
        path = self.folder / "audit.toml"
        here = replace(self.cell, engine=HERE[0])
        path.write_text(self.form.text(here, *names, self.site.bootstrap, batch, quick_java()), encoding="utf-8")
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
        self._env = given
        self.drivers.append(Driver(self.file, log, given, *options))
        self.note(f"driver {len(self.drivers)} started, pid {self.driver.pid}")
        return self.driver

    def driver_has(self, env: Mapping[str, str]) -> bool:
        """Whether the newest driver was started with these settings."""
        return env.items() <= self._env.items()

    def end(self) -> None:
        """Nothing of it is left on the site, but for the table."""
        for driver in self.drivers:
            driver.end()
        for workload in self.workloads:
            workload.give_up()  # one of a cell that could not go on still sends
        if self._connection is not None:
            self._connection.close()
        if self.follower is not None:
            self.follower.stop()
        # Every topic makes a broker's next start longer. It may be gone, or the brokers may be away.
        with suppress(KafkaException):
            self.site.drop_topic(self.topic)
        if self.cell.sink == "kafka":
            for topic in (self.table, f"{self.name}.dead-letters"):
                with suppress(KafkaException):
                    self.site.drop_topic(topic)

    @property
    def stored(self) -> Stored:
        """What is in the sink, for the check."""
        if self.cell.sink == "kafka":
            return InTopic(self.site.bootstrap, self.table, self.name)
        return InTable(self.site.url, self.table, self.name)

    # How far it is. Asked past the proxies, and while the database may be down.

    def rows(self) -> int | None:
        """How many rows the table has; None while the database does not answer. Of a topic, how many offsets."""
        if self.cell.sink == "kafka":
            with suppress(KafkaException, KeyError):
                return sum(self.site.ends(self.table).values())
            return None
        query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self.table))
        found = self._asked(query)
        return None if found is None else int(found[0][0]) if found else 0

    def table_bytes(self) -> int:
        found = self._asked(sql.SQL("SELECT pg_total_relation_size(to_regclass({}))").format(sql.Literal(self.table)))
        return int(found[0][0] or 0) if found else 0

    def positions(self) -> dict[int, int]:
        if self.cell.sink == "kafka":
            found = {number: offset for number, (offset, _) in self.site.committed(self.name, self.topic).items()}
            # With a topic Kafka deletes its positions: then the last ones that were seen are what is known.
            self._positions = found or self._positions
            return self._positions
        query = sql.SQL("SELECT partition, position FROM avow.ledger WHERE pipeline = {}")
        return dict(self._asked(query.format(sql.Literal(self.name))) or [])

    def claiming_run(self) -> int:
        """The newest run that has claimed anything."""
        if self.cell.sink == "kafka":
            return max(
                (json.loads(said)["run"] for _, said in self.site.committed(self.name, self.topic).values()), default=0
            )
        query = sql.SQL("SELECT coalesce(max(run), 0) FROM avow.claims WHERE pipeline = {}")
        found = self._asked(query.format(sql.Literal(self.name)))
        return int(found[0][0]) if found else 0

    def _asked(self, query: sql.Composed) -> list[tuple[Any, ...]] | None:
        """Nothing if the table is not there yet, None if nobody answers. The connection is kept: a new one each time
        is a new process of the server."""
        with self._asking:
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self.site.url, connect_timeout=2, autocommit=True)
                return self._connection.execute(query).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
            except psycopg.OperationalError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                return None

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
