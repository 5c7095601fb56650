"""PostgreSQL as a plugin: what it offers, and the way to its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from avow.settings import PipelineConfig
from avow.sinks.base import DriverSink, Letters, Redriving, SinkPlugin, TaskSink
from avow.sinks.offers import TABLE_OFFERS
from avow.sinks.postgres.config import PostgresConfig

if TYPE_CHECKING:
    from avow.sinks.reading import Reading


class PostgresPlugin(SinkPlugin):
    kind = "postgres"
    title = "PostgreSQL"
    Config = PostgresConfig
    offers = TABLE_OFFERS
    assumes = (
        "The server keeps what it has committed: fsync and synchronous_commit are on, and a failover loses no commit.",
        "Nobody else changes the tables of schema avow, which hold the ledger.",
    )
    spans_partitions = True
    refuses_nul = True
    witness = "avow.prove.witnesses.postgres:PostgresWitness"
    faults = frozenset({"postgres-server"})

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.postgres.store import Store

        return Store(pipeline)

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> TaskSink:  # noqa: ARG002
        from avow.sinks.postgres.task import PostgresTask

        return PostgresTask(pipeline, run)

    def open_redrive(self, pipeline: PipelineConfig) -> Redriving:
        from avow.sinks.postgres.task import PostgresTask

        return PostgresTask(pipeline, run=0)

    def open_dead_letters(self, pipeline: PipelineConfig) -> Letters:
        from avow.sinks.postgres.letters import PostgresLetters

        return PostgresLetters(pipeline)

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> Reading:
        from avow.sinks.postgres.audit import PostgresReading

        return PostgresReading(pipeline, snapshot)

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:  # noqa: ARG002
        return "avow.dead_letters"

    def warnings(self, pipeline: PipelineConfig) -> Iterator[str]:  # noqa: ARG002
        yield (
            "Database connections: one for the driver and one for each Python worker of Spark. That is as many as "
            "tasks run at once (spark.master, executor cores), with a transform by SQL at most twice as many."
        )


POSTGRES = PostgresPlugin()
