"""The promises hold in every reachable world, and the search would see it if they did not.

The widest worlds are explored by the command, once, in a process of its own: under coverage they would take
minutes. What can be asked of a search is asked here of the small ones.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from avow.guarantee import Anomaly, Guarantee
from avow.model import INVARIANTS, Explored, ModelSetup, World, canaries, explore, moves, setups

pytestmark = pytest.mark.xdist_group("model")

CANARIES = [pytest.param(name, setup, id=f"{setup.guarantee}, {name}") for name, setup in canaries()]
SETUPS = [pytest.param(setup, id=f"{setup.guarantee}, {setup.name}") for word in Guarantee for setup in setups(word)]
GUARANTEES = Path(__file__).parents[2] / "docs" / "GUARANTEES.md"


def search(guarantee: Guarantee) -> Explored:
    return explore(setups(guarantee)[-1].world())


def follow(world: World, *labels: str) -> World:
    """The world after these moves. A label that is not a move is an error."""
    for label in labels:
        world = dict(moves(world))[label]
    return world


@pytest.mark.parametrize("guarantee", Guarantee)
def test_the_promise_holds_in_every_reachable_world(guarantee: Guarantee) -> None:
    found = search(guarantee)
    assert found.broken is None, "\n".join(found.trace)
    assert found.completed, "no way leads to the end of the log"
    assert found.reached.keys() == guarantee.permits, "all that is permitted can be reached, and no more"
    assert found.holds


def test_a_record_is_lost_by_a_crash_between_claim_and_write() -> None:
    trace = search(Guarantee.AT_MOST_ONCE).reached[Anomaly.LOST]
    assert [label.split(": ")[-1] for label in trace[-2:]] == ["claims [0, 1)", "crashes"]


def test_a_record_is_doubled_when_it_was_written_and_not_claimed() -> None:
    trace = search(Guarantee.AT_LEAST_ONCE).reached[Anomaly.DUPLICATED]
    assert sum("writes 0" in label for label in trace) == 2
    assert not any("claims" in label for label in trace)


@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_foreign_checkpoint_ends_in_a_protocol_violation_with_nothing_written(guarantee: Guarantee) -> None:
    alone = replace(setups(guarantee)[0], drivers=1).world()
    alone = follow(alone, "driver 1 starts as run 1", "driver 1 plans from a foreign checkpoint, offset 3")
    ends, waiting, seen = set(), [alone], {alone}
    while waiting:
        for label, after in moves(waiting.pop()):
            ends.add(label.split(", ")[-1])
            assert not any(after.written)
            assert after.position == 1
            waiting += {after} - seen
            seen.add(after)
    assert "stops: PositionBehind" in ends
    assert "has nothing to do" not in ends


def test_a_zombie_that_wakes_up_under_exactly_once_writes_nothing() -> None:
    """The story that fencing is not needed for: the claim's own comparison stops the zombie."""
    first, second = "driver 1, attempt 1 at [0, 2):", "driver 1, attempt 2 at [0, 2):"
    world = follow(
        setups(Guarantee.EXACTLY_ONCE)[2].world(),
        "driver 1 starts as run 0",
        "driver 1 plans from the ledger, offset 0",
        "driver 1 plans [0, 2) and starts an attempt",
        f"{first} reads position 0",
        "driver 1 starts another attempt at [0, 2)",
        f"{second} reads position 0",
        f"{second} writes 0, 1 and claims [0, 2)",
        f"{first} finds the position moved, starts over",
        f"{first} reads position 2, has nothing to do",
    )
    assert world.written == (1, 1, 0)
    assert world.position == 2


@pytest.mark.parametrize(("name", "setup"), CANARIES)
def test_a_canary_is_caught_and_its_story_is_true(name: str, setup: ModelSetup) -> None:
    found = explore(setup.world())
    assert found.broken is not None, f"the model is blind to: {name}"
    assert found.trace
    assert not found.holds
    assert not INVARIANTS[found.broken](follow(setup.world(), *found.trace))


def test_a_search_that_grows_too_large_stops() -> None:
    with pytest.raises(RuntimeError, match="more than 100 worlds"):
        explore(setups(Guarantee.EXACTLY_ONCE)[0].world(), most=100)


# ---- The command ----


@pytest.fixture(scope="module")
def report() -> str:
    done = subprocess.run([sys.executable, "-m", "avow.model"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Every promise holds and every canary is caught.\n")
    return done.stdout


def row(report: str, *words: str) -> list[str]:
    """What follows these words in the one line of the report that starts with them."""
    (line,) = (line.split() for line in report.splitlines() if line.split()[: len(words)] == [*words])
    return line[len(words) :]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_command_explores_every_world_and_finds_that_it_holds(setup: ModelSetup, report: str) -> None:
    states, verdict, *permits = row(report, setup.guarantee, *setup.name.split())
    assert int(states.replace(",", "")) > 500
    assert verdict == "held"
    assert " ".join(permits) == (", ".join(f"{word}, reached" for word in setup.guarantee.permits) or "none")


@pytest.mark.parametrize(("name", "setup"), CANARIES)
def test_the_command_names_what_caught_each_canary(name: str, setup: ModelSetup, report: str) -> None:
    _states, *caught_by = row(report, setup.guarantee, *name.split())
    assert " ".join(caught_by) in INVARIANTS


def test_the_docs_tell_the_states_that_the_command_explored(report: str) -> None:
    text = GUARANTEES.read_text(encoding="utf-8")
    for setup in setups(Guarantee.EXACTLY_ONCE):
        states = [row(report, guarantee, *setup.name.split())[0] for guarantee in Guarantee]
        assert f"| {setup.name} | {' | '.join(states)} |" in text
