"""Pipelines with a table for each topic: their parts, and one sink made of those of all topics.

For a sink whose ledger is in its table (``ledger_by_topic``), each topic's part of the pipeline is a whole pipeline
with a sink of its own. ``TopicsDriver`` and ``TopicsDeadLetters`` are all of these as one, for who asks about all.

Owns: the way from a pipeline to its parts. Must not know: any one sink. Neighbours: ``avow.settings`` (what a part is)
and the engines, which deliver each topic by its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime

from avow.errors import ConfigError
from avow.kafka.log import Log, TopicPartition
from avow.ledger import NOTHING, Counts, Entry, OffsetRange
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.settings.values import Refused
from avow.sinks.base import (
    Claim,
    Claimed,
    DeadLetter,
    DeadLetterReader,
    DriverSink,
    PartitionState,
    Selection,
)


def part_of(pipeline: PipelineConfig, topic: str) -> PipelineConfig:
    """What of a pipeline with a table for each topic is about this one, or a ConfigError that says why it cannot be;
    of any other pipeline all."""
    if not pipeline.sink.by_topic:
        return pipeline
    try:
        return pipeline.for_topic(topic)
    except Refused as error:
        wrong, allowed = error.problems[0].wrong, error.problems[0].allowed
    raise ConfigError(
        f"topic {topic} cannot have a table of its own: {wrong}",
        advice=f"Allowed: {allowed}. Give the topic a pipeline of its own, with another table.",
    )


def topics_of(pipeline: PipelineConfig) -> list[str]:
    """The topics that it reads: those that are listed, or those that match the pattern now."""
    if pipeline.source.topics_pattern is None:
        return sorted(pipeline.source.topics)
    with Log(pipeline.source, pipeline.name) as log:
        return sorted({tp.topic for tp in log.partitions()})


def parts_of(pipeline: PipelineConfig) -> dict[str, PipelineConfig]:
    """The part of each topic. Without those that cannot have a table: nothing of them is anywhere."""
    parts = {}
    for topic in topics_of(pipeline):
        try:
            parts[topic] = part_of(pipeline, topic)
        except ConfigError:
            continue
    return parts


class TopicsDriver(DriverSink):
    """The drivers' sinks of all topics as one, to be asked what there is. What changes something is asked of the
    topic's own (``open_topic``)."""

    def __init__(self, pipeline: PipelineConfig, open_driver: Callable[[PipelineConfig], DriverSink]) -> None:
        self._pipeline = pipeline
        self._open_driver = open_driver
        self._opened: dict[str, DriverSink] = {}
        self._closing = ExitStack()

    def close(self) -> None:
        self._opened.clear()
        self._closing.close()

    def _of(self, part: PipelineConfig) -> DriverSink:
        topic = part.topic
        assert topic is not None
        if topic not in self._opened:
            self._opened[topic] = self._closing.enter_context(self._open_driver(part))
        return self._opened[topic]

    def open_topic(self, part: PipelineConfig) -> DriverSink:
        assert part.topic is not None
        self._opened[part.topic] = sink = self._closing.enter_context(self._open_driver(part))
        sink.prepare()
        return sink

    def prepare(self) -> None:
        """Each topic is prepared by itself."""

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        raise NotImplementedError("each topic's own")

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        raise NotImplementedError("each topic's own")

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        raise NotImplementedError("each topic's own")

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = NOTHING) -> None:
        raise NotImplementedError("each topic's own")

    def entries(self) -> dict[TopicPartition, Entry]:
        """Of the topics that are known by now."""
        return {tp: entry for topic, sink in self._all() for tp, entry in sink.entries().items() if tp.topic == topic}

    def ledger_snapshot(self) -> dict[TopicPartition, PartitionState]:
        for part in parts_of(self._pipeline).values():
            self._of(part)
        return {
            tp: state
            for topic, sink in self._all()
            for tp, state in sink.ledger_snapshot().items()
            if tp.topic == topic
        }

    def claims_of(self, tp: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:
        return self._of(part_of(self._pipeline, tp.topic)).claims_of(tp, offsets)

    def claims(self, limit: int) -> list[Claim] | None:
        claims = [sink.claims(limit) for _, sink in self._all()]
        kept = [claim for of_topic in claims if of_topic is not None for claim in of_topic]
        return sorted(kept, key=lambda claim: claim.at, reverse=True) if None not in claims and claims else None

    def keepalive(self) -> None:
        for _, sink in self._all():
            sink.keepalive()

    def _all(self) -> Iterator[tuple[str, DriverSink]]:
        return iter(sorted(self._opened.items()))


class TopicsDeadLetters(DeadLetterReader):
    """The dead letters of all topics, or of those that a selection names."""

    def __init__(
        self, pipeline: PipelineConfig, open_dead_letters: Callable[[PipelineConfig], DeadLetterReader]
    ) -> None:
        self._pipeline = pipeline
        self._open_dead_letters = open_dead_letters
        self._opened: dict[str, DeadLetterReader] = {}
        self._closing = ExitStack()

    def close(self) -> None:
        self._opened.clear()
        self._closing.close()

    def _readers(self, selection: Selection) -> Iterator[DeadLetterReader]:
        for topic, part in parts_of(self._pipeline).items():
            if selection.topic not in (None, topic):
                continue
            if topic not in self._opened:
                self._opened[topic] = self._closing.enter_context(self._open_dead_letters(part))
            yield self._opened[topic]

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        counts: dict[str, tuple[int, datetime]] = {}
        for reader in self._readers(selection):
            for reason, count, last in reader.by_reason(selection):
                before, newest = counts.get(reason, (0, last))
                counts[reason] = before + count, max(newest, last)
        return sorted(((reason, *count) for reason, count in counts.items()), key=lambda line: -line[1])

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        return [tp for reader in self._readers(selection) for tp in reader.partitions(selection)]

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        selected: list[DeadLetter] = []
        for reader in self._readers(selection):  # in the order of topics
            if len(selected) < limit:
                selected += reader.select(selection, limit - len(selected))
        return selected
