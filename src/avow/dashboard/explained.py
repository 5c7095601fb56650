"""Guarantees, explained: a small log is delivered step by step, with a fault where the visitor places it.

The steps are moves of ``avow.model``, which runs the real rules of ``ledger`` in
the real order of ``guarantee``. This module only chooses among the moves that the model offers: the healthy one at
every step, and at one step the fault.

Owns: that choice. Must not know: any rule. Its neighbour is ``avow.model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from avow.dashboard.requests import Params
from avow.guarantee import Guarantee
from avow.model import ModelSetup, Rules, World, anomalies, moves

if TYPE_CHECKING:
    from avow.dashboard.state import AppState

LOG = "rrr.rr"  # six offsets; one is a transaction's marker, which nobody sees
CUTS = frozenset({3, 6})  # two batches
STEPS_MAX = 60

Fault = Literal["crash", "lost-answer", "zombie"]


class ExplainedParams(Params):
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    fault: Annotated[Fault, Field(description="the fault")] = "crash"
    after: Annotated[
        int, Field(ge=0, le=STEPS_MAX, description="the step after which the fault occurs; 0: no fault")
    ] = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment."""

    number: int
    label: str  # what has happened
    fault: bool  # it is the fault
    can_fail: bool  # whether the chosen fault can fall right after it
    written: tuple[int, ...]  # by offset, how often the sink has it; 2 is twice or more
    position: int | None  # None: the ledger has none yet
    planned: tuple[int, int] | None  # the range that is worked on
    run: int
    went_wrong: tuple[str, ...]  # so far, and for good


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    guarantee: str
    meaning: str
    permits: tuple[str, ...]
    steps: tuple[str, ...]  # the order of acts
    fault: str
    after: int
    log: str  # a letter per offset: r is a record, . a marker
    frames: tuple[Frame, ...]
    lost: tuple[int, ...]
    doubled: tuple[int, ...]
    outcome: str  # in one sentence


def _acts(guarantee: Guarantee) -> tuple[str, ...]:
    return tuple(" and ".join(sorted(step, reverse=True)) for step in guarantee.steps)


WORDS = tuple((str(word), _acts(word), word.meaning) for word in Guarantee)


def explained(_: AppState, params: ExplainedParams) -> ExplainedAnswer:
    """The three orders of acts, played by the real rules on a small log."""
    return play(params)


def play(params: ExplainedParams) -> ExplainedAnswer:
    frames = tuple(_frames(params))
    last = frames[-1]
    lost = tuple(at for at, dead_letter in enumerate(LOG) if dead_letter == "r" and not last.written[at])
    doubled = tuple(at for at, times in enumerate(last.written) if times > 1)
    return ExplainedAnswer(
        guarantee=params.guarantee,
        meaning=params.guarantee.meaning,
        permits=tuple(sorted(params.guarantee.permits)),
        steps=_acts(params.guarantee),
        fault=params.fault,
        after=params.after if any(frame.fault for frame in frames) else 0,
        log=LOG,
        frames=frames,
        lost=lost,
        doubled=doubled,
        outcome=_outcome(params, frames, lost, doubled),
    )


def _outcome(
    params: ExplainedParams, frames: tuple[Frame, ...], lost: tuple[int, ...], doubled: tuple[int, ...]
) -> str:
    if not any(frame.fault for frame in frames):
        return "No fault: every record is in the sink once, whatever the order of the acts."
    sentences = []
    if lost:
        sentences.append(f"offset{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} lost")
    if doubled:
        sentences.append(f"offset{'s' * (len(doubled) > 1)} {', '.join(map(str, doubled))} duplicated")
    if sentences:
        return f"{' and '.join(sentences).capitalize()}: {params.guarantee} permits this anomaly, and no other."
    if params.guarantee.atomic:
        return "Every record is in the sink once. No fault at any step changes that."
    return (
        f"Every record is in the sink once with this fault. {params.guarantee} does not promise that: try other steps."
    )


def _frames(params: ExplainedParams) -> Iterator[Frame]:
    setup = ModelSetup("explained", params.guarantee, Rules(params.guarantee.steps), LOG, CUTS, drivers=2, alive=2)
    world = setup.world()
    asleep = False
    failed = False
    for number in range(1, STEPS_MAX):
        step = _healthy(world, asleep=asleep) or (_healthy(world, asleep=False) if asleep else None)
        if step is None or (not failed and world.position == len(LOG) and not world.attempts):
            return  # all is delivered; another run would find nothing to do
        if asleep and _who(step[0]) == 0:
            asleep = False  # it wakes, to a world that has moved on
        label, after = step
        due = params.after == number - 1 and number > 1 and not failed
        if due:
            failed = True
            if params.fault == "zombie" and world.attempts:
                asleep = True
                yield _frame(number, "driver 1 is paused, and driver 2 takes over", world, fault=True)
                continue
            if params.fault != "zombie" and (harm := _harm(world, params.fault)):
                label, world = harm
                yield _frame(number, label, world, fault=True)
                continue
        world = after
        # One fault is enough to see what it does: after it, there is no other to be placed.
        yield _frame(number, label, world, fault=False, can_fail=not failed and _can_fail(world, params.fault))


def _healthy(world: World, *, asleep: bool) -> tuple[str, World] | None:
    """What happens next if nothing goes wrong. ``asleep``: driver 1 and its attempt do nothing."""
    alive = any(driver.alive for number, driver in enumerate(world.drivers) if not (asleep and number == 0))

    def well(label: str) -> bool:
        return not (
            label.endswith("crashes")
            or "the answer is lost" in label
            or "starts another attempt" in label
            or (" starts as run " in label and alive)
            or (asleep and _who(label) == 0)
        )

    # Attempts before drivers, so that one range is worked on at a time.
    offered = [step for step in moves(world) if well(step[0])]
    return next((step for step in offered if "attempt" in step[0] and ":" in step[0]), next(iter(offered), None))


def _who(label: str) -> int:
    """Which driver a label is about."""
    return int(label.removeprefix("driver ").split()[0].rstrip(",")) - 1


def _harm(world: World, fault: Fault) -> tuple[str, World] | None:
    """The fault, as moves of the model."""
    if fault == "lost-answer":
        return next((step for step in moves(world) if "the answer is lost" in step[0]), None)
    crashed: tuple[str, World] | None = None
    while step := next((move for move in moves(world) if move[0].endswith("crashes")), None):
        crashed = ("the process is killed with kill -9", step[1])
        world = step[1]
    return crashed


def _can_fail(world: World, fault: Fault) -> bool:
    match fault:
        case "crash":
            return any(driver.alive for driver in world.drivers)
        case "lost-answer":
            return _harm(world, fault) is not None
        case "zombie":
            return bool(world.attempts)


def _frame(number: int, label: str, world: World, *, fault: bool, can_fail: bool = False) -> Frame:
    planned = next((attempt.planned for attempt in world.attempts), None)
    return Frame(
        number=number,
        label=label,
        fault=fault,
        can_fail=can_fail,
        written=world.written,
        position=world.entry.position if world.entry else None,
        planned=(planned.start, planned.until) if planned else None,
        run=world.entry.run if world.entry else 0,
        went_wrong=tuple(sorted(anomalies(world))),
    )
