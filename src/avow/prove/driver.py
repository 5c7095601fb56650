"""A command of avow's as a real subprocess: started, killed, paused, and asked how it is.

Each driver is in a session of its own, so that everything it started can be found and ended by pid. Owns: the process
and its log. Must not know: why it is killed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

import psutil

from avow.local.part import living

DAEMON = "avow.engines.daemon"  # the module that forks Python workers
STOP_S = 60


class Driver:
    """One ``avow run FILE``, or what is played in its place."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self._seen: dict[int, psutil.Process] = {}
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "avow.prove.hooked", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self.pid = self._child.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._child.poll()

    @property
    def alive(self) -> bool:
        return self.code is None

    def wait(self, timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(timeout_s)
        return None

    def family(self) -> list[psutil.Process]:
        """The driver, its JVM and its Python workers; also those whose parent has died since they were seen."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid) if self.alive else None  # afterwards the pid may be somebody else's
            for one in () if process is None else (process, *process.children(recursive=True)):
                self._seen[one.pid] = one
        return [one for one in self._seen.values() if living(one)]

    def jvm(self) -> psutil.Process | None:
        return next((one for one in self.family() if "java" in _name(one)), None)

    def workers(self) -> list[psutil.Process]:
        """Python workers: the forks of the daemon, which has the same command line as they have. The JVM's names the
        daemon too, as a setting."""
        daemons = {one.pid for one in self.family() if DAEMON in _line(one) and "java" not in _name(one)}
        return [one for one in self.family() if one.pid in daemons and _parent(one) in daemons]

    def kill(self) -> list[int]:
        """kill -9 of everything. Gives the pids that are gone."""
        family = self.family()
        signal(family, SIGKILL)
        self._child.wait()
        gone, _ = psutil.wait_procs(family, 20)
        return [one.pid for one in gone]

    def kill_alone(self) -> None:
        """kill -9 of the Python driver only: its JVM and tasks live on for a moment."""
        self.family()
        self._child.send_signal(SIGKILL)
        self._child.wait()

    def pause(self) -> bool:
        """SIGSTOP of everything; whether it really stands still, which takes a moment."""
        signal(self.family(), SIGSTOP)
        deadline = time.monotonic() + 5
        while not self.paused and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.paused

    def resume(self) -> None:
        signal(self.family(), SIGCONT)

    @property
    def paused(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return stopped(psutil.Process(self.pid))
        return False

    def stop(self) -> int | None:
        """Ask it to end after the current batch; kill it if it does not listen."""
        if self.alive:
            self._child.send_signal(SIGTERM)
            if self.wait(STOP_S) is None:
                self.kill()
        return self.code

    def end(self) -> None:
        """Whatever state it is in, nothing of it is left."""
        self.resume()
        self.kill()

    def says(self, pattern: str) -> bool:
        """Whether its log has a line like that."""
        return re.search(pattern, self.log.read_text(errors="replace")) is not None

    def last_words(self) -> str:
        """What it said in the end: its error, if there is one."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["nothing"])[-1].removeprefix("error: ")[:300]


def signal(processes: list[psutil.Process], number: Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stopped(process: psutil.Process) -> bool:
    """Whether it stands still by SIGSTOP."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def await_gone(process: psutil.Process, timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while living(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.ppid()
    return -1
