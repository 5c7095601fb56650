"""Audits that are kept: one JSON file each, named by pipeline and time, in a folder beside others.

Owns: the files. Must not know: what a report means. Neighbours: ``report``, and whoever shows old ones.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avow.audit.report import Report

SPANS_MAX = 20  # of each finding
FOLDER = "audits"
KEPT_MAX = 200  # of each pipeline
_SHAPE = {"pipeline": str, "verdict": str, "seconds": int | float, "findings": list, "partitions": list, "notes": list}


@dataclass(frozen=True, slots=True)
class Kept:
    """One old audit, as data."""

    name: str  # of its file
    at: float  # seconds since 1970
    report: dict[str, Any]


def keep(report: Report, folder: Path) -> Path:
    """Write a report into ``folder/audits``. Of each pipeline the newest ``KEPT_MAX`` stay."""
    at = time.time()
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(at))
    path = place / f"{report.pipeline}-{stamp}-{os.getpid()}.json"
    making = path.with_suffix(".new")
    making.write_text(json.dumps({"at": at, "report": report.as_json(SPANS_MAX)}, indent=1) + "\n", encoding="utf-8")
    making.replace(path)
    # A report goes here with every audit, which may be one an hour for years.
    for old in sorted(place.glob(f"{report.pipeline}-{'[0-9]' * 8}-{'[0-9]' * 6}-*.json"))[:-KEPT_MAX]:
        old.unlink(missing_ok=True)
    return path


def files(folder: Path) -> Iterator[Path]:
    """What may be audits that were kept there."""
    yield from (folder / FOLDER).glob("*.json")


def read(path: Path) -> Kept | None:
    """One of them; None if it is something else."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        found = Kept(path.name, float(told["at"]), dict(told["report"]))
        whole = all(isinstance(found.report[name], kind) for name, kind in _SHAPE.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole and math.isfinite(found.at) else None
