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
from tests.interleaving import SCENARIOS, PostgresWorld, Topic, World, explore

from avow.engines import redrive
from avow.sinks.base import DeadLetter, Selection
from avow.sinks.delta.table import DeltaLakeTable
from avow.sinks.lake import dead_letters as dead_letter_rows
from avow.sinks.lake import redrive as redriving
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot
from avow.sinks.lake.redrive import LakeRedrive
from avow.sinks.lake.table import CommitConflict, LakeTable

SEED = 1
# Of each scenario: orders of one preemption at most, and random ones. A commit takes Iceberg several times as long.
BOUNDS = {"delta": (6, 2), "iceberg": (2, 1)}


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
    real = DeltaLakeTable._register

    def register(self: DeltaLakeTable, snapshot: LedgerSnapshot) -> None:
        known = self._registered()
        try:
            real(self, snapshot)
        except CommitConflict:
            if self._registered() == known:
                raise  # it was not registered

    monkeypatch.setattr(DeltaLakeTable, "_register", register)


def mark_without_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redrive marks dead letters with a number that another one may have."""
    real = redriving._refuse_concurrent

    def refuse(table: LakeTable, snapshot: LedgerSnapshot, seen: int) -> None:
        if not table.shown.endswith("_dead_letters"):
            real(table, snapshot, seen)

    monkeypatch.setattr(redriving, "_refuse_concurrent", refuse)


def redrive_what_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redrive takes every dead letter, also those that no claim has followed."""

    def all_of_them(self: LakeRedrive, selection: Selection, limit: int) -> list[DeadLetter]:
        found = dead_letter_rows.selected(self._dead_letters.rows(), replace(selection, until_offset=None))
        return dead_letter_rows.from_rows(found.slice(0, limit))

    monkeypatch.setattr(LakeRedrive, "dead_letters", all_of_them)


def settle_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted redrive the number of the table of rows is raised, and that of the dead letters is not."""
    real = LakeRedrive._commit_to

    def committed(self: LakeRedrive, table: LakeTable, make: Any) -> None:
        def changed(snapshot: LedgerSnapshot) -> Any:
            change = make(snapshot)
            unmarks = change is not None and change.marked is not None and change.marked[1] is None
            return replace(change, snapshot=snapshot) if unmarks else change

        real(self, table, changed)

    monkeypatch.setattr(LakeRedrive, "_commit_to", committed)


def read_deletes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redrive by key does not ask what has been deleted since it looked."""
    monkeypatch.setattr(redrive._Deletes, "confirm", lambda *_: None)


def read_deletes_of_claims_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under at-least-once, where records are written before they are claimed."""
    monkeypatch.setattr(Topic, "stable_ends", lambda _, partitions: dict.fromkeys(partitions, 0))


@pytest.mark.parametrize(
    ("kind", "fault", "scenario"),
    [
        ("delta", register_without_comparing, "adoption"),
        ("delta", mark_without_comparing, "two redrives"),
        pytest.param("iceberg", mark_without_comparing, "two redrives", marks=pytest.mark.long),
        ("delta", redrive_what_is_not_claimed, "a redrive beside a member"),
        pytest.param("iceberg", redrive_what_is_not_claimed, "a redrive beside a member", marks=pytest.mark.long),
        ("delta", settle_one_table, "redrives after one that was interrupted"),
        ("delta", read_deletes_once, "a redrive beside a member that deletes, exactly-once"),
        pytest.param(
            "iceberg",
            read_deletes_once,
            "a redrive beside a member that deletes, exactly-once",
            marks=pytest.mark.long,
        ),
        ("delta", read_deletes_of_claims_alone, "a redrive beside a member that deletes, at-least-once"),
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
