"""The pages about pipelines: state, positions, claims, dead letters, and the state of a record.

Owns: these answers. Must not know: how they are shown. Neighbours: ``watch`` (what was seen last), ``avow.sinks``
(claims), ``avow.pipeline`` (dead letters), ``avow.plan`` (what is promised).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from avow import sinks
from avow.clients.outcome import Receipt
from avow.clients.receipts import Receipts
from avow.dashboard.evidence import AuditRow, ProofRow
from avow.dashboard.fields import Offset, OptionalOffset, OptionalPartition, PartitionNumber, TopicName
from avow.dashboard.formatting import FormattedValue, copy_fields, format_record, format_value, visible
from avow.dashboard.jobs import Job
from avow.dashboard.requests import NoParams, NotFound, Params
from avow.dashboard.state import AppState
from avow.dashboard.watch import PartitionSample, WatchedPipeline
from avow.errors import AvowError, ConfigError
from avow.pipeline import DeadLetterQueue, SelectionOptions
from avow.plan import Hop, plan
from avow.settings import PipelineConfig
from avow.sinks.base import Claim, DeadLetterPreview

MOVING_S = 15.0  # positions that moved so lately are moving
STALLED_S = 60.0  # records that wait so long while positions stand: what runs is stuck, or nothing runs
CLAIMS_EACH = 120  # of a partition, for charts
CLAIMS_SHOWN = 60
DEAD_LETTERS_SHOWN = 100
SPARK_POINTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    name: str
    file: str
    state: str  # refused, unreachable, stopped, never-ran, moving, drained, behind or stalled; starting at first
    problem: str
    advice: str
    audit: AuditRow | None  # the last that was stored
    proof: ProofRow | None = None
    # Empty where the file is refused
    guarantee: str = ""
    engine: str = ""
    topics: str = ""
    sink: str = ""
    target: str = ""
    mode: str = ""
    # The last sample; None before the first
    seen_at: float | None = None  # seconds since 1970
    failed_at: float | None = None  # a later attempt to sample, which failed because of the problem
    processes: int | None = None  # of the consumer engine that run; None: not known
    rate: float | None = None  # records a second
    lag: int | None = None
    lag_seconds: float | None = None  # of the oldest that waits; None: nothing does, or it is not known
    lag_note: str = ""  # why it is not known
    trend: str = ""  # of the lag: rising, falling or steady
    lags: tuple[int, ...] = ()  # the last few
    read: int | None = None
    written: int | None = None
    dead: int | None = None
    skipped: int | None = None
    run: int | None = None
    last_batch_at: float | None = None


@dataclass(frozen=True, slots=True)
class PipelinesAnswer:
    pipelines: tuple[PipelineRow, ...]


def pipelines(state: AppState, _: NoParams) -> PipelinesAnswer:
    """All pipelines, as last sampled."""
    return PipelinesAnswer(tuple(row(state, watched) for watched in state.watch.pipelines()))


def row(state: AppState, watched: WatchedPipeline) -> PipelineRow:
    declared: dict[str, Any] = {}
    sampled: dict[str, Any] = {}
    failure = watched.failure
    if (pipeline := watched.pipeline) is not None:
        declared = {
            "guarantee": str(pipeline.guarantee),
            "engine": pipeline.engine,
            "topics": _topics(pipeline),
            "sink": sinks.plugin_of(pipeline).title,
            "target": pipeline.sink.target,
            "mode": pipeline.sink.mode,
            "proof": state.evidence.last_proof(pipeline),
        }
    if (sample := watched.sample) is not None:
        sampled = {
            **asdict(sample.counts),
            **{name: getattr(sample, name) for name in ("lag", "lag_seconds", "lag_note", "run")},
            "seen_at": sample.at,
            "last_batch_at": sample.last_claim.at.timestamp() if sample.last_claim else watched.moved_at,
            "lags": tuple(point.lag for point in list(watched.points)[-SPARK_POINTS:]),
        }
        if failure is None:
            sampled |= {"processes": sample.processes, "rate": watched.rate, "trend": watched.trend}
    return PipelineRow(
        name=watched.name,
        file=str(watched.file),
        state=_state(watched),
        problem=watched.problem or (failure.problem if failure else ""),
        advice=failure.advice if failure and not watched.problem else "",
        failed_at=failure.at if failure else None,
        audit=state.evidence.last_audit(watched.name),
        **declared,
        **sampled,
    )


def _state(watched: WatchedPipeline) -> str:
    sample = watched.sample
    if watched.pipeline is None:
        return "refused"
    if watched.failure:
        return "unreachable"
    if sample is None:
        return "starting"
    if all(partition.position is None for partition in sample.partitions):
        return "never-ran"
    # A process of the consumer engine is a member of a group, so its absence is known; a driver of Spark is not.
    if watched.pipeline.engine == "consumer" and sample.processes == 0:
        return "stopped"
    # Whatever waits at this moment: a pipeline that keeps up is at its end every now and then.
    if watched.moved_at is not None and time.time() - watched.moved_at < MOVING_S:
        return "moving"
    if not sample.lag:
        return "drained"
    stalled = watched.waiting_since is not None and time.time() - watched.waiting_since >= STALLED_S
    return "stalled" if stalled else "behind"


def _topics(pipeline: PipelineConfig) -> str:
    source = pipeline.source
    if source.topics_pattern is not None:
        return str(source.shown("topics_pattern"))
    return ", ".join(source.shown("topics"))


# One pipeline


class NameParams(Params):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]


@dataclass(frozen=True, slots=True)
class JobRow:
    number: int
    kind: str
    pipeline: str
    running: bool
    began: float
    ended: float | None
    progress: tuple[tuple[float, str], ...]
    done: str
    verdict: str
    advice: str
    problem: str


def job_row(job: Job) -> JobRow:
    return copy_fields(JobRow, job, progress=tuple(job.progress))


@dataclass(frozen=True, slots=True)
class PipelineAnswer:
    pipeline: PipelineRow
    partitions: tuple[PartitionSample, ...]
    hops: tuple[Hop, ...]
    warnings: tuple[str, ...]
    jobs: tuple[JobRow, ...]


def _find(state: AppState, name: str) -> WatchedPipeline:
    watched = state.watch.find(name)
    if watched is None:
        raise NotFound(
            f"pipeline {name} does not exist",
            advice="The dashboard shows the pipeline files and folders that were given at its start.",
        )
    return watched


def loaded(state: AppState, name: str) -> tuple[WatchedPipeline, PipelineConfig]:
    """A pipeline whose file is good."""
    watched = _find(state, name)
    if watched.pipeline is None:
        raise ConfigError(watched.problem, advice="Correct the file; the dashboard reloads it every few seconds.")
    return watched, watched.pipeline


def pipeline(state: AppState, params: NameParams) -> PipelineAnswer:
    """One pipeline: what it promises, where it stands in each partition, and what was done to it from here."""
    watched = _find(state, params.name)
    explained = plan(watched.pipeline) if watched.pipeline else None
    return PipelineAnswer(
        row(state, watched),
        watched.sample.partitions if watched.sample else (),
        explained.hops if explained else (),
        explained.warnings if explained else (),
        tuple(job_row(job) for job in state.jobs.of(watched.name)[:5]),
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


def claims(state: AppState, params: NameParams) -> ClaimsAnswer:
    """The newest lines of the claim log."""
    _, pipeline = loaded(state, params.name)
    with sinks.driver_sink(pipeline) as ledger:
        newest = ledger.claims(CLAIMS_SHOWN)
    return ClaimsAnswer(params.name, newest is not None, tuple(map(_claim_row, (newest or [])[:CLAIMS_SHOWN])))


def _claim_row(claim: Claim) -> ClaimRow:
    return copy_fields(ClaimRow, claim, at=claim.at.timestamp(), **asdict(claim.counts))


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one chart; ``at`` is in seconds since 1970."""

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


def charts(state: AppState, params: NameParams) -> ChartsAnswer:
    """What the charts of a pipeline's page show: the last hour as it was seen, and the batches of the claim log."""
    watched, pipeline = loaded(state, params.name)
    points = list(watched.points)
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
        problem = str(error)  # the samples are shown without it
    return ChartsAnswer(
        params.name,
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


def _batches(claims: list[Claim]) -> list[tuple[float, int, float | None]]:
    """(when, records, seconds since the batch before it in the same run), the oldest first."""
    ends: dict[tuple[int, int], float] = {}
    records: Counter[tuple[int, int]] = Counter()
    for claim in claims:
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


class DeadLettersParams(NameParams):
    reason: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,100}$")] = ""
    topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{0,249}$")] = ""
    partition: OptionalPartition = None
    from_offset: OptionalOffset = None
    until_offset: OptionalOffset = None

    def selection(self) -> SelectionOptions:
        return cast(SelectionOptions, self.model_dump(exclude={"name"}, exclude_defaults=True))


@dataclass(frozen=True, slots=True)
class ReasonRow:
    reason: str
    count: int
    last_at: float


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    value: FormattedValue | None


@dataclass(frozen=True, slots=True)
class DeadLettersAnswer:
    name: str
    reasons: tuple[ReasonRow, ...]  # of all that are there
    selected: int  # how many match the parameters
    dead_letters: tuple[DeadLetterRow, ...]
    params: DeadLettersParams


def dead_letters(state: AppState, params: DeadLettersParams) -> DeadLettersAnswer:
    """Dead letters by reason, and the first hundred that match."""
    queue = DeadLetterQueue(loaded(state, params.name)[1])
    selection = params.selection()
    reasons = queue.counts()
    selected = queue.counts(**selection) if selection else reasons
    return DeadLettersAnswer(
        params.name,
        tuple(ReasonRow(visible(count.reason), count.count, count.last.timestamp()) for count in reasons),
        sum(count.count for count in selected),
        tuple(map(_dead_letter_row, queue.preview(limit=DEAD_LETTERS_SHOWN, **selection) if selected else ())),
        params,
    )


def _dead_letter_row(preview: DeadLetterPreview) -> DeadLetterRow:
    value = format_value(preview.head, size=preview.size)
    return copy_fields(DeadLetterRow, preview, detail=visible(preview.detail), value=value)


class OffsetParams(NameParams):
    topic: TopicName
    partition: PartitionNumber
    offset: Offset


@dataclass(frozen=True, slots=True)
class DeadLetterAnswer:
    name: str
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    key: FormattedValue | None
    value: FormattedValue | None
    headers: tuple[tuple[str, FormattedValue | None], ...]
    more_headers: int  # that are not shown


def dead_letter(state: AppState, params: OffsetParams) -> DeadLetterAnswer:
    """One dead letter: reason, headers, key and value as text and in hex."""
    dead_letter = DeadLetterQueue(loaded(state, params.name)[1]).get(params.topic, params.partition, params.offset)
    if dead_letter is None:
        raise NotFound(
            f"pipeline {params.name} has no dead letter at offset {params.offset} of {params.topic}/{params.partition}",
            advice="It may have been redriven meanwhile.",
        )
    return copy_fields(
        DeadLetterAnswer,
        dead_letter,
        name=params.name,
        detail=visible(dead_letter.detail),
        **format_record(dead_letter.key, dead_letter.value, dead_letter.headers, dead_letter.full_bytes),
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


def receipt(state: AppState, params: OffsetParams) -> ReceiptAnswer:
    """What became of a record, from the ledger's current state."""
    _, pipeline = loaded(state, params.name)
    with Receipts(pipeline) as receipts:
        answer = receipts.look(Receipt(params.topic, params.partition, params.offset))
    dead = f"{answer.reason}: {answer.error}" if answer.reason else ""
    detail = visible("; ".join(filter(None, (dead, answer.detail))))
    sentence = f"{answer.state.capitalize()}: {detail}" if detail else answer.state.capitalize()
    return copy_fields(
        ReceiptAnswer, params, state=answer.state, tone=TONES.get(answer.state, "warn"), sentence=sentence
    )


# Jobs


class JobParams(Params):
    number: Annotated[int, Field(ge=1)]


def job(state: AppState, params: JobParams) -> JobRow:
    """An audit or a redrive that was started from here, with what it says of itself."""
    job_ = state.jobs.find(params.number)
    if job_ is None:
        raise NotFound(f"job {params.number} does not exist", advice="Only the last 30 jobs are kept.")
    return job_row(job_)
