"""PostgreSQL, read by psycopg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from avow.prove.oracles.base import OracleEnvironment, SqlOracle


class PostgresOracle(SqlOracle):
    prefix = "avow."
    _connection: psycopg.Connection | None = None

    def sink_config(self) -> dict[str, Any]:
        return {"url": "${env:DATABASE_URL}", "table": self.table}

    def try_query(self, query: str) -> list[tuple[Any, ...]] | None:
        """The connection is kept: a new one each time is a new process of the server."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self.cluster.url, connect_timeout=2, autocommit=True)
                return self._connection.execute(query.encode()).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
            except psycopg.OperationalError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                return None

    def query(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.cluster.url) as connection:
            return connection.execute(query.encode()).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class GroupOracle(PostgresOracle):
    """Rows are there, and the position is the group's: a plain consumer that has no ledger, runs or dead letters."""

    def __init__(self, cluster: OracleEnvironment, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(cluster, folder, pipeline, table)
        self._positions: dict[int, int] = {}  # as last seen: its coordinator may be away

    def positions(self) -> dict[int, int]:
        committed = self.cluster.committed(self.pipeline, self.pipeline)
        self._positions |= {number: offset for number, (offset, _) in committed.items()}
        return dict(self._positions)

    def claiming_run(self) -> int:
        return 0

    def dead_letters(self) -> list[tuple[int, int]]:
        return []
