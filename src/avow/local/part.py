"""One background process of the local cluster, known by its pid: start, stop, and the faults a test injects.

Owns the pid file and the log. Must not know what the process is: ``broker`` and ``postgres`` say that. A pid
alone is not enough (it may have been given to someone else since), so a part is running only if the pid's
command line still names the part's own folder. Nothing is ever ended by name.
"""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import TypedDict

import psutil

from avow.errors import LocalError
from avow.retry import poll_until

SIGNAL_TIMEOUT_S = 30
LOG_LINES_SHOWN = 15

# Children of this very process, so that a dead one is reaped and not seen as running for ever.
_children: dict[int, subprocess.Popen[bytes]] = {}


class PartState(StrEnum):
    UP = "up"
    PAUSED = "paused"
    DOWN = "down"


class Identity(TypedDict, total=False):
    """Whom a process runs as, as ``subprocess`` takes it."""

    user: int
    group: int
    extra_groups: list[int]


def living(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not: it is dead, and only its parent, which may be busy, has not noticed."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class ClusterPart(ABC):
    """A named process with a folder of its own."""

    stop_signal: Signals = SIGTERM

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.name = name
        self.folder = folder
        self.port = port
        self.log = folder / "log"
        self._pid_file = folder / "pid"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def identity(self) -> Identity:
        """The user to run as, where it is not who we are."""
        return {}

    def environment(self) -> dict[str, str]:
        """Variables that it gets beside our own."""
        return {}

    @abstractmethod
    def command(self) -> list[str | Path]:
        """What to run. It must name the part's folder: that is how its pid is recognised."""

    def process(self) -> psutil.Process | None:
        """The running process, if it is still ours."""
        try:
            pid = int(self._pid_file.read_text())
            process = psutil.Process(pid)
            if pid in _children:
                return process if _children[pid].poll() is None else None
            ours = any(str(self.folder) in word for word in process.cmdline())
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return None
        return process if ours else None

    @property
    def pid(self) -> int | None:
        process = self.process()
        return process.pid if process else None

    @property
    def state(self) -> PartState:
        with suppress(psutil.NoSuchProcess):
            if process := self.process():
                return PartState.PAUSED if process.status() == psutil.STATUS_STOPPED else PartState.UP
        return PartState.DOWN

    def start(self) -> None:
        """Start it in the background, if it is not running. Does not wait until it is ready."""
        if self.process():
            return
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | self.environment(),
                **self.identity(),
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )
        _children[child.pid] = child
        self._pid_file.write_text(str(child.pid))

    def check_running(self) -> None:
        """Raise, with the end of the log, if it died."""
        if self.process():
            return
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
        raise LocalError(
            f"{self.name} ended right after its start; the end of its log:\n{tail}",
            advice=f"See the whole log: {self.log}",
        )

    def ask_to_stop(self) -> None:
        """Ask it to end, without waiting. A paused process is resumed first, or it could not handle the signal."""
        self._signal(self.stop_signal, alone=True)
        self.resume()

    def stop(self) -> None:
        """Stop it: SIGTERM, wait, and SIGKILL if it does not end. Removes the pid file."""
        self.ask_to_stop()
        if not self._until(lambda: not self.process()):
            self.kill()
        self._pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """kill -9, and return once it is gone. The pid file stays, as it would after a crash."""
        family = self._family()
        # Its children are not killed but waited for: what a crash leaves behind must go by itself.
        self._signal(SIGKILL, alone=True)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(SIGCONT)
        if not self._until(lambda: not self.process() and not any(map(living, family))):
            raise LocalError(
                f"{self.name} did not end after SIGKILL", advice="Inspect it with ps; it may be blocked on a disk."
            )

    def pause(self) -> None:
        """SIGSTOP, with all its children, and return once it is stopped."""
        self._signal(SIGSTOP)
        self._until(lambda: self.state is not PartState.UP)

    def resume(self) -> None:
        """SIGCONT, with all its children, and return once it moves again."""
        self._signal(SIGCONT)
        self._until(lambda: self.state is not PartState.PAUSED)

    def _signal(self, number: Signals, *, alone: bool = False) -> None:
        for process in self._family()[: 1 if alone else None]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _family(self) -> list[psutil.Process]:
        """The process first, then its children."""
        process = self.process()
        if process is None:
            return []
        try:
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _until(self, done: Callable[[], bool]) -> bool:
        """Signals take effect a moment later: wait for it, within bounds."""
        return poll_until(done, SIGNAL_TIMEOUT_S, every_s=0.02)
