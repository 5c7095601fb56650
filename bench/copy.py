"""What it costs to send rows into PostgreSQL, side by side: ``python -m bench.copy [RECORDS] [ROUNDS]``.

The same Arrow batches go into a fresh table by each way in turn, round after round, each batch in one transaction: by
our own encoding and psycopg (with avow-native, and without it), by ADBC's ingestion, and by pgpq where it is
installed. Prints the CPU time per row of this process and of the server's process for the connection, the medians of
all rounds. Wall time says little on a machine that others use.

Owns: a server of its own, which it stops. Must not know: Kafka, pipelines.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import adbc_driver_postgresql
import numpy as np
import psutil
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement

from avow import native
from avow.local.cluster import PortPicker
from avow.local.postgres import Postgres
from avow.retry import poll_until
from avow.sinks.postgres.session import Session
from bench.records import LINEAGE, Shape

ROWS = 50_000  # of a batch
Send = Callable[[str, pa.RecordBatch], None]


def batch(start: int) -> pa.RecordBatch:
    """What a task makes of ``bench.decode``'s records."""
    numbers = np.arange(start, start + ROWS)
    at = 1_767_225_600_000_000 + numbers % 60 * 1_000_000 + numbers % 1_000_000
    utc = pa.timestamp("us", "UTC")
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(numbers),
            "account": pa.array([f"acc-{number % 10_000:06}" for number in numbers]),
            "amount": pa.array(numbers % 999 + 0.5),
            "at": pa.array(at).cast(utc),
            "note": pa.array(["a note of some bytes"] * ROWS),
            "_kafka_topic": pa.array(["bench-01234567"] * ROWS),
            "_kafka_partition": pa.array([1] * ROWS, pa.int32()),
            "_kafka_offset": pa.array(numbers),
            "_kafka_timestamp": pa.array(at).cast(utc),
        }
    )


@contextmanager
def ours(url: str, *, with_native: bool) -> Iterator[tuple[Send, int]]:
    session = Session(url, "bench")

    def send(table: str, rows: pa.RecordBatch) -> None:
        with session.transaction():
            assert session.copy(table, rows) == rows.num_rows

    native.allow(with_native)
    yield send, session.query("SELECT pg_backend_pid()")[0][0]
    native.allow(True)
    session.close()


@contextmanager
def pgpq(url: str) -> Iterator[tuple[Send, int]]:
    from pgpq import ArrowToPostgresBinaryEncoder  # type: ignore[import-not-found]

    session = Session(url, "bench")

    def send(table: str, rows: pa.RecordBatch) -> None:
        encoder = ArrowToPostgresBinaryEncoder(rows.schema)
        columns = ", ".join(rows.schema.names)
        with session.transaction(), session._connection.cursor() as cursor:
            with cursor.copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT binary)".encode()) as copy:
                copy.write(encoder.write_header())
                copy.write(encoder.write_batch(rows))
                copy.write(encoder.finish())
            assert cursor.rowcount == rows.num_rows

    yield send, session.query("SELECT pg_backend_pid()")[0][0]
    session.close()


@contextmanager
def adbc(url: str) -> Iterator[tuple[Send, int]]:
    database = adbc_driver_postgresql.connect(url)
    connection = AdbcConnection(database)

    @contextmanager
    def statement() -> Iterator[Any]:
        made = AdbcStatement(connection)
        try:
            yield made
        finally:
            made.close()

    def run(sql: str) -> None:
        with statement() as made:
            made.set_sql_query(sql)
            made.execute_update()

    def send(table: str, rows: pa.RecordBatch) -> None:
        run("BEGIN")
        with statement() as made:
            made.set_options(**{"adbc.ingest.target_table": table, "adbc.ingest.mode": "adbc.ingest.mode.append"})
            made.bind(rows)
            made.execute_update()
        run("COMMIT")

    with statement() as made:
        made.set_sql_query("SELECT pg_backend_pid()")
        stream, _ = made.execute_query()
        pid = pa.RecordBatchReader._import_from_c(stream.address).read_all().column(0)[0].as_py()
    yield send, pid
    connection.close()
    database.close()


@contextmanager
def server() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="avow-bench-"))
    part = Postgres(folder / "postgres", PortPicker().free())
    part.prepare()
    part.start()
    try:
        poll_until(lambda: part.version() is not None, 30)
        yield part.url
    finally:
        part.stop()
        shutil.rmtree(folder)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(url: str, way: Callable[[str], Any], batches: list[pa.RecordBatch]) -> tuple[float, float, float]:
    """Microseconds per row: of this process, of the server's, and by the clock."""
    admin = Session(url, "bench-admin")
    with admin.transaction():
        admin.run("DROP TABLE IF EXISTS bench")
        admin.run(f"CREATE TABLE bench ({Shape().payload}, {LINEAGE})")
    with way(url) as (send, pid):
        backend = psutil.Process(pid)
        before, client, clock = cpu_s(backend), time.process_time(), time.perf_counter()
        for rows in batches:
            send("bench", rows)
        client, clock = time.process_time() - client, time.perf_counter() - clock
        count = sum(rows.num_rows for rows in batches)
        spent = cpu_s(backend) - before
    ((found,),) = admin.query("SELECT count(*) FROM bench")
    admin.close()
    assert found == count, f"{found:,} rows of {count:,}"
    return tuple(1e6 * seconds / count for seconds in (client, spent, clock))


def main() -> None:
    records, rounds = (int(word) for word in [*sys.argv[1:], "2000000", "3"][:2])
    batches = [batch(start) for start in range(0, records, ROWS)]
    ways: dict[str, Callable[[str], Any]] = {
        "ADBC": adbc,
        "psycopg, encoded by Arrow": lambda url: ours(url, with_native=False),
    }
    if native.library():
        ways["psycopg, encoded by avow-native"] = lambda url: ours(url, with_native=True)
    if find_spec("pgpq"):
        ways["psycopg, encoded by pgpq"] = pgpq
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    with suppress(KeyboardInterrupt), server() as url:
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(measure(url, way, batches))
    print(f"{'microseconds per row, medians':34} {'client CPU':>11} {'server CPU':>11} {'wall':>7}")
    for name, each in found.items():
        client, spent, clock = (median(column) for column in zip(*each, strict=True))
        print(f"{name:34} {client:11.2f} {spent:11.2f} {clock:7.2f}")


if __name__ == "__main__":
    main()
