"""Pipelines as Prometheus metrics, in its text format.

Owns: the names and the format. Must not know: how anything was found; its neighbour is ``watch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from avow.dashboard.evidence import PROOF_VERDICTS, AuditRow, ProofRow
from avow.dashboard.pipelines import PipelineRow, row
from avow.dashboard.state import AppState

Value = tuple[dict[str, str], float | None]  # labels, and the value; None: not known
OfPipeline = tuple[str, str, str, Callable[[PipelineRow], float | None]]  # name, type, help, value

LAST_PROOF = "the last proof of pipelines with this guarantee, sink, mode and engine"


def is_up(row: PipelineRow) -> bool:
    return row.seen_at is not None and not row.problem


def lag_seconds(row: PipelineRow) -> float | None:
    return row.lag_seconds if row.lag else 0


OF_PIPELINES: tuple[OfPipeline, ...] = (
    ("avow_pipeline_up", "gauge", "1 if the last sample could read ledger and topics", is_up),
    ("avow_pipeline_seen_timestamp_seconds", "gauge", "time of the last successful sample", lambda r: r.seen_at),
    (
        "avow_audit_timestamp_seconds",
        "gauge",
        "time of the last stored audit",
        lambda r: r.audit.at if r.audit else None,
    ),
    ("avow_proof_timestamp_seconds", "gauge", f"time of {LAST_PROOF}", lambda r: r.proof.at if r.proof else None),
)
OF_REACHABLE: tuple[OfPipeline, ...] = (
    ("avow_pipeline_run", "gauge", "number of the newest run", lambda r: r.run),
    ("avow_pipeline_processes", "gauge", "members of the consumer engine's group, if known", lambda r: r.processes),
    ("avow_records_read_total", "counter", "records claimed", lambda r: r.read),
    ("avow_records_written_total", "counter", "records written", lambda r: r.written),
    ("avow_records_skipped_total", "counter", "records skipped as declared", lambda r: r.skipped),
    ("avow_dead_letters", "gauge", "dead letters not redriven", lambda r: r.dead),  # a redrive lowers it
    ("avow_lag_records", "gauge", "committed records not claimed yet (upper bound)", lambda r: r.lag),
    ("avow_lag_seconds", "gauge", "age of the oldest committed record not claimed yet, if known", lag_seconds),
    ("avow_records_per_second", "gauge", "records claimed per second", lambda r: r.rate),
)


def text(state: AppState) -> str:
    watched = state.watch.pipelines()
    rows = [row(state, pipeline) for pipeline in watched]
    reachable = [r for r in rows if is_up(r)]
    lines: list[str] = []
    for metrics, pipelines in ((OF_PIPELINES, rows), (OF_REACHABLE, reachable)):
        for name, kind, description, value in metrics:
            labels = ({"pipeline": r.name, "guarantee": r.guarantee, "sink": r.sink} for r in pipelines)
            lines += _metric(name, kind, description, zip(labels, map(value, pipelines), strict=True))
    audits = _verdicts(((r.name, r.audit) for r in rows), ("held", "broken", "unknown"))
    proofs = _verdicts(((r.name, r.proof) for r in rows), PROOF_VERDICTS)
    lines += _metric("avow_audit_verdict", "gauge", "1 for the verdict of the last stored audit", audits)
    lines += _metric("avow_proof_verdict", "gauge", f"1 for the worst verdict of {LAST_PROOF}", proofs)
    partitions = [
        ({"pipeline": pipeline.name, "topic": p.topic, "partition": str(p.partition)}, p)
        for pipeline in watched
        if pipeline.sample and not (pipeline.problem or pipeline.failure)
        for p in pipeline.sample.partitions
    ]
    positions = ((labels, p.position) for labels, p in partitions)
    lines += _metric("avow_position", "gauge", "next offset to claim", positions)
    ends = ((labels, p.stable_end) for labels, p in partitions)
    lines += _metric("avow_stable_end", "gauge", "last stable offset", ends)
    return "\n".join(lines) + "\n"


def _verdicts(rows: Iterable[tuple[str, AuditRow | ProofRow | None]], words: Iterable[str]) -> Iterator[Value]:
    for name, judged in rows:
        if judged is not None:
            yield from (({"pipeline": name, "verdict": word}, word == judged.verdict) for word in words)


def _metric(name: str, kind: str, description: str, values: Iterable[Value]) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        if value is not None:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            yield f"{name}{{{inside}}} {float(value):.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
