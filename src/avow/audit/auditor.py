"""An audit from end to end.

Theory of operation
-------------------
The sink's snapshot is taken first and Kafka's last stable offsets after it, so every position of the snapshot lies
below them unless the ledger is wrong. They are the high-water mark: what comes later is not looked at. ``examine`` then
says which offsets of which partition can be compared, and ``spark`` or ``inprocess`` compares them, as the pipeline's
engine is. A partition in which no record is visible reaches no Spark task; it is compared here, since its rows may
still be phantoms. With a key, the keys of both
sides are judged in a second pass; where rows do not say which record they came from, what they hold is, on the driver.
Phantoms are looked up among uncommitted records at last: those are aborted reads.

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
from avow.audit import inprocess, table
from avow.audit.compare import Compared, Tally
from avow.audit.content import Matched, match
from avow.audit.judge import ALL_SEEN, Examined, Reservation, examine, miscounted
from avow.audit.keys import SharedKeys
from avow.audit.partition import Job, Scope, compare_partition
from avow.audit.report import Audited, Report, summed_up, unknown
from avow.audit.topics import compacted
from avow.decode import arrow_type
from avow.engines.causes import trace, translated
from avow.engines.columns import sink_columns
from avow.engines.task import Work
from avow.errors import AvowError, ProtocolViolation, SinkError
from avow.findings import Finding, Kind, Offsets, Span, permits, split_phantoms
from avow.guarantee import Guarantee
from avow.kafka.brokers import about
from avow.kafka.log import Log, TopicPartition
from avow.ledger import NOTHING, LogView, OffsetRange
from avow.schema import Field
from avow.settings import REST_COLUMN, PipelineConfig
from avow.sinks.reading import CONTENT, Known, Reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from avow.audit import spark

Tell = Callable[[str], None]
LOGGER = logging.getLogger("avow.audit")  # traces: silent unless somebody listens


def audit(pipeline: PipelineConfig, session: Callable[[], SparkSession], tell: Tell = lambda _: None) -> Report:
    """Audit a pipeline. What cannot be reached or read makes the verdict unknown, with the reason.

    ``session`` gives a Spark session. It is called for a pipeline on Spark, when one is needed, and not before; others
    are audited in this process.
    """
    try:
        with table.open_reading(pipeline) as reading, Log(pipeline.source, pipeline.name) as log:
            return _Audit(pipeline, session, tell, reading, log).report()
    except ProtocolViolation:
        raise
    except AvowError as error:  # also what the sink refuses for good: an audit that could not read has found nothing
        return unknown(pipeline, str(error), error.advice)
    except Exception as error:  # noqa: BLE001 - an audit that could not finish has found nothing broken
        LOGGER.debug("the audit failed\n%s", trace(error))
        advice = "Audit again when the cause is fixed. --verbose shows the whole trace."
        return unknown(pipeline, f"the audit could not read everything: {translated(error)}", advice)


@dataclass(slots=True)
class _State:
    """What is known so far."""

    known: dict[TopicPartition, Known]  # by the ledger
    views: dict[TopicPartition, LogView]  # by Kafka
    rows: dict[TopicPartition, int]  # in the table
    examined: dict[TopicPartition, Examined]
    compared: dict[TopicPartition, Compared] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    shared: SharedKeys = field(default_factory=SharedKeys)
    matched: Matched | None = None  # by content


class _Audit:
    def __init__(
        self, pipeline: PipelineConfig, session: Callable[[], SparkSession], tell: Tell, reading: Reading, log: Log
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._tell = tell
        self._reading = reading
        self._contents = reading.contents()
        self._log = log

    def report(self) -> Report:
        started = time.monotonic()
        pipeline = self._pipeline
        self._tell("reading the ledger")
        known = self._reading.known()
        if not known:
            return unknown(
                pipeline,
                f"the sink has no position of {pipeline.name}: it has never run into it, or its positions are gone",
                "If it has never run: run it, then audit it. If it has: the table was replaced or restored, or the "
                "pipeline was renamed. Without its positions there is nothing to audit against; avow run says how to "
                "go on.",
            )
        state = self._examined(known)
        job = self._job(state)
        self._compare(job, state)
        self._tell_phantoms_apart(state)
        state.findings += self._reading.order_findings()
        partitions = tuple(self._audited(where, state) for where in state.examined)
        state.findings += self._miscounts(job, partitions, state)
        matched = state.matched
        notes = [*_notes(partitions, state), *self._reading.notes(), *(matched.notes() if matched else ())]
        reservation = self._set_aside_gone(state) + (matched.reservation if matched else ALL_SEEN)
        seconds = time.monotonic() - started
        return summed_up(pipeline, partitions, state.findings, notes, state.shared.count, seconds, reservation)

    def _examined(self, known: dict[TopicPartition, Known]) -> _State:
        """Every partition that Kafka, the ledger or the table knows, and what of it can be compared."""
        self._tell("asking Kafka where the topics end")
        there = self._log.partitions()
        topics = {where.topic for where in there}
        # A topic that the pipeline does not read any more, though the ledger knows it, may not even be there.
        wanted = {*there, *(where for where in known if where.topic in topics)}
        views = self._log.view({where: known[where].entry if where in known else None for where in wanted})
        ends = self._log.stable_ends(there)
        held_by = self._held_by([where for where, end in ends.items() if end < views[where].end])
        self._tell("counting rows")
        rows = self._reading.row_counts()
        for where in rows:
            if where.topic in topics and where not in views:  # rows of a partition that there is not
                views[where] = LogView(where.topic, where.partition, "", 0, 0)
        skip_lost = self._pipeline.source.on_data_loss == "skip"
        examined = {
            where: examine(
                known.get(where),
                views[where],
                ends.get(where, 0),
                skip_lost=skip_lost,
                held_by=held_by.get(where, ""),
            )
            for where in sorted(views)
        }
        findings = [finding for one in examined.values() for finding in one.findings]
        return _State(known, views, rows, examined, findings=findings)

    def _held_by(self, waiting: list[TopicPartition]) -> dict[TopicPartition, str]:
        """Who has a transaction open in these partitions, as far as the brokers say it."""
        if not waiting:
            return {}
        found = about(self._pipeline.source, lambda brokers: brokers.holders(waiting)) or {}
        return {where: holders[0].says() for where, holders in found.items()}

    def _job(self, state: _State) -> Job:
        pipeline = self._pipeline
        loose = compacted(pipeline.source, {where.topic for where in state.examined})
        scopes = {
            where: Scope(n, one.start, one.until, one.behind_from, one.readable_until, where.topic in loose)
            for n, (where, one) in enumerate(state.examined.items())
            if one.comparable
        }
        ranges = {
            where: OffsetRange(where.topic, where.partition, scope.start, scope.until)
            for where, scope in scopes.items()
            if scope.until > scope.start
        }
        fields, rest = self._fields()
        columns = [field.name for field in fields] + ([REST_COLUMN] if rest else [])
        key_types = {CONTENT: pa.int64()}
        if self._contents is None:
            key_types = _key_types(pipeline, {one.name: arrow_type(one.type) for one in fields})
        return Job(
            # A query's notes carry the number of the run: this one is nobody else's.
            work=Work(pipeline, -os.getpid(), 0, ranges),
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

    def _comparing(self, job: Job) -> spark.Comparing | inprocess.Comparing:
        if self._pipeline.engine == "consumer":
            return inprocess.Comparing(job, self._tell)
        from avow.audit import spark

        return spark.Comparing(self._session, job)

    def _uncommitted(
        self, ranges: dict[TopicPartition, OffsetRange], phantoms: list[Finding]
    ) -> dict[tuple[str, int], Offsets]:
        if self._pipeline.engine == "consumer":
            return inprocess.uncommitted(self._pipeline, ranges, phantoms)
        from avow.audit import spark

        return spark.uncommitted(self._session(), self._pipeline, ranges, phantoms)

    def _compare(self, job: Job, state: _State) -> None:
        ranges = job.work.ranges
        offsets = sum(map(len, ranges.values()))
        self._tell(f"comparing {offsets:,} offsets of {len(ranges)} partitions with {self._pipeline.sink.target}")
        with self._comparing(job) as comparison:
            state.compared = comparison.results()
            seen_here = []
            for where in job.scopes.keys() - state.compared.keys():
                for given in compare_partition(job, where, (), self._reading):
                    if isinstance(given, Compared):
                        state.compared[where] = given
                    else:
                        seen_here.append(given)
            if self._contents is not None:
                self._tell("looking for each record's like")
                state.matched = match(comparison.due(), self._contents)
                numbers = {scope.number: (where.topic, where.partition) for where, scope in job.scopes.items()}
                _add_lost(state, [*state.matched.findings(numbers)], counted="written")
            elif job.key_types and (ranges or seen_here):
                self._tell("bringing the keys together")
                by_key, state.shared = comparison.judge_keys(seen_here)
                _add_lost(state, by_key, counted="written" if job.by == "upsert" else "skipped")
        state.findings += [finding for one in state.compared.values() for finding in one.findings]

    def _tell_phantoms_apart(self, state: _State) -> None:
        """A row without a committed record may have an uncommitted one."""
        phantoms = [finding for finding in state.findings if finding.kind is Kind.PHANTOM]
        wanted = {}
        for finding in phantoms:
            where = TopicPartition(finding.topic, finding.partition)
            view = state.views[where]
            first, last = max(finding.spans[0].start, view.earliest), min(finding.spans[-1].until, view.end)
            if first < last:
                wanted[where] = OffsetRange(where.topic, where.partition, first, last)
        if not wanted:
            return
        self._tell("looking for the records of phantoms in aborted transactions")
        there = self._uncommitted(wanted, phantoms)
        for finding in phantoms:
            state.findings.remove(finding)
            state.findings += split_phantoms(finding, there[finding.topic, finding.partition])

    def _set_aside_gone(self, state: _State) -> Reservation:
        """Where the sink itself lets rows go, what is not there does not show that it never was."""
        why = self._reading.lets_go()
        lost = [finding for finding in state.findings if finding.kind is Kind.LOST]
        if not why or not lost:
            return ALL_SEEN
        # Where a crash may lose records, they stay findings, but what is missing may be more than crashes have lost.
        if not permits(self._pipeline.guarantee, Kind.LOST):
            state.findings = [finding for finding in state.findings if finding.kind is not Kind.LOST]
        return Reservation(
            undecided=f"{sum(finding.count for finding in lost):,} claimed records are not in the output, which lets "
            f"records go ({why})",
            advice="Audit before retention or compaction gets there: give the output topics a longer retention.",
        )

    def _audited(self, where: TopicPartition, state: _State) -> Audited:
        one, known = state.examined[where], state.known.get(where)
        compared = state.compared.get(where)
        tally = compared.tally if compared else Tally(unchecked=state.rows.get(where, 0))
        counts = known.entry.counts if known else NOTHING
        return Audited(where.topic, where.partition, one.start, one.until, tally, counts)

    def _miscounts(self, job: Job, partitions: tuple[Audited, ...], state: _State) -> Iterator[Finding]:
        """Where the ledger's counts do not agree, of the partitions of which all can be compared."""
        loose = bool(self._pipeline.sink.key) or not sinks.plugin_of(self._pipeline).atomic_writes
        if self._pipeline.guarantee is Guarantee.AT_MOST_ONCE and self._reading.lets_go():
            return  # nobody can say what a crash has lost, and what has gone since
        for audited in partitions:
            where = TopicPartition(audited.topic, audited.partition)
            if not state.examined[where].complete or job.scopes[where].compacted:
                continue
            why = miscounted(self._pipeline.guarantee, loose, audited.counts, audited.tally)
            if why:
                span = Span(audited.start, audited.until, audited.until - audited.start)
                off = abs(audited.tally.read - audited.counts.read)
                yield Finding(Kind.MISCOUNTED, where.topic, where.partition, (span,), off, (), why)


def _key_types(pipeline: PipelineConfig, payload: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The Arrow types of sink.key, lineage columns among them."""
    lineage = dict(
        zip(pipeline.sink.lineage, (pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC")), strict=True)
    )
    types = {name: (lineage | payload)[name] for name in pipeline.sink.key}
    for name, type_ in types.items():
        if pa.types.is_nested(type_):
            raise SinkError(
                f"a key of nested values cannot be audited: {name}", advice="Name a plain column in sink.key."
            )
    return types


def _add_lost(state: _State, found: list[Finding], *, counted: Literal["written", "skipped"]) -> None:
    """What keys or contents show, and the records that are lost by it: ``counted`` until now as if they had arrived."""
    state.findings += found
    for finding in found:
        if finding.kind is not Kind.LOST:
            continue
        where = TopicPartition(finding.topic, finding.partition)
        one = state.compared[where]
        before = getattr(one.tally, counted)
        tally = replace(one.tally, lost=one.tally.lost + finding.count, **{counted: before - finding.count})
        state.compared[where] = replace(one, tally=tally)


def _notes(partitions: tuple[Audited, ...], state: _State) -> Iterator[str]:
    """What is not wrong, and a reader should know."""
    for examined in state.examined.values():
        yield from examined.notes
    unchecked = sum(audited.tally.unchecked for audited in partitions)
    if unchecked:
        yield f"{unchecked:,} rows have no record to compare with any more (retention, compaction), so they were not."
    topics = {audited.topic for audited in partitions}
    others = sum(count for where, count in state.rows.items() if where.topic not in topics)
    if others:
        yield f"{others:,} rows are of topics that this pipeline does not read (any more), so they were not audited."
    if state.shared.count:
        yield (
            f"{state.shared.count:,} keys are in more than one partition, where there is no order between their "
            f"records: {', '.join(state.shared.shown)}{', ...' if state.shared.count > len(state.shared.shown) else ''}"
        )
