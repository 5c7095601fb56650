"""Places where a test can end the process as a crash would: after the claim, in mid-write, after the write, ...

Inert unless the environment names one: ``AVOW_FAILPOINT=NAME:BATCH:WHO:FOLDER`` kills with SIGKILL at point NAME of the
first batch not below BATCH, once (FOLDER remembers that it fired): WHO is ``worker`` (this process alone) or ``run``
(this process and all above it, up to the driver).
"""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL

import psutil

VARIABLE = "AVOW_FAILPOINT"
DRIVER = "AVOW_DRIVER_PID"


def failpoint(name: str, batch: int) -> None:
    declared = os.environ.get(VARIABLE)
    if not declared:
        return
    point, first, who, folder = declared.split(":", 3)
    if point != name or batch < int(first):
        return
    try:
        Path(folder, f"fired-{point}").touch(exist_ok=False)
    except FileExistsError:
        return
    driver = int(os.environ[DRIVER])
    if who == "run":
        for parent in psutil.Process().parents():
            parent.send_signal(SIGKILL)
            if parent.pid == driver:
                break
    os.kill(os.getpid(), SIGKILL)
