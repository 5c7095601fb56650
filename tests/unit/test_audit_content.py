"""Rows that are known by what they hold: what can be told of them, and what cannot."""

from __future__ import annotations

import numpy as np

from avow.audit.content import ContentMatch, Expected, match
from avow.audit.judge import Verdict, verdict
from avow.findings import Kind
from avow.guarantee import Guarantee
from avow.sinks.auditing import Contents

PARTITIONS = {0: ("t", 0), 1: ("t", 1)}


def matched(due: str, *there: str, late: str = "") -> ContentMatch:
    """``due``: the records of partitions 0 and 1, a letter each, with a bar between. ``there``: output partitions."""
    zero, _, one = due.partition("|")
    records = [(ord(c), part, offset) for part, text in enumerate((zero, one)) for offset, c in enumerate(text)]
    rows = [(ord(c), place) for place, text in enumerate(there) for c in text]
    lines, standing = np.array(records, np.int64).reshape(-1, 3), np.array(rows, np.int64).reshape(-1, 2)
    is_late = np.array([chr(content) in late for content, _ in rows], bool)
    return match(Expected(*lines.T), Contents(standing[:, 0], standing[:, 1], is_late))


def found(one: ContentMatch) -> dict[Kind, list[tuple[int, int, int]]]:
    named: dict[Kind, list[tuple[int, int, int]]] = {}
    for f in one.findings(PARTITIONS):
        named.setdefault(f.kind, []).extend((f.partition, span.start, span.until) for span in f.spans)
    return named


def test_all_there() -> None:
    one = matched("abcd|wxyz", "awbxcd", "yz")
    assert (found(one), one.identical, one.unmatched) == ({}, 0, 0)
    assert one.reservation.undecided == ""


def test_nothing_at_all() -> None:
    assert found(matched("|", "")) == {}
    assert found(matched("ab|", "")) == {Kind.LOST: [(0, 0, 2)]}
    assert matched("|", "ab").unmatched == 2


def test_lost_doubled_and_late() -> None:
    assert found(matched("abcd|wxyz", "abdwxyz")) == {Kind.LOST: [(0, 2, 3)]}
    assert found(matched("abcd|wxyz", "abcdwxyzx")) == {Kind.DUPLICATED: [(1, 1, 2)]}
    assert found(matched("abcd|wxyz", "acbdwxyz")) == {Kind.REORDERED: [(0, 1, 2)]}


def test_partitions_have_no_order_between_them() -> None:
    assert found(matched("abcd|wxyz", "wxyzabcd")) == {}
    assert found(matched("abcd|wxyz", "cd", "wabxyz")) == {}


def test_a_replay_is_no_disorder() -> None:
    assert found(matched("abcd|", "ababcd")) == {Kind.DUPLICATED: [(0, 0, 2)]}


def test_what_came_late_by_declaration() -> None:
    assert found(matched("abcd|", "acdb", late="b")) == {}


def test_records_that_are_alike_are_counted_and_no_more() -> None:
    one = matched("aba|a", "aab", "a")
    assert (found(one), one.identical) == ({}, 3)
    assert "3 records have identical content" in " ".join(one.notes())
    assert found(matched("aba|a", "ab", "a")) == {Kind.LOST: [(1, 0, 1)]}, "one of the three"
    # A replay of part of it must not look like disorder.
    assert found(matched("aba|", "aaba")) == {Kind.DUPLICATED: [(0, 0, 1)]}


def test_what_no_record_is_like_decides_nothing() -> None:
    one = matched("abcd|", "abcdX")
    assert (found(one), one.unmatched) == ({}, 1)
    for word in Guarantee:
        assert verdict(word, [], 4, one.reservation) is Verdict.UNKNOWN
    # Changed on the way, or lost and somebody else's: where both are forbidden, it does not matter which.
    one = matched("abcd|", "abXd")
    findings = [*one.findings(PARTITIONS)]
    assert [f.kind for f in findings] == [Kind.LOST]
    assert verdict(Guarantee.EXACTLY_ONCE, findings, 4, one.reservation) is Verdict.BROKEN
    assert verdict(Guarantee.AT_MOST_ONCE, findings, 4, one.reservation) is Verdict.UNKNOWN
