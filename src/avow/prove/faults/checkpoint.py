"""Spark's checkpoint: deleted, rolled back or torn under a running query."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path

from avow.prove.faults.base import WAIT_S, Fault


class _Checkpoint(Fault):
    """Something is done to Spark's checkpoint under a running query."""

    _done = ""

    def inject(self) -> None:
        self.scene.until(lambda: len(self._offsets()) > 1 or not self.scene.driver.alive, WAIT_S)
        for _ in range(50):  # Spark writes here too: try until the harm is really there
            with suppress(OSError):
                self._done = self.harm()
            if self._done:
                break

    def _offsets(self) -> list[Path]:
        """The batches' offset files, oldest first."""
        found = self.scene.temporary.glob("avow-checkpoint-*/offsets/*")
        return sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name))

    @abstractmethod
    def harm(self) -> str:
        """Do it."""

    def fired(self) -> str:
        return self._done


class CheckpointDeleted(_Checkpoint):
    def harm(self) -> str:
        (folder, *_) = {path.parent.parent for path in self._offsets()}
        shutil.rmtree(folder)
        return f"{folder.name} was there and is gone"


class CheckpointRewound(_Checkpoint):
    def harm(self) -> str:
        newest = self._offsets()[-1]
        for path in (newest, newest.parent.parent / "commits" / newest.name):
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        return "" if newest.exists() else f"batch {newest.name} is gone from the checkpoint"


class CheckpointTorn(_Checkpoint):
    def harm(self) -> str:
        newest = self._offsets()[-1]
        size = newest.stat().st_size
        os.truncate(newest, size // 2)
        return f"offsets/{newest.name} cut from {size} to {size // 2} bytes"
