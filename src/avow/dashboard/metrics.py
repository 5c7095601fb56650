"""Pipelines as Prometheus metrics, in its text format.

Owns: the names and the format. Must not know: how anything was found; its neighbour is ``watch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from avow.dashboard.evidence import PROOF_VERDICTS, AuditRow, ProofRow
from avow.dashboard.house import House
from avow.dashboard.pipelines import PipelineRow, row

Value = tuple[dict[str, str], float]


def text(house: House) -> str:
    watched = house.watch.pipelines()
    rows = [row(house, one) for one in watched]
    good = [one for one in rows if one.seen_at is not None and not one.problem]
    lines = [
        *_metric("avow_pipeline_up", "gauge", "1 if ledger and log could be read", _by(rows, _up)),
        *_metric("avow_pipeline_seen_timestamp_seconds", "gauge", "when it was last seen", _by(rows, _seen)),
        *_metric("avow_pipeline_run", "gauge", "number of the newest run", _by(good, lambda one: one.run)),
        *_metric(
            "avow_pipeline_processes",
            "gauge",
            "processes of the consumer engine that run, if it is known",
            _by(good, lambda one: one.processes),
        ),
        *_metric("avow_records_read_total", "counter", "records claimed", _by(good, lambda one: one.read)),
        *_metric("avow_records_written_total", "counter", "records written", _by(good, lambda one: one.written)),
        *_metric(
            "avow_records_skipped_total", "counter", "left out by declaration", _by(good, lambda one: one.skipped)
        ),
        # A redrive takes letters away, so it is no counter.
        *_metric("avow_dead_letters", "gauge", "dead letters that stand", _by(good, lambda one: one.dead)),
        *_metric("avow_lag_records", "gauge", "committed records that wait, at most", _by(good, lambda one: one.lag)),
        *_metric("avow_lag_seconds", "gauge", "age of the oldest that waits, if it is known", _by(good, _lag_seconds)),
        *_metric("avow_records_per_second", "gauge", "records claimed a second", _by(good, lambda one: one.rate)),
        *_metric(
            "avow_audit_verdict",
            "gauge",
            "1 for the verdict of the last audit kept",
            _verdicts(((one.name, one.audit) for one in rows), ("held", "broken", "unknown")),
        ),
        *_metric("avow_audit_timestamp_seconds", "gauge", "when that was", _by(rows, _audited)),
        *_metric(
            "avow_proof_verdict",
            "gauge",
            "1 for the worst verdict of the last proof of pipelines like this one",
            _verdicts(((one.name, one.proof) for one in rows), PROOF_VERDICTS),
        ),
        *_metric("avow_proof_timestamp_seconds", "gauge", "when that was", _by(rows, _proven)),
    ]
    positions: list[Value] = []
    ends: list[Value] = []
    for one in watched:
        for where in one.sample.partitions if one.sample and not (one.problem or one.trouble) else ():
            labels = {"pipeline": one.name, "topic": where.topic, "partition": str(where.partition)}
            if where.position is not None:
                positions.append((labels, where.position))
            ends.append((labels, where.stable_end))
    lines += _metric("avow_position", "gauge", "the next offset that is not claimed", positions)
    lines += _metric("avow_stable_end", "gauge", "where committed records end", ends)
    return "\n".join(lines) + "\n"


def _by(rows: Iterable[PipelineRow], value: Callable[[PipelineRow], float | None]) -> Iterator[Value]:
    for one in rows:
        found = value(one)
        if found is not None:
            yield {"pipeline": one.name, "guarantee": one.guarantee, "sink": one.sink}, float(found)


def _up(one: PipelineRow) -> int:
    return int(one.seen_at is not None and not one.problem)


def _lag_seconds(one: PipelineRow) -> float | None:
    return one.lag_seconds if one.lag else 0


def _seen(one: PipelineRow) -> float | None:
    return one.seen_at


def _audited(one: PipelineRow) -> float | None:
    return one.audit.at if one.audit else None


def _proven(one: PipelineRow) -> float | None:
    return one.proof.at if one.proof else None


def _verdicts(found: Iterable[tuple[str, AuditRow | ProofRow | None]], words: Iterable[str]) -> Iterator[Value]:
    for name, judged in found:
        if judged is not None:
            yield from (({"pipeline": name, "verdict": word}, float(word == judged.verdict)) for word in words)


def _metric(name: str, kind: str, about: str, values: Iterable[Value]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
