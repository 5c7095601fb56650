"""The sink's side of an audit, as every kind of sink gives it: rows in order of their offsets, dead letters, ledger.

All of it is read at one moment. The driver's reading chooses that moment, and ``snapshot`` names it, so that every task
can join it: then the ledger's position is of the same moment as the rows, also while the pipeline runs on.

Owns: the protocol, the opener by kind, and handing rows out piece by piece. Must not know: what is wrong with a row.
Neighbours: one module per kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import numpy as np
import pyarrow as pa

from avow.audit.content import Contents
from avow.audit.findings import Finding, Offsets
from avow.audit.judge import Known
from avow.kafka.log import TopicPartition
from avow.schema import Field
from avow.settings import Delta, Iceberg, Kafka, PipelineConfig, Postgres, Sink


class Reading(Protocol):
    """One pipeline's sink at one moment."""

    @property
    def snapshot(self) -> str:
        """Names the moment, for tasks that join."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def known(self) -> dict[TopicPartition, Known]:
        """The pipeline's ledger. Empty if it never ran."""

    def letters(self, where: TopicPartition) -> Offsets:
        """The offsets of all dead letters of a partition, ascending."""

    def row_counts(self) -> dict[TopicPartition, int]:
        """How many rows of which partition there are."""

    def rows_below(self, where: TopicPartition, offset: int) -> int:
        """How many rows of a partition lie below an offset."""

    def rows(self, where: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        """The rows of a partition from an offset on, ascending by offset, never all at once."""

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:
        """The columns of rows as they are compared. ``payload`` are those that the pipeline makes."""

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that the pipeline makes, as the sink should have them."""

    def comparable(self, due: pa.RecordBatch, there: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that are there, without what may be anything where these are due."""

    def lets_go(self) -> str:
        """Why the sink may lack rows that it had, by its own doing; empty if it keeps them all. Asked in the driver."""

    def order_findings(self) -> Iterator[Finding]:
        """Where rows do not stand in their order, for sinks that keep one."""

    def contents(self) -> Contents | None:
        """All rows by what they hold, if they do not say which record they came from."""

    def notes(self) -> Iterator[str]:
        """What is not wrong, and a reader should know."""

    def json_columns(self, fields: tuple[Field, ...]) -> frozenset[str]:
        """The columns that the sink keeps as JSON: compared by what they say, not by how it is spelled."""


class TableReading:
    """What is the same of every sink that is a table: rows are kept as they were made, and have no order."""

    _sink: Sink

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:
        return (*payload, *self._sink.lineage)

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        return due

    def comparable(self, due: pa.RecordBatch, there: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG002
        return there

    def lets_go(self) -> str:
        return ""

    def order_findings(self) -> Iterator[Finding]:
        return iter(())

    def contents(self) -> None:
        return None

    def notes(self) -> Iterator[str]:
        return iter(())


def open_reading(pipeline: PipelineConfig, snapshot: str | None = None) -> Reading:
    """The pipeline's sink now, or at a moment that another reading has named."""
    match pipeline.sink:
        case Postgres():
            from avow.audit.postgres import PostgresReading

            return PostgresReading(pipeline, snapshot)
        case Kafka():
            from avow.audit.kafka import KafkaReading, KafkaUnmarked

            return (KafkaReading if pipeline.sink.origin else KafkaUnmarked)(pipeline, snapshot)
        case Delta() | Iceberg():
            from avow.audit.lake import LakeReading

            return LakeReading(pipeline, snapshot)


class Ordered:
    """The rows of one partition, ascending by offset, handed out piece by piece."""

    def __init__(self, batches: Iterator[pa.RecordBatch], offset: str) -> None:
        self._offset = offset
        self._batches = batches
        self._ahead: pa.RecordBatch | None = None  # read, and not handed out yet

    def take(self, until: int) -> Iterator[pa.RecordBatch]:
        """The next rows, up to this offset. To be read to its end before anything else is taken."""
        while (batch := self._ahead if self._ahead is not None else next(self._batches, None)) is not None:
            cut = int(np.searchsorted(batch.column(self._offset).to_numpy(), until))
            self._ahead = batch.slice(cut) if cut < batch.num_rows else None
            if cut:
                yield batch.slice(0, cut)
            if self._ahead is not None:
                break

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All rows that are left."""
        if self._ahead is not None:
            yield self._ahead
            self._ahead = None
        yield from self._batches
