"""One ADBC connection that reads: results as Arrow batches, as they come, for the audit.

psycopg has no Arrow; for a table of millions of rows a Python object per value would cost more than all the rest of an
audit. It is ADBC's own interface, not its DB-API layer: importing that one imports pandas, by way of pyarrow.dataset, a
second and a half for the driver and for every worker.

Owns: the connection. Its errors are raised as psycopg's, which ``session`` translates. Must not know: the ledger or any
table. Nothing is ever written over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import adbc_driver_postgresql
import psycopg
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement
from adbc_driver_manager import Error as AdbcError
from adbc_driver_manager._reader import AdbcRecordBatchReader

from avow.sinks.postgres.session import (
    IDLE_IN_TRANSACTION_S,
    connect_error,
    interpolate,
    local_settings,
    with_keepalive,
)

USE_COPY = "adbc.postgresql.use_copy"  # ADBC's own name


class ArrowSession:
    def __init__(self, url: str, application: str) -> None:
        try:
            self._database = adbc_driver_postgresql.connect(with_keepalive(url))
            self._connection = AdbcConnection(self._database)
        except AdbcError as error:
            raise connect_error(str(error), url) from None
        self._application = application

    def begin(self, how: str) -> None:
        """A transaction until the session is closed."""
        self.run(f"BEGIN {how}; {local_settings(self._application, IDLE_IN_TRANSACTION_S)}")

    def run(self, sql: str) -> None:
        with _as_psycopg_error(), self._statement(sql) as statement:
            statement.execute_update()

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """A small result, whole. Without COPY, which would take twice the time."""
        with self.reader(interpolate(sql, values), **{USE_COPY: "false"}) as reader:
            return list(zip(*(column.to_pylist() for column in reader.read_all().columns), strict=True))

    @contextmanager
    def reader(self, sql: str, **options: str) -> Iterator[pa.RecordBatchReader]:
        """The result as it comes. The reader is ADBC's own: an error while rows are read then is the database's."""
        with _as_psycopg_error(), self._statement(sql, **options) as statement:
            stream, _ = statement.execute_query()
            reader = AdbcRecordBatchReader._import_from_c(stream.address)
            try:
                yield reader
            finally:
                reader.close()

    @contextmanager
    def _statement(self, sql: str, **options: str) -> Iterator[AdbcStatement]:
        statement = AdbcStatement(self._connection)
        try:
            statement.set_options(**options)
            statement.set_sql_query(sql)
            yield statement
        finally:
            statement.close()

    def close(self) -> None:
        with suppress(AdbcError):
            self._connection.close()
            self._database.close()


@contextmanager
def _as_psycopg_error() -> Iterator[None]:
    try:
        yield
    except AdbcError as error:
        details = {_text(key): _text(value) for key, value in error.details or ()}
        try:
            kind = psycopg.errors.lookup(error.sqlstate or "")
        except KeyError:  # a code of somebody's trigger, or none
            kind = psycopg.OperationalError
        raise kind(details.get("PG_DIAG_MESSAGE_PRIMARY") or str(error).splitlines()[0]) from None


def _text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")
