"""Full disks: a small tmpfs, filled to the last byte."""

from __future__ import annotations

import os
import pwd
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from avow.prove.faults.base import CannotRun, Fault


class _SmallDisk(Fault):
    """A small tmpfs, filled to the last byte while the fault holds."""

    size_mb: ClassVar[int] = 24

    def mount(self, folder: Path, owner: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={self.size_mb}m"
        if owner and os.geteuid() == 0:
            options += f",uid={pwd.getpwnam(owner).pw_uid},mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "avow-prove", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotRun(f"no small disk can be made here: {error}") from error
        if done.returncode:
            raise CannotRun(f"no small disk can be made here: {done.stderr.strip()}")
        self._disk: Path | None = folder

    def fill(self, folder: Path) -> None:
        self._ballast = folder / "ballast"
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def heal(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        if getattr(self, "_disk", None):
            subprocess.run(["umount", "-l", str(self._disk)], capture_output=True, check=False)
            self._disk = None


FULL = "No space left on device"


class DiskFullDatabase(_SmallDisk):
    """The table moves to a small disk, which is then full: COPY fails until there is room again."""

    def prepare(self) -> None:
        self._space = f"small_{self.chance.randrange(10**9)}"
        self._folder = self.site.postgres.folder / self._space
        self.mount(self._folder, "nobody")

    def inject(self) -> None:
        self._log_size = self.site.postgres.log.stat().st_size
        data = self._folder / "data"
        data.mkdir()
        owner = self.site.postgres.identity()
        if owner:
            os.chown(data, owner["user"], owner["group"])
        self.scene.execute(f"CREATE TABLESPACE {self._space} LOCATION '{data}'")
        self.scene.execute(f'ALTER TABLE "{self.scene.table}" SET TABLESPACE {self._space}')
        self.fill(self._folder)

    def hold(self) -> None:
        self.scene.until(lambda: bool(self.fired()), 30)
        super().hold()

    def fired(self) -> str:
        with self.site.postgres.log.open("rb") as file:
            file.seek(self._log_size)
            count = file.read().count(FULL.encode())
        return f'PostgreSQL said "{FULL}" {count} times' if count else ""

    def close(self) -> None:
        with suppress(Exception):
            self.scene.execute(f'ALTER TABLE "{self.scene.table}" SET TABLESPACE pg_default')
            self.scene.execute(f"DROP TABLESPACE {self._space}")
        self.unmount()


class DiskFullCheckpoint(_SmallDisk):
    def prepare(self) -> None:
        self.mount(self.scene.temporary)

    def inject(self) -> None:
        self._driver = self.scene.driver
        self.fill(self.scene.temporary)

    def hold(self) -> None:
        self.scene.until(lambda: bool(self.fired()) or not self._driver.alive, 30)
        super().hold()

    def fired(self) -> str:
        return f'the run said "{FULL}"' if self._driver.says(FULL) else ""

    def close(self) -> None:
        self.unmount()
