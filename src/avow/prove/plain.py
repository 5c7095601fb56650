"""Plain consumers, as the harness plays them: the command line of ``avow consume``, and the handler that it names.

The handler puts each record into a table that looks as a pipeline's would, so that it is read back and compared as
that is. Under the weaker words it has a connection of its own and commits by itself; under exactly-once it writes
through the transaction it is given. Owns: both, and the table. Must not know: faults, verdicts. Neighbours: ``scene``,
which starts it, and ``avow.clients``, which runs the handler: this module is imported there too, and imports little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from avow.guarantee import Guarantee
from avow.prove.failpoints import Harm

if TYPE_CHECKING:
    from avow.clients.consumer import Record, Transaction

TABLE = "AVOW_PROVE_TABLE"  # the variable that tells the handler
COMMITS = ("auto", "async", "sync")
RETRIES = 8  # for half a minute: longer than a database is away here

_MADE = """CREATE TABLE {} (
    n bigint NOT NULL, k bigint NOT NULL, crc bigint NOT NULL, body text NOT NULL, _kafka_topic text NOT NULL,
    _kafka_partition integer NOT NULL, _kafka_offset bigint NOT NULL, _kafka_timestamp timestamptz)"""
_INSERT = "INSERT INTO {} VALUES (%s, %s, %s, %s, %s, %s, %s, to_timestamp(%s::bigint / 1000.0))"


def command(word: Guarantee, topic: str, brokers: str, kafka: Mapping[str, int], chance: Random) -> list[str]:
    """One member of the group that is named as the topic. What the word leaves open is by chance: members with
    different ways to commit get along."""
    handler, terms = "append", list[str]()
    match word:
        case Guarantee.AT_MOST_ONCE:
            pass  # a handler that failed is not tried again: nobody knows what it did
        case Guarantee.AT_LEAST_ONCE:
            terms = ["--commit", chance.choice(COMMITS), "--commit-interval", "1", "--retries", str(RETRIES)]
        case Guarantee.EXACTLY_ONCE:
            handler, terms = "append_in", ["--retries", str(RETRIES)]
    for name, value in kafka.items():
        terms += ["--kafka", f"{name}={value}"]
    named = ["--group", topic, "--guarantee", str(word), "--handler", f"{__name__}:{handler}"]
    return ["consume", topic, "--brokers", brokers, *named, *terms]


def make_table(url: str, table: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(_MADE).format(sql.Identifier(table)))


# In the consumer's process.


class _Handler:
    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None
        self._handled = 0
        self._harm = Harm.named(os.environ)

    def append(self, record: Record) -> None:
        """The row is committed when this returns: each INSERT is a transaction."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
        self._insert(self._connection, record)

    def append_in(self, record: Record, tx: Transaction) -> None:
        """The row is committed when the position is."""
        self._insert(tx.connection, record)

    def _insert(self, connection: psycopg.Connection[Any], record: Record) -> None:
        self._harm.reached("mid-write", self._handled)
        self._handled += 1
        said = json.loads(record.value or b"")
        place = (record.topic, record.partition, record.offset, record.timestamp_ms)
        statement = sql.SQL(_INSERT).format(sql.Identifier(os.environ[TABLE]))
        for _ in range(self._harm.copies(record.offset)):
            # Not prepared: a proxy knows rows by this text.
            connection.execute(statement, (said["n"], said["k"], said["crc"], said["body"], *place), prepare=False)


_handler = _Handler()
append, append_in = _handler.append, _handler.append_in
