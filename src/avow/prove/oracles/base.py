"""Oracles read a sink back for the proof, without the sink's own code.

Owns: their interface. Must not know: any one sink.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from avow.prove.check import COLUMNS, Row


class OracleEnvironment(Protocol):
    """The parts of the test cluster that an oracle uses, all of them without a proxy."""

    @property
    def url(self) -> str:
        """PostgreSQL."""

    @property
    def bootstrap(self) -> str:
        """The brokers."""

    def ends(self, topic: str) -> dict[int, int]:
        """The end of each partition."""

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str]]:
        """A group's positions with their metadata."""

    def drop_topic(self, name: str) -> None: ...


class Oracle(ABC):
    """Of the sink of one pipeline. ``folder`` is the pipeline's own; its input topic has its name."""

    cells_max: ClassVar[int] = 1_000  # per pipeline; beyond that, reading it back costs more than a new one

    def __init__(self, cluster: OracleEnvironment, folder: Path, pipeline: str, table: str) -> None:
        self.cluster, self.folder, self.pipeline, self.table = cluster, folder.absolute(), pipeline, table
        self._lock = threading.Lock()  # of a client that is kept for asking about progress

    @abstractmethod
    def sink_config(self) -> dict[str, Any]:
        """The keys under [sink] of the cell's pipeline file."""

    @property
    def output_topic(self) -> str:
        """The topic that it is, to be followed by a reader while faults go on; empty if it is none."""
        return ""

    @property
    def files(self) -> Path | None:
        """The folder that holds its data and nothing else; None if it has none on this machine."""
        return None

    # Progress. Called from several threads, also while the sink is down.

    @abstractmethod
    def count(self) -> int | None:
        """The number of rows, for the chart; None while the sink cannot be read."""

    @abstractmethod
    def positions(self) -> dict[int, int]:
        """By partition; empty while the sink cannot be read."""

    @abstractmethod
    def claiming_run(self) -> int:
        """The newest run that has claimed anything."""

    # Content, for the check: read with fresh clients.

    @abstractmethod
    def numbered_rows(self) -> list[Row]:
        """Rows of the harness's numbered records."""

    @abstractmethod
    def origins(self, lineage: Sequence[str]) -> list[tuple[int, int]]:
        """Partition and offset of the record of each row, whatever its columns."""

    @abstractmethod
    def dead_letters(self) -> list[tuple[int, int]]:
        """The same of dead letters."""

    def close(self) -> None:
        """Release connections."""
        return None


class TableOracle(Oracle):
    """Rows are in a table, with their lineage in columns."""

    @abstractmethod
    def read(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """The whole table."""

    def numbered_rows(self) -> list[Row]:
        return [Row(*row) for row in self.read(COLUMNS)]

    def origins(self, lineage: Sequence[str]) -> list[tuple[int, int]]:
        _, partition, offset, _ = lineage
        return [(row[0], row[1]) for row in self.read([partition, offset])]


def quote_identifier(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


class SqlOracle(TableOracle):
    """A table that is queried by SQL, with ledger, claims and dead letters in tables beside it."""

    prefix: ClassVar[str]  # of the names of these

    @abstractmethod
    def query(self, query: str) -> list[tuple[Any, ...]]:
        """By a fresh client."""

    @abstractmethod
    def try_query(self, query: str) -> list[tuple[Any, ...]] | None:
        """Called from several threads, also while the sink is down: None if it cannot be reached, no rows if the table
        does not exist yet."""

    def _select(self, columns: str, table: str) -> str:
        return f"SELECT {columns} FROM {self.prefix}{table} WHERE pipeline = '{self.pipeline}'"

    def count(self) -> int | None:
        rows = self.try_query(f"SELECT count(*) FROM {quote_identifier(self.table)}")
        return None if rows is None else int(rows[0][0]) if rows else 0

    def positions(self) -> dict[int, int]:
        return {row[0]: row[1] for row in self.try_query(self._select("partition, position", "ledger")) or []}

    def claiming_run(self) -> int:
        rows = self.try_query(self._select("coalesce(max(run), 0)", "claims"))
        return int(rows[0][0]) if rows else 0

    def read(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return self.query(f"SELECT {', '.join(map(quote_identifier, columns))} FROM {quote_identifier(self.table)}")

    def dead_letters(self) -> list[tuple[int, int]]:
        return [(row[0], row[1]) for row in self.query(self._select('partition, "offset"', "dead_letters"))]
