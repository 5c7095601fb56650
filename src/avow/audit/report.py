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
class Report:
    pipeline: str
    guarantee: Guarantee
    mode: Mode
    verdict: Verdict
    sentence: str  # the verdict in plain words
    advice: str  # what to do next; empty if nothing
    partitions: tuple[Audited, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    shared_keys: int = 0  # keys in more than one partition: no order between those
    seconds: float = 0

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
        return {**asdict(self), "findings": findings, "tally": asdict(self.tally), "counts": asdict(self.counts)}


def unknown(pipeline: PipelineConfig, reason: str, advice: str) -> Report:
    """Nothing could be audited."""
    name, guarantee, mode = pipeline.name, pipeline.guarantee, pipeline.sink.mode
    return Report(name, guarantee, mode, Verdict.UNKNOWN, f"unknown: {reason}", advice)


def summed_up(
    pipeline: PipelineConfig,
    partitions: tuple[Audited, ...],
    findings: Iterable[Finding],
    notes: Iterable[str],
    shared_keys: int,
    seconds: float,
    reservation: Reservation = ALL_SEEN,
) -> Report:
    guarantee = pipeline.guarantee
    records = sum(audited.tally.read for audited in partitions)
    ordered = tuple(sorted(findings, key=lambda f: (list(Kind).index(f.kind), f.topic, f.partition)))
    reached = verdict(guarantee, ordered, records, reservation)
    sentence = _sentence(guarantee, reached, ordered, records, reservation)
    return Report(
        pipeline=pipeline.name,
        guarantee=guarantee,
        mode=pipeline.sink.mode,
        verdict=reached,
        sentence=f"{sentence} {reservation.limits}".rstrip(),
        advice=_advice(guarantee, reached, ordered, reservation),
        partitions=partitions,
        findings=ordered,
        notes=tuple(notes),
        shared_keys=shared_keys,
        seconds=seconds,
    )


def _sentence(
    guarantee: Guarantee, reached: Verdict, findings: tuple[Finding, ...], records: int, reservation: Reservation
) -> str:
    permitted = _listed(f for f in findings if permits(guarantee, f.kind))
    forbidden = _listed(f for f in findings if not permits(guarantee, f.kind))
    match reached:
        case Verdict.BROKEN:
            return f"broken: {forbidden}. {guarantee} does not permit that."
        case Verdict.UNKNOWN if reservation.undecided:
            return f"unknown: {reservation.undecided}."
        case Verdict.UNKNOWN:
            return "unknown: there is no record to audit. Nothing was compared, so nothing is proven."
        case _ if permitted:
            return f"held: {permitted}, which {guarantee} permits; the rest of {records:,} records is as it should be."
        case _:
            return f"held: {records:,} records, and each is where {guarantee} promises it."


def _listed(findings: Iterable[Finding]) -> str:
    counts: dict[Kind, int] = {}
    for finding in findings:
        counts[finding.kind] = counts.get(finding.kind, 0) + finding.count
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


def _advice(guarantee: Guarantee, reached: Verdict, findings: tuple[Finding, ...], reservation: Reservation) -> str:
    match reached:
        case Verdict.UNKNOWN if reservation.undecided:
            return reservation.advice
        case Verdict.UNKNOWN:
            return "Run the pipeline (avow run FILE --once), then audit again."
        case Verdict.BROKEN:
            worst = next(f.kind for f in findings if not permits(guarantee, f.kind))
            return _ADVICE[worst]
        case _:
            return ""


_AGAIN = "To deliver everything again, give the pipeline a new name and a new table."
_CLAIMS = "Ask who edits avow.claims: a claim starts where the last one ended. The rows themselves are judged apart."
_ADVICE = {
    Kind.LOST: f"Ask who deletes from the sink or from the dead letters; nothing of avow does. {_AGAIN}",
    Kind.DUPLICATED: "Ask who else writes to the table: another pipeline, a restored backup. Extra rows carry the same "
    "lineage as the first.",
    Kind.PHANTOM: "Ask who else writes to the table: these rows came from no record of these topics.",
    Kind.ABORTED_READ: "Another writer has read uncommitted records: avow reads committed ones only.",
    Kind.CORRUPTED: "Ask who updates the table, and whether decode.schema or the transform have changed since the rows "
    f"were written: the audit decodes as the file says today. {_AGAIN}",
    Kind.COERCED: "Compare the column's type in the table with decode.schema: values have lost something on the way.",
    Kind.DOUBLE_COUNTED: "Remove the row or the dead letter: `avow dead-letters show` has the record and the reason.",
    Kind.REORDERED: "Ask who else writes to the output topic: avow writes each partition's records in their order.",
    Kind.SKIPPED_RANGE: _CLAIMS,
    Kind.OVERLAPPING_RANGE: _CLAIMS,
    Kind.LEDGER_AHEAD: "The position was moved by hand. Set it back to where the range begins, and run.",
    Kind.LEDGER_BEHIND: "The ledger was set back, or the rows came from elsewhere: the next run writes them again.",
    Kind.MISCOUNTED: "The ledger's counts or the claim log were edited, or rows went after they were counted.",
    Kind.RETENTION_LOSS: 'Raise the retention of the topic; source.on_data_loss = "skip" goes on without the range.',
    Kind.TOPIC_RECREATED: "The topic was made again: give the pipeline a new name to read the new one.",
    Kind.LOG_TRUNCATED: "Records that were delivered are gone from Kafka: restore the topic, or use a new name.",
}
