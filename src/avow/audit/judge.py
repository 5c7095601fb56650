"""The ledger against the log and against what was found, and the verdict.

``examine`` decides, before anything is compared, which offsets of a partition can be: claimed, still in the log, and
committed. ``miscounted`` checks the accounting afterwards, ``verdict`` sums up.

Owns: these judgements. Must not know: I/O. Neighbours: ``avow.ledger`` (the rules that a run starts by are asked here
too, so that audit and run stop for the same reasons) and ``compare`` (the tally).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from avow import ledger
from avow.audit.compare import Tally
from avow.errors import LogTruncated, RetentionLoss, SourceError, TopicRecreated
from avow.findings import SPANS_MAX, Finding, Kind, Span, permits
from avow.guarantee import Guarantee
from avow.ledger import Counts, Entry, LogView
from avow.sinks.auditing import Known


class Verdict(StrEnum):
    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"


EXIT_CODES = {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.UNKNOWN: 2}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an audit could not see."""

    limits: str = ""  # a sentence that goes with every verdict
    undecided: str = ""  # why the findings do not decide the verdict; empty if they do
    advice: str = ""

    def __add__(self, other: Reservation) -> Reservation:
        both = (self, other)
        return Reservation(
            " ".join(reservation.limits for reservation in both if reservation.limits),
            "; ".join(reservation.undecided for reservation in both if reservation.undecided),
            " ".join(reservation.advice for reservation in both if reservation.undecided),
        )


ALL_SEEN = Reservation()


@dataclass(frozen=True, slots=True)
class Examined:
    """One partition before its rows are compared: which offsets can be, and what the ledger alone shows."""

    start: int  # [start, until): claimed, in the log, committed
    until: int
    behind_from: int  # rows from here on have not been claimed
    readable_until: int  # the high-water mark: where committed records end
    comparable: bool  # False: the log is not the one that was claimed, so offsets mean other records
    complete: bool  # whether all that was ever claimed can be compared, so that counts must agree
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def examine(
    known: Known | None, log: LogView, readable_until: int, *, skip_lost: bool, open_transaction: str = ""
) -> Examined:
    """``readable_until`` is the last stable offset, taken after ``known`` was read. ``open_transaction``: the producer
    with a transaction open there, if known."""
    tp = f"{log.topic}/{log.partition}"
    notes = []
    if readable_until < log.end:
        holder = f" It was opened {open_transaction}." if open_transaction else ""
        notes.append(
            f"{tp}: a transaction is open at offset {readable_until}, and {log.end - readable_until} offsets from "
            f"there on wait for it to end.{holder} If it stays open, it is a hanging-transaction: "
            "kafka-transactions.sh can abort it."
        )
    if known is None:
        # All rows of a partition without claims are beyond its position.
        notes.append(f"{tp}: no position in the ledger; the pipeline has not read it yet.")
        at = log.earliest
        return Examined(at, at, at, readable_until, True, False, (), tuple(notes))
    position, settled = known.entry.position, _settled(known)
    stop = _stop(replace(known.entry, position=settled), log, skip_lost)
    until = min(settled, readable_until)
    start = min(max(known.start, log.earliest), until)
    if start > known.start:
        notes.append(f"{tp}: offsets [{known.start}, {start}) are no longer in the topic and cannot be checked.")
    comparable = not isinstance(stop, TopicRecreated | LogTruncated)
    return Examined(
        start=start,
        until=until if comparable else start,
        behind_from=max(position, settled, _claimed(known)),
        readable_until=readable_until,
        comparable=comparable,
        complete=comparable and start == known.start and until == position == _claimed(known),
        findings=tuple(_ledger_findings(known, log, readable_until, stop)),
        notes=tuple(notes),
    )


def _claimed(known: Known) -> int:
    """Where the claims end. They are kept for a time only: without any, the position is all that is known."""
    return int(known.claim_untils.max()) if len(known.claim_untils) else known.entry.position


def _settled(known: Known) -> int:
    """Up to where position and claims agree."""
    return min(known.entry.position, _claimed(known))


def _stop(entry: Entry, log: LogView, skip_lost: bool) -> SourceError | None:
    """The reason for which a run would not start here."""
    try:
        ledger.plan_start(entry, log, declared=0, skip_lost=skip_lost)
    except (TopicRecreated, LogTruncated, RetentionLoss) as stop:
        return stop
    return None


def _ledger_findings(known: Known, log: LogView, readable_until: int, stop: SourceError | None) -> Iterator[Finding]:
    position, claimed, settled = known.entry.position, _claimed(known), _settled(known)

    def finding(kind: Kind, start: int, until: int, detail: str = "") -> Finding:
        return Finding(kind, log.topic, log.partition, (Span(start, until, until - start),), until - start, (), detail)

    match stop:
        case TopicRecreated():
            yield finding(Kind.TOPIC_RECREATED, known.start, settled, str(stop))
        case LogTruncated():
            last = known.entry.last
            cut = log.end if settled > log.end else last.offset if last else settled
            yield finding(Kind.LOG_TRUNCATED, cut, settled, str(stop))
        case RetentionLoss():
            yield finding(Kind.RETENTION_LOSS, settled, log.earliest, str(stop))
        case _ if settled > readable_until:
            yield finding(Kind.LEDGER_AHEAD, readable_until, settled, "claimed beyond the last stable offset")
    if position > claimed:
        yield finding(Kind.LEDGER_AHEAD, claimed, position, "the position is past the last claim")
    if position < claimed:
        yield finding(Kind.LEDGER_BEHIND, position, claimed, "the position is before the end of the last claim")
    yield from _claim_breaks(known, log)


def _claim_breaks(known: Known, log: LogView) -> Iterator[Finding]:
    """Where a claim does not start at the end of those before it."""
    if not len(known.claim_starts):
        return
    ends, starts = np.maximum.accumulate(known.claim_untils)[:-1], known.claim_starts[1:]
    for kind, mask, begin, until in (
        (Kind.SKIPPED_RANGE, starts > ends, ends, starts),
        (Kind.OVERLAPPING_RANGE, starts < ends, starts, np.minimum(ends, known.claim_untils[1:])),
    ):
        ranges = zip(begin[mask].tolist(), until[mask].tolist(), strict=True)
        spans = tuple(Span(first, last, last - first) for first, last in ranges)
        if spans:
            count = sum(span.count for span in spans)
            yield Finding(kind, log.topic, log.partition, spans[:SPANS_MAX], count)


def miscounted(guarantee: Guarantee, loose: bool, counts: Counts, tally: Tally) -> str:
    """Why the ledger's counts cannot have come from these records; empty if they can.

    Every record is counted when it is claimed. Only under at-most-once it is counted when it is written, after the
    claim: what a crash in between loses is not counted, and neither is what would have been skipped among it. Where
    this is ``loose``, the number is unknown: a sink with a key may have skipped any of them, a topic may
    have taken some of the records of a write that was never counted.
    """
    uncounted = tally.read - counts.read
    least = most = 0
    if guarantee is Guarantee.AT_MOST_ONCE:
        least, most = tally.lost, tally.read if loose else tally.lost + tally.skipped
    if least <= uncounted <= most:
        return ""
    if uncounted < 0:
        return f"the ledger counts {counts.read} records, and the topic has {tally.read}"
    if uncounted < least:
        return f"{tally.lost} records are missing, and crashes between claim and write explain only {uncounted} of them"
    return f"the topic has {tally.read} records, and the ledger counts {counts.read}"


def verdict(
    guarantee: Guarantee, findings: Iterable[Finding], records: int, reservation: Reservation = ALL_SEEN
) -> Verdict:
    """Broken beats unknown: one anomaly is enough, however little was seen."""
    if any(not permits(guarantee, finding.kind) for finding in findings):
        return Verdict.BROKEN
    return Verdict.HELD if records and not reservation.undecided else Verdict.UNKNOWN
