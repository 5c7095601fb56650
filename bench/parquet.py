"""What does writing Parquet cost, and how large does it get, by what has a dictionary? ``python -m bench.parquet``

No cluster is needed. Two kinds of rows: those of the other benches, nearly all of whose values differ, and orders as a
shop has them, with ids, few countries, a skewed choice of customers, amounts and times. CPU time of this process, best
of ``--rounds``.

Owns: the rows and the choices. Neighbour: ``avow.sinks.lake.files``, which has made one of them.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from avow.sinks.lake.files import dictionary_columns


def payments(count: int) -> pa.Table:
    """As ``bench.decode`` has them."""
    numbers = np.arange(count)
    return pa.table(
        {
            "id": numbers,
            "account": [f"account-{number}" for number in range(count)],
            "amount": numbers / 100,
            "at": pa.array(1_700_000_000_000_000 + numbers * 1000, pa.timestamp("us", "UTC")),
            "note": [f"payment number {number}" for number in range(count)],
        }
    )


def orders(count: int) -> pa.Table:
    few, many = random.Random(1), np.random.default_rng(1)
    return pa.table(
        {
            "id": [str(uuid.UUID(int=few.getrandbits(128))) for _ in range(count)],
            "customer": many.zipf(1.3, count) % 100_000,
            "country": many.choice(["DE", "FR", "US", "GB", "IT"], count),
            "status": many.integers(0, 5, count).astype(np.int32),
            "amount": pa.array(many.integers(1, 1_000_000, count))
            .cast(pa.decimal128(21, 2))
            .cast(pa.decimal128(12, 2), safe=False),
            "at": pa.array(1_700_000_000_000_000 + np.cumsum(many.integers(0, 5000, count)), pa.timestamp("us", "UTC")),
            "note": [f"order {number} of customer {number % 977}" for number in range(count)],
        }
    )


def with_lineage(rows: pa.Table) -> pa.Table:
    count = rows.num_rows
    stamps = pa.array(1_700_000_000_000_000 + np.arange(count) * 1000, pa.timestamp("us", "UTC"))
    lineage = {
        "_kafka_topic": pa.array(["payments"] * count),
        "_kafka_partition": pa.array(np.full(count, 3, np.int32)),
        "_kafka_offset": pa.array(np.arange(count)),
        "_kafka_timestamp": stamps,
    }
    for name, column in lineage.items():
        rows = rows.append_column(name, column)
    return rows


def written(rows: pa.Table, rounds: int, choice: Mapping[str, Any]) -> tuple[float, float]:
    """Microseconds of CPU and bytes, of a row."""
    best, size = float("inf"), 0
    for _ in range(rounds):
        stream, began = pa.BufferOutputStream(), time.process_time()
        with pq.ParquetWriter(stream, rows.schema, store_schema=False, compression="zstd", **choice) as writer:
            writer.write_table(rows, row_group_size=rows.num_rows)
        best, size = min(best, time.process_time() - began), stream.tell()
    return best / rows.num_rows * 1e6, size / rows.num_rows


@click.command(help=__doc__)
@click.option("--records", default=250_000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(records: int, rounds: int) -> None:
    table = Table(
        "rows", "dictionary of", "µs of CPU a row", "bytes a row", title=f"{records:,} rows, zstd, statistics"
    )
    for name, rows in {"payments": with_lineage(payments(records)), "orders": with_lineage(orders(records))}.items():
        choices: dict[str, dict[str, Any]] = {
            "all columns": {},
            "none": {"use_dictionary": False},
            "texts and 32 bits (avow)": {"use_dictionary": dictionary_columns(rows.schema)},
            "the same, without statistics": {
                "use_dictionary": dictionary_columns(rows.schema),
                "write_statistics": False,
            },
        }
        for label, choice in choices.items():
            cost, size = written(rows, rounds, choice)
            table.add_row(name, label, f"{cost:.3f}", f"{size:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
