"""The ledger's rules: positions, offset ranges and claims, as functions over frozen values.

Theory of operation
-------------------
The ledger holds, per pipeline, topic and partition, one ``Entry``. Its *position* is the next offset that
has not been claimed. It lives in the sink, so that it can move in the same act as the write. Two rules carry
every guarantee:

* **a task reads the position first and drops what lies below it**: what is known to be claimed is not written
  again (a zombie that read before another's claim may still write under ``at-least-once``, which permits it);
* **a claim is contiguous**: it starts exactly where the last one ended (compare-and-set), so no offset is
  ever passed over unseen.

A planned range against the position:

=====================  =================================================================
position               the task
=====================  =================================================================
== from                goes on with the whole range
between from and until drops what is below the position, goes on with the rest
>= until               has nothing to do: a replay
< from                 stops: a gap would lose records (``PositionBehind``)
=====================  =================================================================

``until`` is the planned end, never "the last record seen + 1": a range that ends on transaction markers or
aborted records must still move the position.

The *run* number is a fence: a newer run bumps it, and an older run's next claim fails. Safety never rests on
it; it only stops a superseded run early.

Identity of a record is (topic id, partition, offset). Batch and task numbers are never part of it: a new
checkpoint restarts them.

Owns: the rules. Must not know: I/O, time, randomness, logging, any sink. Its neighbours are ``guarantee``
(which act comes first) and ``model`` (which explores every crash of the two).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from avow.errors import (
    ConfigError,
    LogTruncated,
    PositionBehind,
    PositionMoved,
    ProtocolViolation,
    RetentionLoss,
    Superseded,
    TopicRecreated,
)


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """A half-open span ``[start, until)`` of one partition."""

    topic: str
    partition: int
    start: int
    until: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.until:
            raise ProtocolViolation(f"not an offset range: {self}")

    def __len__(self) -> int:
        return self.until - self.start

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} [{self.start}, {self.until})"


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the records of one claim, or of all claims of a partition.

    The accounting identity holds by construction: every record read is written, dead or skipped.
    """

    read: int = 0
    written: int = 0
    dead: int = 0
    skipped: int = 0  # left out by declaration: a filter, a repeated key, a range given up to retention

    def __post_init__(self) -> None:
        if min(self.read, self.written, self.dead, self.skipped) < 0:
            raise ProtocolViolation(f"a count is below zero: {self}")
        if self.read != self.written + self.dead + self.skipped:
            raise ProtocolViolation(f"read is not written + dead + skipped: {self}")

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.read + other.read,
            self.written + other.written,
            self.dead + other.dead,
            self.skipped + other.skipped,
        )


NOTHING = Counts()


def redriven(counts: Counts, written: int, skipped: int) -> Counts:
    """After dead letters of a partition were delivered. A crash between a claim and its write can leave some that were
    never counted, and so can a superseded run under at-least-once: these are counted as read now."""
    counted = min(counts.dead, written + skipped)
    read = counts.read + written + skipped - counted
    return Counts(read, counts.written + written, counts.dead - counted, counts.skipped + skipped)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The last claimed record, so that a log that was cut and grew again is noticed.

    Its offset may lie below ``position - 1``: markers and aborted records have no fingerprint.
    """

    offset: int
    timestamp_ms: int
    crc32: int  # of key and value, as zlib computes it


@dataclass(frozen=True, slots=True)
class Entry:
    """The ledger's row for one partition of one pipeline."""

    position: int  # the next offset that has not been claimed
    topic_id: str  # Kafka's own id: a topic made again under the same name has another
    run: int  # the fence: the newest run that owns this partition
    counts: Counts = NOTHING  # over all claims
    last: Fingerprint | None = None  # None until a record was claimed


@dataclass(frozen=True, slots=True)
class LogView:
    """What Kafka says of one partition when a run starts."""

    topic: str
    partition: int
    topic_id: str
    earliest: int
    end: int  # one past the last offset of the log
    found: Fingerprint | None = None  # the record now at the ledger's last offset, if one is there


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins in one partition."""

    position: int
    adopted: bool = False  # there was no position: write this one to the ledger before reading anything
    given_up: OffsetRange | None = None  # claim this as skipped first: retention has deleted it


def plan_start(entry: Entry | None, log: LogView, declared: int, *, skip_lost: bool = False) -> Start:
    """Where to begin, or the named reason why the run must not.

    ``declared`` is the pipeline's start as an offset; it counts only where the ledger has no position.
    ``skip_lost`` is ``on_data_loss = "skip"``.
    """
    where = f"{log.topic}/{log.partition}"
    if entry is None:
        if not log.earliest <= declared <= log.end:
            raise ConfigError(
                f"source.start: offset {declared} of {where} is outside its log [{log.earliest}, {log.end}]",
                advice="Declare an offset inside the log, or earliest, latest or a timestamp.",
            )
        return Start(declared, adopted=True)
    check_topic(f"{where} was claimed up to offset {entry.position}", entry.topic_id, log.topic_id)
    if entry.position > log.end:
        raise LogTruncated(
            f"log-truncated: {where} was claimed up to offset {entry.position}, but its log ends at {log.end}",
            advice="Delivered records are gone from Kafka (an unclean leader election, or a restored "
            "broker). Audit the sink, then give the pipeline a new name or restore the topic.",
        )
    if entry.last is not None and log.found is not None and entry.last != log.found:
        raise LogTruncated(
            f"log-truncated: the record of {where} at offset {entry.last.offset} is not the one that was "
            "claimed; the log was truncated at or below that offset and has grown since",
            advice="Records after the truncation were replaced (an unclean leader election). Audit the sink, "
            "then give the pipeline a new name or restore the topic.",
        )
    if entry.position < log.earliest:
        lost = OffsetRange(log.topic, log.partition, entry.position, log.earliest)
        if not skip_lost:
            raise RetentionLoss(
                f"retention-loss: {lost} was deleted by retention before it was claimed ({len(lost)} offsets)",
                advice='Set source.on_data_loss = "skip" to continue and record the range as skipped, or restore '
                "the records.",
            )
        return Start(log.earliest, given_up=lost)
    return Start(entry.position)


def check_topic(what: str, known_id: str, topic_id: str) -> None:
    """Stop at a topic that is not the one the ledger knows. ``what`` was done with that one."""
    if topic_id != known_id:
        raise TopicRecreated(
            f"topic-recreated: {what} as topic id {known_id}, but the topic now has id {topic_id}",
            advice="The topic was deleted and recreated, so its offsets mean other records; or source.brokers is "
            "another "
            "cluster than the pipeline has read so far. Give the pipeline a new name to read this topic from "
            "source.start.",
        )


def judge(position: int, planned: OffsetRange) -> OffsetRange:
    """The part of a planned range that is still to be done. Empty for a replay."""
    if position < planned.start:
        raise PositionBehind(
            f"{planned} was planned, but the ledger's position is {position}: "
            f"claiming it would skip {planned.start - position} offsets",
            advice="Nothing was written. The sink has lost claims (a failover to a standby that lacked them, or a "
            "restored backup). Start the pipeline again: a run always plans from the ledger.",
        )
    return replace(planned, start=min(position, planned.until))


def claim(
    entry: Entry, done: OffsetRange, run: int, counts: Counts = NOTHING, last: Fingerprint | None = None
) -> Entry:
    """The entry after a claim of ``done``: compare-and-set on the position, fenced by the run."""
    check_fence(entry, run)
    if not done:
        raise ProtocolViolation(f"an empty range cannot be claimed: {done}")
    if entry.position != done.start:
        raise PositionMoved(f"cannot claim {done}: the position is {entry.position}")
    if counts.read > len(done):
        raise ProtocolViolation(f"{done} cannot contain {counts.read} records")
    return replace(entry, position=done.until, run=run, counts=entry.counts + counts, last=last or entry.last)


def tallied(entry: Entry, counts: Counts, last: Fingerprint | None) -> Entry:
    """After records that were claimed before are counted. A newer run may have claimed and counted later ones first."""
    behind = last is not None and entry.last is not None and last.offset < entry.last.offset
    return replace(entry, counts=entry.counts + counts, last=entry.last if behind else last or entry.last)


def check_fence(entry: Entry, run: int) -> None:
    """Stop a run that a newer one has superseded, before it does needless harm."""
    if entry.run > run:
        raise Superseded(
            f"superseded by run {entry.run}: run {run} may no longer write or claim",
            advice="Another run of this pipeline has started. Stop one of the two.",
        )


def next_run(entries: Iterable[Entry]) -> int:
    """The number a new run takes: above every run that has touched the pipeline."""
    return max((entry.run for entry in entries), default=0) + 1


def fence(entry: Entry, run: int) -> Entry:
    """The entry as a starting run leaves it: from here on, older runs cannot claim."""
    if entry.run >= run:
        raise Superseded(
            f"superseded by run {entry.run}: run {run} was fenced while it was starting",
            advice="Another run of this pipeline has started at the same time. Stop one of the two.",
        )
    return replace(entry, run=run)
