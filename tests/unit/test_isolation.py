"""Which records make attempts fail: found in few attempts, with every other record delivered once."""

from __future__ import annotations

import random
from collections.abc import Collection
from threading import Event

import pytest
from confluent_kafka import KafkaError

from avow.engines.consumer import ConsumerRun
from avow.engines.driver import ATTEMPTS_WITHOUT_PROGRESS, RunAttempt
from avow.engines.isolation import IN_A_ROW_MAX, BatchPart, Isolation
from avow.engines.progress import SILENT
from avow.errors import ConfigError, PositionBehind, PositionMoved, SinkError, SourceError, TooManyDeadLetters
from avow.kafka.connect import Connection
from avow.kafka.log import TopicPartition
from avow.ledger import OffsetRange


class World:
    """A log of some partitions, and a sink that fails on some of their offsets."""

    def __init__(self, lengths: dict[int, int], poison: Collection[tuple[int, int]], most: int) -> None:
        self.ends = {TopicPartition("t", number): length for number, length in lengths.items()}
        self.positions = dict.fromkeys(self.ends, 0)
        self.poison = {(TopicPartition("t", number), offset) for number, offset in poison}
        self.aside: list[tuple[int, int]] = []
        self.events: list[str] = []
        self.isolation = Isolation((ConfigError,), self.events.append)
        self.most = most
        self.outage = False  # then the sink takes nothing at all
        self.worst = 0  # attempts in a row without progress

    def bad(self, part: BatchPart) -> bool:
        return any(where in part.ranges and offset in span(part, where) for where, offset in self.poison)

    def attempt(self) -> None:
        """One batch after the other, all partitions in one act, until one fails."""
        while self.positions != self.ends:
            ranges = {
                where: OffsetRange("t", where.partition, at, min(at + self.most, self.ends[where]))
                for where, at in self.positions.items()
                if at < self.ends[where]
            }
            for part in self.isolation.parts(ranges):
                with self.isolation.trying(part):
                    if self.outage:
                        raise RuntimeError("away")
                    if part.set_aside:
                        ((where, one),) = part.ranges.items()
                        assert len(one) == 1
                        self.aside.append((where.partition, one.start))
                    elif self.bad(part):
                        raise RuntimeError("died")
                    for where, done in part.ranges.items():
                        assert done.start == self.positions[where]
                        self.positions[where] = done.until

    def run(self) -> None:
        failures = 0
        while self.positions != self.ends:
            before = dict(self.positions)
            try:
                self.attempt()
            except RuntimeError:
                failures = 1 if self.positions != before else failures + 1
                self.worst = max(self.worst, failures)


def span(part: BatchPart, where: TopicPartition) -> range:
    return range(part.ranges[where].start, part.ranges[where].until)


@pytest.mark.parametrize("seed", range(20))
def test_only_what_fails_is_set_aside(seed: int) -> None:
    chance = random.Random(seed)
    lengths = {number: chance.choice([0, 1, 40, 5_000]) for number in range(3)}
    everything = [(number, offset) for number, length in lengths.items() for offset in range(length)]
    poison = chance.sample(everything, min(len(everything), chance.choice([0, 1, 2])))
    world = World(lengths, poison, chance.choice([1, 7, 500, 1_000_000]))
    world.run()
    assert sorted(world.aside) == sorted(poison)
    assert world.worst <= ATTEMPTS_WITHOUT_PROGRESS


def test_the_first_of_half_a_million_is_found_before_the_attempts_are_over() -> None:
    world = World({0: 500_000}, [(0, 0)], 500_000)
    world.run()
    assert world.aside == [(0, 0)]
    assert world.worst <= ATTEMPTS_WITHOUT_PROGRESS
    said = "offset 0 of t/0 could not be processed, and is a dead letter, unless it was claimed before: died"
    assert said in world.events


def test_a_failure_that_passes_sets_nothing_aside() -> None:
    world = World({0: 100, 1: 100}, [(0, 3)], 50)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            world.attempt()
    world.poison.clear()
    world.run()
    assert world.aside == []


@pytest.mark.parametrize("failures", range(12))
@pytest.mark.parametrize("length", [1, 100])
def test_an_outage_sets_nothing_aside_however_long_it_lasts(failures: int, length: int) -> None:
    world = World({0: length}, [], 1_000)
    world.outage = True
    for _ in range(failures):
        with pytest.raises((RuntimeError, SourceError)):
            world.attempt()
    world.outage = False
    world.run()
    assert world.aside == []


def test_what_fails_for_every_record_stops_the_run() -> None:
    world = World({0: 100}, [(0, offset) for offset in range(100)], 50)
    with pytest.raises(TooManyDeadLetters, match="the one at offset 3 fails too: died"):
        world.run()
    assert len(world.aside) == IN_A_ROW_MAX


def test_a_stop_by_name_isolates_nothing() -> None:
    isolation = Isolation((ConfigError,), lambda _: None)
    ranges = {TopicPartition("t", 0): OffsetRange("t", 0, 0, 10)}
    for _ in range(5):
        (part,) = isolation.parts(ranges)
        assert part == BatchPart(ranges)
        with pytest.raises(ConfigError), isolation.trying(part):
            raise ConfigError("no")


def test_a_record_that_cannot_even_be_set_aside_is_named() -> None:
    isolation = Isolation((), lambda _: None)
    ranges = {TopicPartition("t", 0): OffsetRange("t", 0, 7, 8)}
    for _ in range(2):
        (part,) = isolation.parts(ranges)
        with pytest.raises(RuntimeError), isolation.trying(part):
            raise RuntimeError("first")
    said = ["again", "second"]

    def attempt() -> None:
        for part in isolation.parts(ranges):
            with isolation.trying(part):
                raise RuntimeError(said.pop(0))

    with pytest.raises(SourceError, match=r"offset 7 of t/0 .*\(again\) nor kept .*: second"):
        attempt()


NO_LEADER = Connection("b:1", error=SinkError).translate("write records", KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


@pytest.mark.parametrize("error", [PositionMoved("fenced"), PositionBehind("lost"), NO_LEADER])
def test_who_comes_first_and_what_is_away_is_no_records_fault(error: Exception) -> None:
    """A busy redrive that fences each try of a run would else make dead letters of its records, and so would an output
    partition without a leader, beside a dead-letter topic that has one."""
    running = ConsumerRun.__new__(ConsumerRun)
    running._stop, running._observer, running._once = Event(), SILENT, False
    seen: list[Isolation] = []

    def make(isolation: Isolation) -> RunAttempt:
        seen.append(isolation)
        running.stop()
        raise RuntimeError("no attempt is needed")

    running._attempts(make)
    ranges = {TopicPartition("t", 0): OffsetRange("t", 0, 0, 1)}
    for _ in range(5):
        (part,) = seen[0].parts(ranges)
        assert part == BatchPart(ranges)
        with pytest.raises(type(error)), seen[0].trying(part):
            raise error


def test_what_kafka_does_not_answer_is_no_records_fault() -> None:
    """Also where a Spark worker has raised it, and Spark reports it as text: else the ranges of a broker that is away
    would be delivered in pieces, a Spark job each."""
    away = "Traceback (most recent call last):\navow.errors.SourceError: could not read t/0: nothing came for 30 s\n"

    class OfSpark(Exception):
        _stackTrace = away  # noqa: N815 - as pyspark names it

    isolation = Isolation((SourceError, ConfigError), lambda _: None)
    ranges = {TopicPartition("t", 0): OffsetRange("t", 0, 0, 64)}
    for error in (OfSpark("the job failed"), SourceError("away")) * 3:
        (part,) = isolation.parts(ranges)
        assert part == BatchPart(ranges)
        with pytest.raises(type(error)), isolation.trying(part):
            raise error
