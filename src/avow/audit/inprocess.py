"""The comparison of an audit in this process: partition after partition, without Spark or a JVM.

Memory is bounded by a window of one partition. With a key, the keys of both sides go to a file on disk first; judging
them takes about 60 bytes of memory for each.

Owns: that. Must not know: how anything is judged. Neighbours: ``partition`` (one partition), ``keys`` (the rules for
keys), ``spark`` (the same on a cluster).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow.audit import keys, table
from avow.audit.compare import Compared
from avow.audit.content import Expected
from avow.audit.keys import SHARED_SHOWN, Histories, SharedKeys
from avow.audit.partition import ComparisonJob, compare_partition, offsets_of_phantoms
from avow.engines.task import decoded
from avow.findings import Finding, Offsets
from avow.kafka.log import TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.settings import PipelineConfig


class InProcessComparison(AbstractContextManager["InProcessComparison"]):
    """One comparison over all partitions that have records to compare."""

    def __init__(self, job: ComparisonJob, notify: Callable[[str], None]) -> None:
        self._job, self._notify = job, notify
        self._folder = tempfile.TemporaryDirectory(prefix="avow-audit-")
        self._file = Path(self._folder.name) / "keys.arrow"

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def results(self) -> dict[TopicPartition, Compared]:
        """What each partition came to."""
        job, results = self._job, {}
        pipeline, ranges = job.work.pipeline, job.work.ranges
        with (
            closing(Reader(pipeline.source, pipeline.name)) as reader,
            table.open_reading(pipeline, job.snapshot) as reading,
            pa.OSFile(str(self._file), "wb") as file,
            pa.ipc.new_file(file, job.key_schema) as seen,
        ):
            for number, tp in enumerate(sorted(ranges), start=1):
                self._notify(f"comparing {tp} with {pipeline.sink.target} ({number} of {len(ranges)} partitions)")
                prepared = decoded(reader.read, pipeline, hopeless=0)(ranges[tp])
                for result in compare_partition(job, tp, prepared, reading):
                    if isinstance(result, Compared):
                        results[tp] = result
                    else:
                        seen.write_batch(result)
        return results

    def judge_keys(self, extra: list[pa.RecordBatch]) -> tuple[list[Finding], SharedKeys]:
        """What is wrong by key, over what was seen and ``more``."""
        with pa.memory_map(str(self._file)) as file:
            seen = pa.concat_tables([pa.ipc.open_file(file).read_all(), pa.Table.from_batches(extra, self._seen)])
            pipeline, key = self._job.work.pipeline, _numbered(seen)
            judged = keys.judge(_histories(seen, key), pipeline.sink.mode, pipeline.guarantee)
            of_these = [int(np.argmax(key == number)) for number in judged.shared[:SHARED_SHOWN]]
            shown = seen.select(self._names).take(pa.array(of_these, pa.int64())).to_pylist()
        texts = tuple(json.dumps([*row.values()], default=str) for row in shown)
        partitions = {scope.number: row for row, scope in self._job.scopes.items()}
        return keys.findings(judged.anomalies, partitions), SharedKeys(len(judged.shared), texts)

    def expected(self) -> Expected:
        """By content, all that is due."""
        with pa.memory_map(str(self._file)) as file:
            seen = pa.ipc.open_file(file).read_all().select(["k0", "part", "offset"])
            return Expected(*(column.to_numpy().astype(np.int64) for column in seen.columns))

    @property
    def _seen(self) -> pa.Schema:
        return self._job.key_schema

    @property
    def _names(self) -> list[str]:
        return [name for name in self._seen.names if name.startswith("k")]


def _numbered(seen: pa.Table) -> npt.NDArray[np.int64]:
    """For each row the number of its key."""
    key = np.zeros(seen.num_rows, np.int64)
    for name in (name for name in seen.schema.names if name.startswith("k")):
        column = seen[name].combine_chunks()
        if pa.types.is_floating(column.type):
            column = pc.add(column, pa.scalar(0, column.type))  # 0.0 and -0.0 are one key
        codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
        _, key = np.unique(key * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return key.astype(np.int64)


def _histories(seen: pa.Table, key: npt.NDArray[np.int64]) -> Histories:
    part, offset = seen["part"].to_numpy().astype(np.int64), seen["offset"].to_numpy()
    deletes, actual = (seen[name].to_numpy().astype(bool) for name in ("deletes", "there"))
    order = np.lexsort((deletes, offset, part, key))  # of a record that both deletes and is there, the delete is last
    key, part, offset, deletes, actual = key[order], part[order], offset[order], deletes[order], actual[order]
    changes = (key[1:] != key[:-1]) | (part[1:] != part[:-1])
    heads = np.flatnonzero(np.append(np.full(min(len(key), 1), True), changes))
    if not len(heads):
        return Histories(key, part, offset, offset, deletes, offset, offset)
    ends = np.append(heads[1:], len(key)) - 1
    held = np.maximum.reduceat(np.where(actual, offset, keys.ABSENT), heads)
    rows = np.add.reduceat(actual.astype(np.int64), heads)
    return Histories(key[heads], part[heads], offset[heads], offset[ends], deletes[ends], held, rows)


def uncommitted(
    pipeline: PipelineConfig, ranges: Mapping[TopicPartition, OffsetRange], phantoms: Iterable[Finding]
) -> dict[tuple[str, int], Offsets]:
    """Of the phantoms' offsets, those at which there is a record, committed or not."""
    records = {}
    for finding in phantoms:
        planned = ranges.get(TopicPartition(finding.topic, finding.partition))
        offsets = [] if planned is None else [*offsets_of_phantoms(pipeline, planned, finding.spans)]
        records[finding.topic, finding.partition] = np.concatenate([np.empty(0, np.int64), *offsets])
    return records
