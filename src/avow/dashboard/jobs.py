"""Audits and redrives started from the pages: worker processes, their progress and their results.

Owns: the processes and the list of the last few. They are terminated with the dashboard. Must not know: what is done;
its neighbour is ``worker``, which does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from avow.errors import ConfigError

AT_ONCE = 2
KEPT = 30
LINES_MAX = 200
END_S = 10


@dataclass(slots=True)
class Job:
    """One piece of work. Changed by the thread that reads what its process says."""

    number: int
    kind: Literal["audit", "redrive"]
    pipeline: str
    process: subprocess.Popen[str] = field(repr=False)
    began: float = field(default_factory=time.time)
    ended: float | None = None
    progress: list[tuple[float, str]] = field(default_factory=list)  # (seconds from the beginning, what)
    done: str = ""  # the result
    verdict: str = ""
    advice: str = ""
    problem: str = ""

    @property
    def running(self) -> bool:
        return self.ended is None


class Jobs:
    """Starts and follows them."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(os.environ if env is None else env)
        self._jobs: dict[int, Job] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._closed = False

    def audit(self, pipeline: str, file: Path, folder: Path) -> Job:
        return self._start("audit", pipeline, file, str(folder))

    def redrive(self, pipeline: str, file: Path, selection: Mapping[str, Any]) -> Job:
        return self._start("redrive", pipeline, file, json.dumps(selection))

    def find(self, number: int) -> Job | None:
        return self._jobs.get(number)

    def of(self, pipeline: str) -> list[Job]:
        """The newest first."""
        return [job for job in reversed(list(self._jobs.values())) if job.pipeline == pipeline]

    def _start(self, kind: Literal["audit", "redrive"], pipeline: str, file: Path, rest: str) -> Job:
        with self._lock:
            running = [job for job in self._jobs.values() if job.running]
            if any((job.pipeline, job.kind) == (pipeline, kind) for job in running):
                raise ConfigError(f"{kind} of {pipeline} is already running", advice="Wait until it has ended.")
            if len(running) >= AT_ONCE or self._closed:
                raise ConfigError(f"{len(running)} jobs are already running", advice="Wait until one has ended.")
            process = subprocess.Popen(
                [sys.executable, "-m", "avow.dashboard.worker", kind, str(file.absolute()), rest],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # log output of client libraries may contain secrets
                text=True,
                env=self._env,
                start_new_session=True,
            )
            job = Job(next(self._numbers), kind, pipeline, process)
            self._jobs[job.number] = job
            for old in [job for job in self._jobs.values() if not job.running][:-KEPT]:
                del self._jobs[old.number]
        threading.Thread(target=self._follow, args=(job,), name=f"avow-job-{job.number}", daemon=True).start()
        return job

    def _follow(self, job: Job) -> None:
        assert job.process.stdout is not None
        with job.process.stdout as lines:
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # not a line of the worker's own
                if not isinstance(message, dict):
                    continue
                if "progress" in message and len(job.progress) < LINES_MAX:
                    job.progress.append((time.time() - job.began, str(message["progress"])))
                for name in ("done", "verdict", "advice", "problem"):
                    if name in message:
                        setattr(job, name, str(message[name]))
        code = job.process.wait()
        if not job.done and not job.problem:
            job.problem = f"the process ended with exit code {code} without a message"
        job.ended = time.time()

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed = True
            running = [job for job in self._jobs.values() if job.running]
        for job in running:
            job.process.terminate()
        for job in running:
            try:
                job.process.wait(END_S)
            except subprocess.TimeoutExpired:
                job.process.kill()
