"""The sink's side of an audit: opened by the sink's plugin, and its rows handed out piece by piece.

Owns: that. Must not know: any sink, or what is wrong with a row. Its neighbour is ``sinks.auditing``, the contract.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from avow import sinks
from avow.settings import PipelineConfig
from avow.sinks.auditing import AuditReader


def open_reading(pipeline: PipelineConfig, snapshot: str | None = None) -> AuditReader:
    """The pipeline's sink now, or at a moment that another reading has named."""
    return sinks.audit_reader(pipeline, snapshot)


class Ordered:
    """The rows of one partition, ascending by offset, handed out piece by piece."""

    def __init__(self, batches: Iterator[pa.RecordBatch], offset: str) -> None:
        self._offset = offset
        self._batches = batches
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
