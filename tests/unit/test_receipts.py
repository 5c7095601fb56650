"""What may be said of a record, from what the ledger knows: the table, and that nothing false is ever said."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import avow
from avow.clients.outcome import Answer, Ask, Receipt, ReceiptEvidence, State, judge, judge_up_to
from avow.guarantee import Guarantee
from avow.ledger import NOTHING, Counts, Entry, OffsetRange
from avow.settings import Mode
from avow.sinks.base import Claimed, DeadLetter, PartitionState

AMO, ALO, EOS = Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE
MODES: tuple[Mode, ...] = get_args(Mode)
START, POSITION = 10, 20
LETTER = DeadLetter("t", 0, 15, 0, None, b"{", [], "not-json", "expected a name")


def held(counts: Counts) -> PartitionState:
    return PartitionState(Entry(POSITION, "id", 1, counts), START)


def said(
    offset: int,
    word: Guarantee,
    mode: Mode,
    ledger: PartitionState | None,
    *,
    letter: DeadLetter | None = None,
    claim: Claimed | None = None,
    record: bool | None = True,
) -> Answer:
    """The judgement when every question is answered with what is given."""
    known, answers = ReceiptEvidence(ledger), {Ask.DEAD_LETTER: letter, Ask.CLAIM: claim, Ask.RECORD: record}
    receipt = Receipt("t", 0, offset)
    while isinstance(found := judge(receipt, word, mode, known), Ask):
        assert found not in known.asked, "nothing is asked twice"
        known = known.having(found, answers[found])
    return found


@pytest.mark.parametrize(("word", "mode"), list(product(Guarantee, MODES)))
@pytest.mark.parametrize(("offset", "state"), [(9, State.BEFORE_START), (20, State.NOT_YET), (99, State.NOT_YET)])
def test_outside_of_what_was_passed(word: Guarantee, mode: Mode, offset: int, state: State) -> None:
    """Whatever else is known: a letter above the position is of an attempt that was never claimed."""
    assert said(offset, word, mode, held(Counts(10, 9, 1)), letter=LETTER).state is state


@pytest.mark.parametrize(("word", "mode"), list(product(Guarantee, MODES)))
def test_a_partition_that_was_never_begun(word: Guarantee, mode: Mode) -> None:
    assert said(0, word, mode, None).state is State.NOT_YET


# Counts of the whole partition, of the record's claim (None: not kept), and whether the log has the record
# -> what is said under each word. The partition has passed ten offsets, the claim six of them.
WRITTEN, SKIPPED, HANDLED, NONE, CLAIMED = (
    State.WRITTEN,
    State.SKIPPED,
    State.HANDLED,
    State.NO_RECORD,
    State.CLAIMED,
)
TABLE: dict[tuple[Counts, Counts | None, bool | None], tuple[State, State, State]] = {
    # Every offset is accounted for.
    (Counts(10, 10), None, None): (WRITTEN, WRITTEN, WRITTEN),
    (Counts(10, 9, 1), None, None): (WRITTEN, WRITTEN, WRITTEN),
    (Counts(10, 9, 0, 1), None, None): (HANDLED, HANDLED, HANDLED),
    (Counts(10, 9, 0, 1), Counts(6, 6), None): (WRITTEN, WRITTEN, WRITTEN),
    (Counts(10, 9, 0, 1), Counts(6, 5, 0, 1), None): (HANDLED, HANDLED, HANDLED),
    (Counts(10, 4, 0, 6), Counts(6, 0, 0, 6), None): (SKIPPED, SKIPPED, SKIPPED),
    # A dead letter of the claim that stands no more was redriven, and then written or skipped.
    (Counts(10, 9, 0, 1), Counts(6, 5, 1), None): (HANDLED, HANDLED, HANDLED),
    # Not every offset is: markers and aborted records, or what at-most-once has not written.
    (Counts(8, 8), None, True): (CLAIMED, WRITTEN, WRITTEN),
    (Counts(8, 8), None, False): (CLAIMED, NONE, NONE),
    (Counts(8, 8), None, None): (CLAIMED, HANDLED, HANDLED),
    (Counts(8, 8), Counts(6, 6), None): (WRITTEN, WRITTEN, WRITTEN),
    (Counts(8, 8), Counts(5, 5), True): (WRITTEN, WRITTEN, WRITTEN),
    (Counts(8, 8), Counts(5, 5), False): (NONE, NONE, NONE),
    (Counts(8, 8), Counts(5, 5), None): (HANDLED, HANDLED, HANDLED),
    (Counts(4, 4), NOTHING, True): (CLAIMED, NONE, NONE),
    (Counts(4, 4), NOTHING, False): (NONE, NONE, NONE),
    (Counts(4, 4), NOTHING, None): (CLAIMED, NONE, NONE),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", list(TABLE))
def test_the_table(mode: Mode, case: tuple[Counts, Counts | None, bool | None]) -> None:
    counts, of_claim, record = case
    for word, state in zip(Guarantee, TABLE[case], strict=True):
        claim = None if of_claim is None else Claimed(OffsetRange("t", 0, 12, 18), of_claim, word)
        # What at-least-once writes a second time meets its own key.
        expected = HANDLED if state is SKIPPED and (word, mode) == (ALO, "dedupe") else state
        found = said(15, word, mode, held(counts), claim=claim, record=record)
        assert (found.state, found.dead_letters) == (expected, 0), word
        found = said(15, word, mode, held(counts), claim=claim, record=record, letter=LETTER)
        if counts.dead or counts.read < 10:
            assert (found.state, found.reason, found.error) == (State.DEAD_LETTERED, "not-json", "expected a name")
        else:
            assert found.state is expected, "where none is counted none is looked up"


def test_the_words_tell_what_the_mode_makes_of_it() -> None:
    full = held(Counts(10, 10))
    assert said(15, EOS, "append", full).detail == "it is in the sink"
    assert said(15, ALO, "append", full).detail == "it is in the sink, perhaps more than once"
    assert "by this record or a later one" in said(15, EOS, "upsert", full).detail
    some = held(Counts(10, 9, 0, 1))
    assert said(15, EOS, "dedupe", some).detail.endswith("one row per key")
    assert "row per key" not in said(15, EOS, "append", some).detail


def test_a_range_that_was_given_up_is_skipped() -> None:
    claim = Claimed(OffsetRange("t", 0, 12, 18), Counts(6, 0, 0, 6), ALO, given_up=True)
    found = said(15, ALO, "dedupe", held(Counts(10, 4, 0, 6)), claim=claim)
    assert found.state is State.SKIPPED
    assert "retention" in found.detail


def test_a_claim_counts_under_its_own_word() -> None:
    """The pipeline was at-most-once when it was made, and lost the range."""
    claim = Claimed(OffsetRange("t", 0, 12, 18), NOTHING, AMO)
    assert said(15, EOS, "append", held(Counts(4, 4)), claim=claim).state is State.CLAIMED


@pytest.mark.parametrize(
    ("log", "state", "words"),
    [
        ((0, 30), State.NOT_YET, "position of t/0 is 20"),
        ((0, 25), State.UNKNOWN, "ends at offset 25"),
        ((26, 30), State.NOT_YET, "retention has deleted"),
        ((0, 0), State.UNKNOWN, "ends at offset 0"),
    ],
)
def test_what_the_log_says_of_a_record_that_is_not_there_yet(log: tuple[int, int], state: State, words: str) -> None:
    found = judge(Receipt("t", 0, 25), EOS, "append", ReceiptEvidence(held(Counts(10, 10)), log=log))
    assert isinstance(found, Answer)
    assert (found.state, words in found.detail) == (state, True), found.detail


@pytest.mark.parametrize(
    ("counts", "dead", "states"),
    [
        (Counts(10, 10), None, (WRITTEN, WRITTEN, WRITTEN)),
        (Counts(10, 9, 0, 1), None, (HANDLED, HANDLED, HANDLED)),
        (Counts(10, 9, 1), 1, (State.DEAD_LETTERED,) * 3),
        (Counts(10, 9, 1), 0, (WRITTEN, WRITTEN, WRITTEN)),
        (Counts(8, 8), 0, (CLAIMED, WRITTEN, WRITTEN)),
    ],
)
def test_all_up_to_a_record(counts: Counts, dead: int | None, states: tuple[State, State, State]) -> None:
    for word, state in zip(Guarantee, states, strict=True):
        found = judge_up_to(Receipt("t", 0, 19), word, held(counts), dead)
        assert isinstance(found, Answer)
        assert found.state is state
    for offset, state in [(20, State.NOT_YET), (9, State.BEFORE_START)]:
        found = judge_up_to(Receipt("t", 0, offset), EOS, held(counts), dead)
        assert isinstance(found, Answer)
        assert found.state is state
    if dead is not None:
        assert judge_up_to(Receipt("t", 0, 19), EOS, held(counts), None) is Ask.DEAD_LETTER


def test_public_names_come_when_they_are_asked_for() -> None:
    assert avow.Receipt is Receipt
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        avow.Recipes  # type: ignore[attr-defined]  # noqa: B018


def test_a_receipt_alone_has_nobody_to_ask() -> None:
    assert str(Receipt("t", 3, 17)) == "t/3/17"
    with pytest.raises(TypeError, match="not created by Receipts"):
        Receipt("t", 3, 17).wait(0)


# Whatever happens to a partition, what is said is true.


@dataclass(frozen=True)
class Happened:
    """One claim: its word, and what became of each offset. ``counted`` is false where at-most-once has not written."""

    word: Guarantee
    fates: tuple[str, ...]  # written, dead, skipped, gap; redriven-written, redriven-skipped; replayed
    counted: bool

    @property
    def at_the_time(self) -> Counts:
        """What the claim has counted; a replayed record met its own row, and counts as skipped."""
        if not self.counted:
            return NOTHING
        dead = sum(fate in ("dead", "redriven-written", "redriven-skipped") for fate in self.fates)
        skipped = sum(fate in ("skipped", "replayed") for fate in self.fates)
        written = self.fates.count("written")
        return Counts(written + dead + skipped, written, dead, skipped)

    @property
    def now(self) -> Counts:
        """What the totals have of it."""
        then = self.at_the_time
        if not self.counted:
            return NOTHING
        written, skipped = (self.fates.count(f"redriven-{fate}") for fate in ("written", "skipped"))
        return Counts(then.read, then.written + written, then.dead - written - skipped, then.skipped + skipped)

    def truth(self, index: int) -> str:
        fate = self.fates[index]
        if fate == "gap" or self.counted:
            return "written" if fate == "replayed" else fate.removeprefix("redriven-")
        return "open"


@st.composite
def histories(draw: st.DrawFn) -> tuple[Mode, bool, list[Happened]]:
    mode: Mode = draw(st.sampled_from(MODES))
    kept = draw(st.booleans())  # whether claims are kept; if not, the word never changed
    fixed = draw(st.sampled_from(list(Guarantee)))
    history = []
    for _ in range(draw(st.integers(1, 4))):
        word = draw(st.sampled_from(list(Guarantee))) if kept else fixed
        fates = ["written", "dead", "skipped", "gap", "redriven-written", "redriven-skipped"]
        if mode == "dedupe" and word is ALO:
            fates.append("replayed")
        fated = tuple(draw(st.lists(st.sampled_from(fates), min_size=1, max_size=4)))
        history.append(Happened(word, fated, word is not AMO or draw(st.booleans())))
    return mode, kept, history


MAY_BE = {
    State.WRITTEN: {"written"},
    State.DEAD_LETTERED: {"dead"},
    State.SKIPPED: {"skipped"},
    State.HANDLED: {"written", "skipped"},
    State.NO_RECORD: {"gap"},
    State.CLAIMED: {"open", "gap", "written", "skipped"},  # it says no more than that it was claimed
}


@settings(max_examples=300, deadline=None)
@given(histories(), st.booleans())
def test_nothing_false_is_said(given_history: tuple[Mode, bool, list[Happened]], retained: bool) -> None:
    mode, kept, history = given_history
    claims, truths, position = [], [], START
    for one in history:
        done = OffsetRange("t", 0, position, position + len(one.fates))
        claims += [Claimed(done, one.at_the_time, one.word)] * len(one.fates)
        truths += [one.truth(index) for index in range(len(one.fates))]
        position = done.until
    total = sum((one.now for one in history), NOTHING)
    ledger = PartitionState(Entry(position, "id", 1, total), START)
    for index, truth in enumerate(truths):
        claim = claims[index] if kept else None
        letter = LETTER if truth == "dead" else None
        there = None if not retained else truth != "gap"
        found = said(START + index, history[-1].word, mode, ledger, letter=letter, claim=claim, record=there)
        assert found.state.settled == (found.state is not CLAIMED)
        if found.state is HANDLED and not retained:
            continue  # it says that it does not know
        assert truth in MAY_BE[found.state], (found, truth)
