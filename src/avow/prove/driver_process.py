"""An avow command as a real subprocess: started, killed, paused, and inspected.

Each driver is in its own session, so that its children can be found and ended by pid. Owns: the process and its log.
Must not know: why it is killed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

import psutil

from avow.local.part import living
from avow.retry import poll_until

DAEMON = "avow.engines.daemon"  # the module that forks Python workers
STOP_S = 60


class DriverProcess:
    """One ``avow run FILE``, ``avow consume`` or ``avow dead-letters redrive``."""

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

    def process_tree(self) -> list[psutil.Process]:
        """The driver, its JVM and its Python workers; also those whose parent has died since they were seen."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid) if self.alive else None  # afterwards the pid may be somebody else's
            for child in () if process is None else (process, *process.children(recursive=True)):
                self._seen[child.pid] = child
        return [child for child in self._seen.values() if living(child)]

    def jvm(self) -> psutil.Process | None:
        return next((process for process in self.process_tree() if "java" in _description(process)[0]), None)

    def workers(self) -> list[psutil.Process]:
        """Python workers: the forks of the daemon, which has the same command line as they have. The JVM's names the
        daemon too, as a setting."""
        described = [(process, *_description(process)) for process in self.process_tree()]
        daemons = {process.pid for process, name, line, _ in described if DAEMON in line and "java" not in name}
        return [process for process, _, _, parent in described if process.pid in daemons and parent in daemons]

    def kill(self) -> None:
        """kill -9 of everything, and wait until it is gone."""
        process_tree = self.process_tree()
        signal(process_tree, SIGKILL)
        self._child.wait()
        psutil.wait_procs(process_tree, 20)

    def kill_driver_only(self) -> None:
        """kill -9 of the Python driver only: its JVM and tasks live on for a moment."""
        self.process_tree()
        self._child.send_signal(SIGKILL)
        self._child.wait()

    def pause(self) -> bool:
        """SIGSTOP the whole process tree. True once it is stopped, which takes a moment."""
        signal(self.process_tree(), SIGSTOP)
        return poll_until(lambda: self.paused, 5, every_s=0.02)

    def resume(self) -> None:
        signal(self.process_tree(), SIGCONT)

    @property
    def paused(self) -> bool:
        return stopped(self.pid)

    def stop(self) -> None:
        """SIGTERM: end after the current batch. Killed after a time-out."""
        if self.alive:
            self._child.send_signal(SIGTERM)
            if self.wait(STOP_S) is None:
                self.kill()

    def end(self) -> None:
        """Whatever state it is in, nothing of it is left."""
        self.resume()
        self.kill()

    def logged(self, pattern: str) -> bool:
        """Whether its log has a line like that."""
        return re.search(pattern, self.log.read_text(errors="replace")) is not None

    def last_error(self) -> str:
        """The last error in its log, or its last line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["nothing"])[-1].removeprefix("error: ")[:300]


def signal(processes: list[psutil.Process], number: Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stopped(pid: int) -> bool:
    """Whether the process is stopped by SIGSTOP."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def kill_process(process: psutil.Process) -> bool:
    """kill -9; whether it died of that."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(SIGKILL)
        return poll_until(lambda: not living(process), 10, every_s=0.05)
    return False


def _description(process: psutil.Process) -> tuple[str, str, int]:
    """Its name, command line and parent's pid; nothing of one that has ended."""
    with suppress(psutil.Error):
        return process.name(), " ".join(process.cmdline()), process.ppid()
    return "", "", -1
