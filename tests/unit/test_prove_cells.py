"""The matrix, its schedules and its verdicts, without any process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from avow.cli.prove import exit_code
from avow.guarantee import Anomaly, Guarantee
from avow.prove.cells import CANARIES, FAULTS, Cell, Seen, Verdict, judge, matrix, quick, schedule
from avow.prove.transactions import BUILT
from avow.sinks import SINKS

MOST, LEAST, EXACTLY = Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE
FINE = Seen(fired=("it did",), check={}, audit={}, audit_verdict="held", records=100, drained=True)


def cell(fault: str, guarantee: Guarantee = EXACTLY, mode: str = "append") -> Cell:
    return Cell(FAULTS[fault], guarantee, mode=mode)


def test_every_fault_is_built_or_says_why_not() -> None:
    assert BUILT.keys() == {fault.name for fault in FAULTS.values() if not fault.missing} - {"mix"}
    assert {fault.number for fault in FAULTS.values()} == set(range(27))


def test_the_matrix_has_every_offer_of_every_sink() -> None:
    offers = {(s.kind, m, g) for s in SINKS.values() for m, offer in s.offers.items() for g in offer.guarantees}
    cells = [found for found in matrix() if not found.canary]
    assert {(found.sink, found.mode, found.guarantee) for found in cells} == offers
    assert len({found.name for found in matrix()}) == len(list(matrix()))


def test_quick_has_one_cell_for_each_number_and_every_canary() -> None:
    numbers = Counter(found.fault.number for found in quick())
    assert numbers == dict.fromkeys(range(1, 27), 1) | {0: len(CANARIES)}


def test_what_must_show_is_what_the_guarantee_permits() -> None:
    assert cell("killed-after-claim", MOST).must_show is Anomaly.LOST
    assert cell("killed-after-write", LEAST).must_show is Anomaly.DUPLICATED
    assert cell("killed-after-write", LEAST, "upsert").must_show is None, "a key is there once, whatever happens"
    assert all(found.must_show is None for found in matrix() if found.guarantee is EXACTLY)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_schedule_is_its_seed(name: str) -> None:
    one = cell(name)
    assert schedule(one, 7) == schedule(one, 7)
    assert schedule(one, 7) != schedule(one, 8)
    assert schedule(one, 7) != schedule(replace(one, guarantee=LEAST), 7), "cells do not march in step"


def test_a_mix_is_quiet_a_quarter_of_the_time_and_goes_on_as_long_as_asked() -> None:
    steps = schedule(cell("mix"), 1, minutes=60)
    assert sum(step.quiet_s + step.hold_s for step in steps) >= 3600
    assert 0.2 < sum(not step.fault for step in steps) / len(steps) < 0.3
    assert {step.fault for step in steps if step.fault} == {f.name for f in FAULTS.values() if f.in_mix}
    assert any(step.fault for seed in range(50) for step in schedule(cell("mix"), seed))


def test_held() -> None:
    assert judge(cell("zombie"), FINE) == (Verdict.HELD, "100 records")


@pytest.mark.parametrize("who", ["check", "audit"])
@pytest.mark.parametrize("kind", ["lost", "duplicated", "phantom", "aborted-read", "corrupted", "reordered"])
def test_a_forbidden_anomaly_breaks_whoever_sees_it(who: str, kind: str) -> None:
    verdict, why = judge(cell("zombie"), replace(FINE, fired=("",), **{who: {kind: 3}}))  # type: ignore[arg-type]
    assert verdict is Verdict.BROKEN, "even if the fault did not fire"
    assert f"3 {kind} ({who})" in why


def test_a_fault_that_did_not_fire_proves_nothing() -> None:
    assert judge(cell("zombie"), replace(FINE, fired=("yes", "")))[0] is Verdict.UNKNOWN
    assert judge(cell("zombie"), replace(FINE, fired=()))[0] is Verdict.UNKNOWN


@pytest.mark.parametrize("changed", [{"records": 0}, {"drained": False}, {"kafka_lost": 1}])
def test_what_was_not_seen_is_unknown(changed: dict[str, object]) -> None:
    assert judge(cell("zombie"), replace(FINE, **changed))[0] is Verdict.UNKNOWN  # type: ignore[arg-type]


def test_a_permitted_anomaly_must_show_where_it_is_due() -> None:
    due = cell("killed-after-claim", MOST)
    assert judge(due, FINE)[0] is Verdict.UNPROVEN
    assert judge(due, replace(FINE, check={"lost": 5}, audit={"lost": 5}))[0] is Verdict.HELD
    assert judge(due, replace(FINE, check={"lost": 5}, audit={"lost": 4}))[0] is Verdict.UNKNOWN, "the judges disagree"
    assert judge(due, replace(FINE, check={"duplicated": 1}))[0] is Verdict.BROKEN


def test_a_named_stop() -> None:
    due = cell("retention")
    stopped = replace(FINE, drained=False, exit_code=12, audit={"retention-loss": 40})
    assert judge(due, stopped)[0] is Verdict.HELD
    assert judge(due, replace(stopped, exit_code=0))[0] is Verdict.BROKEN
    assert judge(due, replace(stopped, audit={}))[0] is Verdict.BROKEN
    assert judge(due, replace(stopped, check={"lost": 1}))[0] is Verdict.BROKEN


def test_a_canary_must_be_seen_by_both_judges() -> None:
    due = cell("canary-drops")
    lost = {"lost": 2}
    assert judge(due, replace(FINE, check=lost, audit=lost))[0] is Verdict.CAUGHT
    assert judge(due, replace(FINE, check=lost))[0] is Verdict.MISSED
    assert judge(due, FINE)[0] is Verdict.MISSED


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (["held", "caught", "not-run"], 0),
        (["held", "unknown"], 2),
        (["held", "unproven"], 2),
        (["unknown", "broken"], 1),
        (["held", "missed"], 1),
        (["not-run"], 2),
        ([], 2),
    ],
)
def test_exit_codes(told: list[str], code: int) -> None:
    assert exit_code(Counter(map(Verdict, told))) == code
