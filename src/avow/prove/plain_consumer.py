"""Plain consumers under test: the command line of ``avow consume``, and the handler that it names.

The handler inserts each record into a table like a pipeline's, so that it is read back and compared in the same way.
Under the weaker guarantees it has its own connection and commits by itself; under exactly-once it writes in the
transaction it gets. Owns: both, and the table. Must not know: faults, verdicts. Neighbours: ``scenario``, which starts
it, and ``avow.clients``, which runs the handler: this module is imported there too, and imports little.
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
from avow.prove.failpoints import FaultHooks

if TYPE_CHECKING:
    from avow.clients.consumer import Record, Transaction

TABLE = "AVOW_PROVE_TABLE"  # the environment variable with the handler's table
COMMITS = ("auto", "async", "sync")
RETRIES = 8  # for half a minute: longer than a database is away here

_MADE = """CREATE TABLE {} (
    n bigint NOT NULL, k bigint NOT NULL, crc bigint NOT NULL, body text NOT NULL, _kafka_topic text NOT NULL,
    _kafka_partition integer NOT NULL, _kafka_offset bigint NOT NULL, _kafka_timestamp timestamptz)"""
_INSERT = "INSERT INTO {} VALUES (%s, %s, %s, %s, %s, %s, %s, to_timestamp(%s::bigint / 1000.0))"


def command(guarantee: Guarantee, topic: str, brokers: str, kafka: Mapping[str, int], rng: Random) -> list[str]:
    """One member of the group, which is named as the topic. Options that the guarantee leaves open are random: members
    with different commit modes work together."""
    handler = "append_in" if guarantee is Guarantee.EXACTLY_ONCE else "append"
    options: list[str] = []
    if guarantee is Guarantee.AT_LEAST_ONCE:
        options += ["--commit", rng.choice(COMMITS), "--commit-interval", "1"]
    if guarantee is not Guarantee.AT_MOST_ONCE:  # there a handler that failed is not tried again: who knows what it did
        options += ["--retries", str(RETRIES)]
    for name, value in kafka.items():
        options += ["--kafka", f"{name}={value}"]
    consumer = ["--group", topic, "--guarantee", str(guarantee), "--handler", f"{__name__}:{handler}"]
    return ["consume", topic, "--brokers", brokers, *consumer, *options]


def make_table(url: str, table: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(_MADE).format(sql.Identifier(table)))


# In the consumer's process.


class _Handler:
    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None
        self._handled = 0
        self._hooks = FaultHooks.from_environment(os.environ)

    def append(self, record: Record) -> None:
        """The row is committed when this returns: each INSERT is a transaction."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
        self._insert(self._connection, record)

    def append_in(self, record: Record, tx: Transaction) -> None:
        """The row is committed when the position is."""
        self._insert(tx.connection, record)

    def _insert(self, connection: psycopg.Connection[Any], record: Record) -> None:
        self._hooks.reached("mid-write", self._handled)
        self._handled += 1
        document = json.loads(record.value or b"")
        lineage = (record.topic, record.partition, record.offset, record.timestamp_ms)
        statement = sql.SQL(_INSERT).format(sql.Identifier(os.environ[TABLE]))
        for _ in range(self._hooks.copies(record.offset)):
            # Not prepared: a proxy knows rows by this text.
            connection.execute(
                statement, (document["n"], document["k"], document["crc"], document["body"], *lineage), prepare=False
            )


_handler = _Handler()
append, append_in = _handler.append, _handler.append_in
