"""The matrix, its schedules and its verdicts, without any process."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from avow.cli.prove import exit_code, prove, remaining
from avow.guarantee import Anomaly, Guarantee
from avow.prove.cells import (
    CANARIES,
    CONSUMER,
    FAULTS,
    GROUP_MEMBERS,
    PIPELINES,
    PLAIN,
    SPARK_LOCAL,
    Cell,
    CellVerdict,
    Observation,
    Queue,
    judge,
    matrix,
    quick,
    schedule,
)
from avow.prove.faults import IMPLEMENTED
from avow.prove.faults.brokers import coordinating_partition
from avow.prove.runner import reusable_after
from avow.prove.scenario import oracle_class
from avow.sinks import SINKS

AT_MOST, AT_LEAST, EXACTLY = Guarantee.AT_MOST_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE
NUMBERS = set(range(36)) - {19}  # 19 was Spark's checkpoint: there is none

FINE = Observation(fired=("it did",), check={}, audit={}, audit_verdict="held", records=100, drained=True)


def cell(fault: str, guarantee: Guarantee = EXACTLY, mode: str = "append") -> Cell:
    return Cell(FAULTS[fault], guarantee, mode=mode)


def plain(fault: str, guarantee: Guarantee = EXACTLY) -> Cell:
    return Cell(FAULTS[fault], guarantee, engine="plain")


def test_every_fault_is_built() -> None:
    assert IMPLEMENTED.keys() == FAULTS.keys() - {"mix"}
    assert {fault.number for fault in FAULTS.values()} == NUMBERS


@pytest.mark.parametrize(("name", "hash_"), [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", -(2**31))])
def test_the_coordinator_is_found_by_javas_hash(name: str, hash_: int) -> None:
    for partitions in (1, 12, 50):
        assert coordinating_partition(name, partitions) == (0 if hash_ == -(2**31) else abs(hash_)) % partitions


def test_the_matrix_has_every_offer_of_every_sink_and_each_can_be_read_back() -> None:
    assert len({oracle_class(sink) for sink in SINKS}) == len(SINKS)
    offers = {(s.kind, m, g) for s in SINKS.values() for m, offer in s.offers.items() for g in offer.guarantees}
    cells = [found for found in matrix() if not found.canary]
    assert {(found.sink, found.mode, found.guarantee) for found in cells} == offers
    assert len({found.name for found in matrix()}) == len(list(matrix()))


def test_quick_has_one_cell_for_each_number_and_every_canary() -> None:
    numbers = Counter(found.fault.number for found in quick() if found.engine == "spark")
    assert numbers == dict.fromkeys(NUMBERS - {25}, 1) | {0: len(CANARIES)}
    others = [(found.fault.name, found.engine) for found in quick() if found.engine != "spark"]
    assert others == [
        ("executor-killed", "spark-cluster"),
        *(("group-rebalance", engine) for engine in ("consumer", "plain")),
    ]


def test_quick_of_one_engine() -> None:
    cells = list(quick(engines=CONSUMER))
    assert {found.engine for found in cells} == {"consumer"}
    played = {fault.number for fault in FAULTS.values() if "consumer" in fault.engines}
    assert Counter(found.fault.number for found in cells) == dict.fromkeys(played, 1) | {0: len(CANARIES)}
    assert played == NUMBERS - {6}, "workers and executors are Spark's"


def test_plain_consumers_append_to_postgres_under_every_fault_that_can_hurt_them() -> None:
    cells = [found for found in matrix() if found.engine in PLAIN]
    assert {(found.sink, found.mode) for found in cells} == {("postgres", "append")}
    assert not [found for found in matrix("upsert") if found.engine in PLAIN and found.mode != "append"]
    pipelines = {
        found.name for found in matrix() if found.engine in CONSUMER and found.column[1:3] == cells[0].column[1:3]
    }
    there = {f"{found.name.removesuffix('plain')}consumer" for found in cells}
    missing = {f"topic-recreated/{word}/postgres/append/consumer" for word in (AT_MOST, AT_LEAST)}
    missing |= {name for name in pipelines if FAULTS[name.partition("/")[0]].engines == PIPELINES}
    assert pipelines - there == missing, "with the topic Kafka deletes the group's positions"
    assert there <= pipelines
    names = {step.fault for word in Guarantee for step in schedule(plain("mix", word), 1, minutes=60)}
    assert {"group-rebalance", "killed-at-random", "postgres-cut"} <= names
    assert not {"worker-killed", "jvm-killed"} & names


def test_what_has_no_ledger_has_one_judge() -> None:
    assert {found.guarantee for found in matrix() if not found.audited} == {AT_MOST, AT_LEAST}
    assert {found.engine for found in matrix() if not found.audited} == {"plain"}
    seen = replace(FINE, audit_verdict="")
    lost = plain("killed-after-claim", AT_MOST)
    assert judge(lost, seen)[0] is CellVerdict.UNPROVEN
    assert judge(lost, replace(seen, check={"lost": 2})) == (
        CellVerdict.HELD,
        "100 records; 2 lost, as permitted; judged by the check alone, because there is no ledger to audit",
    )
    assert judge(lost, replace(seen, check={"duplicated": 1}))[0] is CellVerdict.BROKEN
    assert judge(plain("retention", AT_LEAST), replace(seen, drained=False, exit_code=12))[0] is CellVerdict.HELD
    assert judge(plain("retention", AT_LEAST), replace(seen, drained=False, exit_code=0))[0] is CellVerdict.BROKEN
    swapped = plain("canary-swapped", AT_LEAST)
    assert judge(swapped, seen)[0] is CellVerdict.MISSED
    assert judge(swapped, replace(seen, check={"lost": 1}))[0] is CellVerdict.CAUGHT
    assert judge(plain("canary-drops"), replace(seen, check={"lost": 1}))[0] is CellVerdict.MISSED, "there it has two"


@pytest.mark.parametrize("sink", SINKS)
def test_quick_of_one_sink_has_what_concerns_it_and_its_own_canaries(sink: str) -> None:
    cells = list(quick(sinks=[sink]))
    assert {found.sink for found in cells} == {sink}
    numbers = Counter(found.fault.number for found in cells if found.engine == "spark")
    elsewhere = {fault.number for fault in FAULTS.values() if fault.only} - numbers.keys()
    assert numbers == dict.fromkeys(NUMBERS - {25} - elsewhere, 1) | {0: len(CANARIES)}
    only = {"kafka": {13, 14, 34}, "postgres": {15, 16, 32, 35}, "delta": {17}, "iceberg": {17}}
    assert elsewhere == {*range(13, 18), 32, 34, 35} - only[sink]


def test_the_command_lists_one_sink_or_several(tmp_path: Path) -> None:
    listed = CliRunner().invoke(prove, ["--list", "--quick", "--sink", "iceberg"]).output.splitlines()
    assert len(listed) == len(list(quick(sinks=["iceberg"])))
    assert all("iceberg/append/" in line for line in listed)
    both = CliRunner().invoke(prove, ["--list", "--quick", "--sink", "iceberg", "--sink", "delta"]).output.splitlines()
    assert len(both) == len(listed) + len(list(quick(sinks=["delta"])))
    file = tmp_path / "own.toml"
    file.write_text(
        'name = "own"\nguarantee = "at-least-once"\nsource = { brokers = "x:1", topics = ["own"] }\n'
        'decode = { format = "json", schema = "id long not null" }\n'
        f'sink = {{ kind = "delta", path = "{tmp_path}/lake", mode = "upsert", key = ["id"] }}\n'
    )
    for more in ([], ["--quick"]):
        told = CliRunner().invoke(prove, ["--list", "--pipeline", str(file), *more])
        canaries = [line for line in told.output.splitlines() if "canary" in line]
        rest = [line for line in told.output.splitlines() if "canary" not in line]
        assert len(canaries) == len(CANARIES), told.output
        assert all("delta/append/" in line for line in canaries), "its own sink's"
        assert len(rest) > 20, "every fault, in a mode that the matrix plays only some in"
        assert all("at-least-once  delta/upsert/spark" in line for line in rest)


def test_a_fault_is_played_where_it_can_happen() -> None:
    there = [found for found in matrix() if found.engine == "spark-cluster"]
    assert {found.mode for found in there} == {"append"}
    assert {found.guarantee for found in there} == set(Guarantee)
    assert "executor-killed" in {found.fault.name for found in there}
    assert "worker-killed" not in {found.fault.name for found in there}, "Python workers are not the driver's there"
    assert {found.engine for found in matrix() if found.fault.name == "executor-killed"} == {"spark-cluster"}
    alone = [found for found in matrix() if found.engine == "consumer"]
    assert {found.sink for found in alone} == SINKS.keys()
    assert "group-rebalance" in {found.fault.name for found in alone}
    assert not {"worker-killed", "jvm-killed"} & {found.fault.name for found in alone}
    timed_out = {found.guarantee for found in matrix() if found.fault.name == "transaction-times-out"}
    assert timed_out == {EXACTLY}, "under the others no transaction is open while records are written"
    mixed = schedule(Cell(FAULTS["mix"], EXACTLY, engine="spark-cluster"), 1, minutes=60)
    names = {step.fault for step in mixed if step.fault}
    assert {"executor-killed", "spark-worker-killed"} <= names
    assert all("spark-cluster" in FAULTS[name].engines for name in names)


def test_what_strikes_before_the_sink_is_played_in_one_mode() -> None:
    modes = {name: {found.mode for found in matrix() if found.fault.name == name} for name in FAULTS}
    assert modes["leader-killed"] == modes["retention"] == {"append"}
    assert modes["zombie"] == modes["postgres-killed"] == modes["mix"] == {"append", "dedupe", "upsert"}
    assert {found.engine for found in matrix() if found.mode != "append"} == {"consumer"}


def test_a_queue_stays_in_a_column_and_gives_every_cell_once() -> None:
    queue = Queue(matrix())
    taken = [queue.take()]
    while taken[-1]:
        taken.append(queue.take(taken[-1].column))
    cells = [found for found in taken if found]
    assert sorted(found.name for found in cells) == sorted(found.name for found in matrix())
    canaries = [(found.engine, found.sink, found.fault.name) for found in cells if found.canary]
    played = [
        (engine, sink)
        for engine in SPARK_LOCAL + GROUP_MEMBERS
        for sink in SINKS
        if engine != "plain" or sink == "postgres"
    ]
    assert canaries == [(*place, name) for place in played for name in CANARIES]
    assert all(found.canary for found in cells[: len(canaries)]), "before anything else"
    columns = [found.column for found in cells if not found.canary]
    changes = sum(one != other for one, other in itertools.pairwise(columns))
    assert changes == len(set(columns)) - 1, "a pipeline goes on as long as it can"


def test_in_a_column_what_ends_a_pipeline_comes_last() -> None:
    queue = Queue(found for found in matrix() if found.column == (EXACTLY, "postgres", "append", "spark"))
    faults = []
    while found := queue.take():
        faults.append(found.fault)
    alone = [fault.alone for fault in faults]
    assert alone == sorted(alone, reverse=True)
    shared = [bool(fault.stop) for fault in faults if not fault.alone]
    assert shared == sorted(shared)
    assert queue.take() is None


def test_two_at_work_take_from_different_columns_until_there_is_one() -> None:
    cells = [cell(name, word) for name in ("zombie", "leader-killed", "jvm-killed") for word in (AT_LEAST, EXACTLY)]
    queue = Queue(cells)
    first, second = queue.take(), queue.take()
    assert first
    assert second
    assert first.column != second.column
    queue.clear()
    assert queue.take(first.column) is None


def test_only_a_clean_pipeline_goes_on_into_another_cell() -> None:
    assert reusable_after(cell("zombie"), FINE)
    assert not reusable_after(cell("zombie", AT_MOST), replace(FINE, check={"lost": 1})), "permitted, and there to stay"
    assert not reusable_after(cell("zombie", AT_LEAST), replace(FINE, audit={"ledger-behind": 1}))
    assert not reusable_after(cell("retention"), FINE)
    assert not reusable_after(cell("disk-full-lake"), FINE)


def test_remaining() -> None:
    assert remaining(10, 100, 60) == "about 9 min left"
    assert remaining(99, 100, 60) == "a minute left"
    assert remaining(100, 100, 60) == "done"


def test_what_must_show_is_what_the_guarantee_permits() -> None:
    assert cell("killed-after-claim", AT_MOST).must_show is Anomaly.LOST
    assert cell("killed-after-write", AT_LEAST).must_show is Anomaly.DUPLICATED
    assert cell("killed-after-write", AT_LEAST, "upsert").must_show is None, "a key is there once, whatever happens"
    assert all(found.must_show is None for found in matrix() if found.guarantee is EXACTLY)
    shown = {(found.fault.name, found.sink) for found in matrix() if found.must_show}
    assert {sink for name, sink in shown if name == "killed-after-claim"} == SINKS.keys()
    mid_write = {sink for name, sink in shown if name == "killed-in-mid-write"}
    assert mid_write == SINKS.keys() - {"delta", "iceberg"}, "a lake's tasks have done nothing that shows"


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_schedule_is_its_seed(name: str) -> None:
    one = cell(name)
    assert schedule(one, 7) == schedule(one, 7)
    assert schedule(one, 7) != schedule(one, 8)
    assert schedule(one, 7) != schedule(replace(one, guarantee=AT_LEAST), 7), "cells do not march in step"


def test_a_mix_is_quiet_a_quarter_of_the_time_and_goes_on_as_long_as_asked() -> None:
    steps = schedule(cell("mix"), 1, minutes=60)
    assert sum(step.quiet_s + step.hold_s for step in steps) >= 3600
    assert 0.2 < sum(not step.fault for step in steps) / len(steps) < 0.3
    mixed = {fault.name for fault in FAULTS.values() if fault.in_mix and "spark" in fault.engines}
    assert {step.fault for step in steps if step.fault} == mixed
    assert any(step.fault for seed in range(50) for step in schedule(cell("mix"), seed))


def test_held() -> None:
    assert judge(cell("zombie"), FINE) == (CellVerdict.HELD, "100 records")


@pytest.mark.parametrize("who", ["check", "audit"])
@pytest.mark.parametrize("kind", ["lost", "duplicated", "phantom", "aborted-read", "corrupted", "reordered"])
def test_a_forbidden_anomaly_breaks_whoever_sees_it(who: str, kind: str) -> None:
    verdict, why = judge(cell("zombie"), replace(FINE, fired=("",), **{who: {kind: 3}}))  # type: ignore[arg-type]
    assert verdict is CellVerdict.BROKEN, "even if the fault did not fire"
    assert f"3 {kind} ({who})" in why


@pytest.mark.parametrize("word", Guarantee)
def test_what_a_live_reader_saw_must_be_what_is_there_under_every_word(word: Guarantee) -> None:
    one = Cell(FAULTS["zombie"], word, "kafka")
    assert judge(one, FINE)[0] is CellVerdict.HELD
    for kind in ("lost", "duplicated", "aborted-read", "reordered"):
        verdict, why = judge(one, replace(FINE, live={kind: 2}))
        assert verdict is CellVerdict.BROKEN
        assert f"2 {kind} (live reader)" in why


def test_a_fault_that_did_not_fire_proves_nothing() -> None:
    assert judge(cell("zombie"), replace(FINE, fired=("yes", "")))[0] is CellVerdict.UNKNOWN
    assert judge(cell("zombie"), replace(FINE, fired=()))[0] is CellVerdict.UNKNOWN


@pytest.mark.parametrize("changed", [{"records": 0}, {"drained": False}, {"kafka_lost": 1}])
def test_what_was_not_seen_is_unknown(changed: dict[str, object]) -> None:
    assert judge(cell("zombie"), replace(FINE, **changed))[0] is CellVerdict.UNKNOWN  # type: ignore[arg-type]


def test_a_permitted_anomaly_must_show_where_it_is_due() -> None:
    due = cell("killed-after-claim", AT_MOST)
    assert judge(due, FINE)[0] is CellVerdict.UNPROVEN
    assert judge(due, replace(FINE, check={"lost": 5}, audit={"lost": 5}))[0] is CellVerdict.HELD
    assert judge(due, replace(FINE, check={"lost": 5}, audit={"lost": 4}))[0] is CellVerdict.UNKNOWN, (
        "the judges disagree"
    )
    assert judge(due, replace(FINE, check={"duplicated": 1}))[0] is CellVerdict.BROKEN


def test_a_named_stop() -> None:
    due = cell("retention")
    stopped = replace(FINE, drained=False, exit_code=12, audit={"retention-loss": 40})
    assert judge(due, stopped)[0] is CellVerdict.HELD
    assert judge(due, replace(stopped, exit_code=0))[0] is CellVerdict.BROKEN
    assert judge(due, replace(stopped, audit={}))[0] is CellVerdict.BROKEN
    assert judge(due, replace(stopped, check={"lost": 1}))[0] is CellVerdict.BROKEN


def test_without_a_crash_not_even_what_is_permitted_may_appear() -> None:
    one = cell("poison-records", AT_MOST)
    assert judge(one, FINE)[0] is CellVerdict.HELD
    assert judge(one, replace(FINE, check={"lost": 1}, audit={"lost": 1}))[0] is CellVerdict.BROKEN
    stop = replace(FINE, drained=False, exit_code=14)
    assert judge(cell("dead-letter-stop", AT_MOST), stop)[0] is CellVerdict.HELD, "the audit has no word for it"
    assert judge(cell("dead-letter-stop", AT_MOST), replace(stop, check={"lost": 1}))[0] is CellVerdict.BROKEN


def test_what_a_fault_destroys_is_not_the_pipelines_loss() -> None:
    due = Cell(FAULTS["output-recreated-live"], EXACTLY, "kafka")
    stopped = replace(FINE, drained=False, exit_code=10, check={"lost": 9}, audit={"lost": 9, "topic-recreated": 9})
    assert judge(due, stopped)[0] is CellVerdict.HELD
    assert judge(due, replace(stopped, exit_code=0))[0] is CellVerdict.BROKEN
    assert judge(due, replace(stopped, check={"duplicated": 1}))[0] is CellVerdict.BROKEN


def test_what_the_run_itself_did_wrong_breaks() -> None:
    verdict, why = judge(cell("refused-start"), replace(FINE, violations=("the healthy run ended with 13",)))
    assert verdict is CellVerdict.BROKEN
    assert "the healthy run ended with 13" in why


def test_a_canary_must_be_seen_by_both_judges() -> None:
    due = cell("canary-drops")
    lost = {"lost": 2}
    assert judge(due, replace(FINE, check=lost, audit=lost))[0] is CellVerdict.CAUGHT
    assert judge(due, replace(FINE, check=lost))[0] is CellVerdict.MISSED
    assert judge(due, FINE)[0] is CellVerdict.MISSED


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
    assert exit_code(Counter(map(CellVerdict, told))) == code
