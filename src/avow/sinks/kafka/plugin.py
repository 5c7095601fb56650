"""Kafka as a plugin: what it offers, and the way to its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from avow.errors import ConfigError
from avow.guarantee import Guarantee
from avow.settings import PipelineConfig, Problem
from avow.sinks.base import DeadLetterReader, DriverSink, Offer, RedriveSink, SinkPlugin, TaskSink
from avow.sinks.kafka.config import KafkaConfig, config_of, dead_letter_topic, declared_outputs, on_other_cluster

if TYPE_CHECKING:
    from avow.sinks.auditing import AuditReader


class KafkaPlugin(SinkPlugin):
    kind = "kafka"
    title = "Kafka"
    Config = KafkaConfig
    offers = {  # noqa: RUF012
        "append": Offer(
            {
                Guarantee.AT_MOST_ONCE: "The topic has each record's output at most once; a crash can lose it.",
                Guarantee.AT_LEAST_ONCE: "The topic has each record's output at least once; a crash can duplicate it.",
                Guarantee.EXACTLY_ONCE: "The topic has each record's output exactly once, for consumers with "
                "isolation.level=read_committed.",
            }
        ),
    }
    assumes = (
        "The output topics are durable: replicated, min.insync.replicas 2 or more, no unclean leader election.",
        "Under exactly-once, consumers of the output use isolation.level=read_committed. Others also get aborted "
        "records.",
        "The consumer group with the pipeline's name is the ledger: no other client joins it or commits offsets to it.",
        "The pipeline runs at least once within the brokers' offsets.retention.minutes (7 days by default): after that "
        "Kafka deletes its positions, and a run stops with an error.",
    )
    ledger_in_group = True
    atomic_writes = False  # outside of a transaction, some of the records of a failed write are there
    oracle = "avow.prove.oracles.kafka:KafkaOracle"
    faults = frozenset({"kafka-transactions"})

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.kafka.driver import KafkaDriver

        return KafkaDriver(pipeline)

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> TaskSink:  # noqa: ARG002
        from avow.sinks.kafka.task import KafkaTask

        return KafkaTask(pipeline, run)

    def open_redrive(self, pipeline: PipelineConfig) -> RedriveSink:
        from avow.sinks.kafka.task import KafkaTask

        return KafkaTask(pipeline, run=0, redriving=True)

    def open_dead_letters(self, pipeline: PipelineConfig) -> DeadLetterReader:
        from avow.sinks.kafka.dead_letters import KafkaDeadLetters

        return KafkaDeadLetters(pipeline)

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> AuditReader:
        from avow.sinks.kafka.audit import KafkaAuditReader, KafkaUnmarkedAuditReader

        return (KafkaAuditReader if config_of(pipeline).origin else KafkaUnmarkedAuditReader)(pipeline, snapshot)

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:
        if on_other_cluster(pipeline) and pipeline.guarantee.atomic:
            yield Problem(
                ("guarantee",),
                "a Kafka transaction cannot span clusters, but the output (sink.brokers) is on another cluster than "
                "the positions (source.brokers)",
                "at-most-once or at-least-once; or output topics on the source's cluster, without sink.brokers",
            )
        # Not in its settings: a plain consumer, which has dead letters and no output, is declared with one for both.
        if dead_letter_topic(pipeline) in declared_outputs(pipeline):
            yield Problem(
                ("sink", "dead_letter_topic" if config_of(pipeline).dead_letter_topic else "topic"),
                f"{dead_letter_topic(pipeline)!r} is both an output topic and the dead-letter topic",
                "two different topics",
            )

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:
        return f"topic {dead_letter_topic(pipeline)}"

    def warnings(self, pipeline: PipelineConfig) -> Iterator[str]:
        yield (
            f"The consumer group {pipeline.shown('name')} is reserved: it stores the positions, and no consumer may "
            "use it."
        )
        if on_other_cluster(pipeline):
            yield "The output is on another cluster: records and positions cannot be in one transaction."
        if not config_of(pipeline).origin:
            yield ("sink.origin = false: an audit matches records by content, so it can check counts and order only.")

    def topics_written(self, pipeline: PipelineConfig) -> frozenset[str]:
        sink = config_of(pipeline)
        return frozenset({dead_letter_topic(pipeline), *([] if sink.routed_by else [sink.topic])})

    def check_provable(self, pipeline: PipelineConfig) -> None:
        if config_of(pipeline).routed_by or not config_of(pipeline).origin:
            raise ConfigError(
                "sink.topic, sink.origin: a proof reads a single output topic, and matches records by avow-origin",
                advice="Prove the pipeline with a single output topic and sink.origin = true.",
            )


KAFKA = KafkaPlugin()
