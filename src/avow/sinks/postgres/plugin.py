"""PostgreSQL as a plugin: what it offers, and the way to its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetterReader, DriverSink, SinkPlugin, TaskSink
from avow.sinks.offers import TABLE_OFFERS
from avow.sinks.postgres.config import PostgresConfig

if TYPE_CHECKING:
    from avow.sinks.auditing import AuditReader


class PostgresPlugin(SinkPlugin):
    kind = "postgres"
    title = "PostgreSQL"
    Config = PostgresConfig
    offers = TABLE_OFFERS
    assumes = (
        "Commits are durable: fsync and synchronous_commit are on, and a failover loses no commit.",
        "Only avow changes the tables of schema avow, which hold the ledger.",
    )
    spans_partitions = True
    refuses_nul = True
    oracle = "avow.prove.oracles.postgres:PostgresOracle"
    faults = frozenset({"postgres-server"})

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.postgres.driver import PostgresDriver

        return PostgresDriver(pipeline)

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> TaskSink:  # noqa: ARG002
        from avow.sinks.postgres.task import PostgresTask

        return PostgresTask(pipeline, run)

    def open_dead_letters(self, pipeline: PipelineConfig) -> DeadLetterReader:
        from avow.sinks.postgres.dead_letters import PostgresDeadLetters

        return PostgresDeadLetters(pipeline)

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> AuditReader:
        from avow.sinks.postgres.audit import PostgresAuditReader

        return PostgresAuditReader(pipeline, snapshot)

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:  # noqa: ARG002
        return "avow.dead_letters"

    def warnings(self, pipeline: PipelineConfig) -> Iterator[str]:  # noqa: ARG002
        yield (
            "Database connections: one for the driver and one for each Python worker of Spark. That is as many as "
            "tasks run at once (spark.master, executor cores), with a transform by SQL at most twice as many."
        )


POSTGRES = PostgresPlugin()
