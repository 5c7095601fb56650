"""The pages about pipelines: how they are, where they stand, their claims, their dead letters, and where a record is.

Owns: these answers. Must not know: how they are shown. Neighbours: ``watch`` (what was seen last), ``avow.sinks``
(claims and dead letters), ``avow.plan`` (what is promised).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator

from avow import sinks
from avow.clients.outcome import Receipt
from avow.clients.receipts import Receipts
from avow.dashboard.asking import OFFSET_MAX, PARTITION_MAX, Ask, Nothing, NotThere
from avow.dashboard.evidence import AuditRow, ProofRow
from avow.dashboard.house import House
from avow.dashboard.jobs import Job
from avow.dashboard.show import HEADERS_MAX, Shown, shown, shown_headers, visible
from avow.dashboard.watch import Watched, Where
from avow.errors import AvowError, ConfigError
from avow.plan import Hop, plan
from avow.settings import PipelineConfig
from avow.sinks.base import Claim, Glimpse, Selection

NAME = r"^[A-Za-z0-9._-]{1,200}$"
TOPIC = r"^[a-zA-Z0-9._-]{1,249}$"
REASON = r"^[A-Za-z0-9._-]{0,100}$"
MOVING_S = 15.0  # positions that moved so lately are moving
STALLED_S = 60.0  # records that wait so long while positions stand: what runs is stuck, or nothing runs
CLAIMS_EACH = 120  # of a partition, for charts
CLAIMS_SHOWN = 60
LETTERS_SHOWN = 100
SPARK_POINTS = 40


@dataclass(frozen=True, slots=True)
class PipelineRow:
    name: str
    file: str
    state: str  # refused, unreachable, stopped, never-ran, moving, drained, behind or stalled; starting at first
    processes: int | None  # of the consumer engine that run; None: not known
    problem: str
    advice: str
    guarantee: str
    engine: str
    topics: str
    sink: str
    target: str
    mode: str
    seen_at: float | None  # seconds since 1970: as of then is what follows; None: nothing was seen yet
    failed_at: float | None  # a look since then that saw nothing, because of the problem
    rate: float | None  # records a second
    lag: int | None
    lag_seconds: float | None  # of the oldest that waits; None: nothing does, or it is not known
    lag_note: str  # why it is not known
    trend: str  # of the lag: rising, falling or steady
    lags: tuple[int, ...]  # the last few
    read: int | None
    written: int | None
    dead: int | None
    skipped: int | None
    run: int | None
    last_batch_at: float | None
    audit: AuditRow | None
    proof: ProofRow | None


@dataclass(frozen=True, slots=True)
class PipelinesAnswer:
    pipelines: tuple[PipelineRow, ...]


def pipelines(house: House, _: Nothing) -> PipelinesAnswer:
    """All pipelines, as they were seen last."""
    return PipelinesAnswer(tuple(row(house, one) for one in house.watch.pipelines()))


def row(house: House, one: Watched) -> PipelineRow:
    pipeline, sample, trouble = one.pipeline, one.sample, one.trouble
    counts = sample.counts if sample else None
    claimed_at = sample.last_claim.at.timestamp() if sample and sample.last_claim else one.moved_at
    points = list(one.points)[-SPARK_POINTS:]
    return PipelineRow(
        name=one.name,
        file=str(one.file),
        state=_state(one),
        processes=sample.processes if sample and not trouble else None,
        problem=one.problem or (trouble.problem if trouble else ""),
        advice=trouble.advice if trouble and not one.problem else "",
        guarantee=str(pipeline.guarantee) if pipeline else "",
        engine=pipeline.engine if pipeline else "",
        topics=_topics(pipeline) if pipeline else "",
        sink=sinks.plugin_of(pipeline).title if pipeline else "",
        target=pipeline.sink.target if pipeline else "",
        mode=pipeline.sink.mode if pipeline else "",
        seen_at=sample.at if sample else None,
        failed_at=trouble.at if trouble else None,
        rate=None if trouble else one.rate,
        lag=sample.lag if sample else None,
        lag_seconds=sample.lag_seconds if sample else None,
        lag_note=sample.lag_note if sample else "",
        trend="" if trouble else one.trend,
        lags=tuple(point.lag for point in points),
        read=counts.read if counts else None,
        written=counts.written if counts else None,
        dead=counts.dead if counts else None,
        skipped=counts.skipped if counts else None,
        run=sample.run if sample else None,
        last_batch_at=claimed_at,
        audit=house.evidence.last_audit(one.name),
        proof=house.evidence.last_proof(pipeline) if pipeline else None,
    )


def _state(one: Watched) -> str:
    sample = one.sample
    if one.pipeline is None:
        return "refused"
    if one.trouble:
        return "unreachable"
    if sample is None:
        return "starting"
    if all(where.position is None for where in sample.partitions):
        return "never-ran"
    # A process of the consumer engine is a member of a group, so its absence is known; a driver of Spark is not.
    if one.pipeline.engine == "consumer" and sample.processes == 0:
        return "stopped"
    # Whatever waits at this moment: a pipeline that keeps up is at its end every now and then.
    if one.moved_at is not None and time.time() - one.moved_at < MOVING_S:
        return "moving"
    if not sample.lag:
        return "drained"
    return "stalled" if one.still_since is not None and time.time() - one.still_since >= STALLED_S else "behind"


def _topics(pipeline: PipelineConfig) -> str:
    source = pipeline.source
    if source.topics_pattern is not None:
        return str(source.shown("topics_pattern"))
    return ", ".join(source.shown("topics"))


# One pipeline


class ByName(Ask):
    name: Annotated[str, Field(pattern=NAME)]


@dataclass(frozen=True, slots=True)
class JobRow:
    number: int
    kind: str
    pipeline: str
    running: bool
    began: float
    ended: float | None
    told: tuple[tuple[float, str], ...]
    done: str
    verdict: str
    advice: str
    problem: str


def job_row(job: Job) -> JobRow:
    return JobRow(
        job.number,
        job.kind,
        job.pipeline,
        job.running,
        job.began,
        job.ended,
        tuple(job.told),
        job.done,
        job.verdict,
        job.advice,
        job.problem,
    )


@dataclass(frozen=True, slots=True)
class PipelineAnswer:
    pipeline: PipelineRow
    partitions: tuple[Where, ...]
    hops: tuple[Hop, ...]
    warnings: tuple[str, ...]
    jobs: tuple[JobRow, ...]


def _find(house: House, name: str) -> Watched:
    one = house.watch.find(name)
    if one is None:
        raise NotThere(
            f"no pipeline is called {name}",
            advice="The dashboard knows the pipelines whose files or folders it was started with.",
        )
    return one


def loaded(house: House, name: str) -> tuple[Watched, PipelineConfig]:
    """A pipeline whose file is good."""
    one = _find(house, name)
    if one.pipeline is None:
        raise ConfigError(one.problem, advice="Correct the file; it is read again every few seconds.")
    return one, one.pipeline


def pipeline(house: House, ask: ByName) -> PipelineAnswer:
    """One pipeline: what it promises, where it stands in each partition, and what was done to it from here."""
    one = _find(house, ask.name)
    explained = plan(one.pipeline) if one.pipeline else None
    return PipelineAnswer(
        row(house, one),
        one.sample.partitions if one.sample else (),
        explained.hops if explained else (),
        explained.warnings if explained else (),
        tuple(job_row(job) for job in house.jobs.of(one.name)[:5]),
    )


# Claims, and charts of them


@dataclass(frozen=True, slots=True)
class ClaimRow:
    at: float
    topic: str
    partition: int
    start: int
    until: int
    run: int
    batch: int
    read: int
    written: int
    dead: int
    skipped: int


@dataclass(frozen=True, slots=True)
class ClaimsAnswer:
    name: str
    kept: bool  # whether the sink keeps a log of claims
    claims: tuple[ClaimRow, ...]  # the newest first


def claims(house: House, ask: ByName) -> ClaimsAnswer:
    """The newest lines of the claim log."""
    _, pipeline = loaded(house, ask.name)
    with sinks.driver_sink(pipeline) as ledger:
        found = ledger.claims(CLAIMS_SHOWN)
    return ClaimsAnswer(ask.name, found is not None, tuple(map(_claim, (found or [])[:CLAIMS_SHOWN])))


def _claim(one: Claim) -> ClaimRow:
    counts = one.counts
    return ClaimRow(
        one.at.timestamp(),
        one.topic,
        one.partition,
        one.start,
        one.until,
        one.run,
        one.batch,
        counts.read,
        counts.written,
        counts.dead,
        counts.skipped,
    )


@dataclass(frozen=True, slots=True)
class Series:
    """Columns of one chart, as uPlot takes them: the first is the time, in seconds since 1970."""

    at: tuple[float, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class ChartsAnswer:
    name: str
    rate: Series  # records a second
    lag: Series  # records
    lag_seconds: Series
    dead: Series  # dead letters that stand
    batch_records: Series  # of each batch in the claim log
    batch_seconds: Series  # from the batch before it, in the same run
    problem: str  # why the claim log could not be read; empty if it was


def charts(house: House, ask: ByName) -> ChartsAnswer:
    """What the charts of a pipeline's page show: the last hour as it was seen, and the batches of the claim log."""
    one, pipeline = loaded(house, ask.name)
    points = list(one.points)
    rates = [
        (now.at, max(0.0, (now.read - then.read) / (now.at - then.at)))
        for then, now in pairwise(points)
        if now.at > then.at
    ]
    batches, problem = [], ""
    try:
        with sinks.driver_sink(pipeline) as ledger:
            batches = _batches(ledger.claims(CLAIMS_EACH) or [])
    except AvowError as error:
        problem = str(error)  # what was seen before is of use without it
    return ChartsAnswer(
        ask.name,
        _series(rates),
        _series([(point.at, float(point.lag)) for point in points]),
        _series([(point.at, point.lag_seconds) for point in points]),
        _series([(point.at, float(point.dead)) for point in points]),
        _series([(at, float(records)) for at, records, _ in batches]),
        _series([(at, seconds) for at, _, seconds in batches if seconds is not None]),
        problem,
    )


def _series(points: Sequence[tuple[float, float | None]]) -> Series:
    return Series(
        tuple(round(at, 3) for at, _ in points),
        tuple(None if value is None else round(value, 3) for _, value in points),
    )


def _batches(found: list[Claim]) -> list[tuple[float, int, float | None]]:
    """(when, records, seconds since the batch before it in the same run), the oldest first."""
    ends: dict[tuple[int, int], float] = {}
    records: Counter[tuple[int, int]] = Counter()
    for claim in found:
        key = (claim.run, claim.batch)
        ends[key] = max(ends.get(key, 0.0), claim.at.timestamp())
        records[key] += claim.counts.read
    ordered = sorted(ends.items(), key=lambda item: item[1])
    batches: list[tuple[float, int, float | None]] = []
    last: tuple[int, float] | None = None
    for (run, batch), at in ordered:
        batches.append((at, records[run, batch], at - last[1] if last and last[0] == run else None))
        last = (run, at)
    return batches


# Dead letters


class LettersAsk(Ask):
    name: Annotated[str, Field(pattern=NAME)]
    reason: Annotated[str, Field(pattern=REASON)] = ""
    topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{0,249}$")] = ""
    partition: Annotated[int | None, Field(ge=0, le=PARTITION_MAX)] = None
    from_offset: Annotated[int | None, Field(ge=0, le=OFFSET_MAX)] = None
    until_offset: Annotated[int | None, Field(ge=0, le=OFFSET_MAX)] = None

    @field_validator("partition", "from_offset", "until_offset", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return None if value == "" else value

    def selection(self) -> Selection:
        return Selection(self.reason or None, self.topic or None, self.partition, self.from_offset, self.until_offset)


@dataclass(frozen=True, slots=True)
class Reason:
    reason: str
    count: int
    last_at: float


@dataclass(frozen=True, slots=True)
class LetterRow:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    value: Shown | None


@dataclass(frozen=True, slots=True)
class LettersAnswer:
    name: str
    reasons: tuple[Reason, ...]  # of all that are there
    meant: int  # how many the question means
    letters: tuple[LetterRow, ...]
    asked: LettersAsk


def letters(house: House, ask: LettersAsk) -> LettersAnswer:
    """Dead letters by reason, and the first hundred of those that are meant."""
    _, pipeline = loaded(house, ask.name)
    with sinks.dead_letters(pipeline) as graveyard:
        reasons = graveyard.by_reason(Selection())
        selection = ask.selection()
        meant = graveyard.by_reason(selection) if selection != Selection() else reasons
        found = graveyard.glimpses(selection, LETTERS_SHOWN) if meant else []
    return LettersAnswer(
        ask.name,
        tuple(Reason(visible(reason), count, last.timestamp()) for reason, count, last in reasons),
        sum(count for _, count, _ in meant),
        tuple(map(_letter, found)),
        ask,
    )


def _letter(one: Glimpse) -> LetterRow:
    value = shown(one.head, size=one.size)
    return LetterRow(one.topic, one.partition, one.offset, one.timestamp_ms, one.reason, visible(one.detail), value)


class OffsetAsk(Ask):
    name: Annotated[str, Field(pattern=NAME)]
    topic: Annotated[str, Field(pattern=TOPIC)]
    partition: Annotated[int, Field(ge=0, le=PARTITION_MAX)]
    offset: Annotated[int, Field(ge=0, le=OFFSET_MAX)]

    def selection(self) -> Selection:
        return Selection(
            topic=self.topic, partition=self.partition, from_offset=self.offset, until_offset=self.offset + 1
        )


@dataclass(frozen=True, slots=True)
class LetterAnswer:
    name: str
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    key: Shown | None
    value: Shown | None
    headers: tuple[tuple[str, Shown | None], ...]
    more_headers: int  # that are not shown


def letter(house: House, ask: OffsetAsk) -> LetterAnswer:
    """All of one dead letter: reason, headers, key and value as text and in hex."""
    _, pipeline = loaded(house, ask.name)
    with sinks.dead_letters(pipeline) as graveyard:
        found = graveyard.select(ask.selection(), 1)
    if not found:
        raise NotThere(
            f"no dead letter of {ask.name} is at offset {ask.offset} of {ask.topic}/{ask.partition}",
            advice="It may have been redriven meanwhile.",
        )
    one = found[0]
    return LetterAnswer(
        ask.name,
        one.topic,
        one.partition,
        one.offset,
        one.timestamp_ms,
        one.reason,
        visible(one.detail),
        shown(one.key, whole=True),
        shown(one.value, whole=True),
        shown_headers(one.headers),
        max(0, len(one.headers) - HEADERS_MAX),
    )


# Receipts


@dataclass(frozen=True, slots=True)
class ReceiptAnswer:
    name: str
    topic: str
    partition: int
    offset: int
    state: str  # as ``avow wait`` has it
    tone: Literal["good", "warn", "bad"]
    sentence: str


TONES: dict[str, Literal["good", "warn", "bad"]] = {"written": "good", "dead-lettered": "bad"}


def receipt(house: House, ask: OffsetAsk) -> ReceiptAnswer:
    """What became of a record. Asked of the ledger itself, now."""
    _, pipeline = loaded(house, ask.name)
    with Receipts(pipeline) as receipts:
        answer = receipts.look(Receipt(ask.topic, ask.partition, ask.offset))
    dead = f"{answer.reason}: {answer.error}" if answer.reason else ""
    said = visible("; ".join(filter(None, (dead, answer.detail))))
    sentence = f"{answer.state.capitalize()}: {said}" if said else answer.state.capitalize()
    return ReceiptAnswer(
        ask.name, ask.topic, ask.partition, ask.offset, answer.state, TONES.get(answer.state, "warn"), sentence
    )


# Jobs


class JobAsk(Ask):
    number: Annotated[int, Field(ge=1)]


def job(house: House, ask: JobAsk) -> JobRow:
    """An audit or a redrive that was started from here, with what it says of itself."""
    found = house.jobs.find(ask.number)
    if found is None:
        raise NotThere(f"there is no job {ask.number}", advice="Only the last few are remembered.")
    return job_row(found)
