"""The ledger against the log, the accounting and the verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from avow.audit.compare import Tally
from avow.audit.judge import ALL_SEEN, Examined, Reservation, Verdict, examine, miscounted, verdict
from avow.findings import Finding, Kind, Span
from avow.guarantee import Guarantee
from avow.ledger import Counts, Entry, Fingerprint, LogView
from avow.sinks.auditing import Known

EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
LOG = LogView("t", 0, "id-1", earliest=0, end=100)


def known(position: int, *claims: tuple[int, int], start: int = 0, last: Fingerprint | None = None) -> Known:
    return Known(
        Entry(position, "id-1", 1, last=last),
        start,
        np.array([begin for begin, _ in claims], np.int64),
        np.array([until for _, until in claims], np.int64),
    )


def look(
    ledger: Known | None, log: LogView = LOG, readable_until: int | None = None, *, skip_lost: bool = False
) -> Examined:
    return examine(ledger, log, log.end if readable_until is None else readable_until, skip_lost=skip_lost)


def found(examined: Examined) -> list[tuple[Kind, list[tuple[int, int]]]]:
    return [(finding.kind, [(span.start, span.until) for span in finding.spans]) for finding in examined.findings]


def test_all_in_order() -> None:
    examined = look(known(60, (0, 20), (20, 60)))
    assert examined == Examined(0, 60, 60, 100, True, True, (), ())


def test_lag_is_not_loss() -> None:
    assert look(known(0)) == Examined(0, 0, 0, 100, True, True, (), ())


def test_old_claims_are_not_kept() -> None:
    assert found(look(known(60, (40, 60)))) == []
    assert found(look(known(60))) == []


def test_a_claim_is_missing() -> None:
    examined = look(known(60, (0, 20), (30, 50), (51, 60)))
    assert found(examined) == [(Kind.SKIPPED_RANGE, [(20, 30), (50, 51)])]
    assert (examined.start, examined.until, examined.complete) == (0, 60, True)


def test_claims_overlap() -> None:
    assert found(look(known(60, (0, 25), (20, 60)))) == [(Kind.OVERLAPPING_RANGE, [(20, 25)])]
    assert found(look(known(60, (0, 50), (20, 30), (50, 60)))) == [(Kind.OVERLAPPING_RANGE, [(20, 30)])]


def test_the_position_is_past_the_last_claim() -> None:
    examined = look(known(70, (0, 20), (20, 60)))
    assert found(examined) == [(Kind.LEDGER_AHEAD, [(60, 70)])]
    assert (examined.until, examined.behind_from, examined.complete) == (60, 70, False)


def test_the_position_is_far_past_the_last_claim() -> None:
    """Beyond the end of the log, too: it is the ledger that is wrong, and not the log."""
    assert found(look(known(500, (0, 60)))) == [(Kind.LEDGER_AHEAD, [(60, 500)])]


def test_the_position_is_before_the_last_claim() -> None:
    examined = look(known(50, (0, 20), (20, 60)))
    assert found(examined) == [(Kind.LEDGER_BEHIND, [(50, 60)])]
    assert (examined.until, examined.behind_from) == (50, 60)


def test_claimed_beyond_what_is_committed() -> None:
    examined = look(known(60, (0, 60)), readable_until=40)
    assert found(examined) == [(Kind.LEDGER_AHEAD, [(40, 60)])]
    assert examined.until == 40


def test_an_open_transaction_is_a_note() -> None:
    examined = look(known(60, (0, 60)), readable_until=60)
    assert found(examined) == []
    assert "a transaction is open at offset 60, and 40 offsets" in examined.notes[0]


def test_retention_behind_the_position_leaves_less_to_check() -> None:
    examined = look(known(60, (0, 60)), replace(LOG, earliest=30))
    assert (examined.start, examined.until, examined.complete) == (30, 60, False)
    assert found(examined) == []
    assert "[0, 30)" in examined.notes[0]
    assert look(known(60, (0, 60)), replace(LOG, earliest=60)).start == 60


def test_retention_passed_the_position() -> None:
    examined = look(known(60, (0, 60)), replace(LOG, earliest=80))
    assert found(examined) == [(Kind.RETENTION_LOSS, [(60, 80)])]
    assert (examined.start, examined.until) == (60, 60)
    assert found(look(known(60, (0, 60)), replace(LOG, earliest=80), skip_lost=True)) == []


def test_the_topic_was_made_again() -> None:
    examined = look(known(60, (0, 60)), replace(LOG, topic_id="id-2"))
    assert found(examined) == [(Kind.TOPIC_RECREATED, [(0, 60)])]
    assert not examined.comparable
    assert examined.start == examined.until


def test_the_log_was_cut() -> None:
    examined = look(known(60, (0, 60)), replace(LOG, end=45))
    assert found(examined) == [(Kind.LOG_TRUNCATED, [(45, 60)])]
    assert not examined.comparable


def test_the_log_was_cut_and_grew_again() -> None:
    before, now = Fingerprint(58, 1000, 1), Fingerprint(58, 1000, 2)
    examined = look(known(60, (0, 60), last=before), replace(LOG, found=now))
    assert found(examined) == [(Kind.LOG_TRUNCATED, [(58, 60)])]


def test_a_partition_without_position() -> None:
    examined = look(None, replace(LOG, earliest=7))
    assert (examined.start, examined.until, examined.behind_from, examined.complete) == (7, 7, 7, False)
    assert found(examined) == []


@pytest.mark.parametrize("guarantee", [EXACTLY, LEAST])
def test_every_claimed_record_is_counted(guarantee: Guarantee) -> None:
    tally = Tally(read=10, written=7, dead=1, skipped=1, lost=1)
    assert miscounted(guarantee, False, Counts(10, 8, 1, 1), tally) == ""
    few = miscounted(guarantee, False, Counts(9, 7, 1, 1), tally)
    assert few == "the topic has 10 records, and the ledger counts 9"
    assert miscounted(guarantee, False, Counts(11, 9, 1, 1), tally) != ""


def test_at_most_once_counts_what_it_has_written() -> None:
    tally = Tally(read=10, written=5, dead=1, skipped=2, lost=2)
    assert miscounted(MOST, False, Counts(8, 5, 1, 2), tally) == ""
    assert miscounted(MOST, False, Counts(7, 5, 1, 1), tally) == ""  # one was lost that would have been skipped
    assert "explain only 1 of them" in miscounted(
        MOST, False, Counts(9, 6, 1, 2), tally
    )  # a row went after it was counted
    assert miscounted(MOST, False, Counts(5, 3, 1, 1), tally) != ""
    assert miscounted(MOST, True, Counts(5, 3, 1, 1), tally) == ""  # with a key, or in a topic: any of them
    assert miscounted(MOST, True, Counts(9, 6, 1, 2), tally) != ""


def of(kind: Kind) -> Finding:
    return Finding(kind, "t", 0, (Span(1, 2, 1),), 1)


@pytest.mark.parametrize(
    ("guarantee", "kinds", "records", "expected"),
    [
        (EXACTLY, [], 5, Verdict.HELD),
        (EXACTLY, [], 0, Verdict.UNKNOWN),
        (EXACTLY, [Kind.PHANTOM], 0, Verdict.BROKEN),
        (EXACTLY, [Kind.LOST], 5, Verdict.BROKEN),
        (MOST, [Kind.LOST], 5, Verdict.HELD),
        (MOST, [Kind.LOST, Kind.DUPLICATED], 5, Verdict.BROKEN),
        (LEAST, [Kind.DUPLICATED, Kind.LEDGER_BEHIND], 5, Verdict.HELD),
        (LEAST, [Kind.LOST], 5, Verdict.BROKEN),
        (MOST, [Kind.LEDGER_BEHIND], 5, Verdict.BROKEN),
        (EXACTLY, [Kind.LEDGER_BEHIND], 5, Verdict.BROKEN),
    ],
)
def test_verdict(guarantee: Guarantee, kinds: list[Kind], records: int, expected: Verdict) -> None:
    assert verdict(guarantee, map(of, kinds), records) is expected


@pytest.mark.parametrize("guarantee", Guarantee)
@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.LOST, Kind.DUPLICATED, Kind.LEDGER_BEHIND}))
def test_no_word_permits_the_others(guarantee: Guarantee, kind: Kind) -> None:
    assert verdict(guarantee, [of(kind)], 5) is Verdict.BROKEN


def test_reservations_are_told_together() -> None:
    blind = Reservation("Only counts could be seen.", advice="Turn it on.")
    gone = Reservation(undecided="3 are gone", advice="Keep them.")
    assert blind + ALL_SEEN == Reservation("Only counts could be seen.")
    assert gone + blind == Reservation("Only counts could be seen.", "3 are gone", "Keep them.")
    assert (gone + gone).undecided == "3 are gone; 3 are gone"
