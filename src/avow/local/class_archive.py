"""Class-data archives: Java keeps the classes of an earlier start ready in a file, and loads them from there.

Most of a short start is a JVM loading and checking the same thousands of classes as the last time. An archive fits one
Java and the very jars of the class path, with their times of change, and the JVM does without it if anything differs;
so its name tells both, and one that fits no more is not offered, and goes when the next is made. ``avow setup`` makes
archives; what starts a JVM uses one if it is there, and never makes it by itself: where nothing is kept from one start
to the next (a container), making it would cost every start more than it gives.

Owns: names, places and the making. Must not know: what is archived; ``broker`` and ``spark`` say that.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from avow.errors import LocalError
from avow.local import java

MAKE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """``trainer``: a module that, run with the path of an archive, has a JVM do the usual and write it. Each ``home``
    has an archive of its own."""

    name: str
    trainer: str
    home: Path
    class_path: Sequence[Path]

    @property
    def path(self) -> Path:
        installed = java.find()
        jars = (f"{jar} {seen.st_size} {seen.st_mtime_ns}" for jar in self.class_path for seen in [jar.stat()])
        fits = os.pathsep.join([str(installed.path), installed.version, *jars])
        return cache() / f"{self._stem}-{_hash(fits)}.jsa"

    @property
    def _stem(self) -> str:
        return f"{self.name.lower()}-{_hash(str(self.home))}"

    def made(self) -> Path | None:
        """The archive that fits this Java and these jars, if it was made."""
        path = self.path
        return path if path.is_file() else None

    def make(self) -> Path:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
            archive, log = Path(folder, "archive.jsa"), Path(folder, "log")
            with log.open("wb") as output:
                command = [sys.executable, "-m", self.trainer, str(archive)]
                ended = subprocess.run(
                    command, cwd=folder, stdout=output, stderr=output, timeout=MAKE_TIMEOUT_S, check=False
                )
            if ended.returncode or not archive.is_file():
                raise LocalError(
                    f"the class archive of {self.name} could not be "
                    f"created:\n{log.read_text(errors='replace')[-2000:]}",
                    advice="The archive is optional: without it, starts take longer. `avow doctor` checks Java.",
                )
            for old in path.parent.glob(f"{self._stem}-*.jsa"):
                old.unlink()
            archive.replace(path)
        return path


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "avow"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
