"""Shares of a batch: bounded, in proportion, and no partition starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from avow.engines.planner import shares
from avow.kafka.log import TopicPartition

A, B, C = (TopicPartition("t", n) for n in range(3))


def test_what_fits_is_taken_whole() -> None:
    assert shares({A: 3, B: 7}, 10) == {A: 3, B: 7}
    assert shares({}, 10) == {}


def test_what_does_not_fit_is_shared_by_how_far_each_is_behind() -> None:
    assert shares({A: 1_000, B: 3_000}, 100) == {A: 25, B: 75}
    assert shares({A: 1, B: 1_000_000}, 10) == {A: 1, B: 9}, "the smallest gets one offset"
    assert shares({A: 5, B: 5, C: 5}, 1) == {A: 1, B: 1, C: 1}


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.integers(1, 10**6))
def test_a_batch_is_bounded_and_every_partition_moves(behind: list[int], max_records: int) -> None:
    lags = {TopicPartition("t", n): count for n, count in enumerate(behind)}
    found = shares(lags, max_records)
    assert found.keys() == lags.keys()
    assert all(1 <= count <= lags[tp] for tp, count in found.items())
    assert sum(found.values()) <= max(max_records + len(lags), 0)
