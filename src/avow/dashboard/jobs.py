"""Long work that a person has started: audits and redrives, as child processes, with what they say of themselves.

Owns: the processes and the memory of the last few. Each is ended with the dashboard. Must not know: what is done; its
neighbour is ``child``, which does it.
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
    told: list[tuple[float, str]] = field(default_factory=list)  # (seconds from the beginning, what)
    done: str = ""  # what it came to
    verdict: str = ""
    advice: str = ""
    kept: str = ""  # the file of an audit's report
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
                raise ConfigError(f"{kind} of {pipeline} is under way already", advice="Wait for its end.")
            if len(running) >= AT_ONCE or self._closed:
                raise ConfigError(f"{len(running)} jobs are under way already", advice="Wait for one to end.")
            process = subprocess.Popen(
                [sys.executable, "-m", "avow.dashboard.child", kind, str(file.absolute()), rest],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # its clients' chatter may hold what is not to be shown
                text=True,
                env=self._env,
                start_new_session=True,
            )
            job = Job(next(self._numbers), kind, pipeline, process)
            self._jobs[job.number] = job
            for old in [one for one in self._jobs.values() if not one.running][:-KEPT]:
                del self._jobs[old.number]
        threading.Thread(target=self._follow, args=(job,), name=f"avow-job-{job.number}", daemon=True).start()
        return job

    def _follow(self, job: Job) -> None:
        assert job.process.stdout is not None
        with job.process.stdout as lines:
            for line in lines:
                try:
                    said = json.loads(line)
                except ValueError:
                    continue  # something else that was printed
                if not isinstance(said, dict):
                    continue
                if "told" in said and len(job.told) < LINES_MAX:
                    job.told.append((time.time() - job.began, str(said["told"])))
                for name in ("done", "verdict", "advice", "kept", "problem"):
                    if name in said:
                        setattr(job, name, str(said[name]))
        code = job.process.wait()
        if not job.done and not job.problem:
            job.problem = f"it ended with code {code} and said nothing"
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
