"""The outcome of an audit, as values: what was audited, what was found, the verdict and what to do next.

Owns: the shape of a report and its sentences. Must not know: I/O, or how it is shown. Neighbours: ``judge`` (the
verdict) and ``avow.cli.audit`` (which prints it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from avow.audit.compare import Tally
from avow.audit.judge import ALL_SEEN, Reservation, Verdict, verdict
from avow.findings import Finding, Kind, permits
from avow.guarantee import Guarantee
from avow.ledger import NOTHING, Counts
from avow.settings import Mode, PipelineConfig


@dataclass(frozen=True, slots=True)
class Audited:
    """One partition: offsets ``[start, until)`` were compared."""

    topic: str
    partition: int
    start: int
    until: int
    tally: Tally  # as found
    counts: Counts  # as the ledger says


@dataclass(frozen=True, slots=True)
class AuditReport:
    pipeline: str
    guarantee: Guarantee
    mode: Mode
    verdict: Verdict
    sentence: str  # the verdict as a sentence
    advice: str  # what to do next; empty if nothing
    partitions: tuple[Audited, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    shared_keys: int = 0  # keys in more than one partition: no order between those
    seconds: float = 0
    reservation: Reservation = ALL_SEEN  # why the findings do not decide the verdict, where they do not

    @property
    def tally(self) -> Tally:
        return sum((audited.tally for audited in self.partitions), Tally())

    @property
    def counts(self) -> Counts:
        return sum((audited.counts for audited in self.partitions), NOTHING)

    def as_json(self, spans_max: int) -> dict[str, Any]:
        """All of it as data; of each finding no more than so many spans."""
        findings = [
            {
                **asdict(finding),
                "spans": [[span.start, span.until, span.count] for span in finding.spans[:spans_max]],
                "permitted": permits(self.guarantee, finding.kind),
            }
            for finding in self.findings
        ]
        whole = {**asdict(self), "findings": findings, "tally": asdict(self.tally), "counts": asdict(self.counts)}
        del whole["reservation"]  # it is in the sentence
        return whole


def unknown(pipeline: PipelineConfig, reason: str, advice: str) -> AuditReport:
    """Nothing could be audited."""
    name, guarantee, mode = pipeline.name, pipeline.guarantee, pipeline.sink.mode
    reservation = Reservation(undecided=reason, advice=advice)
    return AuditReport(name, guarantee, mode, Verdict.UNKNOWN, f"unknown: {reason}", advice, reservation=reservation)


def summarize(
    pipeline: PipelineConfig,
    partitions: tuple[Audited, ...],
    findings: Iterable[Finding],
    notes: Iterable[str],
    shared_keys: int,
    seconds: float,
    reservation: Reservation = ALL_SEEN,
) -> AuditReport:
    guarantee = pipeline.guarantee
    records = sum(audited.tally.read for audited in partitions)
    ordered = tuple(sorted(findings, key=lambda f: (list(Kind).index(f.kind), f.topic, f.partition)))
    reached = verdict(guarantee, ordered, records, reservation)
    sentence, advice = _conclusion(guarantee, reached, ordered, records, reservation)
    return AuditReport(
        pipeline=pipeline.name,
        guarantee=guarantee,
        mode=pipeline.sink.mode,
        verdict=reached,
        sentence=f"{sentence} {reservation.limits}".rstrip(),
        advice=advice,
        partitions=partitions,
        findings=ordered,
        notes=tuple(notes),
        shared_keys=shared_keys,
        seconds=seconds,
        reservation=reservation,
    )


def _conclusion(
    guarantee: Guarantee, reached: Verdict, findings: tuple[Finding, ...], records: int, reservation: Reservation
) -> tuple[str, str]:
    """The verdict as a sentence, and what to do next."""
    forbidden = [f for f in findings if not permits(guarantee, f.kind)]
    permitted = _listed(f for f in findings if permits(guarantee, f.kind))
    match reached:
        case Verdict.BROKEN:
            worst = forbidden[0].kind
            return f"broken: {_listed(forbidden)}. {guarantee} does not permit that.", _ADVICE[worst]
        case Verdict.UNKNOWN if reservation.undecided:
            return f"unknown: {reservation.undecided}.", reservation.advice
        case Verdict.UNKNOWN:
            advice = "Run the pipeline (avow run FILE --once), then audit again."
            return "unknown: there is no record to audit, so nothing was compared.", advice
        case _ if permitted:
            return f"held: {permitted}, which {guarantee} permits; all other records of {records:,} are correct.", ""
        case _:
            return f"held: {records:,} records, each delivered as {guarantee} promises.", ""


def _listed(findings: Iterable[Finding]) -> str:
    counts: dict[Kind, int] = {}
    for finding in findings:
        counts[finding.kind] = counts.get(finding.kind, 0) + finding.count
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


_AGAIN = "To deliver everything again, give the pipeline a new name and a new table."
_CLAIMS = "Find out what edits avow.claims: each claim starts where the last one ended. Rows are audited separately."
_ADVICE = {
    Kind.LOST: f"Find out what deletes rows from the sink or dead letters; avow never does. {_AGAIN}",
    Kind.DUPLICATED: "Find out what else writes to the table: another pipeline, a restored backup. Extra rows have the "
    "same lineage as the first.",
    Kind.PHANTOM: "Find out what else writes to the table: no record of these topics produces these rows.",
    Kind.ABORTED_READ: "Another writer reads uncommitted records: avow reads with isolation.level=read_committed.",
    Kind.CORRUPTED: "Find out what updates the table, and whether decode.schema or the transform changed since the "
    f"rows were written: the audit decodes with the current file. {_AGAIN}",
    Kind.COERCED: "Compare the column's type in the table with decode.schema: values were rounded, truncated or set "
    "to null.",
    Kind.DOUBLE_COUNTED: "Remove the row or the dead letter: `avow dead-letters show` has the record and the reason.",
    Kind.REORDERED: "Find out what else writes to the output topic: avow writes each partition's records in order.",
    Kind.SKIPPED_RANGE: _CLAIMS,
    Kind.OVERLAPPING_RANGE: _CLAIMS,
    Kind.LEDGER_AHEAD: "The position was changed manually. Set it back to the start of the range, then run the "
    "pipeline.",
    Kind.LEDGER_BEHIND: "The ledger was set back, or another writer wrote the rows: the next run writes them again.",
    Kind.MISCOUNTED: "The ledger's counts or the claim log were edited, or rows were deleted after they were counted.",
    Kind.RETENTION_LOSS: 'Raise the retention of the topic; source.on_data_loss = "skip" continues after the range.',
    Kind.TOPIC_RECREATED: "The topic was deleted and recreated: give the pipeline a new name to read the new topic.",
    Kind.LOG_TRUNCATED: "Delivered records are gone from Kafka: restore the topic, or give the pipeline a new name.",
}
