"""The faults: each injects its failure, heals it, and proves that it happened.

A fault is injected, held and healed. ``fired()`` returns the proof as a sentence, or an empty string if there is none;
then the cell is unknown, because a fault that did not happen proves nothing. Random choices come from the fault's seed.

Owns: how faults are injected. Must not know: verdicts, or how the result is read back. Neighbours: ``cells`` (the table
of faults by name), ``scenario`` (what faults are injected into).
"""

from __future__ import annotations

from avow.prove.faults import (  # noqa: F401 - importing a module registers its faults
    brokers,
    canaries,
    database,
    disks,
    network,
    processes,
    records,
    spark,
    topics,
)
from avow.prove.faults.base import IMPLEMENTED, CannotRun, Fault

__all__ = ["IMPLEMENTED", "CannotRun", "Fault"]
