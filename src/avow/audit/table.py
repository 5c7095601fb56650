"""The sink's side of an audit, read on one snapshot: rows in order of their offsets, dead letters, ledger and claims.

The driver opens a read-only transaction and exports its snapshot; every task joins it. So all of them see one moment,
also while the pipeline runs on, and the ledger's position is of the same moment as the rows.

Owns: the audit's SQL. Must not know: what is wrong with a row. Nothing here is shared with the code that wrote the rows
but the connection and the quoting of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from avow.audit.findings import Offsets
from avow.audit.judge import Known
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.settings import Pipeline, Postgres
from avow.sinks.postgres.session import Session, as_sink_error, literal, name
from avow.sinks.postgres.tables import full_name


class Reading(Session):
    """A connection that sees one moment of the database: its own, or one that another exported."""

    def __init__(self, sink: Postgres, snapshot: str | None = None) -> None:
        super().__init__(sink.url.get_secret_value(), "avow-audit")
        with as_sink_error("cannot read one snapshot"):
            self.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if snapshot is not None:
                self.run(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            # The driver waits inside this transaction for as long as the tasks need.
            self.run("SET LOCAL idle_in_transaction_session_timeout = 0")
            self.snapshot: str = snapshot or self.query("SELECT pg_export_snapshot()")[0][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """The result as it comes, never all of it at once."""
        with as_sink_error("cannot read the sink"), self.reader(sql) as reader:
            yield from reader

    def numbers(self, sql: str) -> list[Offsets]:
        """Columns of whole numbers."""
        with as_sink_error("cannot read the sink"), self.reader(sql) as reader:
            return [column.to_numpy() for column in reader.read_all().columns]


def has_ledger(reading: Reading) -> bool:
    """Whether any pipeline has ever run into this database."""
    return reading.query("SELECT to_regclass('avow.ledger') IS NOT NULL")[0] == (True,)


def known(reading: Reading, pipeline: Pipeline) -> dict[TopicPartition, Known]:
    """The ledger of this pipeline."""
    with as_sink_error("cannot read the ledger"):
        lines = reading.query(
            "SELECT topic, partition, start, position, topic_id, run, read, written, dead, skipped,"
            " last_offset, last_timestamp_ms, last_crc32 FROM avow.ledger WHERE pipeline = $1 ORDER BY 1, 2",
            pipeline.name,
        )
    found = {}
    for topic, partition, start, position, topic_id, run, read, written, dead, skipped, *last in lines:
        where = TopicPartition(topic, partition)
        counts = Counts(read, written, dead, skipped)
        entry = Entry(position, topic_id, run, counts, Fingerprint(*last) if last[0] is not None else None)
        found[where] = Known(entry, start, *_claims(reading, pipeline, where))
    return found


def _claims(reading: Reading, pipeline: Pipeline, where: TopicPartition) -> list[Offsets]:
    return reading.numbers(
        f"SELECT from_offset, until_offset FROM avow.claims WHERE {_mine(pipeline, where)} ORDER BY from_offset"
    )


def letters(reading: Reading, pipeline: Pipeline, where: TopicPartition) -> Offsets:
    """The offsets of all dead letters of a partition."""
    (offsets,) = reading.numbers(
        f'SELECT "offset" FROM avow.dead_letters WHERE {_mine(pipeline, where)} ORDER BY "offset"'
    )
    return offsets


def _mine(pipeline: Pipeline, where: TopicPartition) -> str:
    return f"pipeline = {literal(pipeline.name)} AND topic = {literal(where.topic)} AND partition = {where.partition}"


def row_counts(reading: Reading, sink: Postgres) -> dict[TopicPartition, int]:
    """How many rows of which partition the table holds."""
    topic, partition, _, _ = map(name, sink.lineage)
    with as_sink_error(f"cannot read table {sink.table}"):
        lines = reading.query(f"SELECT {topic}, {partition}, count(*) FROM {full_name(sink.table)} GROUP BY 1, 2")
    return {TopicPartition(*line[:2]): line[2] for line in lines}


def rows_below(reading: Reading, sink: Postgres, where: TopicPartition, offset: int) -> int:
    """How many rows of a partition lie below an offset."""
    if not offset:
        return 0
    with as_sink_error(f"cannot read table {sink.table}"):
        below = f"{_of(sink, where)} AND {name(sink.lineage[2])} < {offset}"
        found = reading.query(f"SELECT count(*) FROM {full_name(sink.table)} WHERE {below}")
    return int(found[0][0])


def _of(sink: Postgres, where: TopicPartition) -> str:
    topic, partition, _, _ = map(name, sink.lineage)
    return f"{topic} = {literal(where.topic)} AND {partition} = {where.partition}"


class Ordered:
    """The rows of one partition, ascending by offset, handed out piece by piece."""

    def __init__(
        self, reading: Reading, sink: Postgres, where: TopicPartition, columns: Sequence[str], start: int = 0
    ) -> None:
        self._offset = sink.lineage[2]
        offset = name(self._offset)
        self._batches = reading.batches(
            f"SELECT {', '.join(map(name, columns))} FROM {full_name(sink.table)}"
            f" WHERE {_of(sink, where)} AND {offset} >= {start} ORDER BY {offset}"
        )
        self._ahead: pa.RecordBatch | None = None  # read, and not handed out yet

    def take(self, until: int) -> Iterator[pa.RecordBatch]:
        """The next rows, up to this offset. To be read to its end before anything else is taken."""
        while (batch := self._ahead if self._ahead is not None else next(self._batches, None)) is not None:
            cut = int(np.searchsorted(batch.column(self._offset).to_numpy(), until))
            self._ahead = batch.slice(cut) if cut < batch.num_rows else None
            if cut:
                yield batch.slice(0, cut)
            if self._ahead is not None:
                break

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All rows that are left."""
        if self._ahead is not None:
            yield self._ahead
            self._ahead = None
        yield from self._batches
