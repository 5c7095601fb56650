"""PostgreSQL: killed, cut off, failed over, behind a pooler, or with its answers lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from signal import SIGKILL, SIGQUIT

import psutil
import psycopg

from avow.local.cluster import PortPicker
from avow.prove.faults.base import WAIT_S, Fault
from avow.prove.faults.network import NetworkFault, ReplyLost
from avow.prove.pooler import Pooler
from avow.prove.proxy import LostReply, Proxy


class PostgresKilled(Fault):
    def inject(self) -> None:
        pid = self.cluster.postgres.pid
        self.end()
        if pid and not psutil.pid_exists(pid):
            self.proof = f"PostgreSQL, pid {pid}, was gone"

    def end(self) -> None:
        self.cluster.postgres.kill()

    def heal(self) -> None:
        self.cluster.local.start("postgres")


class PostgresImmediate(PostgresKilled):
    """Its own "immediate" shutdown: no checkpoint, every session ended at once."""

    def end(self) -> None:
        process = self.cluster.postgres.process()
        if process:
            process.send_signal(SIGQUIT)
            self.scenario.wait_until(lambda: self.cluster.postgres.process() is None, 30)


class FailoverLostCommits(Fault):
    """A standby that has not received the last commits: a copy of the database from a moment earlier."""

    def inject(self) -> None:
        scenario, postgres = self.scenario, self.cluster.postgres
        self._driver = scenario.driver
        data, standby = postgres.folder / "data", postgres.folder / "standby"
        postgres.stop()
        shutil.rmtree(standby, ignore_errors=True)
        shutil.copytree(data, standby, symlinks=True)
        self._own(standby)
        self.cluster.local.start("postgres")
        before = scenario.claimed()
        scenario.wait_until(lambda: scenario.claimed() > before + 200 or not scenario.driver.alive, WAIT_S)
        claimed = scenario.claimed()
        postgres.kill()
        shutil.rmtree(data)
        standby.rename(data)
        self.cluster.local.start("postgres")
        with psycopg.connect(self.cluster.url) as connection:
            query = "SELECT coalesce(sum(position), 0) FROM avow.ledger WHERE pipeline = %s"
            row = connection.execute(query, [scenario.name]).fetchone()
        lost = claimed - int(row[0] if row else 0)
        if lost > 0:
            self.proof = f"the server that took over had not received the claims of {lost} offsets"

    def _own(self, folder: Path) -> None:
        owner = self.cluster.postgres.identity()
        if owner:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, owner["user"], owner["group"], follow_symlinks=False)

    def violation(self) -> str:
        code = self._driver.code
        return "" if code in (None, 0) else f"the run ended with exit code {code} instead of continuing from the ledger"


class BehindAPooler(Fault):
    """All of the pipeline's connections share a few of the server's, a transaction at a time; and a driver dies, with
    what it had set and begun on them."""

    size = 3
    _pooler: Pooler | None = None
    _killed = False

    def prepare(self) -> None:
        self._pooler = Pooler(PortPicker().free(), self.cluster.postgres.port, self.size).start()
        self.env = {
            "DATABASE_URL": self.cluster.url.replace(f":{self.cluster.postgres.port}/", f":{self._pooler.port}/")
        }

    def inject(self) -> None:
        scenario, driver = self.scenario, self.scenario.driver
        driver.kill()
        self._killed = driver.code == -SIGKILL
        before = scenario.claimed()
        scenario.start(env=self.env)
        scenario.wait_for_claims(before)

    def close(self) -> None:
        if self._pooler is not None:
            self._pooler.stop()

    def fired(self) -> str:
        pooler = self._pooler
        if pooler is None or not self._killed or pooler.transactions < 10 * pooler.servers:
            return ""
        return (
            f"{pooler.transactions} transactions of {pooler.clients} clients on {pooler.servers} connections to "
            "PostgreSQL, and a driver died of SIGKILL"
        )


class PostgresCut(NetworkFault):
    needs = ("cut",)
    evidence = "{cut} connections to PostgreSQL cut, {refused} new ones refused"

    def proxies(self) -> list[Proxy]:
        return [self.cluster.database]

    def apply(self) -> None:
        self.cluster.database.cut()


class CommitReplyLost(ReplyLost):
    """PostgreSQL commits rows, and its answer never arrives: the task cannot know."""

    evidence = "{lost_replies} replies to COMMIT were dropped before they reached the task"

    def proxies(self) -> list[Proxy]:
        return [self.cluster.database]

    def apply(self) -> None:
        # With the end of the text: a temporary table is made ON COMMIT DROP, and that is not it.
        commit, rows = b"COMMIT\0", b"INSERT INTO" if self.scenario.plain else b"COPY"
        lost = LostReply(commit, rows, commit, times=2)
        if self.scenario.plain and not self.scenario.cell.audited:
            lost = LostReply(rows, rows, b"INSERT 0 1\0", times=2)  # autocommitted before the server answers
        self.cluster.database.lose_replies(lost)
