"""An audit from end to end.

Theory of operation
-------------------
The sink's snapshot is taken first and Kafka's last stable offsets after it, so every position of the snapshot lies
below them unless the ledger is wrong. They are the high-water mark: later records are not audited. ``examine`` then
decides which offsets of which partition can be compared, and ``spark`` or ``inprocess`` compares them, depending on the
engine. A partition in which no record is visible reaches no Spark task; it is compared here, since its rows may
still be phantoms. With a key, the keys of both sides are judged in a second pass; rows without lineage are matched by
content, on the driver. At last, phantoms are looked up among uncommitted records: those are aborted reads.

Owns: the order of these steps. Must not know: how anything is judged, or how Spark does its part. Neighbours:
``judge``, ``spark`` and ``inprocess``, ``table`` and ``report``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from avow import sinks
from avow.arrow import arrow_type
from avow.audit import inprocess, table
from avow.audit.compare import Compared, Tally
from avow.audit.content import ContentMatch, match
from avow.audit.judge import ALL_SEEN, Examined, Reservation, examine, miscounted
from avow.audit.keys import SharedKeys
from avow.audit.partition import ComparisonJob, Scope, compare_partition
from avow.audit.report import Audited, AuditReport, summarize, unknown
from avow.audit.topics import compacted
from avow.engines.causes import trace, translated
from avow.engines.columns import sink_columns
from avow.engines.task import BatchWork
from avow.errors import AvowError, ProtocolViolation, SinkError
from avow.findings import Finding, Kind, Offsets, Span, permits, split_phantoms
from avow.guarantee import Guarantee
from avow.kafka.brokers import try_query
from avow.kafka.log import Log, TopicPartition
from avow.ledger import NOTHING, LogView, OffsetRange
from avow.schema import Field
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.auditing import CONTENT, AuditReader, Known

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from avow.audit import spark

Notify = Callable[[str], None]
LOGGER = logging.getLogger("avow.audit")  # tracebacks: dropped unless a handler is configured


def audit(
    pipeline: PipelineConfig, session: Callable[[], SparkSession], notify: Notify = lambda _: None
) -> AuditReport:
    """Audit a pipeline. What cannot be reached or read makes the verdict unknown, with the reason.

    ``session`` gives a Spark session. It is called for a pipeline on Spark, when one is needed, and not before; others
    are audited in this process.
    """
    try:
        with table.open_reading(pipeline) as reading, Log(pipeline.source, pipeline.name) as log:
            return _Audit(pipeline, session, notify, reading, log).report()
    except ProtocolViolation:
        raise
    except AvowError as error:  # permanent sink errors too: an audit that could not read has no findings
        return unknown(pipeline, str(error), error.advice)
    except Exception as error:  # noqa: BLE001 - an audit that could not finish has found nothing broken
        LOGGER.debug("the audit failed\n%s", trace(error))
        advice = "Audit again when the cause is fixed. --verbose prints the traceback."
        return unknown(pipeline, f"the audit failed: {translated(error)}", advice)


@dataclass(slots=True)
class _AuditState:
    """What the audit knows so far."""

    known: dict[TopicPartition, Known]  # by the ledger
    views: dict[TopicPartition, LogView]  # by Kafka
    rows: dict[TopicPartition, int]  # in the table
    examined: dict[TopicPartition, Examined]
    compared: dict[TopicPartition, Compared] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    shared: SharedKeys = field(default_factory=SharedKeys)
    matched: ContentMatch | None = None  # by content


class _Audit:
    def __init__(
        self,
        pipeline: PipelineConfig,
        session: Callable[[], SparkSession],
        notify: Notify,
        reading: AuditReader,
        log: Log,
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._notify = notify
        self._reading = reading
        self._contents = reading.contents()
        self._log = log

    def report(self) -> AuditReport:
        started = time.monotonic()
        pipeline = self._pipeline
        self._notify("reading the ledger")
        known = self._reading.known()
        if not known:
            return unknown(
                pipeline,
                f"the sink has no positions of pipeline {pipeline.name}: it has never run, or its positions were "
                "deleted",
                "If it has never run, run it first. Otherwise the table was replaced or restored, or the pipeline was "
                "renamed. Without positions there is nothing to audit against; `avow run` explains how to continue.",
            )
        state = self._examined(known)
        job = self._job(state)
        self._compare(job, state)
        self._split_phantoms(state)
        state.findings += self._reading.order_findings()
        partitions = tuple(self._audited(tp, state) for tp in state.examined)
        state.findings += self._miscounts(job, partitions, state)
        matched = state.matched
        notes = [*_notes(partitions, state), *self._reading.notes(), *(matched.notes() if matched else ())]
        reservation = self._set_aside_expired(state) + (matched.reservation if matched else ALL_SEEN)
        seconds = time.monotonic() - started
        return summarize(pipeline, partitions, state.findings, notes, state.shared.count, seconds, reservation)

    def _examined(self, known: dict[TopicPartition, Known]) -> _AuditState:
        """Every partition that Kafka, the ledger or the table knows, and what of it can be compared."""
        self._notify("reading the topics' end offsets")
        actual = self._log.partitions()
        topics = {tp.topic for tp in actual}
        # A topic in the ledger that the pipeline no longer reads may not exist any more.
        wanted = {*actual, *(tp for tp in known if tp.topic in topics)}
        views = self._log.view({tp: known[tp].entry if tp in known else None for tp in wanted})
        ends = self._log.stable_ends(actual)
        open_transaction = self._open_transactions([tp for tp, end in ends.items() if end < views[tp].end])
        self._notify("counting rows")
        rows = self._reading.row_counts()
        for tp in rows:
            if tp.topic in topics and tp not in views:  # rows of a partition that there is not
                views[tp] = LogView(tp.topic, tp.partition, "", 0, 0)
        skip_lost = self._pipeline.source.on_data_loss == "skip"
        examined = {
            tp: examine(
                known.get(tp),
                views[tp],
                ends.get(tp, 0),
                skip_lost=skip_lost,
                open_transaction=open_transaction.get(tp, ""),
            )
            for tp in sorted(views)
        }
        findings = [finding for partition in examined.values() for finding in partition.findings]
        return _AuditState(known, views, rows, examined, findings=findings)

    def _open_transactions(self, waiting: list[TopicPartition]) -> dict[TopicPartition, str]:
        """The producers with an open transaction in these partitions, as far as the brokers report them."""
        if not waiting:
            return {}
        holders_by_tp = try_query(self._pipeline.source, lambda brokers: brokers.holders(waiting)) or {}
        return {tp: holders[0].describe() for tp, holders in holders_by_tp.items()}

    def _job(self, state: _AuditState) -> ComparisonJob:
        pipeline = self._pipeline
        loose = compacted(pipeline.source, {tp.topic for tp in state.examined})
        scopes = {
            tp: Scope(
                n, partition.start, partition.until, partition.behind_from, partition.readable_until, tp.topic in loose
            )
            for n, (tp, partition) in enumerate(state.examined.items())
            if partition.comparable
        }
        ranges = {
            tp: OffsetRange(tp.topic, tp.partition, scope.start, scope.until)
            for tp, scope in scopes.items()
            if scope.until > scope.start
        }
        fields, rest = self._fields()
        columns = [field.name for field in fields] + ([REST_COLUMN] if rest else [])
        key_types = {CONTENT: pa.int64()}
        if self._contents is None:
            key_types = _key_types(pipeline, {partition.name: arrow_type(partition.type) for partition in fields})
        return ComparisonJob(
            # A query's notes carry the number of the run: this number is unique.
            work=BatchWork(pipeline, -os.getpid(), 0, ranges),
            snapshot=self._reading.snapshot,
            scopes=scopes,
            columns=self._reading.columns(columns),
            json_columns=self._reading.json_columns(fields),
            key_types=key_types,
            by=pipeline.sink.mode if self._contents is None else "content",
        )

    def _fields(self) -> tuple[tuple[Field, ...], bool]:
        if not self._pipeline.by_sql:
            return sink_columns(self._pipeline)
        from avow.engines import sql

        return sql.output_fields(self._session(), self._pipeline), False

    def _comparing(self, job: ComparisonJob) -> spark.SparkComparison | inprocess.InProcessComparison:
        if self._pipeline.engine == "consumer":
            return inprocess.InProcessComparison(job, self._notify)
        from avow.audit import spark

        return spark.SparkComparison(self._session, job)

    def _uncommitted(
        self, ranges: dict[TopicPartition, OffsetRange], phantoms: list[Finding]
    ) -> dict[tuple[str, int], Offsets]:
        if self._pipeline.engine == "consumer":
            return inprocess.uncommitted(self._pipeline, ranges, phantoms)
        from avow.audit import spark

        return spark.uncommitted(self._session(), self._pipeline, ranges, phantoms)

    def _compare(self, job: ComparisonJob, state: _AuditState) -> None:
        ranges = job.work.ranges
        offsets = sum(map(len, ranges.values()))
        self._notify(f"comparing {offsets:,} offsets of {len(ranges)} partitions with {self._pipeline.sink.target}")
        with self._comparing(job) as comparison:
            state.compared = comparison.results()
            seen_here = []
            for tp in job.scopes.keys() - state.compared.keys():
                for result in compare_partition(job, tp, (), self._reading):
                    if isinstance(result, Compared):
                        state.compared[tp] = result
                    else:
                        seen_here.append(result)
            if self._contents is not None:
                self._notify("matching records by content")
                state.matched = match(comparison.expected(), self._contents)
                numbers = {scope.number: (tp.topic, tp.partition) for tp, scope in job.scopes.items()}
                _add_lost(state, [*state.matched.findings(numbers)], counted="written")
            elif job.key_types and (ranges or seen_here):
                self._notify("comparing keys")
                by_key, state.shared = comparison.judge_keys(seen_here)
                _add_lost(state, by_key, counted="written" if job.by == "upsert" else "skipped")
        state.findings += [finding for compared in state.compared.values() for finding in compared.findings]

    def _split_phantoms(self, state: _AuditState) -> None:
        """A row without a committed record may have an uncommitted one."""
        phantoms = [finding for finding in state.findings if finding.kind is Kind.PHANTOM]
        wanted = {}
        for finding in phantoms:
            tp = TopicPartition(finding.topic, finding.partition)
            view = state.views[tp]
            first, last = max(finding.spans[0].start, view.earliest), min(finding.spans[-1].until, view.end)
            if first < last:
                wanted[tp] = OffsetRange(tp.topic, tp.partition, first, last)
        if not wanted:
            return
        self._notify("looking up phantoms in aborted transactions")
        actual = self._uncommitted(wanted, phantoms)
        for finding in phantoms:
            state.findings.remove(finding)
            state.findings += split_phantoms(finding, actual[finding.topic, finding.partition])

    def _set_aside_expired(self, state: _AuditState) -> Reservation:
        """Where the sink itself deletes rows (retention, compaction), a missing row may have been written."""
        why = self._reading.retention_reason()
        lost = [finding for finding in state.findings if finding.kind is Kind.LOST]
        if not why or not lost:
            return ALL_SEEN
        # Where a crash may lose records, they stay findings, but what is missing may be more than crashes have lost.
        if not permits(self._pipeline.guarantee, Kind.LOST):
            state.findings = [finding for finding in state.findings if finding.kind is not Kind.LOST]
        return Reservation(
            undecided=f"{sum(finding.count for finding in lost):,} claimed records are not in the output, which "
            f"deletes records ({why})",
            advice="Give the output topics a longer retention, so that audits run before retention or compaction.",
        )

    def _audited(self, tp: TopicPartition, state: _AuditState) -> Audited:
        examined, known = state.examined[tp], state.known.get(tp)
        compared = state.compared.get(tp)
        tally = compared.tally if compared else Tally(unchecked=state.rows.get(tp, 0))
        counts = known.entry.counts if known else NOTHING
        return Audited(tp.topic, tp.partition, examined.start, examined.until, tally, counts)

    def _miscounts(self, job: ComparisonJob, partitions: tuple[Audited, ...], state: _AuditState) -> Iterator[Finding]:
        """Where the ledger's counts do not agree, of the partitions of which all can be compared."""
        loose = bool(self._pipeline.sink.key) or not sinks.plugin_of(self._pipeline).atomic_writes
        if self._pipeline.guarantee is Guarantee.AT_MOST_ONCE and self._reading.retention_reason():
            return  # records that a crash lost cannot be distinguished from records deleted since
        for audited in partitions:
            tp = TopicPartition(audited.topic, audited.partition)
            if not state.examined[tp].complete or job.scopes[tp].compacted:
                continue
            why = miscounted(self._pipeline.guarantee, loose, audited.counts, audited.tally)
            if why:
                span = Span(audited.start, audited.until, audited.until - audited.start)
                off = abs(audited.tally.read - audited.counts.read)
                yield Finding(Kind.MISCOUNTED, tp.topic, tp.partition, (span,), off, (), why)


def _key_types(pipeline: PipelineConfig, payload: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The Arrow types of sink.key, lineage columns among them."""
    lineage = dict(
        zip(pipeline.sink.lineage, (pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC")), strict=True)
    )
    types = {name: (lineage | payload)[name] for name in pipeline.sink.key}
    for name, type_ in types.items():
        if pa.types.is_nested(type_):
            raise SinkError(
                f"sink.key: {name} is a nested column, and a nested key cannot be audited",
                advice="Use a scalar column in sink.key.",
            )
    return types


def _add_lost(state: _AuditState, findings: list[Finding], *, counted: Literal["written", "skipped"]) -> None:
    """Add findings by key or by content. Lost records among them were ``counted`` as delivered until now."""
    state.findings += findings
    for finding in findings:
        if finding.kind is not Kind.LOST:
            continue
        tp = TopicPartition(finding.topic, finding.partition)
        compared = state.compared[tp]
        before = getattr(compared.tally, counted)
        tally = replace(compared.tally, lost=compared.tally.lost + finding.count, **{counted: before - finding.count})
        state.compared[tp] = replace(compared, tally=tally)


def _notes(partitions: tuple[Audited, ...], state: _AuditState) -> Iterator[str]:
    """Notes for the reader that are no findings."""
    for examined in state.examined.values():
        yield from examined.notes
    unchecked = sum(audited.tally.unchecked for audited in partitions)
    if unchecked:
        yield f"{unchecked:,} rows were not compared: their records are no longer in the topic (retention, compaction)."
    topics = {audited.topic for audited in partitions}
    others = sum(count for tp, count in state.rows.items() if tp.topic not in topics)
    if others:
        yield f"{others:,} rows were not audited: they come from topics that this pipeline does not read (any more)."
    if state.shared.count:
        yield (
            f"{state.shared.count:,} keys occur in more than one partition, so there is no order between their "
            f"records: {', '.join(state.shared.shown)}{', ...' if state.shared.count > len(state.shared.shown) else ''}"
        )
