"""What happened, as JSON lines that are only ever added to: the evidence, and what an interrupted proof resumes from.

One file per proof. The first line says what is proven and with what; each cell's lines carry its name. A line that a
crash cut short is left out when reading. Owns: the file. Must not know: what an event means.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "history.jsonl"


class History:
    """Adds events to ``folder/history.jsonl``. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._lock = threading.Lock()
        # After a crash the last line may lack its end: begin a new one.
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        self._file = self.path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def add(self, event: str, cell: str = "", **details: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "event": event, "cell": cell, **details}, ensure_ascii=False)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole line."""
    path = folder / FILE
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """The last verdict of each cell."""
    return {event["cell"]: event for event in read(folder) if event["event"] == "verdict"}
