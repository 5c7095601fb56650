"""What became of a record, judged from what the ledger says.

Theory of operation
-------------------
A receipt names a record by topic, partition and offset. The ledger knows no single record: it knows a position, totals
for each partition and, in PostgreSQL, every claim of the last weeks with its counts. What follows from that is said,
and nothing else:

* at or above the position: *not-yet*; below the first position: *before-start*;
* a dead letter stands under its identity: *dead-lettered*;
* below the position means *claimed*. Under at-most-once a claim comes before the write, and only counts show that the
  write came as well: those of the claim; or the totals, if they account for every offset since the start;
* not every offset is a record's: there are transaction markers, aborted records, gaps of compaction. Where the counts
  do not account for every offset, the log is asked: *no-record* if it has no committed record there;
* a record that was counted is *written* if nothing was skipped (in the partition; in its claim), *skipped* if all of
  its claim was, and *handled* otherwise: it is one of the two, and the ledger does not say which.

``judge`` is given what is known so far and may answer with a question (``Ask``): what the totals say needs none.

Owns: this judgement. Must not know: I/O, time. Its neighbour is ``receipts``, which asks and waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from avow.guarantee import Guarantee
from avow.settings import Mode
from avow.sinks.base import Claimed, DeadLetter, PartitionState

if TYPE_CHECKING:
    from avow.clients.receipts import Receipts

TIMEOUT_S = 30.0


class State(StrEnum):
    """What can be said of a record."""

    WRITTEN = "written"
    DEAD_LETTERED = "dead-lettered"  # with its reason
    SKIPPED = "skipped"  # left out by declaration
    HANDLED = "handled"  # written or skipped: the ledger does not say which
    NO_RECORD = "no-record"  # the log has no committed record at this offset
    BEFORE_START = "before-start"  # the pipeline began behind it, and never reads it
    UNKNOWN = "unknown"  # not a record that this pipeline's ledger covers
    CLAIMED = "claimed"  # at-most-once: the write may follow, or is lost
    NOT_YET = "not-yet"

    @property
    def settled(self) -> bool:
        """Whether it stays as it is. A redrive can still turn a dead letter into a row."""
        return self not in (State.CLAIMED, State.NOT_YET)


@dataclass(frozen=True, slots=True, order=True)
class Receipt:
    """A record that was sent, by its identity: what Kafka's acknowledgement says of it."""

    topic: str
    partition: int
    offset: int
    by: Receipts | None = field(default=None, compare=False, repr=False)  # who can be asked about it

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    def wait(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """As ``Receipts.wait``; for a receipt that ``Receipts.receipt`` has made."""
        if self.by is None:
            raise TypeError("this receipt was not created by Receipts.receipt: call Receipts.wait(receipt) instead")
        return self.by.wait(self, timeout_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a record; or, where up to it was asked, of all records of its partition up to it."""

    receipt: Receipt
    state: State
    detail: str  # one sentence, for people
    reason: str = ""  # of the dead letter
    error: str = ""  # its text
    dead_letters: int = 0

    def as_json(self) -> dict[str, Any]:
        position = {"topic": self.receipt.topic, "partition": self.receipt.partition, "offset": self.receipt.offset}
        state = {"state": str(self.state), "detail": self.detail}
        dead = {"reason": self.reason, "error": self.error} if self.reason else {}
        return position | state | dead | ({"dead_letters": self.dead_letters} if self.dead_letters else {})


class Ask(StrEnum):
    """What has to be known before more can be said."""

    DEAD_LETTER = "dead_letter"  # the dead letter of this offset, if there is one
    CLAIM = "claim"  # the claim that it was part of, if it is kept
    RECORD = "record"  # whether the log has a committed record there


@dataclass(frozen=True, slots=True)
class ReceiptEvidence:
    """What is known. What was not asked is None, and so is what was asked and is not there."""

    held: PartitionState | None = None
    asked: frozenset[Ask] = frozenset()
    dead_letter: DeadLetter | None = None
    claim: Claimed | None = None
    record: bool | None = None  # None: the log cannot say any more
    log: tuple[int, int] | None = None  # its earliest offset and its end, where they were asked for

    def lacks(self, ask: Ask) -> bool:
        return ask not in self.asked

    def having(self, ask: Ask, value: Any) -> ReceiptEvidence:
        return replace(self, asked=self.asked | {ask}, **{str(ask): value})


def whole(state: PartitionState) -> bool:
    """Whether the totals account for every offset that was passed: all are records, and none is open or lost."""
    return state.entry.counts.read == state.entry.position - state.start


def judge(receipt: Receipt, guarantee: Guarantee, mode: Mode, known: ReceiptEvidence) -> Answer | Ask:
    """What can be said, or what must be asked first."""
    partition = known.held
    if partition is None or not partition.start <= receipt.offset < partition.entry.position:
        return _not_passed(receipt, known)
    counts, claim, accounted = partition.entry.counts, known.claim, whole(partition)
    # An act that was not counted may have left dead letters, too: a crash came before the count.
    if known.lacks(Ask.DEAD_LETTER) and (counts.dead or not accounted):
        return Ask.DEAD_LETTER
    if known.dead_letter is not None:
        dead_letter = known.dead_letter
        detail = "it is a dead letter: `avow dead-letters show` prints it"
        return Answer(receipt, State.DEAD_LETTERED, detail, dead_letter.reason, dead_letter.detail, 1)
    if known.lacks(Ask.CLAIM) and not (accounted and not counts.skipped):
        return Ask.CLAIM
    word = claim.guarantee if claim else guarantee
    counted = accounted or bool(claim and claim.counts.read)
    if not counted and word is Guarantee.AT_MOST_ONCE:
        return _claimed(receipt, known)
    if claim and not claim.counts.read:
        return _no_record(receipt)
    record = True if accounted or (claim and claim.counts.read == len(claim.done)) else known.record
    if record is None and known.lacks(Ask.RECORD):
        return Ask.RECORD
    if record is False:
        return _no_record(receipt)
    if record is None:
        return Answer(
            receipt, State.HANDLED, "its offset was claimed; whether the log had a record there is no longer known"
        )
    return _counted(receipt, word, mode, partition, claim)


def _not_passed(receipt: Receipt, known: ReceiptEvidence) -> Answer:
    """The position has not passed it, or began behind it."""
    tp, partition = f"{receipt.topic}/{receipt.partition}", known.held
    if partition is not None and receipt.offset < partition.start:
        detail = f"the pipeline started after it, at offset {partition.start} of the partition"
        return Answer(receipt, State.BEFORE_START, detail)
    if known.log is not None and receipt.offset >= known.log[1]:
        return Answer(receipt, State.UNKNOWN, f"no such record: the log of {tp} ends at offset {known.log[1]}")
    if partition is None:
        return Answer(receipt, State.NOT_YET, f"the pipeline has not started reading {tp}")
    detail = f"the position of {tp} is {partition.entry.position}"
    if known.log is not None and receipt.offset < known.log[0]:
        detail += f", and retention has deleted all records below {known.log[0]}: the pipeline can no longer read it"
    return Answer(receipt, State.NOT_YET, detail)


def _claimed(receipt: Receipt, known: ReceiptEvidence) -> Answer | Ask:
    """Nobody has counted it: no record, on its way, or lost."""
    if known.claim and known.lacks(Ask.RECORD):
        return Ask.RECORD
    if known.record is False:
        return _no_record(receipt)
    return Answer(
        receipt,
        State.CLAIMED,
        "it was claimed before its write (at-most-once): the write is in progress, or a crash lost it",
    )


def _no_record(receipt: Receipt) -> Answer:
    detail = "no committed record has this offset: it is a transaction marker, aborted, or removed by compaction"
    return Answer(receipt, State.NO_RECORD, detail)


def _counted(
    receipt: Receipt, guarantee: Guarantee, mode: Mode, partition: PartitionState, claim: Claimed | None
) -> Answer:
    """A record that was counted and is no dead letter: written, or skipped."""
    if claim and claim.given_up:
        return Answer(
            receipt, State.SKIPPED, "retention deleted it before it was read, and it was skipped (on_data_loss)"
        )
    # A claim's own counts do not change when its dead letters are redriven; the totals do.
    if not partition.entry.counts.skipped or (claim and not claim.counts.skipped and not claim.counts.dead):
        return Answer(receipt, State.WRITTEN, _written(guarantee, mode))
    # What at-least-once writes again meets its own key, and is counted as skipped: its row is there all the same.
    own_key = mode == "dedupe" and guarantee is Guarantee.AT_LEAST_ONCE
    if claim and claim.counts.skipped == claim.counts.read and not own_key:
        return Answer(
            receipt, State.SKIPPED, "it was skipped as declared: by a filter, as a tombstone or as a repeated key"
        )
    detail = "it was written or skipped as declared; the ledger does not record which"
    detail += "; the table keeps one row per key" if mode != "append" else ""
    return Answer(receipt, State.HANDLED, detail)


def _written(word: Guarantee, mode: Mode) -> str:
    if mode == "upsert":
        return "it was applied: the row of its key was written or deleted by this record or a later one"
    doubled = word is Guarantee.AT_LEAST_ONCE and mode == "append"
    return f"it is in the sink{', perhaps more than once' if doubled else ''}"


def judge_up_to(
    receipt: Receipt, guarantee: Guarantee, partition: PartitionState | None, dead: int | None
) -> Answer | Ask:
    """The same of all records of a partition up to and including this one. ``dead``: how many of them are dead letters;
    None: not asked."""
    if partition is None or not partition.start <= receipt.offset < partition.entry.position:
        return _not_passed(receipt, ReceiptEvidence(partition))
    counts = partition.entry.counts
    if dead is None and (counts.dead or not whole(partition)):
        return Ask.DEAD_LETTER
    if guarantee is Guarantee.AT_MOST_ONCE and not whole(partition):
        detail = "all were claimed; the counts do not show that all were written (at-most-once)"
        return Answer(receipt, State.CLAIMED, detail, dead_letters=dead or 0)
    if dead:
        return Answer(
            receipt, State.DEAD_LETTERED, f"all were claimed; {dead:,} of them are dead letters", dead_letters=dead
        )
    if counts.skipped:
        return Answer(receipt, State.HANDLED, "all were written, or skipped as declared")
    return Answer(receipt, State.WRITTEN, "all are in the sink")
