"""The comparison on hand-written histories: each planted anomaly is named, with its offsets, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.audit.compare import CodedRows, Compared, Comparison, Tally
from avow.findings import Kind, Offsets, Span, Spans
from avow.settings import Mode


@dataclass
class World:
    """One partition as it is: records by offset with the rows they give, and what the sink holds."""

    records: dict[int, list[int]]  # offset -> codes of the rows it gives
    dead: set[int] = field(default_factory=set)  # records that decode refuses
    deletes: set[int] = field(default_factory=set)
    table: list[tuple[int, int]] = field(default_factory=list)  # offset, code
    letters: set[int] = field(default_factory=set)

    @classmethod
    def delivered(cls, offsets: Iterable[int], dead: Iterable[int] = (), skipped: Iterable[int] = ()) -> World:
        """Records at these offsets, all delivered as they should be."""
        none = {*dead, *skipped}
        records = {offset: [] if offset in none else [offset * 10] for offset in offsets}
        world = cls(records, set(dead), letters=set(dead))
        world.table = [(offset, code) for offset, codes in records.items() for code in codes]
        return world

    def audit(
        self, *cuts: int, mode: Mode = "append", compacted: bool = False, records_at_the_end: bool = False
    ) -> Compared:
        """Compare, in windows that end at ``cuts`` and at 100."""
        comparison = Comparison("t", 0, 0, mode, compacted=compacted)
        begin = 0
        for until in (*cuts, 100):
            due = [(o, code) for o, codes in self.records.items() for code in codes if begin <= o < until]
            there = [(o, code) for o, code in self.table if begin <= o < until]
            letters = offsets(o for o in self.letters if begin <= o < until)
            changed = comparison.rows(until, rows(due), rows(there), letters)
            comparison.changed(Kind.CORRUPTED, changed, {"amount"} if len(changed) else set())
            if not records_at_the_end:
                self._tell(comparison, begin, until)
            begin = until
        if records_at_the_end:
            self._tell(comparison, 0, 100)
        return comparison.result()

    def _tell(self, comparison: Comparison, begin: int, until: int) -> None:
        within = [{o for o in known if begin <= o < until} for known in (self.records, self.dead, self.deletes)]
        comparison.records(until, *map(offsets, within))


def offsets(some: Iterable[int]) -> Offsets:
    return np.array(sorted(some), np.int64)


def rows(pairs: list[tuple[int, int]]) -> CodedRows:
    ordered = sorted(pairs)
    return CodedRows(np.array([o for o, _ in ordered], np.int64), np.array([code for _, code in ordered], np.int64))


def found(compared: Compared) -> dict[Kind, list[tuple[int, int, int]]]:
    assert (compared.topic, compared.partition) == ("t", 0)
    for finding in compared.findings:
        assert finding.count == sum(span.count for span in finding.spans)
    return {f.kind: [(s.start, s.until, s.count) for s in f.spans] for f in compared.findings}


# Markers and aborted records leave gaps: 5 and 9 hold nothing visible. 3 is bad, 7 is left out by declaration.
VISIBLE = (0, 1, 2, 3, 4, 6, 7, 8, 10, 11)


@pytest.fixture
def world() -> World:
    return World.delivered(VISIBLE, dead=[3], skipped=[7])


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)])
@pytest.mark.parametrize("records_at_the_end", [False, True])
def test_nothing_planted_nothing_found(world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
    compared = world.audit(*cuts, records_at_the_end=records_at_the_end)
    assert found(compared) == {}
    assert compared.tally == Tally(read=10, written=8, dead=1, skipped=1)


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)])
@pytest.mark.parametrize("records_at_the_end", [False, True])
class TestPlanted:
    """Wherever the windows are cut, and whenever the records are told."""

    def audit(self, world: World, cuts: tuple[int, ...], late: bool) -> dict[Kind, list[tuple[int, int, int]]]:
        compared = world.audit(*cuts, records_at_the_end=late)
        tally = compared.tally
        assert tally.read == tally.written + tally.dead + tally.skipped + tally.lost == 10
        self.tally = tally
        return found(compared)

    def test_lost(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table.remove((4, 40))
        assert self.audit(world, cuts, records_at_the_end) == {Kind.LOST: [(4, 5, 1)]}
        assert self.tally == Tally(read=10, written=7, dead=1, skipped=1, lost=1)

    def test_a_lost_stretch_is_one_span_across_gaps(
        self, world: World, cuts: tuple[int, ...], records_at_the_end: bool
    ) -> None:
        # 5 and 9 are gaps, and 7 is due no row: nothing that is there lies between.
        world.table = [row for row in world.table if not 4 <= row[0] <= 10]
        assert self.audit(world, cuts, records_at_the_end) == {Kind.LOST: [(4, 11, 4)]}

    def test_lost_apart(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table = [row for row in world.table if row[0] not in (0, 2, 11)]
        assert self.audit(world, cuts, records_at_the_end) == {Kind.LOST: [(0, 1, 1), (2, 3, 1), (11, 12, 1)]}

    def test_lost_dead_letter(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.letters.clear()
        assert self.audit(world, cuts, records_at_the_end) == {Kind.LOST: [(3, 4, 1)]}
        assert self.tally == Tally(read=10, written=8, skipped=1, lost=1)

    def test_everything_lost(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table.clear()
        world.letters.clear()
        assert self.audit(world, cuts, records_at_the_end) == {Kind.LOST: [(0, 12, 9)]}

    def test_duplicated(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table += [(4, 40), (6, 60), (6, 60), (10, 100)]
        expected = {Kind.DUPLICATED: [(4, 7, 2), (10, 11, 1)]}
        assert self.audit(world, cuts, records_at_the_end) == expected

    def test_corrupted(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table[world.table.index((8, 80))] = (8, 81)
        assert self.audit(world, cuts, records_at_the_end) == {Kind.CORRUPTED: [(8, 9, 1)]}

    def test_a_copy_that_differs(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table.append((8, 81))
        expected = {Kind.CORRUPTED: [(8, 9, 1)], Kind.DUPLICATED: [(8, 9, 1)]}
        assert self.audit(world, cuts, records_at_the_end) == expected

    def test_a_row_of_a_record_that_gives_none(
        self, world: World, cuts: tuple[int, ...], records_at_the_end: bool
    ) -> None:
        world.table.append((7, 70))
        assert self.audit(world, cuts, records_at_the_end) == {Kind.CORRUPTED: [(7, 8, 1)]}

    def test_phantom(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table += [(5, 1), (12, 1), (13, 1), (50, 1)]
        expected = {Kind.PHANTOM: [(5, 6, 1), (12, 14, 2), (50, 51, 1)]}
        assert self.audit(world, cuts, records_at_the_end) == expected

    def test_phantom_dead_letter(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.letters |= {9, 40}
        assert self.audit(world, cuts, records_at_the_end) == {Kind.PHANTOM: [(9, 10, 1), (40, 41, 1)]}

    def test_double_counted(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.letters.add(2)
        assert self.audit(world, cuts, records_at_the_end) == {Kind.DOUBLE_COUNTED: [(2, 3, 1)]}

    def test_a_bad_record_with_a_row(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table.append((3, 30))
        assert self.audit(world, cuts, records_at_the_end) == {Kind.DOUBLE_COUNTED: [(3, 4, 1)]}

    def test_refused_by_the_sink_is_not_lost(
        self, world: World, cuts: tuple[int, ...], records_at_the_end: bool
    ) -> None:
        world.table.remove((6, 60))
        world.letters.add(6)
        assert self.audit(world, cuts, records_at_the_end) == {}
        assert self.tally == Tally(read=10, written=7, dead=2, skipped=1)

    def test_several_rows_of_one_record(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.records |= {0: [1, 2, 2], 1: [1, 2, 3], 2: [1, 2, 3]}
        world.table = [row for row in world.table if row[0] > 2]
        world.table += [(0, 2), (0, 1), (0, 2)]  # as due, in another order
        world.table += [(1, 3), (1, 1)]  # one of three is missing
        world.table += [(2, 1), (2, 1), (2, 3)]  # one twice, one missing
        expected = {Kind.LOST: [(1, 3, 2)], Kind.DUPLICATED: [(2, 3, 1)]}
        assert self.audit(world, cuts, records_at_the_end) == expected

    def test_all_at_once(self, world: World, cuts: tuple[int, ...], records_at_the_end: bool) -> None:
        world.table.remove((0, 0))
        world.table += [(1, 10), (5, 9)]
        world.table[world.table.index((10, 100))] = (10, 7)
        world.letters.add(8)
        assert self.audit(world, cuts, records_at_the_end) == {
            Kind.LOST: [(0, 1, 1)],
            Kind.DUPLICATED: [(1, 2, 1)],
            Kind.PHANTOM: [(5, 6, 1)],
            Kind.DOUBLE_COUNTED: [(8, 9, 1)],
            Kind.CORRUPTED: [(10, 11, 1)],
        }


def test_columns_are_named_with_what_differs(world: World) -> None:
    world.table[world.table.index((8, 80))] = (8, 81)
    (finding,) = world.audit().findings
    assert finding.columns == ("amount",)


def test_compaction_is_not_phantom(world: World) -> None:
    """Records that were delivered and then compacted away."""
    for offset in (0, 4, 6):
        del world.records[offset]
    compared = world.audit(5, compacted=True)
    assert found(compared) == {}
    assert compared.tally == Tally(read=7, written=5, dead=1, skipped=1, unchecked=3)


def test_rows_beyond_the_position() -> None:
    comparison = Comparison("t", 0, 0)
    comparison.records(10, offsets(()))
    comparison.beyond(np.array([10, 10, 11, 15, 19, 20, 90], np.int64), readable_until=20)
    assert found(comparison.result()) == {
        Kind.LEDGER_BEHIND: [(10, 12, 2), (15, 16, 1), (19, 20, 1)],
        Kind.PHANTOM: [(20, 21, 1), (90, 91, 1)],
    }


@pytest.mark.parametrize("mode", ["dedupe", "upsert"])
def test_with_a_key_a_row_may_be_absent(world: World, mode: Mode) -> None:
    world.table = [(offset, code) for offset, code in world.table if offset > 6]
    assert found(world.audit(5, mode=mode)) == {}
    assert world.audit(mode=mode).tally.written == {"dedupe": 3, "upsert": 8}[mode]


def test_with_a_key_a_row_must_still_be_what_its_record_gives(world: World) -> None:
    world.table = [(8, 81), (9, 90), (10, 100)]
    expected = {Kind.CORRUPTED: [(8, 9, 1)], Kind.PHANTOM: [(9, 10, 1)]}
    assert found(world.audit(mode="upsert")) == expected


def test_a_tombstone_counts_as_written() -> None:
    world = World.delivered([0, 1, 2], skipped=[1])
    world.deletes = {1}
    assert world.audit(mode="upsert").tally == Tally(read=3, written=3)


# Random plants are exactly recovered.

PLANTS = ("none", "gap", "lost", "duplicated", "corrupted", "phantom", "double-counted", "skipped", "dead", "lost-dead")


@given(
    plants=st.lists(st.sampled_from(PLANTS), max_size=60),
    cuts=st.sets(st.integers(1, 99), max_size=6),
    late=st.booleans(),
)
def test_random_plants_are_recovered(plants: list[str], cuts: set[int], late: bool) -> None:
    world = World({})
    expected: dict[Kind, set[int]] = {}
    for offset, plant in enumerate(plants):
        code = offset * 10
        if plant not in ("gap", "phantom"):
            world.records[offset] = [] if plant in ("skipped", "dead", "lost-dead") else [code]
        if plant in ("dead", "lost-dead"):
            world.dead.add(offset)
        if plant in ("dead", "double-counted"):
            world.letters.add(offset)
        copies = {"none": 1, "duplicated": 2, "double-counted": 1, "phantom": 1}.get(plant, 0)
        world.table += [(offset, code)] * copies
        if plant == "corrupted":
            world.table.append((offset, code + 1))
        name = "lost" if plant == "lost-dead" else plant
        if name in set(Kind):
            expected.setdefault(Kind(name), set()).add(offset)
    compared = world.audit(*sorted(cuts), records_at_the_end=late)
    counts = {finding.kind: finding.count for finding in compared.findings}
    assert counts == {kind: len(planted) for kind, planted in expected.items()}
    for finding in compared.findings:
        planted = expected[finding.kind]
        covered = {o for span in finding.spans for o in range(span.start, span.until)}
        assert planted <= covered
        assert {span.start for span in finding.spans} | {span.until - 1 for span in finding.spans} <= planted
        # What else a span covers is nothing that could have been wrong in this way.
        assert not any(plants[o] == "none" for o in covered - planted)
    tally = compared.tally
    assert tally.read == tally.written + tally.dead + tally.skipped + tally.lost == len(world.records)
    assert tally.lost == len(expected.get(Kind.LOST, ()))
    assert tally.skipped == plants.count("skipped")


@given(bad=st.sets(st.integers(0, 200)), cut=st.integers(0, 201))
def test_spans_do_not_depend_on_where_windows_end(bad: set[int], cut: int) -> None:
    whole, parts = Spans(), Spans()
    among = offsets(range(0, 201, 3))
    wrong = offsets(bad & set(among.tolist()))
    whole.add(wrong, among, 0, 201)
    parts.add(wrong[wrong < cut], among[among < cut], 0, cut)
    parts.add(wrong[wrong >= cut], among[among >= cut], cut, 201)
    assert whole.joined() == parts.joined()
    assert whole.count == parts.count == len(wrong)


def test_a_span_reads_like_a_range() -> None:
    assert str(Span(4, 7, 2)) == "[4, 7)"
