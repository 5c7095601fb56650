"""One ADBC connection, with BEGIN, COMMIT and savepoints in our own hands.

Everything runs in a transaction, and every setting is ``SET LOCAL`` in it: behind a pooler that hands out a server's
connection for each transaction (PgBouncer) nothing of ours stays behind on one that somebody else gets next, and the
preparing of a statement and its execution reach the same one.

The connection is in ADBC's autocommit mode on purpose: in its other mode the driver begins transactions by itself, and
then cannot go back to a savepoint after a refused COPY. And it is ADBC's own interface, not its DB-API layer: importing
that one imports pandas, by way of pyarrow.dataset, a second and a half for the driver and for every worker.

Owns: the connection and what its errors mean. Must not know: the ledger or any table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import unquote

import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement, StatementOptions
from adbc_driver_manager import Error as DatabaseError
from adbc_driver_manager._reader import AdbcRecordBatchReader

from avow.client_cache import ClientCache
from avow.errors import AvowError, ConfigError, SinkError
from avow.sinks.base import Refusal

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
            self._database = adbc_driver_postgresql.connect(with_keepalive(url))
            self._connection = AdbcConnection(self._database)
        except DatabaseError as error:
            raise connect_error(str(error), url) from None
        self.application = application  # the name of the next transactions
        self._in_transaction = False

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """A small result, whole. Without COPY, which would take twice the time."""
        if not self._in_transaction:
            with self.transaction():
                return self.query(sql, *values)
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

    def copy(self, table: str, rows: pa.RecordBatch, *, schema: str | None = None, temporary: bool = False) -> None:
        """Binary COPY of ``rows`` by column name."""
        options = {INGEST_TABLE: table, INGEST_MODE: INGEST_APPEND}
        if schema is not None:
            options[StatementOptions.INGEST_TARGET_DB_SCHEMA.value] = schema
        if temporary:
            options[StatementOptions.INGEST_TEMPORARY.value] = "true"
        with self._statement(None, **options) as statement:
            statement.bind(rows)
            statement.execute_update()  # what it gives is the number of rows sent, whatever the server took

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

    def begin(self, how: str = "") -> None:
        self.run(f"BEGIN {how}; {local_settings(self.application, IDLE_IN_TRANSACTION_S)}")
        self._in_transaction = True

    def commit(self) -> None:
        self._in_transaction = False
        self.run("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        except BaseException:
            self._in_transaction = False
            with suppress(DatabaseError):  # the connection may be gone, and the transaction with it
                self.run("ROLLBACK")
            raise
        self.commit()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """What fails inside is undone, and the transaction goes on. Deferred constraints are checked at its end: at the
        commit it would be too late to find the row that violates one."""
        self.run("SAVEPOINT avow")
        try:
            yield
            self.run("SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT avow")
        except DatabaseError:
            with suppress(DatabaseError):  # the connection may be gone: the error that is raised says so
                self.run("ROLLBACK TO SAVEPOINT avow")
            raise

    def close(self) -> None:
        with suppress(DatabaseError):
            self._connection.close()
            self._database.close()


@contextmanager
def as_sink_error(what: str) -> Iterator[None]:
    """An error of the database as ours, with what was tried. One that trying again cannot heal is a ConfigError."""
    try:
        yield
    except DatabaseError as error:
        state = error.sqlstate or ""
        kind = ConfigError if _PERMANENT.match(state) else SinkError
        raise kind(f"{what}: {message(error)}", advice=_ADVICE.get(state, _CHECK)) from None


# The classes of SQLSTATE that are about the connection, the server or the transaction, and not about what is in a row
# (https://www.postgresql.org/docs/current/errcodes-appendix.html). Any other is an answer to a row: also those that a
# trigger makes up.
_NOT_OF_A_ROW = re.compile("08|0B|25|26|28|2D|34|3B|3D|3F|40|53|55|57|58|72|F0|XX")
# These come again until somebody changes the pipeline or the table, or grants a right.
_PERMANENT = re.compile("0A|28|3D|3F|42")
_CHECK = "Check the server's log and the rights of sink.url's user."
_ADVICE = {
    "25006": "The server takes no writes: it is a standby, or default_transaction_read_only is on. Connect to the "
    "primary (with several hosts in sink.url: target_session_attrs=read-write).",
    "42501": "Grant the user of sink.url the right that is named (docs/PIPELINE.md lists what a pipeline needs).",
}


def refused(error: DatabaseError) -> bool:
    """Whether the server refused a row for what is in it, and not for something passing, or for whatever row."""
    state = error.sqlstate or ""
    if state[:2] in ("0A", "42"):  # our own statements are refused without a context, what a trigger runs has one
        return bool(_diagnostic(error, "PG_DIAG_CONTEXT"))
    return len(state) == 5 and not _NOT_OF_A_ROW.match(state)


def refused_line(error: DatabaseError) -> int | None:
    """Which row of a COPY was refused, from 0, if the server says so."""
    found = re.search(r"^COPY .*?, line (\d+)", _diagnostic(error, "PG_DIAG_CONTEXT"), re.MULTILINE | re.DOTALL)
    return int(found[1]) - 1 if found else None


def message(error: DatabaseError) -> str:
    """What the server said, in one line, with its SQLSTATE."""
    text = _diagnostic(error, "PG_DIAG_MESSAGE_PRIMARY") or str(error).splitlines()[0]
    return f"{text} (SQLSTATE {error.sqlstate})" if error.sqlstate else text


def refusal(error: DatabaseError) -> Refusal:
    """Why a row was refused, with the server's DETAIL, as the detail of a dead letter."""
    detail = _diagnostic(error, "PG_DIAG_MESSAGE_DETAIL")
    return Refusal(f"{message(error)}{f'. {detail}' if detail else ''}", error.sqlstate or "")


def without_url(text: str, url: str) -> str:
    """An error's text without the address, which may hold a password."""
    text = text.replace(url, "sink.url")
    for secret in re.findall(r"://[^/@:]*:([^@]+)@|[?&](?:password|sslpassword)=([^&]+)", url):
        for part in filter(None, secret):
            text = text.replace(part, "***").replace(unquote(part), "***")
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
    """A quoted string, that means the same whether ``standard_conforming_strings`` is on or off."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in quoted else quoted


def filled(sql: str, values: tuple[str, ...]) -> str:
    """Texts put in place of $1, $2, ... here and not by the driver: its binding of one text imports pandas, which costs
    a worker's first task half a second. Only for SQL of our own: it must hold neither somebody's identifiers nor
    somebody's texts, in which a $1 would be filled in too. What is filled in is not looked at again."""
    return re.sub(r"\$(\d)", lambda found: literal(values[int(found[1]) - 1]), sql) if values else sql


# A connection that nobody answers on is noticed within a minute, and not after two hours or never.
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}


def with_keepalive(url: str) -> str:
    """The URL with keepalives, unless it has its own."""
    base, _, query = url.partition("?")
    given = {pair.partition("=")[0] for pair in query.split("&")}
    added = [f"{name}={value}" for name, value in _KEEPALIVE.items() if name not in given]
    return f"{base}?{'&'.join(filter(None, [query, *added]))}"


def local_settings(application: str, idle_s: float) -> str:
    """The settings of each transaction."""
    return (
        f"SET LOCAL application_name = {literal(application)};"
        f" SET LOCAL idle_in_transaction_session_timeout = '{idle_s:.0f}s';"
        f" SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'; SET LOCAL client_min_messages = 'warning'"
    )


# libpq gives no SQLSTATE for a connection that fails. Where the server speaks another language these are tried again.
_NEVER = re.compile(
    "password authentication failed|no pg_hba.conf entry|no password supplied"
    '|(role|database) ".*" does not exist|is not permitted to log in|permission denied for database'
    "|certificate verify failed|root certificate file .* does not exist|invalid (URI|connection option|sslmode)"
)


def connect_error(text: str, url: str) -> AvowError:
    """Why there is no connection. One that trying again cannot heal is a ConfigError."""
    kind = ConfigError if _NEVER.search(text) else SinkError
    return kind(
        f"could not connect to PostgreSQL: {without_url(text, url)}",
        advice="Check that the server runs, and sink.url: host, port, database, user and password.",
    )


SESSIONS_MAX = 4  # of one thread, to as many databases

_sessions = ClientCache(Session.close, keep=SESSIONS_MAX)


def cached(url: str, application: str) -> Session:
    """This thread's own connection, opened once."""
    session = _sessions.get(url, lambda: Session(url, application))
    session.application = application
    return session


def forget(url: str) -> None:
    """Drop this thread's connection: it broke, or the server ended it."""
    _sessions.drop(url)
