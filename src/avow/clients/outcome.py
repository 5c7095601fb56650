"""What became of a record, judged from what the ledger says.

Theory of operation
-------------------
A receipt names a record by topic, partition and offset. The ledger knows no single record: it knows a position, totals
for each partition and, in PostgreSQL, every claim of the last weeks with its counts. What follows from that is said,
and nothing else:

* at or above the position: *not-yet*; below the first position: *before-start*;
* a dead letter stands under its identity: *dead-lettered*;
* below the position means *claimed*. Under at-most-once a claim comes before the write, and only counts tell that the
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
from avow.sinks.base import Claimed, DeadLetter, Held

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
    UNKNOWN = "unknown"  # not a record that this pipeline's ledger can speak of
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
            raise TypeError("nobody to ask: make it with Receipts.receipt, or call Receipts.wait")
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
        where = {"topic": self.receipt.topic, "partition": self.receipt.partition, "offset": self.receipt.offset}
        said = {"state": str(self.state), "detail": self.detail}
        dead = {"reason": self.reason, "error": self.error} if self.reason else {}
        return where | said | dead | ({"dead_letters": self.dead_letters} if self.dead_letters else {})


class Ask(StrEnum):
    """What has to be known before more can be said."""

    LETTER = "letter"  # the dead letter of this offset, if there is one
    CLAIM = "claim"  # the claim that it was part of, if it is kept
    RECORD = "record"  # whether the log has a committed record there


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known. What was not asked is None, and so is what was asked and is not there."""

    held: Held | None = None
    asked: frozenset[Ask] = frozenset()
    letter: DeadLetter | None = None
    claim: Claimed | None = None
    record: bool | None = None  # None: the log cannot say any more
    log: tuple[int, int] | None = None  # its earliest offset and its end, where they were asked for

    def lacks(self, ask: Ask) -> bool:
        return ask not in self.asked

    def having(self, ask: Ask, found: Any) -> Evidence:
        return replace(self, asked=self.asked | {ask}, **{str(ask): found})


def whole(held: Held) -> bool:
    """Whether the totals account for every offset that was passed: all are records, and none is open or lost."""
    return held.entry.counts.read == held.entry.position - held.start


def judge(receipt: Receipt, guarantee: Guarantee, mode: Mode, known: Evidence) -> Answer | Ask:
    """What can be said, or what must be asked first."""
    held = known.held
    if held is not None and receipt.offset < held.start:
        return _before_start(receipt, held)
    if held is None or held.entry.position <= receipt.offset:
        return _not_yet(receipt, known)
    counts, claim, all_told = held.entry.counts, known.claim, whole(held)
    # Letters of an act that was not counted can stand as well: a crash came between the two.
    if known.lacks(Ask.LETTER) and (counts.dead or not all_told):
        return Ask.LETTER
    if known.letter is not None:
        letter = known.letter
        said = "it is a dead letter, with its bytes: avow dead-letters shows it"
        return Answer(receipt, State.DEAD_LETTERED, said, letter.reason, letter.detail, 1)
    if known.lacks(Ask.CLAIM) and not (all_told and not counts.skipped):
        return Ask.CLAIM
    word = claim.guarantee if claim else guarantee
    told = all_told or bool(claim and claim.counts.read)
    if not told and word is Guarantee.AT_MOST_ONCE:
        return _claimed(receipt, known)
    if claim and not claim.counts.read:
        return _no_record(receipt)
    record = True if all_told or (claim and claim.counts.read == len(claim.done)) else known.record
    if record is None and known.lacks(Ask.RECORD):
        return Ask.RECORD
    if record is False:
        return _no_record(receipt)
    if record is None:
        return Answer(receipt, State.HANDLED, "it was passed; the log no longer tells whether a record was there")
    return _counted(receipt, word, mode, held, claim)


def _before_start(receipt: Receipt, held: Held) -> Answer:
    return Answer(receipt, State.BEFORE_START, f"the pipeline began behind it, at offset {held.start} of the partition")


def _not_yet(receipt: Receipt, known: Evidence) -> Answer:
    where = f"{receipt.topic}/{receipt.partition}"
    if known.log is not None and receipt.offset >= known.log[1]:
        said = f"the log of {where} ends at offset {known.log[1]}: there is no such record"
        return Answer(receipt, State.UNKNOWN, said)
    if known.held is None:
        return Answer(receipt, State.NOT_YET, f"the pipeline has not begun to read {where}")
    said = f"the position of {where} is {known.held.entry.position}"
    if known.log is not None and receipt.offset < known.log[0]:
        said += f", and retention has deleted all below {known.log[0]}: the pipeline cannot read it any more"
    return Answer(receipt, State.NOT_YET, said)


def _claimed(receipt: Receipt, known: Evidence) -> Answer | Ask:
    """Nobody has counted it: no record, on its way, or lost."""
    if known.claim and known.lacks(Ask.RECORD):
        return Ask.RECORD
    if known.record is False:
        return _no_record(receipt)
    return Answer(
        receipt, State.CLAIMED, "it was claimed before it is written (at-most-once): on its way, or lost by a crash"
    )


def _no_record(receipt: Receipt) -> Answer:
    said = "there is no committed record: a transaction's marker, an aborted record, or one that compaction removed"
    return Answer(receipt, State.NO_RECORD, said)


def _counted(receipt: Receipt, word: Guarantee, mode: Mode, held: Held, claim: Claimed | None) -> Answer:
    """A record that was counted and is no dead letter: written, or skipped."""
    if claim and claim.given_up:
        return Answer(receipt, State.SKIPPED, "retention deleted it before it was read, and the pipeline gave it up")
    # A claim's own counts do not change when its dead letters are redriven; the totals do.
    if not held.entry.counts.skipped or (claim and not claim.counts.skipped and not claim.counts.dead):
        return Answer(receipt, State.WRITTEN, _written(word, mode))
    # What at-least-once writes again meets its own key, and is counted as skipped: its row is there all the same.
    own_key = mode == "dedupe" and word is Guarantee.AT_LEAST_ONCE
    if claim and claim.counts.skipped == claim.counts.read and not own_key:
        return Answer(receipt, State.SKIPPED, "it was left out as declared: a filter, a tombstone or a repeated key")
    said = "written, or left out as declared: the ledger does not say which"
    said += "; the table keeps one row per key" if mode != "append" else ""
    return Answer(receipt, State.HANDLED, said)


def _written(word: Guarantee, mode: Mode) -> str:
    if mode == "upsert":
        return "it was applied: its key's row is from it or from a later record, or was deleted by one"
    doubled = word is Guarantee.AT_LEAST_ONCE and mode == "append"
    return f"it is in the sink{', perhaps more than once' if doubled else ''}"


def judge_up_to(receipt: Receipt, guarantee: Guarantee, held: Held | None, dead: int | None) -> Answer | Ask:
    """The same of all records of a partition up to and including this one. ``dead``: how many of them are dead letters;
    None: not asked."""
    if held is not None and receipt.offset < held.start:
        return _before_start(receipt, held)
    if held is None or held.entry.position <= receipt.offset:
        return _not_yet(receipt, Evidence(held))
    counts = held.entry.counts
    if dead is None and (counts.dead or not whole(held)):
        return Ask.LETTER
    if guarantee is Guarantee.AT_MOST_ONCE and not whole(held):
        said = "all were claimed; the counts do not tell that all were written (at-most-once)"
        return Answer(receipt, State.CLAIMED, said, dead_letters=dead or 0)
    if dead:
        return Answer(
            receipt, State.DEAD_LETTERED, f"all were passed; dead letters among them: {dead:,}", dead_letters=dead
        )
    if counts.skipped:
        return Answer(receipt, State.HANDLED, "all were written, or left out as declared")
    return Answer(receipt, State.WRITTEN, "all are in the sink")
