"""The ledger's rules, one by one, and what must hold for any sequence of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.errors import (
    AvowError,
    ConfigError,
    LogTruncated,
    PositionBehind,
    PositionMoved,
    ProtocolViolation,
    RetentionLoss,
    Superseded,
    TopicRecreated,
)
from avow.ledger import (
    Counts,
    Entry,
    Fingerprint,
    LogView,
    OffsetRange,
    Start,
    claim,
    fence,
    judge,
    next_run,
    plan_start,
    redriven,
    tallied,
)

LAST = Fingerprint(offset=99, timestamp_ms=1_700_000_000_000, crc32=0xE3069283)
ENTRY = Entry(position=100, topic_id="id-1", run=3, counts=Counts(read=100, written=100), last=LAST)
LOG = LogView("payments", 2, "id-1", earliest=0, end=500, found=LAST)


def span(start: int, until: int) -> OffsetRange:
    return OffsetRange("payments", 2, start, until)


# ---- Offset ranges and counts ----


def test_a_range_is_half_open() -> None:
    assert len(span(3, 7)) == 4
    assert not span(3, 3)
    assert str(span(3, 7)) == "payments/2 [3, 7)"


@pytest.mark.parametrize(("start", "until"), [(-1, 3), (4, 3)])
def test_what_is_not_a_range(start: int, until: int) -> None:
    with pytest.raises(ProtocolViolation, match="not an offset range"):
        span(start, until)


def test_counts_add_up() -> None:
    assert Counts(3, 1, 1, 1) + Counts(2, 2) == Counts(read=5, written=3, dead=1, skipped=1)


@pytest.mark.parametrize(
    ("read", "written", "dead", "skipped", "reason"),
    [
        (3, 2, 0, 0, "read is not written"),
        (3, 2, 1, 1, "read is not written"),
        (0, 1, -1, 0, "below zero"),
        (-1, -1, 0, 0, "below zero"),
    ],
)
def test_counts_that_do_not_account_for_every_record(
    read: int, written: int, dead: int, skipped: int, reason: str
) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        Counts(read, written, dead, skipped)


# ---- The judge: the four rows of its table ----


@pytest.mark.parametrize(
    ("position", "rest"),
    [
        pytest.param(10, (10, 20), id="at from: the whole range"),
        pytest.param(11, (11, 20), id="in between: the rest"),
        pytest.param(19, (19, 20), id="in between: the last offset"),
        pytest.param(20, (20, 20), id="at until: a replay"),
        pytest.param(95, (20, 20), id="beyond until: a replay"),
    ],
)
def test_what_is_left_of_the_range_10_to_20(position: int, rest: tuple[int, int]) -> None:
    assert judge(position, span(10, 20)) == span(*rest)


def test_a_gap_stops_and_says_how_much_it_would_lose() -> None:
    with pytest.raises(PositionBehind) as caught:
        judge(7, span(10, 20))
    assert "payments/2 [10, 20)" in str(caught.value)
    assert "position is 7" in str(caught.value)
    assert "skip 3 offsets" in str(caught.value)
    assert "Nothing was written" in caught.value.advice


# ---- The claim ----


def test_a_claim_moves_the_position_to_the_planned_end() -> None:
    last = Fingerprint(offset=118, timestamp_ms=5, crc32=7)  # 119 is a marker: it has no fingerprint
    after = claim(ENTRY, span(100, 120), run=3, counts=Counts(19, 17, 1, 1), last=last)
    assert after == Entry(120, "id-1", 3, Counts(119, 117, 1, 1), last)


def test_a_claim_of_markers_only_keeps_the_last_fingerprint() -> None:
    assert claim(ENTRY, span(100, 120), run=3) == replace(ENTRY, position=120)


@pytest.mark.parametrize("done", [span(90, 120), span(101, 120)])
def test_a_claim_compares_the_position(done: OffsetRange) -> None:
    with pytest.raises(PositionMoved, match="the position is 100"):
        claim(ENTRY, done, run=3)


def test_a_claim_is_fenced_by_the_run() -> None:
    with pytest.raises(Superseded, match="superseded by run 3: run 2 may no longer write or claim") as caught:
        claim(ENTRY, span(100, 120), run=2)
    assert "Stop one of the two" in caught.value.advice


def test_an_older_run_hears_that_it_is_superseded_before_it_hears_that_the_position_moved() -> None:
    with pytest.raises(Superseded):
        claim(ENTRY, span(0, 50), run=2)


def test_an_empty_range_cannot_be_claimed() -> None:
    with pytest.raises(ProtocolViolation, match="empty range"):
        claim(ENTRY, span(100, 100), run=3)


def test_a_range_cannot_hold_more_records_than_offsets() -> None:
    with pytest.raises(ProtocolViolation, match="cannot contain 21 records"):
        claim(ENTRY, span(100, 120), run=3, counts=Counts(21, 21))
    assert claim(ENTRY, span(100, 120), run=3, counts=Counts(20, 20)).counts.read == 120


# ---- The fence ----


def test_a_new_run_is_numbered_above_all_others() -> None:
    assert next_run([]) == 1
    assert next_run([replace(ENTRY, run=4), replace(ENTRY, run=2)]) == 5


def test_a_fenced_entry_refuses_the_older_run_and_takes_the_newer() -> None:
    fenced = fence(ENTRY, run=4)
    assert fenced == replace(ENTRY, run=4)
    with pytest.raises(Superseded):
        claim(fenced, span(100, 120), run=3)
    assert claim(fenced, span(100, 120), run=4).position == 120


@pytest.mark.parametrize("run", [2, 3])
def test_a_run_that_fences_too_late_stops(run: int) -> None:
    with pytest.raises(Superseded, match=f"superseded by run 3: run {run}"):
        fence(ENTRY, run)


# ---- Where a run starts ----


@pytest.mark.parametrize("declared", [0, 250, 500])
def test_without_a_position_the_declared_start_is_adopted(declared: int) -> None:
    assert plan_start(None, LOG, declared) == Start(declared, adopted=True)


@pytest.mark.parametrize("declared", [9, 501])
def test_a_declared_start_outside_the_log_is_a_mistake_in_the_pipeline_file(declared: int) -> None:
    with pytest.raises(ConfigError, match=rf"offset {declared} of payments/2 .* \[10, 500\]") as caught:
        plan_start(None, replace(LOG, earliest=10), declared)
    assert "earliest, latest or a timestamp" in caught.value.advice


def test_a_position_wins_over_the_declared_start() -> None:
    assert plan_start(ENTRY, LOG, declared=0) == Start(100)


@pytest.mark.parametrize(
    ("entry", "log"),
    [
        pytest.param(ENTRY, replace(LOG, end=100), id="nothing new"),
        pytest.param(ENTRY, replace(LOG, earliest=100), id="all that was claimed is deleted"),
        pytest.param(ENTRY, replace(LOG, found=None), id="the last claimed record is deleted"),
        pytest.param(replace(ENTRY, last=None), LOG, id="no record was ever claimed"),
    ],
)
def test_a_run_goes_on_from_its_position(entry: Entry, log: LogView) -> None:
    assert plan_start(entry, log, declared=0) == Start(100)


STOPS = {
    "topic-recreated": (
        replace(LOG, topic_id="id-2"),
        TopicRecreated,
        ["payments/2", "offset 100", "id-1", "id-2"],
        "new name",
    ),
    "log ends below the position": (
        replace(LOG, end=99),
        LogTruncated,
        ["log-truncated", "payments/2", "offset 100", "ends at 99"],
        "Audit the sink",
    ),
    "another record at the last offset": (
        replace(LOG, found=replace(LAST, crc32=1)),
        LogTruncated,
        ["log-truncated", "payments/2", "at offset 99 is not the one"],
        "Audit the sink",
    ),
    "retention-loss": (
        replace(LOG, earliest=130, found=None),
        RetentionLoss,
        ["retention-loss", "payments/2 [100, 130)", "30 offsets"],
        'on_data_loss = "skip"',
    ),
}


@pytest.mark.parametrize(("log", "error", "says", "advises"), STOPS.values(), ids=STOPS)
def test_a_named_stop_says_what_happened_and_what_to_do(
    log: LogView, error: type[AvowError], says: list[str], advises: str
) -> None:
    with pytest.raises(error) as caught:
        plan_start(ENTRY, log, declared=0)
    assert [word for word in says if word not in str(caught.value)] == []
    assert advises in caught.value.advice


def test_a_topic_made_again_is_named_first() -> None:
    with pytest.raises(TopicRecreated):
        plan_start(ENTRY, LogView("payments", 2, "id-2", earliest=0, end=3), declared=0, skip_lost=True)


def test_what_retention_took_can_be_given_up_by_declaration() -> None:
    start = plan_start(ENTRY, replace(LOG, earliest=130, found=None), declared=0, skip_lost=True)
    assert start == Start(130, given_up=span(100, 130))
    assert start.given_up is not None
    after = claim(ENTRY, start.given_up, run=3, counts=Counts(read=30, skipped=30))
    assert after.position == start.position
    assert after.counts == Counts(read=130, written=100, skipped=30)


@pytest.mark.parametrize(("log", "error"), [(row[0], row[1]) for row in list(STOPS.values())[:3]])
def test_skipping_what_was_lost_excuses_nothing_else(log: LogView, error: type[AvowError]) -> None:
    with pytest.raises(error):
        plan_start(ENTRY, log, declared=0, skip_lost=True)


# ---- What holds for any values ----

offsets = st.integers(0, 2**63 - 1)
ranges = st.tuples(offsets, offsets).map(lambda pair: span(min(pair), max(pair)))


@given(offsets, ranges)
def test_to_judge_twice_is_to_judge_once(position: int, planned: OffsetRange) -> None:
    if position < planned.start:
        with pytest.raises(PositionBehind):
            judge(position, planned)
        return
    rest = judge(position, planned)
    assert judge(position, rest) == rest
    assert rest.until == planned.until
    assert not rest or rest.start == position


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2))),
)
def test_any_sequence_of_attempts_keeps_the_claims_contiguous_and_the_sums_right(
    start: int, attempts: list[tuple[int, int, int, int]]
) -> None:
    """Attempts at any ranges in any order: replays, overlaps, gaps, runs that come and go."""
    entry = Entry(start, "id-1", run=0)
    claimed: list[OffsetRange] = []
    read = 0
    for first, length, records, run in attempts:
        try:
            rest = judge(entry.position, span(first, first + length))
            counts = Counts(read=min(records, len(rest)), skipped=min(records, len(rest)))
            entry = claim(entry, rest, run, counts) if rest else entry
        except (PositionBehind, Superseded):
            continue
        if rest:
            claimed.append(rest)
            read += counts.read
    ends = [start, *(done.until for done in claimed)]
    assert [done.start for done in claimed] == ends[:-1]
    assert entry.position == ends[-1]
    assert entry.counts == Counts(read=read, skipped=read)


@given(st.lists(st.integers(0, 2**31)), offsets)
def test_a_new_run_can_always_fence(runs: list[int], position: int) -> None:
    entries = [Entry(position, "id-1", run) for run in runs]
    new = next_run(entries)
    assert all(fence(entry, new).run == new for entry in entries)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Counts(10, 6, 3, 1), Counts(10, 8, 0, 2)),
        (Counts(10, 7, 2, 1), Counts(11, 9, 0, 2)),
        (Counts(), Counts(3, 2, 0, 1)),
    ],
)
def test_redriven_dead_letters_are_counted_once(before: Counts, after: Counts) -> None:
    """Two are written and one is skipped. What a crash has left uncounted is read by now."""
    assert redriven(before, written=2, skipped=1) == after


def test_what_was_claimed_first_is_counted_later() -> None:
    later = Fingerprint(offset=104, timestamp_ms=1_700_000_000_001, crc32=1)
    counted = tallied(ENTRY, Counts(read=5, written=4, dead=1), later)
    assert (counted.position, counted.counts, counted.last) == (100, Counts(105, 104, 1), later)
    assert tallied(ENTRY, Counts(), None) == ENTRY
    overtaken = replace(ENTRY, position=200, last=replace(later, offset=199))
    assert tallied(overtaken, Counts(), later).last == overtaken.last, "a newer run has counted first"
