"""The kinds of sinks: what each offers, and the one place where a pipeline gets its own.

A new kind is a settings class (``avow.settings``), an entry here, and a case in each of the five openers below. Its
module is imported when it is opened, so that a command waits for no client that it does not use.

Owns: the registry. Must not know: how a kind writes. Its neighbour is ``base`` (the shape of all this).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from avow.guarantee import Guarantee
from avow.settings import Delta, Iceberg, Kafka, PipelineConfig, Postgres
from avow.sinks.base import DriverSink, Letters, Offer, Redriving, SinkKind, StagingSink, TaskSink

if TYPE_CHECKING:
    from avow.sinks.lake.table import LakeTable

__all__ = [
    "SINKS",
    "Offer",
    "SinkKind",
    "dead_letters",
    "driver_sink",
    "lake_tables",
    "redriving",
    "task_sink",
]

_POSTGRES = SinkKind(
    kind="postgres",
    title="PostgreSQL",
    offers=MappingProxyType(
        {
            "append": Offer(
                {
                    Guarantee.AT_MOST_ONCE: "What a record gives is in the table at most once; a crash can lose it.",
                    Guarantee.AT_LEAST_ONCE: "What a record gives is in the table; a crash can put it there twice.",
                    Guarantee.EXACTLY_ONCE: "What a record gives is in the table exactly once.",
                }
            ),
            "dedupe": Offer(
                {
                    Guarantee.AT_MOST_ONCE: "At most one row per key; a crash can lose the first record of a key, "
                    "and then a later one takes its place, or none.",
                    Guarantee.AT_LEAST_ONCE: "One row per key, also after a crash: what is written again meets its "
                    "own key and is skipped.",
                    Guarantee.EXACTLY_ONCE: "One row per key, from the first record that brought it.",
                }
            ),
            "upsert": Offer(
                {
                    Guarantee.AT_MOST_ONCE: "One row per key; a crash can lose a change, and the row stays as it was "
                    "until the key's next record.",
                    Guarantee.AT_LEAST_ONCE: "One row per key, from its last record: what is written again has no "
                    "later offset and changes nothing, unless its row was deleted meanwhile.",
                    Guarantee.EXACTLY_ONCE: "One row per key, from its last record; a null value deletes it.",
                }
            ),
        }
    ),
    assumes=(
        "The server keeps what it has committed: fsync and synchronous_commit are on, and a failover loses no commit.",
        "Nobody else changes the tables of schema avow, which hold the ledger.",
    ),
    spanning=True,
)

_KAFKA = SinkKind(
    kind="kafka",
    title="Kafka",
    offers=MappingProxyType(
        {
            "append": Offer(
                {
                    Guarantee.AT_MOST_ONCE: "What a record gives is in the topic at most once; a crash can lose it.",
                    Guarantee.AT_LEAST_ONCE: "What a record gives is in the topic; a crash can put it there twice.",
                    Guarantee.EXACTLY_ONCE: "What a record gives is in the topic exactly once, for those who read "
                    "committed records.",
                }
            ),
        }
    ),
    assumes=(
        "The output topics are durable: replicated, min.insync.replicas 2 or more, no unclean leader election.",
        "Under exactly-once, readers of the output use isolation.level = read_committed. Others see what was aborted.",
        "The consumer group named like the pipeline is the ledger: nobody else joins it or commits to it.",
        "The pipeline runs at least once within the brokers' offsets.retention.minutes (7 days unless set): after that "
        "Kafka forgets its positions, and a run stops and says so.",
    ),
    ledger_in_group=True,
)

_DELTA = SinkKind(
    kind="delta",
    title="Delta Lake",
    offers=_POSTGRES.offers,
    assumes=(
        "The store keeps what it has acknowledged, and puts a file under a new name only if there is none (a local "
        "file system does, and S3 with conditional puts).",
        "Nobody restores the table to an older version or removes its transactions; both are looked for at the start.",
    ),
)

_ICEBERG = SinkKind(
    kind="iceberg",
    title="Iceberg",
    offers=_POSTGRES.offers,
    assumes=(
        "The catalog keeps what it has acknowledged, and compares the table's newest snapshot before it commits.",
        "Nobody removes the table's avow.* properties or rolls the table back; both are looked for at the start.",
    ),
)

SINKS: Mapping[str, SinkKind] = MappingProxyType({kind.kind: kind for kind in (_POSTGRES, _DELTA, _ICEBERG, _KAFKA)})


def driver_sink(pipeline: PipelineConfig) -> DriverSink:
    """The pipeline's sink, for the driver of a run."""
    match pipeline.sink:
        case Postgres():
            from avow.sinks.postgres import Store

            return Store(pipeline)
        case Kafka():
            from avow.sinks.kafka import Store as KafkaStore

            return KafkaStore(pipeline)
        case Delta() | Iceberg():
            from avow.sinks.lake.driver import LakeDriver

            return LakeDriver(pipeline, *lake_tables(pipeline))


def lake_tables(pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
    """A lake's table of rows, and that of its dead letters."""
    if isinstance(pipeline.sink, Delta):
        from avow.sinks.delta import open_tables

        return open_tables(pipeline)
    from avow.sinks.iceberg import open_tables as open_iceberg_tables

    return open_iceberg_tables(pipeline)


def task_sink(pipeline: PipelineConfig, run: int, brief: bytes) -> TaskSink | StagingSink:
    """The pipeline's sink, for one task of a run. ``brief`` is what the driver's side says to all of them."""
    match pipeline.sink:
        case Postgres():
            from avow.sinks.postgres import PostgresTask

            return PostgresTask(pipeline, run)
        case Kafka():
            from avow.sinks.kafka import KafkaTask

            return KafkaTask(pipeline, run)
        case Delta() | Iceberg():
            from avow.sinks.lake.staging import LakeStaging

            return LakeStaging(pipeline, run, brief)


def redriving(pipeline: PipelineConfig) -> Redriving:
    """The pipeline's sink, for a redrive."""
    match pipeline.sink:
        case Postgres():
            from avow.sinks.postgres import PostgresTask

            return PostgresTask(pipeline, run=0)
        case Kafka():
            from avow.sinks.kafka import KafkaTask

            return KafkaTask(pipeline, run=0, redriving=True)
        case Delta() | Iceberg():
            from avow.sinks.lake.redrive import LakeRedriving

            return LakeRedriving(pipeline, *lake_tables(pipeline))


def dead_letters(pipeline: PipelineConfig) -> Letters:
    """The pipeline's dead letters, for looking at."""
    match pipeline.sink:
        case Postgres():
            from avow.sinks.postgres import PostgresLetters

            return PostgresLetters(pipeline)
        case Kafka():
            from avow.sinks.kafka import KafkaLetters

            return KafkaLetters(pipeline)
        case Delta() | Iceberg():
            from avow.sinks.lake.redrive import LakeLetters

            return LakeLetters(*lake_tables(pipeline))
