"""PostgreSQL: ended, cut off, or answering without being heard."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from signal import SIGKILL, SIGQUIT

import psutil
import psycopg

from avow.local.cluster import PortPicker
from avow.prove.faults.base import WAIT_S, Fault
from avow.prove.faults.network import NetworkFault
from avow.prove.pooler import Pooler
from avow.prove.proxy import LostReply, Proxy


class PostgresKilled(Fault):
    def inject(self) -> None:
        self._pid = self.site.postgres.pid
        self.end()
        self._gone = bool(self._pid) and not psutil.pid_exists(self._pid or 0)

    def end(self) -> None:
        self.site.postgres.kill()

    def heal(self) -> None:
        self.site.cluster.start("postgres")

    def fired(self) -> str:
        return f"PostgreSQL, pid {self._pid}, was gone" if self._gone else ""


class PostgresImmediate(PostgresKilled):
    """Its own "immediate" shutdown: no checkpoint, every session ended at once."""

    def end(self) -> None:
        process = self.site.postgres.process()
        if process:
            process.send_signal(SIGQUIT)
            self.scene.until(lambda: self.site.postgres.process() is None, 30)


class FailoverLostCommits(Fault):
    """What a standby is that has not received the last commits: the same database, a moment earlier, as a whole."""

    _lost = 0

    def inject(self) -> None:
        scene, postgres = self.scene, self.site.postgres
        self._driver = scene.driver
        data, standby = postgres.folder / "data", postgres.folder / "standby"
        postgres.stop()
        shutil.rmtree(standby, ignore_errors=True)
        shutil.copytree(data, standby, symlinks=True)
        self._own(standby)
        self.site.cluster.start("postgres")
        before = scene.claimed()
        scene.until(lambda: scene.claimed() > before + 200 or not scene.driver.alive, WAIT_S)
        claimed = scene.claimed()
        postgres.kill()
        shutil.rmtree(data)
        standby.rename(data)
        self.site.cluster.start("postgres")
        with psycopg.connect(self.site.url) as connection:
            query = "SELECT coalesce(sum(position), 0) FROM avow.ledger WHERE pipeline = %s"
            row = connection.execute(query, [scene.name]).fetchone()
        self._lost = claimed - int(row[0] if row else 0)

    def _own(self, folder: Path) -> None:
        owner = self.site.postgres.identity()
        if owner:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, owner["user"], owner["group"], follow_symlinks=False)

    def violation(self) -> str:
        code = self._driver.code
        return "" if code in (None, 0) else f"the run ended with {code} instead of going on from the ledger"

    def fired(self) -> str:
        return (
            f"the server that took over had not received the claims of {self._lost} offsets" if self._lost > 0 else ""
        )


class BehindAPooler(Fault):
    """All of the pipeline's connections share a few of the server's, a transaction at a time; and a driver dies, with
    what it had set and begun on them."""

    size = 3
    _pooler: Pooler | None = None
    _killed = False

    def prepare(self) -> None:
        self._pooler = Pooler(PortPicker().free(), self.site.postgres.port, self.size).start()
        self.env = {"DATABASE_URL": self.site.url.replace(f":{self.site.postgres.port}/", f":{self._pooler.port}/")}

    def inject(self) -> None:
        scene, driver = self.scene, self.scene.driver
        driver.kill()
        self._killed = driver.code == -SIGKILL
        before = scene.claimed()
        scene.start(env=self.env)
        scene.until_claimed_more(before)

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
    def proxies(self) -> list[Proxy]:
        return [self.site.database]

    def harm(self) -> None:
        self.site.database.cut()

    def fired(self) -> str:
        cut = self.did("cut")
        return f"{cut} connections to PostgreSQL cut, {self.did('refused')} new ones refused" if cut else ""


class CommitReplyLost(NetworkFault):
    """PostgreSQL commits rows, and its answer never arrives: the task cannot know."""

    def proxies(self) -> list[Proxy]:
        return [self.site.database]

    def harm(self) -> None:
        # With the end of the text: a temporary table is made ON COMMIT DROP, and that is not it.
        commit, rows = b"COMMIT\0", b"INSERT INTO" if self.scene.plain else b"COPY"
        lost = LostReply(commit, rows, commit, times=2)
        if self.scene.plain and not self.scene.cell.audited:
            lost = LostReply(rows, rows, b"INSERT 0 1\0", times=2)  # which commits by itself, before that is said
        self.site.database.lose_replies(lost)

    def hold(self) -> None:
        before = self._before.lost_replies
        self.scene.until(lambda: self.site.database.counts.lost_replies > before, 30)
        super().hold()

    def fired(self) -> str:
        lost = self.did("lost_replies")
        return f"PostgreSQL answered COMMIT {lost} times, and the task never heard it" if lost else ""
