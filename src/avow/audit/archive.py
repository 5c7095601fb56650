"""The archive of audit reports: one JSON file each, named by pipeline and time.

Owns: the files. Must not know: what a report means. Neighbours: ``report``, and the dashboard, which shows old ones.
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

from avow.audit.report import AuditReport

SPANS_MAX = 20  # of each finding
FOLDER = "audits"
KEPT_MAX = 200  # of each pipeline
_SHAPE = {"pipeline": str, "verdict": str, "seconds": int | float, "findings": list, "partitions": list, "notes": list}


@dataclass(frozen=True, slots=True)
class StoredAudit:
    """One stored audit, as data."""

    name: str  # of its file
    at: float  # seconds since 1970
    report: dict[str, Any]


def keep(report: AuditReport, folder: Path) -> Path:
    """Write a report into ``folder/audits``. Of each pipeline the newest ``KEPT_MAX`` stay."""
    at = time.time()
    archive = folder / FOLDER
    archive.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(at))
    path = archive / f"{report.pipeline}-{stamp}-{os.getpid()}.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"at": at, "report": report.as_json(SPANS_MAX)}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    # A report goes here with every audit, which may be one an hour for years.
    for old in sorted(archive.glob(f"{report.pipeline}-{'[0-9]' * 8}-{'[0-9]' * 6}-*.json"))[:-KEPT_MAX]:
        old.unlink(missing_ok=True)
    return path


def files(folder: Path) -> Iterator[Path]:
    """Files that may be stored audits."""
    yield from (folder / FOLDER).glob("*.json")


def read(path: Path) -> StoredAudit | None:
    """A stored audit; None if the file is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        audit = StoredAudit(path.name, float(document["at"]), dict(document["report"]))
        complete = all(isinstance(audit.report[name], kind) for name, kind in _SHAPE.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return audit if complete and math.isfinite(audit.at) else None
