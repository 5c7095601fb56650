"""The pages of evidence: proofs with their matrices, and audits that were kept.

Owns: finding them under the folders that were given, and these answers. Must not know: how anything was judged.
Neighbours: ``avow.prove.report`` (which reads a proof's history) and ``avow.audit.archive``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from avow.audit import archive
from avow.dashboard.formatting import copy_fields
from avow.dashboard.requests import NoParams, NotFound, Params
from avow.guarantee import Guarantee
from avow.prove import history, report
from avow.prove.cells import ENGINES, FAULTS
from avow.prove.report import RecordedCell
from avow.settings import PipelineConfig

if TYPE_CHECKING:
    from avow.dashboard.state import AppState

# Where a proof may be, below a given folder.
PLACES = (history.FILE, f"*/{history.FILE}", f"proofs/*/{history.FILE}")
AGAIN_S = 2.0  # how old a look into the folders may be
PROOFS_MAX = 100
AUDITS_MAX = 200
BAD = ("broken", "missed")
OPEN = ("unproven", "unknown")
PROOF_VERDICTS = ("held", *BAD, *OPEN)  # of a whole proof

StoredProof = tuple[Path, dict[str, Any], list[RecordedCell]]  # a folder with a history, its first line, and its cells


@dataclass(frozen=True, slots=True)
class ProofRow:
    id: str
    name: str  # of its folder
    at: float  # seconds since 1970
    seed: int
    verdict: str  # the worst of its cells
    counts: dict[str, int]  # verdict -> cells
    sinks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditRow:
    id: str
    at: float
    pipeline: str
    guarantee: str
    verdict: str
    sentence: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EvidenceAnswer:
    folders: tuple[str, ...]
    proofs: tuple[ProofRow, ...]
    audits: tuple[AuditRow, ...]


@dataclass(frozen=True, slots=True)
class CellRow:
    name: str
    guarantee: str
    fault: str
    mode: str
    engine: str
    verdict: str
    counts: str  # what was found, in a few words
    why: str
    seconds: float
    fired: tuple[str, ...]
    notes: tuple[tuple[float, str], ...]
    replay: str
    rows: tuple[tuple[float, int], ...]  # (seconds, rows in the sink)
    faults: tuple[tuple[float, float, str], ...]  # (from, until, fault)


@dataclass(frozen=True, slots=True)
class ProofAnswer:
    proof: ProofRow
    versions: dict[str, str]
    columns: tuple[tuple[str, str, str, str], ...]  # sink, mode, engine, guarantee
    faults: tuple[tuple[str, str], ...]  # name, title
    cells: tuple[CellRow, ...]


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    audit: AuditRow
    report: dict[str, Any]


class Evidence:
    """What there is under the given folders. A file is read again when it has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._lock = threading.Lock()
        self._refreshed_at = -AGAIN_S
        self._files: dict[Path, tuple[tuple[float, int], Any]] = {}  # path -> (stamp, what was in it)
        self._proofs: list[StoredProof] = []
        self._audits: list[archive.StoredAudit] = []

    def proofs(self) -> list[StoredProof]:
        """The newest first."""
        self._refresh()
        return self._proofs

    def audits(self) -> list[archive.StoredAudit]:
        """The newest first."""
        self._refresh()
        return self._audits

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._refreshed_at < AGAIN_S:
                return
            histories = {path for folder in self.folders for pattern in PLACES for path in folder.glob(pattern)}
            proofs = [(path.parent, *history) for path in histories if (history := self._read(path, _history))]
            self._proofs = sorted(proofs, key=lambda entry: -float(entry[1].get("at", 0)))[:PROOFS_MAX]
            old = {path for folder in self.folders for path in archive.files(folder)}
            audits = [entry for path in old if (entry := self._read(path, archive.read)) is not None]
            self._audits = sorted(audits, key=lambda entry: -entry.at)[:AUDITS_MAX]
            for gone in self._files.keys() - histories - old:
                del self._files[gone]
            self._refreshed_at = time.monotonic()

    def _read(self, path: Path, read: Callable[[Path], Any]) -> Any:
        try:
            stat = path.stat()
        except OSError:
            return None
        stamp = (stat.st_mtime, stat.st_size)
        known = self._files.get(path)
        if known is None or known[0] != stamp:
            known = self._files[path] = (stamp, read(path))
        return known[1]

    def last_audit(self, pipeline: str) -> AuditRow | None:
        return next((audit_row(audit) for audit in self.audits() if audit.report.get("pipeline") == pipeline), None)

    def last_proof(self, pipeline: PipelineConfig) -> ProofRow | None:
        """The newest proof of pipelines like this one: same guarantee, sink, mode and engine."""
        for path, header, cells in self.proofs():
            matching = [cell for cell in cells if _like(cell, pipeline)]
            if matching:
                return proof_row(path, header, matching)
        return None


def _like(cell: RecordedCell, pipeline: PipelineConfig) -> bool:
    engine = ENGINES.get(cell.engine)
    return (cell.guarantee, cell.sink, cell.mode, engine.name if engine else cell.engine) == (
        pipeline.guarantee,
        pipeline.sink.kind,
        pipeline.sink.mode,
        pipeline.engine,
    )


def _history(path: Path) -> tuple[dict[str, Any], list[RecordedCell]] | None:
    try:
        header, cells = report.load(path.parent)
        proof_row(path.parent, header, cells)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # something else of this name, or of another version
    return (header, cells) if cells else None


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _worst(counts: Counter[str]) -> str:
    for verdict in (*BAD, *OPEN):
        if counts[verdict]:
            return verdict
    return "held" if counts["held"] or counts["caught"] else "unknown"


def proof_row(path: Path, header: dict[str, Any], cells: list[RecordedCell]) -> ProofRow:
    counts = Counter(cell.verdict for cell in cells)
    return ProofRow(
        _id(str(path.absolute())),
        path.name,
        float(header.get("at", 0)),
        int(header.get("seed", 0)),
        _worst(counts),
        {word: counts[word] for word in report.VERDICTS if counts[word]},
        tuple(dict.fromkeys(cell.sink for cell in cells)),
    )


def audit_row(stored: archive.StoredAudit) -> AuditRow:
    report = stored.report
    return AuditRow(
        _id(stored.name),
        stored.at,
        str(report.get("pipeline", "")),
        str(report.get("guarantee", "")),
        str(report.get("verdict", "unknown")),
        str(report.get("sentence", "")),
        float(report.get("seconds", 0)),
    )


def evidence(state: AppState, _: NoParams) -> EvidenceAnswer:
    """Proofs and audits, the newest first."""
    stored = state.evidence
    return EvidenceAnswer(
        tuple(str(folder) for folder in stored.folders),
        tuple(proof_row(*entry) for entry in stored.proofs()),
        tuple(audit_row(entry) for entry in stored.audits()),
    )


class IdParams(Params):
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def proof(state: AppState, params: IdParams) -> ProofAnswer:
    """One proof: its matrix, and what happened in each cell."""
    for path, header, cells in state.evidence.proofs():
        row = proof_row(path, header, cells)
        if row.id != params.id:
            continue
        words = [str(word) for word in Guarantee]
        columns = sorted(
            {(cell.sink, cell.mode, cell.engine, cell.guarantee) for cell in cells},
            key=lambda column: (*column[:3], words.index(column[3]) if column[3] in words else 0),
        )
        played = {cell.fault for cell in cells}
        faults = [(name, FAULTS[name].title) for name in FAULTS if name in played]
        faults += [(name, "") for name in sorted(played - FAULTS.keys())]
        versions = {str(name): str(value) for name, value in header.get("versions", {}).items()}
        return ProofAnswer(row, versions, tuple(columns), tuple(faults), tuple(map(_cell, cells)))
    raise NotFound("proof not found", advice="Its folder may have been removed. See the list of proofs.")


def _cell(cell: RecordedCell) -> CellRow:
    return copy_fields(
        CellRow,
        cell,
        why=str(cell.end.get("why", "")),
        seconds=float(cell.end.get("seconds", 0)),
        fired=tuple(str(text) for text in cell.end.get("fired", ()) if text),
        notes=tuple(cell.notes),
        replay=f"avow prove {cell.replay}" if cell.replay else "",
        rows=tuple(cell.rows),
        faults=tuple(cell.bars),
    )


def audit(state: AppState, params: IdParams) -> AuditAnswer:
    """One audit as it was kept."""
    for stored in state.evidence.audits():
        row = audit_row(stored)
        if row.id == params.id:
            return AuditAnswer(row, stored.report)
    raise NotFound("audit not found", advice="Its file may have been removed. See the list of audits.")
