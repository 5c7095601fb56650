"""Explores every crash of the protocol in small worlds, with the real rules. Run it: ``python -m avow.model``.

Theory of operation
-------------------
A ``World`` is one frozen moment: what the sink holds, the ledger's entry, the runs, and the attempts that are
alive. ``moves`` gives every next moment with a label: a driver starts, plans or crashes; an attempt reads, acts,
crashes, or loses the response to an act that took effect. ``explore`` visits every world that can be reached
and checks each against ``INVARIANTS``. It goes breadth first, so that every trace it reports is a shortest one.

Nothing of the protocol is written here a second time. The order of acts is ``Guarantee.steps``, what may go
wrong is ``Guarantee.permits``, and every decision is made by a function of ``ledger``. They come in as ``Rules``,
so that a *canary* can put a wrong rule in place of one. A canary that is not caught means that the model is blind.

How the real world appears here:

* A zombie is an attempt whose driver has started another one, or is gone. It may wake at any moment.
* A sink that is not atomic takes one record per move, so that a crash leaves a range half written.
* An atomic act rests on a position that was read earlier, on a handle; the claim in it compares. So it covers
  both a ``SELECT ... FOR UPDATE`` that came second and a lake commit that lost a race.
* After a lost answer an attempt knows nothing of what it did: it starts over by reading the position.
* A lost or rewound checkpoint makes a driver plan from below the position; a foreign one, from above it.

Owns: worlds, moves, invariants, canaries. Must not know: I/O, time, randomness, any sink; only ``main`` prints.
Its neighbours are ``ledger`` and ``guarantee``, whose rules it runs.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from avow import ledger
from avow.errors import PositionBehind, PositionMoved, Superseded
from avow.guarantee import Act, Anomaly, Guarantee
from avow.ledger import Counts, Entry, LogView, OffsetRange

Trace = tuple[str, ...]  # the labels of the moves that lead to a world

TOPIC, TOPIC_ID = "topic", "id"


# ---- A world: named tuples, because the search hashes each of them many times ----


class DriverState(NamedTuple):
    """The driver of one run. It plans one range at a time and starts the attempts at it."""

    run: int
    alive: bool = True
    next: int | None = None  # where its next range starts; None until it has taken over the ledger
    planned: OffsetRange | None = None  # the range it waits for
    foreign: bool = False  # it planned from above the position, so not from the ledger
    batch: int = 0  # its batch number, which a new checkpoint starts again from 0


GONE = DriverState(run=-1, alive=False)


class AttemptWork(NamedTuple):
    """What an attempt holds between reading the position and its last act."""

    read: Entry  # its handle: the entry as it was when the attempt read it
    rest: OffsetRange  # what the judge left of the planned range
    step: int  # which step of the order of acts comes next
    todo: tuple[int, ...]  # the offsets that this step has still to write


class TaskAttempt(NamedTuple):
    """One attempt at a planned range. Several at the same range can be alive at once."""

    driver: int  # an index into the world's drivers
    planned: OffsetRange
    batch: int
    work: AttemptWork | None = None  # None: it must read the position first
    number: int = 1  # tells attempts at the same range apart, for the reader only


class World(NamedTuple):
    """One moment."""

    setup: ModelSetup
    written: tuple[int, ...]  # by offset, how often the sink holds the record; 2 is twice or more
    entry: Entry | None = None
    claims: tuple[OffsetRange, ...] = ()  # all that was claimed, adjacent claims joined
    batches: frozenset[int] = frozenset()  # the batch numbers claimed
    drivers: tuple[DriverState, ...] = ()
    gap: bool = False  # a driver that planned from the ledger met a PositionBehind
    early: bool = False  # an attempt ended well, but its range was not claimed
    attempts: tuple[TaskAttempt, ...] = ()

    @property
    def position(self) -> int:
        return self.entry.position if self.entry else self.setup.start


# ---- The rules, and the setup they are explored in ----


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides. The defaults are the real rules; a canary replaces one."""

    steps: tuple[frozenset[Act], ...]
    position: Callable[[World, TaskAttempt], int] = lambda world, _: world.position  # the position that is judged
    judge: Callable[[int, OffsetRange], OffsetRange] = ledger.judge
    until: Callable[[OffsetRange, Sequence[int]], int] = lambda rest, _: rest.until  # where a claim ends
    claim: Callable[[Entry, OffsetRange, int, Counts], Entry] = ledger.claim
    handle: Callable[[Entry, Entry], Entry] = lambda _, now: now  # of (as read, as it is), what a claim compares
    fencing: bool = True
    batches: bool = False  # whether batches are numbered; only an identity by batch number asks for it


@dataclass(frozen=True, eq=False)  # compared by identity: all worlds of a search share one
class ModelSetup:
    """What stays the same during a search: the promise, the rules, the log, and the bounds."""

    name: str
    guarantee: Guarantee
    rules: Rules
    log: str  # a character per offset: "r" is a record, "." a transaction marker or an aborted record
    cuts: frozenset[int]  # where a planned range may start or end
    start: int = 0  # the declared start
    drivers: int = 2  # how many runs start in all
    alive: int = 2  # how many attempts are alive at once
    checkpoints: bool = False  # whether a driver may plan from a rewound or foreign checkpoint
    partition: int = 0

    @cached_property
    def visible(self) -> frozenset[int]:
        return frozenset(offset for offset, kind in enumerate(self.log) if kind == "r")

    def records(self, start: int, until: int) -> tuple[int, ...]:
        """The offsets in between that hold a visible record."""
        return tuple(offset for offset in range(start, until) if offset in self.visible)

    def world(self) -> World:
        """The first moment: an empty sink, no position, no run."""
        return World(self, written=(0,) * len(self.log))


# ---- The moves ----


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Every next moment, and what happened."""
    if len(world.drivers) < world.setup.drivers:
        yield _start(world)
    for index, driver in enumerate(world.drivers):
        if driver.alive:
            subject = f"driver {index + 1}"
            if driver.next is None:
                yield from _take_over(world, index, subject)
            elif len(world.attempts) < world.setup.alive:
                yield from _plan(world, index, driver.next, subject)
            yield f"{subject} crashes", _stop(world, index)
    for attempt in world.attempts:
        subject = f"driver {attempt.driver + 1}, attempt {attempt.number} at {_span(attempt.planned)}:"
        if attempt.work is None:
            yield _read(world, attempt, subject)
        else:
            yield from _act(world, attempt, attempt.work, subject)
        yield f"{subject} crashes", _without(world, attempt)


def _start(world: World) -> tuple[str, World]:
    """A run takes its number. Another may take the same one before it has fenced."""
    run = ledger.next_run([world.entry] if world.entry else []) if world.setup.rules.fencing else 0
    label = f"driver {len(world.drivers) + 1} starts as run {run}"
    return label, world._replace(drivers=(*world.drivers, DriverState(run)))


def _take_over(world: World, index: int, subject: str) -> Iterator[tuple[str, World]]:
    """A run adopts or fences the ledger's entry and settles where it plans from."""
    setup, driver = world.setup, world.drivers[index]
    log = LogView(TOPIC, setup.partition, TOPIC_ID, earliest=0, end=len(setup.log))
    position = ledger.plan_start(world.entry, log, setup.start).position
    entry = world.entry or Entry(position, TOPIC_ID, driver.run)
    if world.entry and setup.rules.fencing:
        try:
            entry = ledger.fence(world.entry, driver.run)
        except Superseded:
            yield f"{subject} stops: superseded", _stop(world, index)
            return
    world = world._replace(entry=entry)
    yield f"{subject} plans from the ledger, offset {position}", _put(world, index, driver._replace(next=position))
    if setup.checkpoints:
        for offset in sorted(setup.cuts - {position, log.end}):
            foreign = offset > position
            label = f"{subject} plans from a {'foreign' if foreign else 'rewound'} checkpoint, offset {offset}"
            yield label, _put(world, index, driver._replace(next=offset, foreign=foreign))


def _plan(world: World, index: int, start: int, subject: str) -> Iterator[tuple[str, World]]:
    """A driver starts an attempt: again at the range it waits for, or at its next one, cut anywhere."""
    waits_for = world.drivers[index].planned
    if waits_for is not None:
        yield f"{subject} starts another attempt at {_span(waits_for)}", _attempt(world, index, waits_for)
        return
    for until in sorted(world.setup.cuts):
        if until > start:
            planned = OffsetRange(TOPIC, world.setup.partition, start, until)
            yield f"{subject} plans {_span(planned)} and starts an attempt", _attempt(world, index, planned)


def _read(world: World, attempt: TaskAttempt, subject: str) -> tuple[str, World]:
    """An attempt reads the position and judges its range."""
    rules, entry = world.setup.rules, world.entry
    assert entry is not None, "an attempt starts after its driver took over the ledger"
    position = rules.position(world, attempt)
    label = f"{subject} reads position {position}"
    try:
        rest = rules.judge(position, attempt.planned)
    except PositionBehind:
        gap = world.gap or not world.drivers[attempt.driver].foreign
        after = _stop(_without(world, attempt), attempt.driver)._replace(gap=gap)
        return f"{label}, stops: PositionBehind", after
    rest = replace(rest, until=rules.until(rest, world.setup.records(rest.start, rest.until)))
    if not rest:
        return f"{label}, has nothing to do", _done(world, attempt)
    return label, _enter(world, attempt, AttemptWork(entry, rest, step=0, todo=()))


def _act(world: World, attempt: TaskAttempt, work: AttemptWork, subject: str) -> Iterator[tuple[str, World]]:
    """An attempt does its next act, and its response arrives or is lost."""
    step = world.setup.rules.steps[work.step]
    # An atomic act writes all it has to; a sink that is not atomic takes one record at a time.
    now = work.todo if Act.CLAIM in step else work.todo[:1]
    start_over = attempt._replace(work=None)
    try:
        after = _claim(world, attempt, work) if Act.CLAIM in step else world
    except PositionMoved:
        yield f"{subject} finds the position moved, starts over", _swap(world, attempt, start_over)
        return
    except Superseded:
        yield f"{subject} stops: superseded", _stop(_without(world, attempt), attempt.driver)
        return
    written = tuple(min(times + (offset in now), 2) for offset, times in enumerate(world.written))
    after = after._replace(written=written)
    acts = {Act.WRITE: f"writes {', '.join(map(str, now))}", Act.CLAIM: f"claims {_span(work.rest)}"}
    label = f"{subject} {' and '.join(acts[act] for act in Act if act in step)}"
    left = work.todo[len(now) :]
    if left:
        yield label, _swap(after, attempt, attempt._replace(work=work._replace(todo=left)))
    else:
        yield label, _enter(after, attempt, work._replace(step=work.step + 1))
    yield f"{label}; the answer is lost, starts over", _swap(after, attempt, start_over)


def _claim(world: World, attempt: TaskAttempt, work: AttemptWork) -> World:
    rules, rest = world.setup.rules, work.rest
    assert world.entry is not None, "an attempt starts after its driver took over the ledger"
    records = len(world.setup.records(rest.start, rest.until))
    run = world.drivers[attempt.driver].run
    entry = rules.claim(rules.handle(work.read, world.entry), rest, run, Counts(read=records, written=records))
    claims = (*world.claims, rest)
    if len(claims) > 1 and claims[-2].until == rest.start:
        claims = (*claims[:-2], replace(claims[-2], until=rest.until))
    batches = world.batches | {attempt.batch} if rules.batches else world.batches
    return world._replace(entry=entry, claims=claims, batches=batches)


# ---- What the moves are made of ----


def _enter(world: World, attempt: TaskAttempt, work: AttemptWork) -> World:
    """An attempt reaches the next step of its order, or the end."""
    steps = world.setup.rules.steps
    records = world.setup.records(work.rest.start, work.rest.until)
    step = work.step
    if step < len(steps) and Act.CLAIM not in steps[step] and not records:
        step += 1  # a range of markers only: claimed, with nothing to write
    if step == len(steps):
        return _done(world, attempt)
    todo = records if Act.WRITE in steps[step] else ()
    return _swap(world, attempt, attempt._replace(work=work._replace(step=step, todo=todo)))


def _done(world: World, attempt: TaskAttempt) -> World:
    """An attempt ends well. Its driver goes on, if it lives and waits for that range."""
    until = attempt.planned.until
    world = _without(world, attempt)._replace(early=world.early or world.position < until)
    driver = world.drivers[attempt.driver]
    if driver.planned != attempt.planned:
        return world
    if until == len(world.setup.log):
        return _stop(world, attempt.driver)
    batch = driver.batch + world.setup.rules.batches
    return _put(world, attempt.driver, driver._replace(next=until, planned=None, batch=batch))


def _attempt(world: World, index: int, planned: OffsetRange) -> World:
    taken = {attempt.number for attempt in world.attempts if attempt.planned == planned and attempt.driver == index}
    number = next(n for n in count(1) if n not in taken)
    driver = world.drivers[index]._replace(planned=planned)
    attempt = TaskAttempt(index, planned, driver.batch, number=number)
    return _put(world, index, driver)._replace(attempts=(*world.attempts, attempt))


def _stop(world: World, index: int) -> World:
    """A driver ends; its attempts live on. Only what they need of it is kept: the rest changes nothing."""
    gone = GONE
    if any(attempt.driver == index for attempt in world.attempts):
        gone = GONE._replace(run=world.drivers[index].run, foreign=world.drivers[index].foreign)
    return _put(world, index, gone)


def _put(world: World, index: int, driver: DriverState) -> World:
    return world._replace(drivers=(*world.drivers[:index], driver, *world.drivers[index + 1 :]))


def _without(world: World, attempt: TaskAttempt) -> World:
    world = world._replace(attempts=tuple(other for other in world.attempts if other is not attempt))
    return world if world.drivers[attempt.driver].alive else _stop(world, attempt.driver)


def _swap(world: World, old: TaskAttempt, new: TaskAttempt) -> World:
    return world._replace(attempts=tuple(new if attempt is old else attempt for attempt in world.attempts))


def _span(span: OffsetRange) -> str:
    return f"[{span.start}, {span.until})"


# ---- What must hold in every world ----


def _absent(world: World, below: int) -> list[int]:
    """The visible records from the declared start on that the sink does not hold."""
    return [offset for offset in world.setup.records(world.setup.start, below) if not world.written[offset]]


def _may(world: World, anomaly: Anomaly) -> bool:
    return anomaly in world.setup.guarantee.permits


def _nothing_past_an_absent_record(world: World) -> bool:
    last = max((offset for offset, times in enumerate(world.written) if times), default=-1)
    return not _absent(world, below=last)


def _contiguous(world: World) -> bool:
    start, position = world.setup.start, world.position
    return [(span.start, span.until) for span in world.claims] == ([(start, position)] if start != position else [])


def _counted(world: World) -> bool:
    records = len(world.setup.records(world.setup.start, world.position))
    return world.entry is None or world.entry.counts == Counts(read=records, written=records)


def _only_visible(world: World) -> bool:
    held = {offset for offset, times in enumerate(world.written) if times}
    return held <= world.setup.visible and min(held, default=world.setup.start) >= world.setup.start


INVARIANTS: Mapping[str, Callable[[World], bool]] = MappingProxyType(
    {
        "no record is there twice": lambda w: _may(w, Anomaly.DUPLICATED) or max(w.written) < 2,
        # What is written and not claimed would be written again after a crash.
        "nothing is written above the position": lambda w: (
            _may(w, Anomaly.DUPLICATED) or not any(w.written[w.position :])
        ),
        "no record below the position is absent": lambda w: _may(w, Anomaly.LOST) or not _absent(w, w.position),
        # So a plan with a gap has written nothing, also where writing comes before claiming.
        "nothing is written past an absent record": lambda w: (
            _may(w, Anomaly.LOST) or _nothing_past_an_absent_record(w)
        ),
        "claims are contiguous from the adopted start": _contiguous,
        "only visible records from the start on are written": _only_visible,
        "a range that is done lies below the position": lambda w: not w.early,
        "only a foreign plan meets PositionBehind": lambda w: not w.gap,
        "counts agree with the records claimed": _counted,
    }
)


def anomalies(world: World) -> frozenset[Anomaly]:
    """What has gone wrong for good in a world, permitted or not."""
    anomalies_ = set()
    if max(world.written) > 1:
        anomalies_.add(Anomaly.DUPLICATED)
    # Absent is not lost while an attempt is alive that may still write it.
    hoped_for = {o for attempt in world.attempts for o in range(attempt.planned.start, attempt.planned.until)}
    if set(_absent(world, world.position)) - hoped_for:
        anomalies_.add(Anomaly.LOST)
    return frozenset(anomalies_)


# ---- The search ----


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search found."""

    setup: ModelSetup
    states: int  # worlds found, those with equal futures counted once
    broken: str | None  # the invariant that does not hold, if one does not; the search ended there
    trace: Trace  # how it was broken
    completed: Trace | None  # how the position came to the end of the log
    reached: Mapping[Anomaly, Trace]  # how each anomaly came about

    @property
    def holds(self) -> bool:
        """Every invariant holds, the end can be reached, and so can all that is permitted, and no more."""
        permits = self.setup.guarantee.permits
        return self.broken is None and self.completed is not None and self.reached.keys() == permits


def explore(first: World, most: int = 1_000_000) -> Explored:
    """Visit every world that can be reached, or the worlds up to the first that breaks an invariant."""
    setup = first.setup
    came_by: list[tuple[int, str]] = [(0, "")]  # by number of visit: the world before, and the move
    waiting = deque([(0, first)])
    seen = {_key(first)}
    completed: Trace | None = None
    reached: dict[Anomaly, Trace] = {}
    while waiting:
        number, world = waiting.popleft()
        broken = next((name for name, holds in INVARIANTS.items() if not holds(world)), None)
        if broken is not None:
            return Explored(setup, len(seen), broken, _trace(came_by, number), completed, MappingProxyType(reached))
        if completed is None and world.position == len(setup.log):
            completed = _trace(came_by, number)
        for anomaly in anomalies(world) - reached.keys():
            reached[anomaly] = _trace(came_by, number)
        for label, after in moves(world):
            key = _key(after)
            if key not in seen:
                seen.add(key)
                waiting.append((len(came_by), after))
                came_by.append((number, label))
        if len(seen) > most:
            raise RuntimeError(f"{setup.name}: more than {most} worlds; choose a smaller setup")
    return Explored(setup, len(seen), None, (), completed, MappingProxyType(reached))


def _key(world: World) -> tuple[object, ...]:
    """Equal for worlds whose futures are equal.

    How attempts are numbered and ordered changes nothing, nor does which of the records is there twice.
    """
    setup, written, *rest, attempts = world
    held = tuple(map(bool, written))
    return (setup, max(written), held, *rest, *sorted([attempt[:-1] for attempt in attempts], key=hash))


def _trace(came_by: Sequence[tuple[int, str]], number: int) -> Trace:
    labels = []
    while number:
        number, label = came_by[number]
        labels.append(label)
    return tuple(reversed(labels))


# ---- What is explored: the worlds, and the canaries ----


def setups(guarantee: Guarantee, rules: Rules | None = None) -> tuple[ModelSetup, ...]:
    """The worlds that a guarantee is explored in. The first is the widest."""
    rules = rules or Rules(guarantee.steps)
    # Offset 0 lies below the declared start; [1, 3) ends on a marker; [1, 4) can be left half written.
    wide = ModelSetup(
        "two runs, any checkpoint", guarantee, rules, "rr.r", frozenset({0, 1, 3, 4}), 1, checkpoints=True
    )
    # The log ends on a range of markers only, [2, 3).
    markers = ModelSetup("a range of markers", guarantee, rules, "rr.", frozenset({0, 2, 3}), checkpoints=True)
    attempts = ModelSetup("three attempts at once", guarantee, rules, "rr.", frozenset(range(4)), drivers=1, alive=3)
    # Safety must not rest on the fence.
    unfenced = replace(markers, name="the same, no fencing", rules=replace(rules, fencing=False))
    return wide, markers, unfenced, attempts


def canaries() -> Iterator[tuple[str, ModelSetup]]:
    """Wrong rules, each in the widest world. The search must catch every one."""
    for promised in Guarantee:
        for ordered in Guarantee:
            if ordered is not promised and not ordered.atomic:
                yield f"the order of {ordered}", setups(promised, Rules(ordered.steps))[0]
        real = Rules(promised.steps)
        yield "claim without compare-and-set", setups(promised, replace(real, claim=_claim_without_compare))[0]
        yield "claim on a fresh handle", setups(promised, replace(real, handle=lambda read, _: read))[0]
        yield "until is the last record seen + 1", setups(promised, replace(real, until=_until_last_seen))[0]
        by_batch = replace(real, batches=True, position=_position_by_batch, claim=_claim_without_compare)
        # One attempt at a time, planned from the ledger: nothing but the numbers is to blame.
        yield "identity by batch number", replace(setups(promised, by_batch)[0], alive=1, checkpoints=False)
    # Under the other two guarantees the claim's own compare-and-set catches it.
    word = Guarantee.AT_LEAST_ONCE
    yield "a gap is not stopped", setups(word, Rules(word.steps, judge=_judge_without_stop))[0]


def _claim_without_compare(entry: Entry, done: OffsetRange, run: int, counts: Counts) -> Entry:
    return ledger.claim(replace(entry, position=done.start), done, run, counts)


def _until_last_seen(rest: OffsetRange, records: Sequence[int]) -> int:
    return records[-1] + 1 if records else rest.start


def _position_by_batch(world: World, attempt: TaskAttempt) -> int:
    """A batch number that was claimed before is a replay, any other one is new."""
    return attempt.planned.until if attempt.batch in world.batches else attempt.planned.start


def _judge_without_stop(position: int, planned: OffsetRange) -> OffsetRange:
    return ledger.judge(max(position, planned.start), planned)


# ---- The report ----


def main() -> int:
    """Print what every search found. 0 only if every promise holds and every canary is caught."""
    good = True
    stories: list[tuple[str, Trace]] = []

    print(f"{'guarantee':<14} {'world':<25} {'states':>7}  {'verdict':<8} permitted anomaly")
    for guarantee in Guarantee:
        searches = [explore(setup.world()) for setup in setups(guarantee)]
        for result in searches:
            good &= result.holds
            verdict = "held" if result.holds else "broken" if result.broken else "unknown"
            permits = [
                f"{word}, {'reached' if word in result.reached else 'not reached'}" for word in guarantee.permits
            ]
            row = f"{guarantee:<14} {result.setup.name:<25} {result.states:>7,}  {verdict:<8}"
            print(row, *permits or ["none"])
            if result.broken:
                stories.append((f"{guarantee}, {result.setup.name}: broken, {result.broken}", result.trace))
        stories += [(f"{guarantee}: {word}", trace) for word, trace in searches[0].reached.items()]

    print(f"\n{'guarantee':<14} {'canary':<34} {'states':>7}  caught by")
    for name, setup in canaries():
        result = explore(setup.world())
        good &= result.broken is not None
        print(f"{setup.guarantee:<14} {name:<34} {result.states:>7,}  {result.broken or 'NOTHING: the model is blind'}")

    for title, trace in stories:
        print(f"\nA shortest way to {title}")
        for number, label in enumerate(trace, start=1):
            print(f"{number:>4}. {label}")
    print(f"\n{'Every promise holds and every canary is caught.' if good else 'NOT held: see above.'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
