"""One ADBC connection, with BEGIN, COMMIT and savepoints in our own hands.

The connection is in ADBC's autocommit mode on purpose: in its other mode the driver begins transactions by itself, and
then cannot go back to a savepoint after a refused COPY. And it is ADBC's own interface, not its DB-API layer: importing
that one imports pandas, by way of pyarrow.dataset, a second and a half for the driver and for every worker.

Owns: the connection and what its errors mean. Must not know: the ledger or any table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement, StatementOptions
from adbc_driver_manager import Error as DatabaseError
from adbc_driver_manager._reader import AdbcRecordBatchReader

from avow.errors import SinkError

# A zombie that holds a row's lock must not hold it for ever, nor must one who waits for it.
IDLE_IN_TRANSACTION_S = 120
LOCK_WAIT_S = 60

# ADBC's own names, as its specification has them.
INGEST_TABLE, INGEST_MODE, INGEST_APPEND = "adbc.ingest.target_table", "adbc.ingest.mode", "adbc.ingest.mode.append"
USE_COPY = "adbc.postgresql.use_copy"


class Queries(Protocol):
    """What the ledger's SQL needs of a connection."""

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]: ...

    def run(self, sql: str, *values: str) -> int:
        """Gives the number of rows that it touched."""


class Session:
    def __init__(self, url: str, application: str) -> None:
        try:
            self._database = adbc_driver_postgresql.connect(url)
            self._connection = AdbcConnection(self._database)
        except DatabaseError as error:
            raise SinkError(
                f"PostgreSQL does not let us in: {plain(error, url)}",
                advice="Check that the server runs, and sink.url: host, port, database, user and password.",
            ) from None
        self.run(f"SET application_name = {literal(application)}")
        self.run(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
        self.run(f"SET lock_timeout = '{LOCK_WAIT_S}s'")
        self.run("SET client_min_messages = 'warning'")
        self.run("SET standard_conforming_strings = on")

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """A small result, whole. Without COPY, which would take twice the time."""
        with self.reader(filled(sql, values), **{USE_COPY: "false"}) as reader:
            return list(zip(*(column.to_pylist() for column in reader.read_all().columns), strict=True))

    def run(self, sql: str, *values: str) -> int:
        with self._statement(filled(sql, values)) as statement:
            return int(statement.execute_update())

    def run_many(self, sql: str, values: pa.RecordBatch) -> None:
        """Once per row of ``values``, whose columns are the parameters."""
        with self._statement(sql) as statement:
            statement.prepare()
            statement.bind(values)
            statement.execute_update()

    def copy(self, table: str, rows: pa.RecordBatch, *, schema: str | None = None, temporary: bool = False) -> int:
        """Binary COPY of ``rows`` by column name. Gives the number of rows that the server took."""
        options = {INGEST_TABLE: table, INGEST_MODE: INGEST_APPEND}
        if schema is not None:
            options[StatementOptions.INGEST_TARGET_DB_SCHEMA.value] = schema
        if temporary:
            options[StatementOptions.INGEST_TEMPORARY.value] = "true"
        with self._statement(None, **options) as statement:
            statement.bind(rows)
            return int(statement.execute_update())

    @contextmanager
    def reader(self, sql: str, **options: str) -> Iterator[pa.RecordBatchReader]:
        """The result as it comes. The reader is ADBC's own: an error while rows are read then is the database's."""
        with self._statement(sql, **options) as statement:
            stream, _ = statement.execute_query()
            reader = AdbcRecordBatchReader._import_from_c(stream.address)
            try:
                yield reader
            finally:
                reader.close()

    @contextmanager
    def _statement(self, sql: str | None, **options: str) -> Iterator[AdbcStatement]:
        statement = AdbcStatement(self._connection)
        try:
            statement.set_options(**options)
            if sql is not None:
                statement.set_sql_query(sql)
            yield statement
        finally:
            statement.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.run("BEGIN")
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):  # the connection may be gone, and the transaction with it
                self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """What fails inside is undone, and the transaction goes on."""
        self.run("SAVEPOINT avow")
        try:
            yield
        except DatabaseError as error:
            if refused(error):
                self.run("ROLLBACK TO SAVEPOINT avow")
            raise
        self.run("RELEASE SAVEPOINT avow")

    def close(self) -> None:
        with suppress(DatabaseError):
            self._connection.close()
            self._database.close()


@contextmanager
def as_sink_error(what: str) -> Iterator[None]:
    """An error of the database is told as ours, with what was tried."""
    try:
        yield
    except DatabaseError as error:
        raise SinkError(
            f"{what}: {message(error)}", advice="Check the server's log and the rights of sink.url's user."
        ) from None


def refused(error: DatabaseError) -> bool:
    """Whether the server refused a row for what is in it (SQLSTATE class 22 or 23), and not for something passing."""
    return (error.sqlstate or "")[:2] in ("22", "23")


def refused_line(error: DatabaseError) -> int | None:
    """Which row of a COPY was refused, from 0, if the server says so."""
    found = re.search(r"^COPY .*?, line (\d+)", _diagnostic(error, "PG_DIAG_CONTEXT"), re.MULTILINE | re.DOTALL)
    return int(found[1]) - 1 if found else None


def message(error: DatabaseError) -> str:
    """What the server said, in one line, with its SQLSTATE."""
    text = _diagnostic(error, "PG_DIAG_MESSAGE_PRIMARY") or str(error).splitlines()[0]
    return f"{text} (SQLSTATE {error.sqlstate})" if error.sqlstate else text


def plain(error: DatabaseError, url: str) -> str:
    """An error's text without the address, which may hold a password."""
    return without_url(str(error), url)


def without_url(text: str, url: str) -> str:
    text = text.replace(url, "sink.url")
    for secret in re.findall(r"://[^/@:]*:([^@]+)@|[?&]password=([^&]+)", url):
        for part in filter(None, secret):
            text = text.replace(part, "***")
    return text.strip()


def _diagnostic(error: DatabaseError, name: str) -> str:
    for key, value in error.details or ():
        if (key if isinstance(key, str) else key.decode()) == name:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def name(text: str) -> str:
    """A quoted identifier."""
    return '"' + text.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A quoted string. ``standard_conforming_strings`` is on, so a quote is all there is to escape."""
    return "'" + text.replace("'", "''") + "'"


def filled(sql: str, values: tuple[str, ...]) -> str:
    """Texts put in place of $1, $2, ... here and not by the driver: its binding of one text imports pandas, which costs
    a worker's first task half a second. Only for SQL of our own: it must hold neither somebody's identifiers nor
    somebody's texts, in which a $1 would be filled in too. What is filled in is not looked at again."""
    return re.sub(r"\$(\d)", lambda found: literal(values[int(found[1]) - 1]), sql) if values else sql


_sessions: dict[tuple[int, str], Session] = {}


def cached(url: str, application: str) -> Session:
    """This process's own connection, opened once: opening one costs more than a small batch.

    Keyed by pid, because Spark's Python workers are forked, and a connection must not be shared by two.
    """
    key = (os.getpid(), url)
    if key not in _sessions:
        _sessions[key] = Session(url, application)
    return _sessions[key]


def forget(url: str) -> None:
    """Drop this process's connection: it broke, or the server ended it."""
    session = _sessions.pop((os.getpid(), url), None)
    if session:
        session.close()
