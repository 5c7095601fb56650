"""Places where a test can end the process as a crash would: after the claim, in mid-write, after the write, ...

Inert unless the environment names one: ``AVOW_FAILPOINT=NAME:BATCH:WHO:FOLDER`` kills with SIGKILL at point NAME of the
first batch not below BATCH, once (FOLDER remembers that it fired): WHO is ``worker`` (this process alone), ``executor``
(this process and all above it, up to the executor's JVM) or ``run`` (the same, up to the driver, where that is above).
``stop`` is this process alone with SIGSTOP: whoever asked for it lets it go on.
With ``answer`` nothing is killed: what was done stays done, and an error takes the place of its answer.

And places where a pipeline can be made to break its word on purpose, so that a proof can show that it would be caught:
``AVOW_CANARY=swap`` takes the acts in the wrong order, ``drop:N`` and ``double:N`` do that to one row in N.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

import psutil

from avow.guarantee import Act

if TYPE_CHECKING:  # a command that only names a failpoint need not wait for Arrow
    import pyarrow as pa

VARIABLE = "AVOW_FAILPOINT"
DRIVER = "AVOW_DRIVER_PID"
CANARY = "AVOW_CANARY"

SENT_WITHIN_S = 0.5  # before a process is stopped: what it gave to a client has left, and a transaction has begun


def declared() -> dict[str, str]:
    """What the environment names, for executors that have another one."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def failpoint(name: str, batch: int) -> None:
    wish = os.environ.get(VARIABLE)
    if not wish:
        return
    point, first, who, folder = wish.split(":", 3)
    if point != name or batch < int(first):
        return
    try:
        Path(folder, f"fired-{point}").touch(exist_ok=False)
    except FileExistsError:
        return
    if who == "answer":
        raise OSError("the answer was lost, as a failpoint wished")
    if who == "stop":
        time.sleep(SENT_WITHIN_S)
        os.kill(os.getpid(), SIGSTOP)
        return
    for process in list(_above(who)):
        process.send_signal(SIGKILL)
    os.kill(os.getpid(), SIGKILL)


def _above(who: str) -> Iterator[psutil.Process]:
    """The processes above this one that are to go too; none if the last of them is not above it."""
    found = []
    for process in psutil.Process().parents() if who != "worker" else []:
        found.append(process)
        if process.name() == "java" if who == "executor" else process.pid == int(os.environ.get(DRIVER, 0)):
            yield from found
            return


def order(steps: tuple[frozenset[Act], ...]) -> tuple[frozenset[Act], ...]:
    """The acts as they were given, unless a canary swaps them."""
    return steps[::-1] if os.environ.get(CANARY) == "swap" else steps


def copies(offset: int) -> int:
    """How often a record's row is to be written: once, unless a canary drops or doubles one in so many."""
    what, _, every = os.environ.get(CANARY, "").partition(":")
    return 1 if what not in ("drop", "double") or (offset + 1) % int(every) else {"drop": 0, "double": 2}[what]


def sabotaged(rows: pa.RecordBatch, offset_column: str) -> pa.RecordBatch:
    """The rows as they were given, unless there is a canary."""
    if CANARY not in os.environ:
        return rows
    offsets = rows.column(offset_column).to_pylist()
    return rows.take([row for row, offset in enumerate(offsets) for _ in range(copies(offset))])
