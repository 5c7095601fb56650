"""The independent check on hand-written histories: each planted anomaly is named, exactly, and nothing else is."""

from __future__ import annotations

import json

import pytest

from avow.prove.check import Fate, Row, Sent, checksum, compare, value


def sent(number: int, fate: Fate = Fate.ACKNOWLEDGED, *, key: int | None = None, offset: int | None = None) -> Sent:
    key = number if key is None else key
    return Sent(number, key, fate, key % 2, number // 2 if offset is None else offset)


def row(of: Sent, **changed: object) -> Row:
    content = json.loads(value(of.number, of.key))
    whole = Row(of.number, of.key, content["crc"], content["body"], of.partition, of.offset)
    return whole._replace(**changed)  # type: ignore[arg-type]


TEN = [sent(number) for number in range(10)]
ROWS = [row(one) for one in TEN]


def test_each_once_is_nothing_wrong() -> None:
    found = compare(TEN, ROWS)
    assert (found.anomalies, found.records) == ({}, 10)


def test_rows_may_stand_in_any_order() -> None:
    assert compare(TEN, ROWS[::-1]).anomalies == {}


def test_lost() -> None:
    found = compare(TEN, [one for one in ROWS if one.number not in (3, 8)])
    assert found.anomalies == {"lost": 2}
    assert found.examples == {"lost": [3, 8]}


def test_duplicated_counts_records_and_not_copies() -> None:
    assert compare(TEN, [*ROWS, ROWS[4], ROWS[4]]).anomalies == {"duplicated": 1}


@pytest.mark.parametrize("changed", [{"body": "other"}, {"crc": 7}, {"key": 99}])
def test_corrupted(changed: dict[str, object]) -> None:
    rows = [row(one, **changed) if one.number == 5 else row(one) for one in TEN]
    assert compare(TEN, rows).anomalies == {"corrupted": 1}


def test_a_whole_row_of_a_number_that_was_never_sent_is_a_phantom() -> None:
    assert compare(TEN, [*ROWS, row(sent(77))]).anomalies == {"phantom": 1}


def test_a_record_that_never_left_is_a_phantom_too() -> None:
    failed = sent(10, Fate.FAILED, offset=-1)
    assert compare([*TEN, failed], [*ROWS, row(failed, offset=5)]).anomalies == {"phantom": 1}


def test_aborted_read() -> None:
    aborted = sent(10, Fate.ABORTED)
    assert compare([*TEN, aborted], ROWS).anomalies == {}
    assert compare([*TEN, aborted], [*ROWS, row(aborted)]).anomalies == {"aborted-read": 1}


def test_reordered_two_records_in_each_others_place() -> None:
    swapped = {2: ROWS[2]._replace(offset=2), 4: ROWS[4]._replace(offset=1)}
    rows = [swapped.get(one.number, one) for one in ROWS]
    assert compare(TEN, rows).anomalies == {"reordered": 2}


@pytest.mark.parametrize(("in_log", "rows", "anomalies"), [(True, 1, {}), (True, 0, {"lost": 1}), (False, 0, {})])
def test_the_log_settles_what_the_producer_does_not_know(in_log: bool, rows: int, anomalies: dict[str, int]) -> None:
    unknown = sent(10, Fate.UNKNOWN, offset=5)
    log = {*range(10), *([10] if in_log else [])}
    assert compare([*TEN, unknown], [*ROWS, row(unknown)][: 10 + rows], in_log=log).anomalies == anomalies


def test_an_unknown_record_that_the_log_lacks_and_the_table_has_is_a_phantom() -> None:
    unknown = sent(10, Fate.UNKNOWN, offset=-1)
    found = compare([*TEN, unknown], [*ROWS, row(unknown, offset=5)], in_log=set(range(10)))
    assert found.anomalies == {"phantom": 1}


def test_dead_letters_are_accounted_for() -> None:
    assert compare(TEN, ROWS[1:], dead_letters=[(0, 0)]).anomalies == {}


def test_beyond_the_position_nothing_is_expected() -> None:
    found = compare(TEN, [one for one in ROWS if one.offset < 3], stopped_at={0: 3, 1: 3})
    assert (found.anomalies, found.records) == ({}, 6)


# Three records a key, as the workload sends them.
KEYED = [sent(number, key=number // 3, offset=number) for number in range(12)]


def test_dedupe_the_first_of_a_key_wins() -> None:
    first = [row(one) for one in KEYED if one.number % 3 == 0]
    assert compare(KEYED, first, "dedupe").anomalies == {}
    assert compare(KEYED, [row(KEYED[1]), *first[1:]], "dedupe").anomalies == {"lost": 1}
    assert compare(KEYED, first[1:], "dedupe").anomalies == {"lost": 1}


def test_upsert_the_last_of_a_key_wins() -> None:
    last = [row(one) for one in KEYED if one.number % 3 == 2]
    assert compare(KEYED, last, "upsert").anomalies == {}
    assert compare(KEYED, [row(KEYED[1]), *last[1:]], "upsert").examples == {"lost": [2]}


def test_a_key_twice_is_duplicated() -> None:
    last = [row(one) for one in KEYED if one.number % 3 == 2]
    found = compare(KEYED, [*last, row(KEYED[1])], "upsert")
    assert found.anomalies["duplicated"] == 2


def test_the_checksum_is_over_all_of_a_record() -> None:
    assert len({checksum(1, 2, "a"), checksum(2, 2, "a"), checksum(1, 3, "a"), checksum(1, 2, "b")}) == 4
