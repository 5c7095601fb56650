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
``judge``, ``spark`` and ``inprocess``, ``sinks.auditing`` and ``report``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from avow import sinks
from avow.arrow import arrow_type
from avow.audit.compare import Compared, Tally
from avow.audit.content import ContentMatch, match
from avow.audit.inprocess import InProcessComparison
from avow.audit.judge import ALL_SEEN, Examined, Reservation, examine, miscounted
from avow.audit.keys import SharedKeys
from avow.audit.partition import ComparisonJob, Scope, compare_partition
from avow.audit.report import Audited, AuditReport, summarize, unknown
from avow.engines.causes import trace, translated
from avow.engines.columns import sink_columns
from avow.engines.task import BatchWork
from avow.engines.topics import resolved_part
from avow.errors import AvowError, ConfigError, ProtocolViolation, SinkError, SourceError
from avow.findings import Finding, Kind, Span, permits, split_phantoms
from avow.guarantee import Guarantee
from avow.kafka.admin import several
from avow.kafka.brokers import try_query
from avow.kafka.log import Log, TopicPartition
from avow.ledger import NOTHING, LogView, OffsetRange
from avow.schema import Field
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.auditing import CONTENT, AuditReader, Contents, Known
from avow.sinks.topics import topics_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from avow.audit.spark import SparkComparison

    AnyComparison = InProcessComparison | SparkComparison

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
        if pipeline.sink.by_topic:
            return _audit_topics(pipeline, session, notify)
        with sinks.audit_reader(pipeline) as reading, Log(pipeline.source, pipeline.name) as log:
            return _Audit(pipeline, session, notify, reading, log).report()
    except ProtocolViolation:
        raise
    except AvowError as error:  # permanent sink errors too: an audit that could not read has no findings
        return unknown(pipeline, str(error), error.advice)
    except Exception as error:  # noqa: BLE001 - an audit that could not finish has found nothing broken
        LOGGER.debug("the audit failed\n%s", trace(error))
        advice = "Audit again when the cause is fixed. --verbose prints the traceback."
        return unknown(pipeline, f"the audit failed: {translated(error)}", advice)


def _audit_topics(pipeline: PipelineConfig, session: Callable[[], SparkSession], notify: Notify) -> AuditReport:
    """Each topic's table by itself, in one report. One that cannot be audited leaves the verdict unknown, unless
    another is broken."""
    reports, undecided = [], ALL_SEEN
    for topic in topics_of(pipeline):
        try:
            report = audit(resolved_part(pipeline, topic), session, partial(_notify_of, notify, topic))
        except ConfigError as error:
            report = unknown(pipeline, str(error), error.advice)
        undecided += replace(
            report.reservation, undecided=report.reservation.undecided and f"{topic}: {report.reservation.undecided}"
        )
        reports.append((topic, report))
    return summarize(
        pipeline,
        tuple(audited for _, report in reports for audited in report.partitions),
        [finding for _, report in reports for finding in report.findings],
        [f"{topic}: {note}" for topic, report in reports for note in report.notes],
        sum(report.shared_keys for _, report in reports),
        sum(report.seconds for _, report in reports),
        undecided,
    )


def _notify_of(notify: Notify, topic: str, text: str) -> None:
    notify(f"{topic}: {text}")


@dataclass(slots=True, eq=False, repr=False)
class _Audit:
    """One audit, and what it knows so far."""

    pipeline: PipelineConfig
    session: Callable[[], SparkSession]
    notify: Notify
    reading: AuditReader
    log: Log
    contents: Contents | None = field(init=False)  # of a sink whose rows do not say which record they came from
    known: dict[TopicPartition, Known] = field(default_factory=dict)  # by the ledger
    views: dict[TopicPartition, LogView] = field(default_factory=dict)  # by Kafka
    rows: dict[TopicPartition, int] = field(default_factory=dict)  # in the table
    examined: dict[TopicPartition, Examined] = field(default_factory=dict)
    compared: dict[TopicPartition, Compared] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    shared: SharedKeys = field(default_factory=SharedKeys)
    matched: ContentMatch | None = None  # by content

    def __post_init__(self) -> None:
        self.contents = self.reading.contents()

    def report(self) -> AuditReport:
        started = time.monotonic()
        pipeline = self.pipeline
        self.notify("reading the ledger")
        self.known = {tp: known for tp, known in self.reading.known().items() if pipeline.topic in (None, tp.topic)}
        if not self.known:
            return unknown(
                pipeline,
                f"the sink has no positions of pipeline {pipeline.name}: it has never run, or its positions were "
                "deleted",
                "If it has never run, run it first. Otherwise the table was replaced or restored, or the pipeline was "
                "renamed. Without positions there is nothing to audit against; `avow run` explains how to continue.",
            )
        self.examine_partitions()
        job = self._job()
        with self._comparison(job) as comparison:
            self._compare(job, comparison)
            self._split_phantoms(comparison)
        self.findings += self.reading.order_findings()
        partitions = tuple(self._audited(tp) for tp in self.examined)
        self.findings += self._miscounts(job, partitions)
        matched = self.matched
        notes = [*self._notes(partitions), *self.reading.notes(), *(matched.notes() if matched else ())]
        reservation = self._set_aside_expired() + (matched.reservation if matched else ALL_SEEN)
        seconds = time.monotonic() - started
        return summarize(pipeline, partitions, self.findings, notes, self.shared.count, seconds, reservation)

    def examine_partitions(self) -> None:
        """Every partition that Kafka, the ledger or the table knows, and what of it can be compared."""
        self.notify("reading the topics' end offsets")
        known, actual = self.known, self.log.partitions()
        topics = {tp.topic for tp in actual}
        # A topic in the ledger that the pipeline no longer reads may not exist any more.
        wanted = {*actual, *(tp for tp in known if tp.topic in topics)}
        self.views = self.log.view({tp: known[tp].entry if tp in known else None for tp in wanted})
        ends = self.log.stable_ends(actual)
        open_transaction = self._open_transactions([tp for tp, end in ends.items() if end < self.views[tp].end])
        self.notify("counting rows")
        self.rows = self.reading.row_counts()
        for tp in self.rows:
            if tp.topic in topics and tp not in self.views:  # rows of a partition that there is not
                self.views[tp] = LogView(tp.topic, tp.partition, "", 0, 0)
        self.examined = {
            tp: examine(
                known.get(tp),
                self.views[tp],
                ends.get(tp, 0),
                skip_lost=self.pipeline.source.on_data_loss == "skip",
                open_transaction=open_transaction.get(tp, ""),
            )
            for tp in sorted(self.views)
        }
        self.findings += [finding for partition in self.examined.values() for finding in partition.findings]

    def _open_transactions(self, waiting: list[TopicPartition]) -> dict[TopicPartition, str]:
        """The producers with an open transaction in these partitions, as far as the brokers report them."""
        if not waiting:
            return {}
        holders_by_tp = try_query(self.pipeline.source, lambda brokers: brokers.holders(waiting)) or {}
        return {tp: holders[0].describe() for tp, holders in holders_by_tp.items()}

    def _job(self) -> ComparisonJob:
        pipeline, reading = self.pipeline, self.reading
        compacted = self._compacted()
        scopes = {
            tp: Scope(
                n,
                partition.start,
                partition.until,
                partition.behind_from,
                partition.readable_until,
                tp.topic in compacted,
            )
            for n, (tp, partition) in enumerate(self.examined.items())
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
        if self.contents is None:
            key_types = _key_types(pipeline, {field.name: arrow_type(field.type) for field in fields})
        return ComparisonJob(
            # A query's notes carry the number of the run: this number is unique.
            work=BatchWork(pipeline, -os.getpid(), 0, ranges),
            snapshot=reading.snapshot,
            scopes=scopes,
            columns=reading.columns(columns),
            json_columns=reading.json_columns(fields),
            key_types=key_types,
            by=pipeline.sink.mode if self.contents is None else "content",
        )

    def _compacted(self) -> set[str]:
        """Topics in which a row without a record proves nothing."""
        topics = {tp.topic for tp in self.examined}
        configs = self.log.admin.topic_configs(topics)
        if hidden := sorted(topics - configs.keys()):
            raise SourceError(
                f"not authorized to describe the configuration of topic {several(hidden)}, which says whether it is "
                "compacted",
                advice="Grant the pipeline's Kafka user DescribeConfigs on its topics.",
            )
        return {topic for topic, config in configs.items() if "compact" in str(config["cleanup.policy"].value)}

    def _fields(self) -> tuple[tuple[Field, ...], bool]:
        if not self.pipeline.by_sql:
            return sink_columns(self.pipeline)
        from avow.engines import sql

        return sql.output_fields(self.session(), self.pipeline), False

    def _comparison(self, job: ComparisonJob) -> AnyComparison:
        ranges = job.work.ranges
        offsets = sum(map(len, ranges.values()))
        self.notify(f"comparing {offsets:,} offsets of {len(ranges)} partitions with {self.pipeline.sink.target}")
        if self.pipeline.engine == "consumer":
            return InProcessComparison(job, self.notify)
        from avow.audit.spark import SparkComparison

        return SparkComparison(self.session, job)

    def _compare(self, job: ComparisonJob, comparison: AnyComparison) -> None:
        self.compared = comparison.results()
        seen_here = []
        for tp in job.scopes.keys() - self.compared.keys():
            for result in compare_partition(job, tp, (), self.reading):
                if isinstance(result, Compared):
                    self.compared[tp] = result
                else:
                    seen_here.append(result)
        if self.contents is not None:
            self.notify("matching records by content")
            self.matched = match(comparison.expected(), self.contents)
            numbers = {scope.number: (tp.topic, tp.partition) for tp, scope in job.scopes.items()}
            self._add_lost([*self.matched.findings(numbers)], counted="written")
        elif job.key_types and (job.work.ranges or seen_here):
            self.notify("comparing keys")
            by_key, self.shared = comparison.judge_keys(seen_here)
            self._add_lost(by_key, counted="written" if job.by == "upsert" else "skipped")
        self.findings += [finding for compared in self.compared.values() for finding in compared.findings]

    def _add_lost(self, findings: list[Finding], *, counted: Literal["written", "skipped"]) -> None:
        """Add findings by key or by content. Lost records among them were ``counted`` as delivered until now."""
        self.findings += findings
        for finding in findings:
            if finding.kind is not Kind.LOST:
                continue
            tp = TopicPartition(finding.topic, finding.partition)
            tally = self.compared[tp].tally
            before = getattr(tally, counted)
            tally = replace(tally, lost=tally.lost + finding.count, **{counted: before - finding.count})
            self.compared[tp] = replace(self.compared[tp], tally=tally)

    def _split_phantoms(self, comparison: AnyComparison) -> None:
        """A row without a committed record may have an uncommitted one."""
        phantoms = [finding for finding in self.findings if finding.kind is Kind.PHANTOM]
        wanted = {}
        for finding in phantoms:
            tp = TopicPartition(finding.topic, finding.partition)
            view = self.views[tp]
            first, last = max(finding.spans[0].start, view.earliest), min(finding.spans[-1].until, view.end)
            if first < last:
                wanted[tp] = OffsetRange(tp.topic, tp.partition, first, last)
        if not wanted:
            return
        self.notify("looking up phantoms in aborted transactions")
        actual = comparison.uncommitted(wanted, phantoms)
        for finding in phantoms:
            self.findings.remove(finding)
            self.findings += split_phantoms(finding, actual[TopicPartition(finding.topic, finding.partition)])

    def _set_aside_expired(self) -> Reservation:
        """Where the sink itself deletes rows (retention, compaction), a missing row may have been written."""
        why = self.reading.retention_reason()
        lost = [finding for finding in self.findings if finding.kind is Kind.LOST]
        if not why or not lost:
            return ALL_SEEN
        # Where a crash may lose records, they stay findings, but what is missing may be more than crashes have lost.
        if not permits(self.pipeline.guarantee, Kind.LOST):
            self.findings = [finding for finding in self.findings if finding.kind is not Kind.LOST]
        return Reservation(
            undecided=f"{sum(finding.count for finding in lost):,} claimed records are not in the output, which "
            f"deletes records ({why})",
            advice="Give the output topics a longer retention, so that audits run before retention or compaction.",
        )

    def _audited(self, tp: TopicPartition) -> Audited:
        examined, known, compared = self.examined[tp], self.known.get(tp), self.compared.get(tp)
        tally = compared.tally if compared else Tally(unchecked=self.rows.get(tp, 0))
        counts = known.entry.counts if known else NOTHING
        return Audited(tp.topic, tp.partition, examined.start, examined.until, tally, counts)

    def _miscounts(self, job: ComparisonJob, partitions: tuple[Audited, ...]) -> Iterator[Finding]:
        """Where the ledger's counts do not agree, of the partitions of which all can be compared."""
        guarantee = self.pipeline.guarantee
        loose = bool(self.pipeline.sink.key) or not sinks.plugin_of(self.pipeline).atomic_writes
        if guarantee is Guarantee.AT_MOST_ONCE and self.reading.retention_reason():
            return  # records that a crash lost cannot be distinguished from records deleted since
        for audited in partitions:
            tp = TopicPartition(audited.topic, audited.partition)
            if not self.examined[tp].complete or job.scopes[tp].compacted:
                continue
            why = miscounted(guarantee, loose, audited.counts, audited.tally)
            if why:
                span = Span(audited.start, audited.until, audited.until - audited.start)
                off = abs(audited.tally.read - audited.counts.read)
                yield Finding(Kind.MISCOUNTED, tp.topic, tp.partition, (span,), off, (), why)

    def _notes(self, partitions: tuple[Audited, ...]) -> Iterator[str]:
        """Notes for the reader that are no findings."""
        for examined in self.examined.values():
            yield from examined.notes
        unchecked = sum(audited.tally.unchecked for audited in partitions)
        if unchecked:
            yield (
                f"{unchecked:,} rows were not compared: their records are no longer in the topic (retention, "
                "compaction)."
            )
        topics = {audited.topic for audited in partitions}
        others = sum(count for tp, count in self.rows.items() if tp.topic not in topics)
        if others:
            yield (
                f"{others:,} rows were not audited: they come from topics that this pipeline does not read (any more)."
            )
        shared = self.shared
        if shared.count:
            yield (
                f"{shared.count:,} keys occur in more than one partition, so there is no order between their records: "
                f"{', '.join(shared.shown)}{', ...' if shared.count > len(shared.shown) else ''}"
            )


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
