"""Random walks through worlds too big to exhaust: three partitions, four runs, longer logs, more crashes.

The small worlds of ``test_model`` are exhausted; these are sampled, with a fixed seed. They look for what
needs more room than two runs and four offsets. A canary shows that the walks can fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from avow.guarantee import Guarantee
from avow.model import INVARIANTS, ModelSetup, Rules, World, canaries, moves

PARTITIONS = 3
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    stateful_step_count=40,
    # A counter-example is told as it was found: shrinking it would cost minutes.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Walk(RuleBasedStateMachine):
    """Several partitions side by side; a power cut hits all of them."""

    guarantee: Guarantee
    played: Rules

    def __init__(self) -> None:
        super().__init__()
        self.worlds: list[World] = []

    @initialize(data=st.data())
    def logs(self, data: st.DataObject) -> None:
        for partition in range(PARTITIONS):
            log = data.draw(st.text("r.", min_size=6, max_size=12))
            setup = ModelSetup(
                f"partition {partition}",
                self.guarantee,
                self.played,
                log,
                cuts=frozenset(range(len(log) + 1)),
                start=data.draw(st.integers(0, 3)),
                drivers=4,
                alive=4,
                checkpoints=True,
                partition=partition,
            )
            self.worlds.append(setup.world())

    @rule(data=st.data(), partition=st.integers(0, PARTITIONS - 1), steps=st.integers(1, 12))
    def go_on(self, data: st.DataObject, partition: int, steps: int) -> None:
        for _ in range(steps):
            self.move(data, partition, crashes=False)

    @rule(data=st.data(), partition=st.integers(0, PARTITIONS - 1))
    def crash_one(self, data: st.DataObject, partition: int) -> None:
        self.move(data, partition, crashes=True)

    @rule()
    def power_cut(self) -> None:
        for partition in range(PARTITIONS):
            while ways := self.ways(partition, crashes=True):
                self.worlds[partition] = ways[0][1]

    @invariant()
    def every_invariant_holds(self) -> None:
        for world in self.worlds:
            assert [name for name, holds in INVARIANTS.items() if not holds(world)] == []

    def ways(self, partition: int, *, crashes: bool) -> list[tuple[str, World]]:
        return [way for way in moves(self.worlds[partition]) if way[0].endswith("crashes") is crashes]

    def move(self, data: st.DataObject, partition: int, *, crashes: bool) -> None:
        ways = self.ways(partition, crashes=crashes)
        if ways:
            index = data.draw(st.integers(0, len(ways) - 1))
            label, self.worlds[partition] = ways[index]
            note(f"partition {partition}: {label}")
            self.every_invariant_holds()


def walk(promised: Guarantee, rules: Rules) -> type[Walk]:
    class Chosen(Walk):
        guarantee = promised
        played = rules

    return Chosen


@pytest.mark.parametrize("fencing", [True, False], ids=["fenced", "no fencing"])
@pytest.mark.parametrize("guarantee", Guarantee)
def test_the_promise_holds_in_bigger_worlds(guarantee: Guarantee, fencing: bool) -> None:
    run_state_machine_as_test(walk(guarantee, replace(Rules(guarantee.steps), fencing=fencing)), settings=FIXED)


@pytest.mark.parametrize(
    "setup",
    [setup for _, setup in canaries()],
    ids=[f"{setup.guarantee}, {name}" for name, setup in canaries()],
)
def test_a_canary_is_caught_here_too(setup: ModelSetup) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(walk(setup.guarantee, setup.rules), settings=settings(FIXED, max_examples=400))
