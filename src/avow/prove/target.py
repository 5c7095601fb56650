"""Where a cell's rows go: how its sink is declared, and how it is read back without any code of the sinks.

PostgreSQL is read by psycopg, a Delta table by deltalake, an Iceberg table by pyiceberg and pyarrow, each with a fresh
eye and as little as possible in between.

Owns: the scratch place of each kind of sink. Must not know: pipelines, the audit, how anything was written.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from psycopg import sql
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from sqlalchemy.exc import SQLAlchemyError


class Target(ABC):
    """One cell's sink. ``url`` is PostgreSQL past its proxy; ``folder`` is the cell's own."""

    def __init__(self, url: str, folder: Path, pipeline: str, table: str) -> None:
        self.url, self.folder, self.pipeline, self.table = url, folder, pipeline, table

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """What the pipeline file says under [sink] to get there."""

    @abstractmethod
    def count(self) -> int | None:
        """How many rows there are; 0 if the table is not there yet, None while nobody answers."""

    @abstractmethod
    def positions(self) -> dict[int, int]:
        """By partition."""

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """The whole table."""

    @abstractmethod
    def dead(self) -> list[tuple[int, int]]:
        """Partition and offset of every dead letter."""

    def close(self) -> None:
        return None


class PostgresTarget(Target):
    def __init__(self, url: str, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(url, folder, pipeline, table)
        self._connection: psycopg.Connection | None = None
        self._asking = threading.Lock()

    def section(self) -> dict[str, Any]:
        return {"url": "${env:DATABASE_URL}", "table": self.table}

    def count(self) -> int | None:
        found = self._asked(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self.table)))
        return None if found is None else int(found[0][0]) if found else 0

    def positions(self) -> dict[int, int]:
        query = sql.SQL("SELECT partition, position FROM avow.ledger WHERE pipeline = {}")
        return dict(self._asked(query.format(sql.Literal(self.pipeline))) or [])

    def _asked(self, query: sql.Composed) -> list[tuple[Any, ...]] | None:
        """Nothing if the table is not there yet, None if nobody answers. The connection is kept: a new one each time
        is a new process of the server."""
        with self._asking:
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self.url, connect_timeout=2, autocommit=True)
                return self._connection.execute(query).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
            except psycopg.OperationalError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                return None

    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        listed = sql.SQL(", ").join(map(sql.Identifier, columns))
        query = sql.SQL("SELECT {} FROM {}").format(listed, sql.Identifier(self.table))
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def dead(self) -> list[tuple[int, int]]:
        query = 'SELECT partition, "offset" FROM avow.dead_letters WHERE pipeline = %s'
        with psycopg.connect(self.url) as connection:
            return [(row[0], row[1]) for row in connection.execute(query, [self.pipeline]).fetchall()]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class DeltaTarget(Target):
    @property
    def _path(self) -> str:
        return str(self.folder / "lake" / self.table)

    def section(self) -> dict[str, Any]:
        return {"path": self._path}

    def _newest(self, suffix: str = "") -> DeltaTable | None:
        try:
            return DeltaTable(self._path + suffix)
        except TableNotFoundError:
            return None

    def count(self) -> int | None:
        try:
            found = self._newest()
            return found.count() if found is not None else 0
        except (DeltaError, OSError):  # in the middle of being made, or no room
            return None

    def positions(self) -> dict[int, int]:
        positions: dict[int, int] = {}
        found = self._newest()
        while found is not None:
            position = found.transaction_version(f"avow/{self.pipeline}/{self.pipeline}/{len(positions)}")
            if position is None:
                break
            positions[len(positions)] = position
        return positions

    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        found = self._newest()
        rows = found.to_pyarrow_table(columns=list(columns)).to_pylist() if found is not None else []
        return [tuple(row[name] for name in columns) for row in rows]

    def dead(self) -> list[tuple[int, int]]:
        found = self._newest("_dead_letters")
        rows = found.to_pyarrow_table(columns=["partition", "offset"]).to_pylist() if found is not None else []
        return [(row["partition"], row["offset"]) for row in rows]


class IcebergTarget(Target):
    def section(self) -> dict[str, Any]:
        return {"table": f"lake.{self.table}", "catalog": {"warehouse": str(self._place)}}

    @property
    def _place(self) -> Path:
        return self.folder / "lake"

    def _catalog(self) -> Catalog:
        return SqlCatalog(
            "default",
            uri=f"sqlite:///{self._place}/catalog.db",
            warehouse=f"file://{self._place}",
            init_catalog_tables="false",
        )

    def _newest(self, suffix: str = "") -> Table | None:
        if not (self._place / "catalog.db").exists():
            return None
        try:
            return self._catalog().load_table(f"lake.{self.table}{suffix}")
        except (NoSuchTableError, SQLAlchemyError):
            return None

    def count(self) -> int | None:
        try:
            found = self._newest()
            return found.scan().count() if found is not None else 0
        except OSError:
            return None

    def positions(self) -> dict[int, int]:
        found = self._newest()
        told = json.loads(found.properties.get(f"avow.{self.pipeline}", "{}")) if found is not None else {}
        held = json.loads(told["book"])["held"] if told else []
        return {line[1]: line[4] for line in held}

    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._read(self._newest(), columns)

    def dead(self) -> list[tuple[int, int]]:
        return [(row[0], row[1]) for row in self._read(self._newest("_dead_letters"), ["partition", "offset"])]

    def _read(self, table: Table | None, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        rows = []
        for task in table.scan().plan_files() if table is not None else ():
            found = pq.read_table(task.file.file_path.removeprefix("file://"), columns=list(columns)).to_pylist()
            rows += [tuple(row[name] for name in columns) for row in found]
        return rows


TARGETS: Mapping[str, Callable[[str, Path, str, str], Target]] = MappingProxyType(
    {"postgres": PostgresTarget, "delta": DeltaTarget, "iceberg": IcebergTarget}
)
