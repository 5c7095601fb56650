"""Kafka as a plugin: what it offers, and the way to its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from avow.errors import ConfigError
from avow.guarantee import Guarantee
from avow.settings import PipelineConfig, Problem
from avow.sinks.base import DriverSink, Letters, Offer, Redriving, SinkPlugin, TaskSink
from avow.sinks.kafka.config import KafkaConfig, config_of, dead_letter_topic, declared_outputs, on_other_cluster

if TYPE_CHECKING:
    from avow.sinks.reading import Reading


class KafkaPlugin(SinkPlugin):
    kind = "kafka"
    title = "Kafka"
    Config = KafkaConfig
    offers = {  # noqa: RUF012
        "append": Offer(
            {
                Guarantee.AT_MOST_ONCE: "What a record gives is in the topic at most once; a crash can lose it.",
                Guarantee.AT_LEAST_ONCE: "What a record gives is in the topic; a crash can put it there twice.",
                Guarantee.EXACTLY_ONCE: "What a record gives is in the topic exactly once, for those who read "
                "committed records.",
            }
        ),
    }
    assumes = (
        "The output topics are durable: replicated, min.insync.replicas 2 or more, no unclean leader election.",
        "Under exactly-once, readers of the output use isolation.level = read_committed. Others see what was aborted.",
        "The consumer group named like the pipeline is the ledger: nobody else joins it or commits to it.",
        "The pipeline runs at least once within the brokers' offsets.retention.minutes (7 days unless set): after that "
        "Kafka forgets its positions, and a run stops and says so.",
    )
    ledger_in_group = True
    atomic_writes = False  # outside of a transaction, some of the records of a failed write are there
    witness = "avow.prove.witnesses.kafka:KafkaWitness"
    faults = frozenset({"kafka-transactions"})

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.kafka.store import Store

        return Store(pipeline)

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> TaskSink:  # noqa: ARG002
        from avow.sinks.kafka.task import KafkaTask

        return KafkaTask(pipeline, run)

    def open_redrive(self, pipeline: PipelineConfig) -> Redriving:
        from avow.sinks.kafka.task import KafkaTask

        return KafkaTask(pipeline, run=0, redriving=True)

    def open_dead_letters(self, pipeline: PipelineConfig) -> Letters:
        from avow.sinks.kafka.letters import KafkaLetters

        return KafkaLetters(pipeline)

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> Reading:
        from avow.sinks.kafka.audit import KafkaReading, KafkaUnmarked

        return (KafkaReading if config_of(pipeline).origin else KafkaUnmarked)(pipeline, snapshot)

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:
        if on_other_cluster(pipeline) and pipeline.guarantee.atomic:
            yield Problem(
                ("guarantee",),
                "a Kafka transaction ends at its cluster, and the output (sink.brokers) is on another than the "
                "positions (source.brokers)",
                "at-most-once or at-least-once; or output topics on the source's cluster, without sink.brokers",
            )
        # Not in its settings: a plain consumer, which has dead letters and no output, is declared with one for both.
        if dead_letter_topic(pipeline) in declared_outputs(pipeline):
            yield Problem(
                ("sink", "dead_letter_topic" if config_of(pipeline).dead_letter_topic else "topic"),
                f"{dead_letter_topic(pipeline)!r} is an output topic and the one for dead letters",
                "two topics",
            )

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:
        return f"topic {dead_letter_topic(pipeline)}"

    def warnings(self, pipeline: PipelineConfig) -> Iterator[str]:
        yield f"The group {pipeline.shown('name')} is reserved: it holds the positions, and no consumer may use it."
        if on_other_cluster(pipeline):
            yield "The output is on another cluster: rows and positions cannot be in one act."
        if not config_of(pipeline).origin:
            yield (
                "sink.origin = false: an audit knows records by what they hold, so it can check counts and order only."
            )

    def topics_written(self, pipeline: PipelineConfig) -> frozenset[str]:
        sink = config_of(pipeline)
        return frozenset({dead_letter_topic(pipeline), *([] if sink.routed_by else [sink.topic])})

    def check_provable(self, pipeline: PipelineConfig) -> None:
        if config_of(pipeline).routed_by or not config_of(pipeline).origin:
            raise ConfigError(
                "sink.topic, sink.origin: a proof reads one output topic, and knows records by their origin",
                advice="Prove the pipeline with one topic and sink.origin = true.",
            )


KAFKA = KafkaPlugin()
