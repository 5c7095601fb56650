"""Several actors on the same two tables, in many orders: see ``tests.interleaving``. Without Kafka and Spark.

Here each scenario is played in all orders of one preemption and a few random ones, up to a bound. The long run is
``python -m tests.interleaving --preemptions 2 --random 500``. Canaries, the faults that these orders once had to find,
must be caught.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.interleaving import SCENARIOS, PostgresWorld, World, explore

from avow.sinks.base import DeadLetter, Selection
from avow.sinks.delta.table import DeltaFormat
from avow.sinks.lake import letters as graveyard
from avow.sinks.lake import redrive as redriving
from avow.sinks.lake.book import Book
from avow.sinks.lake.redrive import LakeRedriving
from avow.sinks.lake.table import Conflict, LakeTable

SEED = 1
# Of each scenario: orders of one preemption at most, and random ones. A commit takes Iceberg several times as long.
BOUNDS = {"delta": (9, 3), "iceberg": (2, 1)}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be had: a commit waits for the disk else."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_every_order_keeps_the_contract(kind: str, scenario: str, folder: Path) -> None:
    at_most, walks = BOUNDS[kind]
    found = explore(World(kind, folder, scenario), 1, at_most=at_most, walks=walks, seed=SEED)
    assert not found.problem, found.told()
    assert found.schedules == at_most + walks


@pytest.mark.parametrize("scenario", ["two redrives", "a redrive beside two members, at-least-once"])
def test_orders_in_postgres(server: str, scenario: str, folder: Path) -> None:
    with closing(PostgresWorld(server, folder, scenario)) as world:
        found = explore(world, 1, at_most=3, walks=1, seed=SEED)
    assert not found.problem, found.told()


def register_without_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta, a new partition: the commit behind its registering is made on whatever version came meanwhile."""
    real = DeltaFormat._register

    def register(self: DeltaFormat, book: Book) -> None:
        known = self._registered()
        try:
            real(self, book)
        except Conflict:
            if self._registered() == known:
                raise  # it was not registered

    monkeypatch.setattr(DeltaFormat, "_register", register)


def mark_without_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redrive marks dead letters with a number that another one may have."""
    real = redriving._refuse_other

    def refuse(table: LakeTable, book: Book, seen: int) -> None:
        if not table.shown.endswith("_dead_letters"):
            real(table, book, seen)

    monkeypatch.setattr(redriving, "_refuse_other", refuse)


def redrive_what_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redrive takes every dead letter, also those that no claim has followed."""

    def all_of_them(self: LakeRedriving, selection: Selection, limit: int) -> list[DeadLetter]:
        found = graveyard.selected(self._letters.rows(), replace(selection, until_offset=None))
        return graveyard.from_rows(found.slice(0, limit))

    monkeypatch.setattr(LakeRedriving, "dead_letters", all_of_them)


def settle_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted redrive the number of the table of rows is raised, and that of the dead letters is not."""
    real = LakeRedriving._committed

    def committed(self: LakeRedriving, table: LakeTable, make: Any) -> None:
        def changed(book: Book) -> Any:
            change = make(book)
            unmarks = change is not None and change.marked is not None and change.marked[1] is None
            return replace(change, book=book) if unmarks else change

        real(self, table, changed)

    monkeypatch.setattr(LakeRedriving, "_committed", committed)


@pytest.mark.parametrize(
    ("kind", "fault", "scenario"),
    [
        ("delta", register_without_comparing, "adoption"),
        *((kind, mark_without_comparing, "two redrives") for kind in BOUNDS),
        *((kind, redrive_what_is_not_claimed, "a redrive beside a member") for kind in BOUNDS),
        ("delta", settle_one_table, "redrives after one that was interrupted"),
    ],
)
def test_canaries_are_caught(
    kind: str, fault: Any, scenario: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(kind, folder, scenario)
    fault(monkeypatch)
    found = explore(world, 1, seed=SEED)
    print(found.told())  # shown with ``pytest -s``: how many orders it takes, and which one finds it
    assert found.problem
