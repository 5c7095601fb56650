"""PostgreSQL, read by psycopg."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from avow.prove.witnesses.base import Around, TableWitness


class PostgresWitness(TableWitness):
    def __init__(self, site: Around, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(site, folder, pipeline, table)
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

    def claiming_run(self) -> int:
        query = sql.SQL("SELECT coalesce(max(run), 0) FROM avow.claims WHERE pipeline = {}")
        found = self._asked(query.format(sql.Literal(self.pipeline)))
        return int(found[0][0]) if found else 0

    def bytes(self) -> int:
        found = self._asked(sql.SQL("SELECT pg_total_relation_size(to_regclass({}))").format(sql.Literal(self.table)))
        return int(found[0][0] or 0) if found else 0

    def _asked(self, query: sql.Composed) -> list[tuple[Any, ...]] | None:
        """Nothing if the table is not there yet, None if nobody answers. The connection is kept: a new one each time
        is a new process of the server."""
        with self._asking:
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self.site.url, connect_timeout=2, autocommit=True)
                return self._connection.execute(query).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
            except psycopg.OperationalError:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                return None

    def read(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        listed = sql.SQL(", ").join(map(sql.Identifier, columns))
        query = sql.SQL("SELECT {} FROM {}").format(listed, sql.Identifier(self.table))
        with psycopg.connect(self.site.url) as connection:
            return connection.execute(query).fetchall()

    def dead(self) -> list[tuple[int, int]]:
        query = 'SELECT partition, "offset" FROM avow.dead_letters WHERE pipeline = %s'
        with psycopg.connect(self.site.url) as connection:
            return [(row[0], row[1]) for row in connection.execute(query, [self.pipeline]).fetchall()]

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.site.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class GroupWitness(PostgresWitness):
    """Rows are there, and the position is the group's: a plain consumer that has no ledger, runs or dead letters."""

    def __init__(self, site: Around, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(site, folder, pipeline, table)
        self._positions: dict[int, int] = {}  # as last seen: its coordinator may be away

    def positions(self) -> dict[int, int]:
        told = self.site.committed(self.pipeline, self.pipeline)
        self._positions |= {number: offset for number, (offset, _) in told.items()}
        return dict(self._positions)

    def claiming_run(self) -> int:
        return 0

    def dead(self) -> list[tuple[int, int]]:
        return []
