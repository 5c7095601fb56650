"""The contract of a sink's audit reader: rows in order of their offsets, dead letters, ledger, all of one moment.

The driver's reading chooses that moment, and ``snapshot`` names it, so that every task can join it: then the ledger's
position is of the same moment as the rows, also while the pipeline runs on.

Owns: that contract. Must not know: any sink, or what is wrong with a row. Its neighbour is ``avow.audit``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from avow.findings import Finding, Offsets
from avow.kafka.log import TopicPartition
from avow.ledger import Entry
from avow.schema import Array, Field, Map, Struct
from avow.settings import REST_COLUMN, SinkConfig
from avow.sinks.base import ClosingContext

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Known:
    """What the sink's ledger knows of one partition."""

    entry: Entry
    start: int  # where its first claim began, or will begin
    claim_starts: Offsets  # of the claims that are kept, ascending
    claim_untils: Offsets


@dataclass(frozen=True, slots=True)
class Evolved:
    """A column that ``sink.evolve`` has added, or widened from a float, when one partition stood at a position. Rows of
    records before it may have no value there, or a float's; one that a redrive has brought in since has its own."""

    column: str
    until: int  # that position
    was_float: bool  # else it was not there


CONTENT = "content"  # the column


@dataclass(frozen=True, slots=True)
class Contents:
    """What is there, in the order in which it stands in its place."""

    content: Numbers
    place: Numbers  # an output partition
    late: Mask  # came late by declaration, so that its order says nothing


class AuditReader(Protocol):
    """One pipeline's sink at one moment. A sink whose rows are in a table subclasses ``TableAuditReader``. What has an
    answer here is the same for sinks that store rows as they were made, in no order, and keep them."""

    @property
    def snapshot(self) -> str:
        """Names the moment, for tasks that join."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def known(self) -> dict[TopicPartition, Known]:
        """The pipeline's ledger. Empty if it never ran."""

    def dead_letters(self, tp: TopicPartition) -> Offsets:
        """The offsets of all dead letters of a partition, ascending."""

    def row_counts(self) -> dict[TopicPartition, int]:
        """How many rows of which partition there are."""

    def rows_below(self, tp: TopicPartition, offset: int) -> int:
        """How many rows of a partition lie below an offset."""

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        """The rows of a partition from an offset on, ascending by offset, never all at once."""

    def evolved(self, tp: TopicPartition) -> Sequence[Evolved]:  # noqa: ARG002
        """What was added and widened while there were rows of a partition."""
        return ()

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:
        """The columns of rows as they are compared. ``payload`` are those that the pipeline makes."""

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that the pipeline makes, as the sink should have them."""
        return due

    def comparable(self, due: pa.RecordBatch, stored: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG002
        """Rows that are there, without what may be anything where these are due."""
        return stored

    def retention_reason(self) -> str:
        """Why the sink may lack rows that it had, by its own doing; empty if it keeps them all. Asked in the driver."""
        return ""

    def order_findings(self) -> Iterator[Finding]:
        """Where rows do not stand in their order, for sinks that keep one."""
        return iter(())

    def contents(self) -> Contents | None:
        """All rows by what they hold, if they do not say which record they came from."""
        return None

    def notes(self) -> Iterator[str]:
        """What is not wrong, and a reader should know."""
        return iter(())

    def json_columns(self, fields: tuple[Field, ...]) -> frozenset[str]:  # noqa: ARG002
        """The columns that the sink keeps as JSON: compared by what they say, not by how it is spelled."""
        return frozenset()


class TableAuditReader(ClosingContext, AuditReader):
    """What is the same of every sink that is a table."""

    _sink: SinkConfig
    snapshot = ""  # assigned by the reader

    @abstractmethod
    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]: ...

    def rows_below(self, tp: TopicPartition, offset: int) -> int:
        column, count = self._sink.lineage.offset, 0
        for batch in self.rows(tp, [column], 0) if offset else ():
            below = int(np.searchsorted(batch.column(0).to_numpy(), offset))
            count += below
            if below < batch.num_rows:
                break
        return count

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:
        return (*payload, *self._sink.lineage)

    def json_columns(self, fields: tuple[Field, ...]) -> frozenset[str]:
        """Nested values and unknown fields, unless the table has types for them."""
        nested = (field.name for field in fields if isinstance(field.type, Array | Map | Struct))
        return frozenset({REST_COLUMN, *nested})
