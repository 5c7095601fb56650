"""The topics of a run whose pipeline has a table for each: their parts of the pipeline, and which of them have stopped.

Theory of operation
-------------------
Such a pipeline is one run with one ledger position for each partition, as any other; but what is done for a topic is
done by its part of the pipeline (``PipelineConfig.for_topic``): its own table, columns and decoder. So a topic can fail
alone. A stop by name (``TOPIC_STOPS``) in what is done for a topic, or a failure that came back as often as an attempt
may fail, stops this topic for the rest of the run, and not the others, unless ``sink.on_topic_failure`` says so. The
run ends with ``TopicsStopped`` then.

With one table for all topics nothing of this is different from what it was: the part is the whole pipeline, and a stop
is raised as it is.

Owns: which topics go on. Must not know: what is done for a topic. Its neighbour is ``driver``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from avow import formats
from avow.engines.columns import Columns
from avow.engines.progress import Observer
from avow.errors import (
    AvowError,
    ConfigError,
    LogTruncated,
    RetentionLoss,
    SourceError,
    TooManyDeadLetters,
    TopicRecreated,
    TopicsStopped,
    first_line,
)
from avow.kafka.log import Log, TopicPartition
from avow.settings import PipelineConfig, TableSinkConfig, shared_places
from avow.sinks.topics import part_of

# What is one topic's alone when it happens in what is done for that topic.
TOPIC_STOPS = (ConfigError, LogTruncated, RetentionLoss, TooManyDeadLetters, TopicRecreated)


class GaveUp(Exception):
    """A topic has failed too often, and the others may not go on without it: ends the run with its error."""

    def __init__(self, error: AvowError) -> None:
        super().__init__(str(error))
        self.error = error


class Topics:
    """Of one run, over its attempts. ``columns``: those of a part of the pipeline in the sink."""

    def __init__(
        self, pipeline: PipelineConfig, columns: Callable[[PipelineConfig], Columns], observer: Observer
    ) -> None:
        self.pipeline = pipeline
        self.by_topic = pipeline.sink.by_topic
        self.stopped: dict[str, AvowError] = {}
        self.columns_of = columns
        self._columns: dict[str, Columns] = {}
        self._parts: dict[str, PipelineConfig] = {}
        self._failures: Counter[str] = Counter()  # in a row
        self._observer = observer

    # What is declared of one

    def part(self, topic: str) -> PipelineConfig:
        """What of the pipeline is about this topic; where there is one table for all, that is all of it."""
        if not self.by_topic:
            return self.pipeline
        if topic not in self._parts:
            self._parts[topic] = resolved_part(self.pipeline, topic)
        return self._parts[topic]

    def columns(self, topic: str = "") -> Columns:
        """Of this topic's table, or of the one that there is."""
        part = self.part(topic)
        own = topic if part.decode is not self.pipeline.decode else ""  # most parts share them
        if own not in self._columns:
            self._columns[own] = self.columns_of(part)
        return self._columns[own]

    def renew(self, topic: str = "") -> None:
        """A topic's records have other columns than its table was prepared for, or those of all topics have."""
        self._columns.pop(topic, None)
        if self.by_topic:
            self._parts.pop(topic, None)
        else:
            self.pipeline = formats.renewed(self.pipeline)

    def check_places(self, topics: Collection[str], known: Collection[str]) -> None:
        """Stop topics whose table is that of another topic: of two that are new both, else the one that the ledger does
        not know."""
        sinks = {}
        for topic in topics:
            with self.apart(topic):
                sinks[topic] = part_of(self.pipeline, topic).sink
        for topic, other in sorted(shared_places(sinks).items()):
            if topic in known and other not in known:
                continue
            with self.apart(topic):
                raise ConfigError(
                    f"topic {topic} cannot have {sinks[topic].target}: it would be that of topic {other} too",
                    advice="Give one of the two a pipeline of its own, with another table.",
                )

    # Which go on

    def partitions(self, log: Log) -> dict[TopicPartition, str]:
        """Every partition of the topics that go on -> topic id. A topic that is declared and does not exist stops."""
        source = self.pipeline.source
        if not self.by_topic or source.topics_pattern is not None:
            return self.going(log.partitions())
        known = log.partitions_of([t for t in source.topics if t not in self.stopped], skip_missing=True)
        for topic in set(source.topics) - self.stopped.keys() - {tp.topic for tp in known}:
            self.stop(topic, SourceError(f"topic {topic} does not exist at {log.admin.connection}"))
        return known

    def going(self, partitions: Mapping[TopicPartition, str]) -> dict[TopicPartition, str]:
        return {tp: topic_id for tp, topic_id in partitions.items() if tp.topic not in self.stopped}

    @contextmanager
    def apart(self, topic: str) -> Iterator[None]:
        """Around what is done for one topic: what stops it by name stops it alone."""
        try:
            yield
        except TOPIC_STOPS as error:
            self.stop(topic, error)

    def stop(self, topic: str, error: AvowError) -> None:
        """It is not delivered any more in this run. Raises the error where the others may not go on without it."""
        sink = self.pipeline.sink
        if not self.by_topic or (isinstance(sink, TableSinkConfig) and sink.on_topic_failure == "stop-all"):
            raise error
        if topic not in self.stopped:
            self.stopped[topic] = error
            self._observer.event(f"topic {topic} stopped, the others go on: {first_line(error)}")

    def failed(self, topic: str) -> int:
        """How often a topic has failed without a name since it was last delivered."""
        self._failures[topic] += 1
        return self._failures[topic]

    def delivered(self, topic: str) -> None:
        self._failures.pop(topic, None)

    def raise_stopped(self) -> None:
        """At the end of the run."""
        if self.stopped:
            raise TopicsStopped(self.stopped)


def resolved_part(pipeline: PipelineConfig, topic: str) -> PipelineConfig:
    """The part of one topic, with its columns: of a format that takes them from a registry each topic has its own. Of a
    pipeline with one table all of it."""
    return formats.renewed(part_of(pipeline, topic)) if pipeline.sink.by_topic else pipeline
