"""Shares of a batch: bounded, in proportion, and no partition starves. Which ranges a task has."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from avow.engines.consumer import together
from avow.engines.planner import TASK_RANGES, TASK_RECORDS, TURNS_MIN, WORTH_READING, share_out, shares
from avow.kafka.log import TopicPartition
from avow.kafka.reader import BATCH_RECORDS
from avow.ledger import OffsetRange

A, B, C = (TopicPartition("t", n) for n in range(3))


def test_what_fits_is_taken_whole() -> None:
    assert shares({A: 3, B: 7}, 10) == {A: 3, B: 7}
    assert shares({}, 10) == {}


def test_what_does_not_fit_is_shared_by_how_far_each_is_behind() -> None:
    assert shares({A: 120_000, B: 320_000}, 120_000) == {A: 40_000, B: 80_000}, "20,000 each, and of the rest"
    assert shares({A: 1, B: 1_000_000}, 10) == {A: 1, B: 9}, "what is a little behind is read whole"
    assert shares({A: 60, B: 1_000_000}, 100) == {A: 25, B: 74}
    assert shares({A: 5, B: 5, C: 5}, 1) == {A: 1, B: 1, C: 1}, "the smallest share is one offset"


def test_one_that_is_very_far_behind_does_not_starve_the_others() -> None:
    found = shares({A: 10**9, B: 30_000, C: 30_000}, 80_000)
    assert min(found.values()) >= WORTH_READING, found


def test_many_partitions_that_are_far_behind_take_turns() -> None:
    lags = {TopicPartition("t", n): 10**6 for n in range(100)}
    found = shares(lags, 500_000)
    assert list(found) == list(lags)[: 500_000 // WORTH_READING], "those that come first"
    assert set(found.values()) == {WORTH_READING}


def test_a_batch_is_full_as_long_as_anybody_is_behind() -> None:
    """Many partitions, each a little more behind than its share: a few of them would be a batch of almost nothing."""
    lags = {TopicPartition("t", n): 800 for n in range(500)}
    assert shares(lags, 100_000) == dict(list(lags.items())[:125])


def test_who_is_up_to_date_does_not_wait_for_those_who_are_not() -> None:
    lags = {TopicPartition("t", n): 10**6 for n in range(100)} | {A: 7, TopicPartition("u", 0): 9}
    found = shares(lags, 500_000)
    assert found[A] == 7
    assert found[TopicPartition("u", 0)] == 9


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.integers(1, 10**6))
def test_a_batch_is_bounded_and_those_whose_turn_it_is_move(behind: list[int], max_records: int) -> None:
    lags = {TopicPartition("t", n): count for n, count in enumerate(behind)}
    found = shares(lags, max_records)
    assert all(1 <= count <= lags[tp] for tp, count in found.items())
    assert sum(found.values()) <= max_records + len(lags)
    left_out = [tp for tp in lags if tp not in found]
    assert not left_out or len(found) >= TURNS_MIN
    assert all(lags[tp] > max_records // len(lags) for tp in left_out), "only those that are far behind wait"


@given(st.lists(st.integers(1, 3 * TASK_RECORDS), max_size=200))
def test_each_range_is_in_one_task(sizes: list[int]) -> None:
    ranges = [OffsetRange("t", n, 5, 5 + size) for n, size in enumerate(sizes)]
    tasks = share_out(ranges)
    assert sorted(r.partition for task in tasks for r in task) == list(range(len(ranges)))
    assert all(0 < len(task) <= TASK_RANGES for task in tasks)
    for task in tasks:
        assert len(task) == 1 or sum(map(len, task)) <= 2 * TASK_RECORDS
    assert tasks == share_out(list(reversed(ranges))), "driver and tasks ask alike"


@given(st.lists(st.integers(0, BATCH_RECORDS + 1_000), max_size=40))
def test_on_the_consumer_engine_small_parts_go_together(sizes: list[int]) -> None:
    longest = pa.record_batch({"offset": pa.array(range(BATCH_RECORDS + 1_000), pa.int64())})
    parts = {TopicPartition("t", n): longest.slice(0, size) if size else None for n, size in enumerate(sizes)}
    groups = together(parts)
    assert [tp for group in groups for tp in group] == list(parts)
    counts = [sum(sizes[tp.partition] for tp in group) for group in groups]
    assert all(len(group) == 1 or count <= BATCH_RECORDS for group, count in zip(groups, counts, strict=True)), (
        "what is decoded as one batch is no larger than one"
    )
    assert all(one + sizes[after[0].partition] > BATCH_RECORDS for one, after in zip(counts, groups[1:], strict=False))


def test_small_ranges_share_a_task_and_large_ones_do_not() -> None:
    small = [OffsetRange("t", n, 0, 100) for n in range(12)]
    large = [OffsetRange("u", n, 0, TASK_RECORDS) for n in range(3)]
    assert [len(task) for task in share_out([*small, *large])] == [1, 1, 1, 12]
    assert [len(task) for task in share_out([OffsetRange("t", n, 0, 20_000) for n in range(4)])] == [2, 2]
    assert share_out([]) == []
