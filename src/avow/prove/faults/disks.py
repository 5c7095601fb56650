"""Full disks: a small tmpfs, filled to the last byte."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psycopg

from avow.local.cluster import disk_use
from avow.prove.faults.base import WAIT_S, CannotRun, Fault

SIZE_MB = 24
FULL = "No space left on device"


def _times_full(log: Path, since: int) -> int:
    """How often the log has that error after its first ``since`` bytes."""
    return log.read_bytes()[since:].count(FULL.encode())


class _SmallDisk(Fault):
    """A small tmpfs, filled to the last byte while the fault holds."""

    notice_s: float = 30
    _disk: Path | None = None

    def mount(self, folder: Path, owner: str | None = None, size_mb: int = SIZE_MB) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={size_mb}m"
        if owner and os.geteuid() == 0:
            options += f",uid={pwd.getpwnam(owner).pw_uid},mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "avow-prove", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotRun(f"cannot mount a tmpfs: {error}") from error
        if done.returncode:
            raise CannotRun(f"cannot mount a tmpfs: {done.stderr.strip()}")
        self._disk = folder

    def fill(self, folder: Path) -> None:
        self._ballast = folder / "ballast"
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def noticed(self) -> bool:
        return bool(self.fired())

    def hold(self) -> None:
        self.scenario.wait_until(self.noticed, self.notice_s)
        super().hold()

    def heal(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self._disk:
            subprocess.run(["umount", "-l", str(self._disk)], capture_output=True, check=False)
            self._disk = None


class DiskFullDatabase(_SmallDisk):
    """The table moves to a small disk, which is then full: COPY fails until there is room again."""

    def prepare(self) -> None:
        self._table = self.scenario.oracle.table
        self._space = f"small_{self.rng.randrange(10**9)}"
        self._folder = self.cluster.postgres.folder / self._space
        with psycopg.connect(self.cluster.url) as connection:
            size = connection.execute("SELECT pg_total_relation_size(to_regclass(%s))", [self._table]).fetchone()
        self.mount(self._folder, "nobody", SIZE_MB + 2 * ((size and size[0]) or 0) // 2**20)

    def _execute(self, *statements: str) -> None:
        with psycopg.connect(self.cluster.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def inject(self) -> None:
        self._log_size = self.cluster.postgres.log.stat().st_size
        data = self._folder / "data"
        data.mkdir()
        owner = self.cluster.postgres.identity()
        if owner:
            os.chown(data, owner["user"], owner["group"])
        self._execute(
            f"CREATE TABLESPACE {self._space} LOCATION '{data}'",
            f'ALTER TABLE "{self._table}" SET TABLESPACE {self._space}',
        )
        self.fill(self._folder)

    def fired(self) -> str:
        count = _times_full(self.cluster.postgres.log, self._log_size)
        return f'PostgreSQL logged "{FULL}" {count} times' if count else ""

    def close(self) -> None:
        with suppress(Exception):
            self._execute(f'ALTER TABLE "{self._table}" SET TABLESPACE pg_default', f"DROP TABLESPACE {self._space}")
        super().close()


class DiskFullBroker(_SmallDisk):
    """A broker's whole data is on a small disk. Kafka cannot go on without its only folder: the broker ends itself, and
    is started again when there is room. The disk is made before the load begins, and taken away after the verdict."""

    notice_s = WAIT_S  # Kafka writes rarely where nobody reads or writes

    def prepare(self) -> None:
        self._number = self.rng.choice([broker.number for broker in self.cluster.local.brokers()])
        data, aside = self._stopped()
        data.rename(aside)
        try:
            self.mount(data, size_mb=SIZE_MB + 2 * disk_use(aside) // 2**20)
            _copy(aside, data)
            shutil.rmtree(aside)
        except CannotRun:
            data.rmdir()
            aside.rename(data)
            raise
        finally:
            self._started()

    def _stopped(self) -> tuple[Path, Path]:
        """The broker's data, and where it is put meanwhile."""
        broker = self.cluster.broker(self._number)
        broker.stop()
        return broker.data, broker.folder / "data.aside"

    def _started(self) -> None:
        self.cluster.local.up()
        self.scenario.wait_until(self.cluster.fully_replicated, WAIT_S)

    def inject(self) -> None:
        broker = self.cluster.broker(self._number)
        self._log_size = broker.log.stat().st_size
        self.fill(broker.data)

    def heal(self) -> None:
        super().heal()
        self.cluster.broker(self._number).kill()  # it may hang half dead
        self._started()

    def fired(self) -> str:
        count = _times_full(self.cluster.broker(self._number).log, self._log_size)
        return f'broker-{self._number} logged "{FULL}" {count} times' if count else ""

    def close(self) -> None:
        if self._disk:
            data, aside = self._stopped()
            _copy(data, aside)
            super().close()
            data.rmdir()
            aside.rename(data)
            self._started()


def _copy(source: Path, target: Path) -> None:
    """Holes stay holes: Kafka's indexes are mostly that."""
    subprocess.run(["cp", "-a", "--sparse=always", f"{source}/.", str(target)], check=True)


class DiskFullLake(_SmallDisk):
    """The table's folder is a small disk from the first driver on: neither a file nor a commit can be written until
    there is room again."""

    size_mb = 64  # every commit leaves files, and Iceberg's grow

    def prepare(self) -> None:
        folder = self.scenario.oracle.files
        assert folder is not None, "it concerns sinks that have their files here"
        self.mount(folder, size_mb=self.size_mb)
        self._folder = folder

    def inject(self) -> None:
        self._driver = self.scenario.driver
        self.fill(self._folder)

    def noticed(self) -> bool:
        return super().noticed() or not self._driver.alive

    def fired(self) -> str:
        return f'the run logged "{FULL}"' if self._driver.logged(FULL) else ""
