"""One psycopg connection, with BEGIN, COMMIT and savepoints in our own hands.

Everything runs in a transaction, and every setting is ``SET LOCAL`` in it: behind a pooler that hands out a server's
connection for each transaction (PgBouncer) nothing of ours stays behind on one that somebody else gets next. For the
same reason no statement is prepared.

Rows go in by binary COPY, whose bytes are ``copy_format``'s, and are counted by the server: COPY's own number is
compared with the number of rows that were sent.

Owns: the connection and what its errors mean. Must not know: the ledger or any table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import unquote

import psycopg
import pyarrow as pa
from psycopg import Error as DatabaseError
from psycopg.types.datetime import TimestamptzBinaryLoader

from avow.client_cache import ClientCache
from avow.errors import AvowError, ConfigError, SinkError, SinkUnavailable
from avow.sinks.base import Refusal
from avow.sinks.postgres import copy_format
from avow.sinks.postgres.copy_format import EncodeError

# A zombie that holds a row's lock must not hold it for ever, nor must one who waits for it.
IDLE_IN_TRANSACTION_S = 120
LOCK_WAIT_S = 60

# What a statement or a COPY can fail with.
Failure = DatabaseError | EncodeError


class _UtcLoader(TimestamptzBinaryLoader):
    """Times in UTC, and not in the zone of the server's session."""

    def load(self, data: Any) -> datetime:
        return super().load(data).astimezone(UTC)


class Queries(Protocol):
    """What the ledger's SQL needs of a connection."""

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]: ...

    def run(self, sql: str, *values: str) -> int:
        """Gives the number of rows that it touched."""


class Session:
    def __init__(self, url: str, application: str, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        try:
            # Autocommit: psycopg begins no transaction by itself.
            self._connection = psycopg.connect(with_keepalive(url, timeout_s), autocommit=True, prepare_threshold=None)
        except DatabaseError as error:
            raise connect_error(str(error), url) from None
        self._connection.adapters.register_loader("timestamptz", _UtcLoader)
        self.application = application  # the name of the next transactions
        self._in_transaction = False

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        if not self._in_transaction:
            with self.transaction():
                return self.query(sql, *values)
        with self._connection.cursor(binary=True) as cursor:
            return cursor.execute(interpolate(sql, values).encode()).fetchall()

    def run(self, sql: str, *values: str) -> int:
        with self._connection.cursor() as cursor:
            return cursor.execute(interpolate(sql, values).encode()).rowcount

    def run_many(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Once for each of ``values``, which are the parameters $1, $2, ..."""
        with psycopg.RawCursor(self._connection) as cursor:
            cursor.executemany(sql.encode(), values)

    def copy(self, table: str, rows: pa.RecordBatch) -> int:
        """Binary COPY of ``rows`` by column name into a table, by its quoted name. How many rows the server took."""
        columns = ", ".join(map(name, rows.schema.names))
        with self._connection.cursor() as cursor:
            with cursor.copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT binary)".encode()) as copy:
                for chunk in copy_format.chunks(rows):
                    copy.write(chunk)
            return cursor.rowcount

    def storable(self, text: str) -> str:
        return storable(text, self._connection)

    def begin(self) -> None:
        # Whatever the server's default is: what was committed while we waited for a lock must be seen.
        settings = local_settings(self.application, IDLE_IN_TRANSACTION_S, self._timeout_s)
        self.run(f"BEGIN ISOLATION LEVEL READ COMMITTED; {settings}")
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
        except (DatabaseError, EncodeError):
            with suppress(DatabaseError):  # the connection may be gone: the error that is raised says so
                self.run("ROLLBACK TO SAVEPOINT avow")
            raise

    def close(self) -> None:
        self._connection.close()


@contextmanager
def as_sink_error(what: str) -> Iterator[None]:
    """An error of the database as ours, with what was tried. One that trying again cannot heal is a ConfigError."""
    try:
        yield
    except DatabaseError as error:
        state = error.sqlstate or ""
        kind = ConfigError if _PERMANENT.match(state) else SinkUnavailable if unavailable(error) else SinkError
        raise kind(f"{what}: {message(error)}", advice=_ADVICE.get(state, _CHECK)) from None


# The classes of SQLSTATE that are about the connection, the server or the transaction, and not about what is in a row
# (https://www.postgresql.org/docs/current/errcodes-appendix.html). Any other is an answer to a row: also those that a
# trigger makes up.
_NOT_OF_A_ROW = re.compile("08|0B|25|26|28|2D|34|3B|3D|3F|40|53|55|57|58|72|F0|XX")
# Permanent: these recur until the pipeline, the table or a privilege is changed.
_PERMANENT = re.compile("0A|28|3D|3F|42")
# Locks that are not had in time, deadlocks, full disks, too many connections, a session that somebody ended, a server
# that is shut down or starts: no row's fault.
_UNAVAILABLE = re.compile("40|53100|53300|55P03|57P01|57P03")
_CHECK = "Check the server's log and the privileges of the user of sink.url."
_ADVICE = {
    "25006": "The server is read-only: it is a standby, or default_transaction_read_only is on. Connect to the "
    "primary (with several hosts in sink.url: target_session_attrs=read-write).",
    "42501": "Grant the user of sink.url the named privilege (docs/PIPELINE.md lists what a pipeline needs).",
}


def unavailable(error: DatabaseError) -> bool:
    """Whether the server, or the table, takes nothing now. A session that ended without a word says no such thing: a
    row may have ended it."""
    return _UNAVAILABLE.match(error.sqlstate or "") is not None


def refused(error: Failure) -> bool:
    """Whether a row was refused for what is in it, and not for something passing, or for whatever row."""
    if isinstance(error, EncodeError):
        return True
    state = error.sqlstate or ""
    if state[:2] in ("0A", "42"):  # our own statements are refused without a context, what a trigger runs has one
        return bool(error.diag.context)
    return len(state) == 5 and not _NOT_OF_A_ROW.match(state)


def refused_line(error: Failure) -> int | None:
    """Which row of a COPY was refused, from 0, if the server says so."""
    if isinstance(error, EncodeError):
        return error.row
    # The last COPY that is named is ours: those before it are of triggers. Names may look like lines, too.
    lines = re.findall(r"^COPY .*?, line (\d+)(?:, column .*)?$", error.diag.context or "", re.MULTILINE)
    return int(lines[-1]) - 1 if lines else None


def message(error: Failure) -> str:
    """What the server said, in one line, with its SQLSTATE."""
    said = error.diag.message_primary if isinstance(error, DatabaseError) else None
    text = said or next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"{text} (SQLSTATE {error.sqlstate})" if error.sqlstate else text


def refusal(error: Failure) -> Refusal:
    """Why a row was refused, with the server's DETAIL, as the detail of a dead letter."""
    detail = error.diag.message_detail if isinstance(error, DatabaseError) else None
    return Refusal(f"{message(error)}{f'. {detail}' if detail else ''}", error.sqlstate or "")


def without_url(text: str, url: str) -> str:
    """An error's text without the address, which may hold a password."""
    text = text.replace(url, "sink.url")
    for secret in re.findall(r"://[^/@:]*:([^@]+)@|[?&](?:password|sslpassword)=([^&]+)", url):
        for part in filter(None, secret):
            text = text.replace(part, "***").replace(unquote(part), "***")
    return text.strip()


def storable(text: str, connection: psycopg.Connection[Any]) -> str:
    """A text as the database can hold it, with escapes for what its encoding may not have, and for NUL."""
    utf8 = connection.info.parameter_status("server_encoding") in ("UTF8", "SQL_ASCII")
    held = "utf-8" if utf8 else "ascii"
    return text.replace("\0", "\\x00").encode(held, "backslashreplace").decode(held)


def name(text: str) -> str:
    """A quoted identifier."""
    return '"' + text.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A quoted string, that means the same whether ``standard_conforming_strings`` is on or off."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in quoted else quoted


def interpolate(sql: str, values: tuple[str, ...]) -> str:
    """Texts put in place of $1, $2, ... here and not by the server, to which they then are literals: of a parameter it
    cannot always say what type it is. Only for SQL of our own: it must hold neither somebody's identifiers nor
    somebody's texts, in which a $1 would be filled in too. What is filled in is not looked at again."""
    return re.sub(r"\$(\d)", lambda match: literal(values[int(match[1]) - 1]), sql) if values else sql


# A dead connection is noticed within a minute, not after two hours or never.
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}


def with_keepalive(url: str, connect_s: float | None = None) -> str:
    """The URL with keepalives and a bound on connecting, unless it has its own. What is sent and read is UTF-8,
    whatever the database is in: of a parameter that is there twice, libpq takes the last."""
    base, _, query = url.partition("?")
    own = {pair.partition("=")[0] for pair in query.split("&")}
    wanted = _KEEPALIVE if connect_s is None else {**_KEEPALIVE, "connect_timeout": math.ceil(connect_s)}
    added = [f"{name}={value}" for name, value in wanted.items() if name not in own]
    return f"{base}?{'&'.join(filter(None, [query, *added, 'client_encoding=UTF8']))}"


def local_settings(application: str, idle_s: float, statement_s: float | None = None) -> str:
    """The settings of each transaction."""
    bound = "" if statement_s is None else f" SET LOCAL statement_timeout = '{statement_s * 1000:.0f}ms';"
    return (
        f"SET LOCAL application_name = {literal(application)};"
        f" SET LOCAL idle_in_transaction_session_timeout = '{idle_s:.0f}s';{bound}"
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
    kind = ConfigError if _NEVER.search(text) else SinkUnavailable
    return kind(
        f"could not connect to PostgreSQL: {without_url(text, url)}",
        advice="Check that the server runs, and check sink.url: host, port, database, user and password.",
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
