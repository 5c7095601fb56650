"""Programs that no package of Python brings: Debian's own, installed where that can be done without asking anybody."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLACES = f"{os.environ['PATH']}:/usr/sbin"


def program(name: str) -> str:
    """The path of a program that has its package's name."""
    with Path(__file__).open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # two workers would be in each other's way
        if not shutil.which(name, path=PLACES) and shutil.which("apt-get") and os.geteuid() == 0:
            for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", name]):
                subprocess.run(command, capture_output=True, timeout=300, check=False)
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.fail(f"this test needs {name}: apt-get install {name} (as root, `make test` does it by itself)")
    return found
