"""The comparison of an audit in this process: partition after partition, without Spark or a JVM.

Memory is bounded by a window of one partition. With a key, the keys of both sides go to a file on disk first; judging
them takes about 60 bytes of memory for each.

Owns: that. Must not know: how anything is judged. Neighbours: ``partition`` (one partition), ``keys`` (the rules for
keys), ``spark`` (the same on a cluster).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow import sinks
from avow.audit import keys
from avow.audit.compare import NONE, Compared, heads_of
from avow.audit.content import Expected
from avow.audit.keys import SHARED_SHOWN, Histories, SharedKeys
from avow.audit.partition import ComparisonJob, compare_partition, offsets_of_phantoms
from avow.engines.task import decoded
from avow.findings import Finding, Offsets
from avow.kafka.log import TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange


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
            sinks.audit_reader(pipeline, job.snapshot) as reading,
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
        """What is wrong by key, over what was seen and ``extra``."""
        job, pipeline = self._job, self._job.work.pipeline
        with pa.memory_map(str(self._file)) as file:
            seen = pa.concat_tables([pa.ipc.open_file(file).read_all(), pa.Table.from_batches(extra, job.key_schema)])
            of_keys = seen.select(job.key_names)
            key = _numbered(of_keys)
            judged = keys.judge(_histories(seen, key), pipeline.sink.mode, pipeline.guarantee)
            of_these = [int(np.argmax(key == number)) for number in judged.shared[:SHARED_SHOWN]]
            shown = of_keys.take(pa.array(of_these, pa.int64())).to_pylist()
        return keys.findings(judged.anomalies, job.partitions), SharedKeys(len(judged.shared), keys.as_texts(shown))

    def expected(self) -> Expected:
        """By content, all that is due."""
        with pa.memory_map(str(self._file)) as file:
            seen = pa.ipc.open_file(file).read_all().select(["k0", "part", "offset"])
            return Expected(*(column.to_numpy().astype(np.int64) for column in seen.columns))

    def uncommitted(
        self, ranges: Mapping[TopicPartition, OffsetRange], phantoms: Iterable[Finding]
    ) -> dict[TopicPartition, Offsets]:
        """Of the phantoms' offsets, those at which there is a record, committed or not."""
        records = {}
        for finding in phantoms:
            tp = TopicPartition(finding.topic, finding.partition)
            planned = ranges.get(tp)
            offsets = () if planned is None else offsets_of_phantoms(self._job.work.pipeline, planned, finding.spans)
            records[tp] = np.concatenate([NONE, *offsets])
        return records


def _numbered(of_keys: pa.Table) -> npt.NDArray[np.int64]:
    """For each row the number of its key."""
    key = np.zeros(of_keys.num_rows, np.int64)
    for column in (column.combine_chunks() for column in of_keys.columns):
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
    heads = heads_of(key, part)
    if not len(heads):
        return Histories(key, part, offset, offset, deletes, offset, offset)
    ends = np.append(heads[1:], len(key)) - 1
    held = np.maximum.reduceat(np.where(actual, offset, keys.ABSENT), heads)
    rows = np.add.reduceat(actual.astype(np.int64), heads)
    return Histories(key[heads], part[heads], offset[heads], offset[ends], deletes[ends], held, rows)
