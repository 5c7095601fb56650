"""An audit's view of PostgreSQL: one snapshot, exported by the driver and joined by every task.

The driver opens a read-only transaction and exports its snapshot; every task joins it.

Owns: the audit's SQL. Must not know: what is wrong with a row. Nothing here is shared with the code that wrote the rows
but the quoting of names and what the server's errors mean: even the client is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from avow.findings import Offsets
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.settings import PipelineConfig
from avow.sinks.auditing import Evolved, Known, TableAuditReader
from avow.sinks.postgres.arrow_session import ArrowSession
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.session import as_sink_error, literal, name
from avow.sinks.postgres.tables import full_name


class PostgresAuditReader(ArrowSession, TableAuditReader):
    """A connection that sees one moment of the database: its own, or one that another exported."""

    _sink: PostgresConfig

    def __init__(self, pipeline: PipelineConfig, snapshot: str | None = None) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        super().__init__(self._sink.url.get_secret_value(), "avow-audit")
        with as_sink_error("cannot read one snapshot"):
            self.begin("ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if snapshot is not None:
                self.run(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            # The driver waits inside this transaction for as long as the tasks need.
            self.run("SET LOCAL idle_in_transaction_session_timeout = 0")
            self.snapshot: str = snapshot or self.query("SELECT pg_export_snapshot()")[0][0]

    def known(self) -> dict[TopicPartition, Known]:
        if self.query("SELECT to_regclass('avow.ledger') IS NOT NULL")[0] != (True,):
            return {}
        with as_sink_error("cannot read the ledger"):
            lines = self.query(
                "SELECT topic, partition, start, position, topic_id, run, read, written, dead, skipped,"
                " last_offset, last_timestamp_ms, last_crc32 FROM avow.ledger WHERE pipeline = $1 ORDER BY 1, 2",
                self._pipeline.name,
            )
        partitions = {}
        for topic, partition, start, position, topic_id, run, read, written, dead, skipped, *last in lines:
            tp = TopicPartition(topic, partition)
            counts = Counts(read, written, dead, skipped)
            entry = Entry(position, topic_id, run, counts, Fingerprint(*last) if last[0] is not None else None)
            partitions[tp] = Known(entry, start, *self._claims(tp))
        return partitions

    def _claims(self, tp: TopicPartition) -> list[Offsets]:
        return self._numbers(
            f"SELECT from_offset, until_offset FROM avow.claims WHERE {self._mine(tp)} ORDER BY from_offset"
        )

    def dead_letters(self, tp: TopicPartition) -> Offsets:
        (offsets,) = self._numbers(f'SELECT "offset" FROM avow.dead_letters WHERE {self._mine(tp)} ORDER BY "offset"')
        return offsets

    def evolved(self, tp: TopicPartition) -> list[Evolved]:
        # Somebody who may read the table and the ledger need not have a right on what a newer version has made.
        readable = "SELECT coalesce(has_table_privilege(to_regclass('avow.columns')::oid, 'SELECT'), false)"
        if self.query(readable)[0] != (True,):
            return []
        with as_sink_error("cannot read the table's changes"):
            lines = self.query(f"SELECT name, until_offset, before <> '' FROM avow.columns WHERE {self._mine(tp)}")
        return [Evolved(*line) for line in lines]

    def _numbers(self, sql: str) -> list[Offsets]:
        """Columns of whole numbers."""
        with as_sink_error("cannot read the sink"), self.reader(sql) as reader:
            return [column.to_numpy() for column in reader.read_all().columns]

    def _mine(self, tp: TopicPartition) -> str:
        pipeline, topic = literal(self._pipeline.name), literal(tp.topic)
        return f"pipeline = {pipeline} AND topic = {topic} AND partition = {tp.partition}"

    def row_counts(self) -> dict[TopicPartition, int]:
        topic, partition, _, _ = map(name, self._sink.lineage)
        with as_sink_error(f"cannot read table {self._sink.table}"):
            lines = self.query(
                f"SELECT {topic}, {partition}, count(*) FROM {full_name(self._sink.table)} GROUP BY 1, 2"
            )
        return {TopicPartition(*line[:2]): line[2] for line in lines}

    def rows_below(self, tp: TopicPartition, offset: int) -> int:
        if not offset:
            return 0
        with as_sink_error(f"cannot read table {self._sink.table}"):
            below = f"{self._of(tp)} AND {name(self._sink.lineage.offset)} < {offset}"
            rows = self.query(f"SELECT count(*) FROM {full_name(self._sink.table)} WHERE {below}")
        return int(rows[0][0])

    def _of(self, tp: TopicPartition) -> str:
        topic, partition, _, _ = map(name, self._sink.lineage)
        return f"{topic} = {literal(tp.topic)} AND {partition} = {tp.partition}"

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        offset = name(self._sink.lineage.offset)
        query = (
            f"SELECT {', '.join(map(name, columns))} FROM {full_name(self._sink.table)}"
            f" WHERE {self._of(tp)} AND {offset} >= {start} ORDER BY {offset}"
        )
        with as_sink_error("cannot read the sink"), self.reader(query) as reader:
            yield from reader
