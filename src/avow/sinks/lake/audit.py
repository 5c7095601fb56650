"""An audit's view of a lake: one version of each of its two tables, pinned by the driver and opened by every task.

Rows are read file by file where the files' statistics allow it: files whose offsets do not overlap are read one after
the other, so that a partition is never in memory as a whole.

Owns: how rows are found in the files. Must not know: what is wrong with a row. Nothing is shared with the code that
wrote the rows but the opening of a table and the form of the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from avow.errors import SinkError
from avow.findings import Offsets
from avow.kafka.log import TopicPartition
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.auditing import Evolved, Known, TableAuditReader
from avow.sinks.lake import alterations
from avow.sinks.lake.config import LakeConfig
from avow.sinks.lake.plugin import lake_tables
from avow.sinks.lake.redrive import claimed_only
from avow.sinks.lake.table import RowFilter


class LakeAuditReader(TableAuditReader):
    def __init__(self, pipeline: PipelineConfig, snapshot: str | None = None) -> None:
        assert isinstance(pipeline.sink, LakeConfig)
        self._sink = pipeline.sink
        self._rows, self._dead_letters = lake_tables(pipeline)
        if snapshot is None:
            # The dead letters last: they are committed first, so none can be missing of what is claimed.
            self._exists = all([self._rows.load(), self._dead_letters.load()])
            pinned = [table.pinned() if self._exists else None for table in (self._rows, self._dead_letters)]
            self.snapshot = json.dumps(pinned)
        else:
            self.snapshot, self._exists = snapshot, True
            for table, pinned in zip((self._rows, self._dead_letters), json.loads(snapshot), strict=True):
                table.load(pinned)

    def known(self) -> dict[TopicPartition, Known]:
        if not self._exists:
            return {}
        # A lake keeps no log of claims beside its commits, so there is none to check for gaps.
        snapshot = self._rows.ledger()
        entries, none = snapshot.entries(), np.empty(0, np.int64)
        return {tp: Known(entries[tp], state.start, none, none) for tp, state in snapshot.partitions.items()}

    def dead_letters(self, tp: TopicPartition) -> Offsets:
        """Those of claimed records: those of a claim that has not come yet do not count yet."""
        rows = claimed_only(self._dead_letters.rows(["topic", "partition", "offset", "redrive"]), self._rows.ledger())
        return np.sort(rows.filter(RowFilter(tp).expression())["offset"].to_numpy())

    def evolved(self, tp: TopicPartition) -> list[Evolved]:
        return alterations.evolved(self._rows.alterations(), tp)

    def row_counts(self) -> dict[TopicPartition, int]:
        topic, partition, _, _ = self._sink.lineage
        counts: dict[TopicPartition, int] = {}
        for batch in self._rows.batches([topic, partition]):
            groups = pa.table(batch).group_by([topic, partition]).aggregate([([], "count_all")])
            for row in groups.to_pylist():
                tp = TopicPartition(row[topic], row[partition])
                counts[tp] = counts.get(tp, 0) + row["count_all"]
        return counts

    def rows_below(self, tp: TopicPartition, offset: int) -> int:
        if not offset:
            return 0
        row_filter = RowFilter(tp, self._sink.lineage[:3], start=0, until=offset)
        return sum(batch.num_rows for batch in self._rows.batches([self._sink.lineage.offset], row_filter))

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        offset = self._sink.lineage.offset
        missing = [name for name in columns if name not in self._rows.schema().names]
        if missing:
            raise SinkError(
                f"table {self._rows.shown} has no column {missing[0]!r}",
                advice="Restore the column, if it was dropped.",
            )
        for first, until in _stretches(self._rows.spans(offset), start):
            rows = self._rows.rows(columns, RowFilter(tp, self._sink.lineage[:3], start=first, until=until))
            if rows.num_rows:
                yield from rows.sort_by(offset).combine_chunks().to_batches()

    def json_columns(self, fields: tuple[Field, ...]) -> frozenset[str]:  # noqa: ARG002 - nested values stay nested
        return frozenset()


def _stretches(spans: Sequence[tuple[int, int]], start: int) -> Iterator[tuple[int, int | None]]:
    """Stretches of offsets that no file crosses, ascending, from ``start`` on. ``spans``: of each file."""
    ends: list[tuple[int, int]] = []
    for first, last in sorted(span for span in spans if span[1] >= start):
        if ends and first <= ends[-1][1]:
            ends[-1] = (ends[-1][0], max(ends[-1][1], last))
        else:
            ends.append((first, last))
    begin = start
    for _, last in ends:
        yield begin, last + 1
        begin = last + 1
    yield begin, None
