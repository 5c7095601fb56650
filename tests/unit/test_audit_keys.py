"""Rows by key on hand-written histories: what a script of records leaves in the table, and what is wrong with it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.audit.keys import ABSENT, Histories, judge
from avow.findings import Kind
from avow.guarantee import Guarantee
from avow.settings import Mode

EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE

Record = tuple[str, int, int, bool]  # key, partition, offset, whether it deletes
Row = tuple[str, int, int]  # key, partition, offset
Wrong = list[tuple[Kind, int, int]]


def row(key: str, offset: int, partition: int = 0) -> Record:
    return (key, partition, offset, False)


def tombstone(key: str, offset: int, partition: int = 0) -> Record:
    return (key, partition, offset, True)


def histories(records: list[Record], table: list[Row]) -> Histories:
    """As Spark groups them: by key and partition."""
    events: dict[tuple[str, int], list[tuple[int, bool, bool]]] = defaultdict(list)
    for key, partition, offset, deletes in records:
        events[key, partition].append((offset, deletes, False))
    for key, partition, offset in table:
        events[key, partition].append((offset, False, True))
    names = sorted({key for key, _ in events})
    lines = []
    for (key, partition), found in sorted(events.items()):
        held = [offset for offset, _, there in found if there]
        last = max(offset for offset, _, _ in found)
        deletes = any(deleted for offset, deleted, _ in found if offset == last)
        lines.append((names.index(key), partition, min(found)[0], last, deletes, max(held, default=ABSENT), len(held)))
    columns = zip(*lines, strict=True) if lines else [()] * 7
    types = (np.int64, np.int64, np.int64, np.int64, np.bool_, np.int64, np.int64)
    return Histories(*(np.array(column, type_) for column, type_ in zip(columns, types, strict=True)))


def wrong(records: list[Record], table: list[Row], mode: Mode = "upsert", guarantee: Guarantee = EXACTLY) -> Wrong:
    judged = judge(histories(records, table), mode, guarantee)
    return sorted(
        (found.kind, int(partition), int(offset))
        for found in judged.anomalies
        for partition, offset in zip(found.partition, found.offset, strict=True)
    )


def test_nothing_at_all() -> None:
    assert wrong([], []) == []


def test_upsert_the_last_record_is_the_row() -> None:
    records = [row("a", 1), row("b", 2), row("a", 3), tombstone("b", 4), row("c", 5)]
    assert wrong(records, [("a", 0, 3), ("c", 0, 5)]) == []


@pytest.mark.parametrize("guarantee", Guarantee)
def test_upsert_a_missing_row_is_lost(guarantee: Guarantee) -> None:
    assert wrong([row("a", 1), row("a", 3)], [], guarantee=guarantee) == [(Kind.LOST, 0, 3)]


def test_upsert_a_stale_row_has_lost_its_last_change() -> None:
    assert wrong([row("a", 1), row("a", 3), row("b", 4)], [("a", 0, 1), ("b", 0, 4)]) == [(Kind.LOST, 0, 3)]


@pytest.mark.parametrize(("guarantee", "kind"), [(EXACTLY, Kind.LOST), (MOST, Kind.LOST), (LEAST, Kind.DUPLICATED)])
def test_upsert_a_deleted_row_that_is_there(guarantee: Guarantee, kind: Kind) -> None:
    """Under at-least-once a replay can bring it back; under the others the delete was lost."""
    records = [row("a", 1), tombstone("a", 3)]
    assert wrong(records, [("a", 0, 1)], guarantee=guarantee) == [(kind, 0, 3)]


def test_upsert_a_key_in_two_partitions_may_be_either() -> None:
    records = [row("a", 1, 0), row("a", 5, 0), row("a", 2, 1), row("b", 9, 1)]
    b = ("b", 1, 9)
    assert wrong(records, [("a", 0, 5), b]) == []
    assert wrong(records, [("a", 1, 2), b]) == []
    assert wrong(records, [("a", 0, 1), b]) == [(Kind.LOST, 0, 5)]
    assert wrong(records, [b]) == [(Kind.LOST, 0, 5)]
    assert wrong([*records, tombstone("a", 7, 1)], [b]) == []
    assert list(judge(histories(records, []), "upsert", EXACTLY).shared) == [0]


def test_a_row_whose_records_are_gone_proves_nothing() -> None:
    assert wrong([row("b", 9)], [("a", 0, 5), ("b", 0, 9)]) == []
    assert wrong([row("b", 9)], [("a", 0, 5), ("b", 0, 9)], "dedupe") == []


def test_a_row_older_than_the_topic_is_stale_if_the_topic_has_a_later_record() -> None:
    assert wrong([row("a", 9)], [("a", 0, 5)]) == [(Kind.LOST, 0, 9)]
    assert wrong([row("a", 9)], [("a", 0, 5)], "dedupe") == []


def test_dedupe_the_first_record_is_the_row() -> None:
    records = [row("a", 1), row("a", 3), row("b", 4)]
    assert wrong(records, [("a", 0, 1), ("b", 0, 4)], "dedupe") == []


def test_dedupe_a_later_record_in_its_place() -> None:
    assert wrong([row("a", 1), row("a", 3)], [("a", 0, 3)], "dedupe") == [(Kind.LOST, 0, 1)]


def test_dedupe_a_missing_row_is_lost() -> None:
    assert wrong([row("a", 1), row("a", 3)], [], "dedupe") == [(Kind.LOST, 0, 1)]


def test_dedupe_the_first_of_either_partition() -> None:
    records = [row("a", 1, 0), row("a", 5, 0), row("a", 2, 1)]
    assert wrong(records, [("a", 0, 1)], "dedupe") == []
    assert wrong(records, [("a", 1, 2)], "dedupe") == []
    assert wrong(records, [("a", 0, 5)], "dedupe") == [(Kind.LOST, 0, 1)]


def test_two_rows_under_one_key() -> None:
    records = [row("a", 1, 0), row("a", 2, 1), row("b", 3)]
    table = [("a", 0, 1), ("a", 1, 2), ("b", 0, 3)]
    assert wrong(records, table) == [(Kind.DUPLICATED, 0, 1), (Kind.DUPLICATED, 1, 2)]
    assert wrong(records, [("a", 0, 1), ("b", 0, 3), ("b", 0, 3)]) == [(Kind.DUPLICATED, 0, 3)]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=30), st.data())
def test_upsert_replayed_in_order_is_held(script: list[tuple[str, bool]], data: st.DataObject) -> None:
    """One partition, applied in order, is always right; with one row taken out, exactly that key is lost."""
    records = [(key, 0, offset, deletes) for offset, (key, deletes) in enumerate(script)]
    state: dict[str, int] = {}
    for key, _, offset, deletes in records:
        if deletes:
            state.pop(key, None)
        else:
            state[key] = offset
    table = [(key, 0, offset) for key, offset in state.items()]
    assert wrong(records, table) == []
    if table:
        gone = data.draw(st.sampled_from(table))
        assert wrong(records, [one for one in table if one != gone]) == [(Kind.LOST, 0, gone[2])]
