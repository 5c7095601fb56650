"""An audit's view of output topics: committed records, told apart by the identity in their header ``avow-origin``, or
by what they hold where the pipeline leaves that out.

The driver reads the ledger, then waits until all that was open in the output topics at that moment has ended, and reads
them once, to there. Then it reads the ledger again: what was claimed in between is left aside, for the pipeline may run
on, and only what no claim covers even then is beyond the position. What it read is spilled: one file per input
partition, values longer than a digest as their digest. A task on the same machine takes the file; one elsewhere reads
the topics itself, up to the same offsets.

Owns: reading the output. Must not know: what is wrong with a row. How a row looks as a record, ``sinks.kafka.messages``
says for both sides: the audit sees what was delivered, not whether that mapping is wise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import confluent_kafka as client
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from avow.errors import SinkError, TopicRecreated
from avow.findings import Finding, Kind, Offsets, Span, Spans
from avow.kafka.admin import several
from avow.kafka.headers import headers_of
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry
from avow.settings import PipelineConfig
from avow.sinks.auditing import CONTENT, AuditReader, Contents, Known
from avow.sinks.base import Selection
from avow.sinks.kafka import dead_letters as dead
from avow.sinks.kafka import start_records
from avow.sinks.kafka.clients import PATIENCE_S, KafkaClients
from avow.sinks.kafka.config import config_of, dead_letter_topic
from avow.sinks.kafka.driver import KafkaDriver
from avow.sinks.kafka.messages import ORIGIN, REDRIVEN, Messages, RecordMapper, output_topics

# As ``read_origin`` reads it, of many at once. No topic has another name, and no number is longer.
ORIGIN_PATTERN = r"^(?P<partition>[A-Za-z0-9._-]+/[0-9]{1,9})/(?P<offset>[0-9]{1,18})$"
SHORT_BYTES = 40
SPILL_ROWS = 50_000
COLUMNS = ("topic", "key", "value", "headers", "timestamp")
_TYPES = (pa.string(), pa.binary(), pa.binary(), pa.string(), pa.int64())
_SCHEMA = pa.schema(
    [("offset", pa.int64()), ("place", pa.int32()), ("redriven", pa.bool_()), *zip(COLUMNS, _TYPES, strict=True)]
)
_WAITING = pa.schema([("origin", pa.binary()), ("stamped", pa.bool_()), *list(_SCHEMA)[1:]])
UNMARKED = TopicPartition("", 0)  # where records stand that do not say which one they came from


class KafkaAuditReader(AuditReader):
    """The output of one pipeline, up to where it ended at one moment."""

    snapshot = ""

    def __init__(self, pipeline: PipelineConfig, snapshot: str | None = None) -> None:
        self._pipeline = pipeline
        self._sink = config_of(pipeline)
        self._offset = self._sink.lineage.offset
        self._mapper = RecordMapper(pipeline)
        self._clients = KafkaClients(pipeline)
        self._spill: _Spill | None = None
        self._moment = json.loads(snapshot) if snapshot else None
        self._folders: list[Path] = []  # ours, which go at the end
        self._losses: list[str] = []  # by the output, as far as it says
        self._recreated = ""  # which topic is not the one that was written to
        try:
            self.snapshot = snapshot or self._take_snapshot()
        except BaseException:
            self.__exit__()  # nobody else ends what was never entered
            raise

    def _take_snapshot(self) -> str:
        """Choose the moment: the ledger first, then everything that it counts is in the output."""
        with KafkaDriver(self._pipeline) as store:
            self._stored = store.stored_entries(stable=True)
            ends = self._output_ends()
            try:
                written_to = [*ends, dead_letter_topic(self._pipeline)]
                self._clients.topic_ids(written_to, *(stored.topics for stored in self._stored.values()))
            except TopicRecreated as error:
                self._recreated = str(error)
            folder = self._new_folder()
            self._moment = {"ends": ends, "folder": str(folder), "machine": os.uname().nodename}
            self._spill = self._filled(folder, ends)
            self._losses = [*self._retention_losses(ends)]
            after = store.stored_entries(stable=True)
        claimed = {
            str(tp): (self._stored[tp].entry.position if tp in self._stored else stored.start, stored.entry.position)
            for tp, stored in after.items()
        }
        self._moment["meanwhile"] = claimed
        return json.dumps(self._moment)

    def _output_ends(self) -> dict[str, dict[int, int]]:
        with Log(self._pipeline.source, self._pipeline.name) as log:
            topics = output_topics(self._sink, {tp.topic for tp in log.partitions()})
        return {topic: self._clients.settled_ends(topic) for topic in topics}

    def _retention_losses(self, ends: dict[str, dict[int, int]]) -> Iterator[str]:
        """Why the output may lack what was in it. Asked when it has been read: retention goes on meanwhile."""
        for topic in (*(topic for topic, parts in ends.items() if parts), dead_letter_topic(self._pipeline)):
            gone = {number: start for number, start in self._clients.starts(topic).items() if start > 0}
            for number, start in sorted(gone.items()):
                yield f"{topic}/{number} begins at offset {start:,}"
            if topic in ends and self._clients.limits(topic).compacted:
                yield f"{topic} is compacted"

    def _claimed_meanwhile(self, tp: TopicPartition, offsets: Offsets) -> npt.NDArray[np.bool_]:
        assert self._moment is not None
        begin, until = self._moment["meanwhile"].get(str(tp), (0, 0))
        within: npt.NDArray[np.bool_] = (offsets >= begin) & (offsets < until)
        return within

    def _dead_letter_offsets(self) -> dict[str, list[int]]:
        by_partition: defaultdict[str, list[int]] = defaultdict(list)
        scan = dead.DeadLetterScan(self._clients, dead_letter_topic(self._pipeline), Selection(), dead.whole)
        for dead_letter, _ in scan.read().values():
            by_partition[f"{dead_letter.topic}/{dead_letter.partition}"].append(dead_letter.offset)
        return {tp: sorted(offsets) for tp, offsets in by_partition.items()}

    def _new_folder(self) -> Path:
        self._folders.append(Path(tempfile.mkdtemp(prefix="avow-audit-")))
        return self._folders[-1]

    def _filled(self, folder: Path, ends: dict[str, dict[int, int]]) -> _Spill:
        dead_letters, writer = self._dead_letter_offsets(), _SpillWriter(folder, marked=self._sink.origin)
        partitions = {TopicPartition(topic, n): end for topic, parts in ends.items() for n, end in parts.items()}
        places = {(tp.topic, tp.partition): number for number, tp in enumerate(partitions)}
        for record in self._clients.records_between({}, partitions):
            writer.add(record, places[record.topic() or "", record.partition() or 0])
        writer.close(dead_letters)
        return _Spill(folder)

    @property
    def _spilled(self) -> _Spill:
        if self._spill is None:
            assert self._moment is not None
            folder = Path(self._moment["folder"])
            if self._moment["machine"] == os.uname().nodename and (folder / "done").exists():
                self._spill = _Spill(folder)
            else:
                ends = {t: {int(p): end for p, end in parts.items()} for t, parts in self._moment["ends"].items()}
                self._spill = self._filled(self._new_folder(), ends)
        return self._spill

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def known(self) -> dict[TopicPartition, Known]:
        partitions = {}
        for tp, stored in self._stored.items():
            claimed = stored.entry.position > stored.claimed_from
            # Of the claims, Kafka keeps the last.
            starts, untils = (
                np.array([n] if claimed else [], np.int64) for n in (stored.claimed_from, stored.entry.position)
            )
            partitions[tp] = Known(stored.entry, stored.start, starts, untils)
        started = start_records.read(self._clients, dead_letter_topic(self._pipeline))
        lost = {tp: start for tp, start in started.items() if tp not in partitions}
        self._refuse_lost(lost)
        for tp, start in lost.items():
            none = np.empty(0, np.int64)
            partitions[tp] = Known(Entry(start.start, start.topic_id, 0), start.start, none, none)
        return partitions

    def _refuse_lost(self, lost: dict[TopicPartition, start_records.StartRecord]) -> None:
        """Partitions that were begun and have no position: it was forgotten, and nobody can say what was claimed; or
        their topic was recreated, which the rest of the audit reports; or they were begun just now."""
        if not lost:
            return
        begun_since, _ = self._clients.positions(PATIENCE_S, lost)
        with Log(self._pipeline.source, self._pipeline.name) as log:
            ids = log.partitions()
        for tp in lost.keys() & ids.keys() - begun_since.keys():
            why = start_records.lost(tp, lost[tp], ids[tp])
            if not isinstance(why, TopicRecreated):
                raise SinkError(str(why), advice=why.advice)

    def dead_letters(self, tp: TopicPartition) -> Offsets:
        offsets = np.array(self._spilled.dead_letters.get(str(tp), []), np.int64)
        return offsets[~self._claimed_meanwhile(tp, offsets)]

    def row_counts(self) -> dict[TopicPartition, int]:
        return self._spilled.counts

    def rows_below(self, tp: TopicPartition, offset: int) -> int:
        return int((self._spilled.table(tp)["offset"].to_numpy() < offset).sum())

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        rows = self._spilled.table(tp)
        offsets = rows["offset"].to_numpy()
        wanted = np.flatnonzero((offsets >= start) & ~self._claimed_meanwhile(tp, offsets))
        order = wanted[np.argsort(offsets[wanted], kind="stable")]
        rows = rows.take(pa.array(order)).select(["offset", *COLUMNS])
        rows = rows.rename_columns([self._offset, *COLUMNS]).select(list(columns))
        yield from rows.combine_chunks().to_batches(max_chunksize=SPILL_ROWS)

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        timed = self._sink.timestamps == "keep" and not self._spilled.stamped
        return (*(name for name in COLUMNS if timed or name != "timestamp"), self._offset)

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        """What the records in the output should be. Those that are refused are dead letters, and are not due."""
        messages = self._mapper.messages(due)
        columns = [
            pa.array(messages.topic_list(), pa.string()),
            _shortened(messages.keys),
            _shortened(messages.values),
            self._spelled_headers(messages),
            pa.array(messages.timestamps_ms, mask=messages.timestamps_ms == 0),
            due.column(self._offset),
        ]
        return pa.RecordBatch.from_arrays(columns, names=[*COLUMNS, self._offset])

    def _spelled_headers(self, messages: Messages) -> pa.Array:
        if not messages.has_headers:  # but ours, which are left out
            return pa.repeat("", len(messages.headers))
        marked = self._sink.origin
        return pa.array([_spelled(headers, marked=marked) for headers in messages.header_lists()], pa.string())

    def comparable(self, due: pa.RecordBatch, stored: pa.RecordBatch) -> pa.RecordBatch:
        """A record without a timestamp got the producer's: whatever that is, it is right."""
        none = due.column(self._offset).filter(due.column("timestamp").is_null())
        if "timestamp" not in stored.schema.names or not len(none):
            return stored
        at = stored.schema.get_field_index("timestamp")
        untimed = pc.is_in(stored.column(self._offset), value_set=none)
        return stored.set_column(at, "timestamp", pc.if_else(untimed, pa.scalar(None, pa.int64()), stored.column(at)))

    def retention_reason(self) -> str:
        return several(self._losses)

    def order_findings(self) -> Iterator[Finding]:
        """Records of one input partition stand in each output partition in the order of their offsets."""
        yield from self._other_topics()
        for tp in self._spilled.counts:
            rows = self._spilled.table(tp)
            if not rows.num_rows:
                continue
            offsets, places = rows["offset"].to_numpy(), rows["place"].to_numpy()
            late = rows["redriven"].to_numpy(zero_copy_only=False)
            spans = Spans()
            wrong = [_out_of_order(offsets[(places == place) & ~late]) for place in np.unique(places)]
            spans.add(np.unique(np.concatenate(wrong)))
            if spans.count:
                yield Finding(Kind.REORDERED, tp.topic, tp.partition, spans.joined(), spans.count)

    def _other_topics(self) -> Iterator[Finding]:
        """What was claimed went into a topic that is no more."""
        for tp, stored in self._stored.items() if self._recreated else ():
            span = Span(stored.start, stored.entry.position, stored.entry.position - stored.start)
            if span.count:
                kind = Kind.TOPIC_RECREATED
                yield Finding(kind, tp.topic, tp.partition, (span,), span.count, (), self._recreated)

    def notes(self) -> Iterator[str]:
        if self._losses:
            yield f"Retention or compaction deletes records of the output: {self.retention_reason()}."
        if self._spilled.foreign:
            yield f"{self._spilled.foreign:,} records of the output have no {ORIGIN}: another producer writes to it."
        if self._sink.timestamps == "now" or self._spilled.stamped:
            yield "Timestamps were not compared: the output has its own (sink.timestamps, or LogAppendTime)."


class KafkaUnmarkedAuditReader(KafkaAuditReader):
    """The same of records that do not say which one they came from (``sink.origin = false``): no row is known by its
    offset, and ``contents`` has all of them."""

    def row_counts(self) -> dict[TopicPartition, int]:
        return {}

    def rows(self, tp: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        return iter(())

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        return (CONTENT, self._offset)

    @property
    def _compared(self) -> tuple[str, ...]:
        return super().columns(())[:-1]

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        contents = _digests(super().stored(due).select(self._compared))
        return pa.RecordBatch.from_arrays([contents, due.column(self._offset)], names=[CONTENT, self._offset])

    def comparable(self, due: pa.RecordBatch, stored: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG002
        return stored

    def order_findings(self) -> Iterator[Finding]:
        return self._other_topics()

    def contents(self) -> Contents:
        rows = self._spilled.table(UNMARKED)
        digests = [_digests(batch.select(self._compared)) for batch in rows.to_batches()]
        return Contents(
            pa.chunked_array(digests, pa.int64()).to_numpy(),
            rows["place"].to_numpy().astype(np.int64),
            rows["redriven"].to_numpy(),
        )


def _digests(rows: pa.RecordBatch) -> pa.Array:
    """A number for each row, of all that it holds."""
    columns = (column.to_pylist() for column in rows.columns)
    texts = (repr(row).encode() for row in zip(*columns, strict=True))
    digests = (hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return pa.array([int.from_bytes(digest, "big", signed=True) for digest in digests], pa.int64())


def _out_of_order(offsets: Offsets) -> Offsets:
    """Of offsets as they stand in one output partition, those that come after a larger one, a repetition aside."""
    _, first = np.unique(offsets, return_index=True)
    seen = offsets[np.sort(first)]
    return seen[seen < np.maximum.accumulate(seen)] if len(seen) else seen


def _short(value: bytes | None) -> bytes | None:
    """The value, or its digest: what is compared must not need the memory of what was sent."""
    if value is None or len(value) <= SHORT_BYTES:
        return value
    return hashlib.blake2b(value, digest_size=SHORT_BYTES).digest()


def _shortened(values: pa.Array) -> pa.Array:
    """The same of a column."""
    longest = pc.max(pc.binary_length(values)).as_py() or 0
    if longest <= SHORT_BYTES:
        return values.cast(pa.binary())
    return pa.array([_short(value) for value in values.to_pylist()], pa.binary())


def _spelled(headers: Sequence[tuple[str, bytes | str | None]], *, marked: bool) -> str:
    """Headers in one spelling, ours left out. Where records are ``marked`` the last of its name is ours; others came
    with the record."""
    names = [name for name, _ in headers]
    own = {len(names) - 1 - names[::-1].index(ORIGIN)} if marked and ORIGIN in names else set()
    own |= {number for number, name in enumerate(names) if name == REDRIVEN}
    stored = [(name, value) for number, (name, value) in enumerate(headers) if number not in own]
    if not stored:
        return ""
    text = json.dumps([(n, v.hex() if isinstance(v, bytes) else v and v.encode().hex()) for n, v in stored])
    return hashlib.blake2b(text.encode(), digest_size=SHORT_BYTES // 2).hexdigest() if len(text) > SHORT_BYTES else text


class _Spill:
    """What was read, on disk: a file per input partition."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        summary = json.loads((folder / "done").read_text())
        self._files = {TopicPartition(t, p): name for t, p, name in summary["files"]}
        self.counts = {TopicPartition(t, p): count for t, p, count in summary["counts"]}
        self.dead_letters: dict[str, list[int]] = summary["letters"]
        self.foreign: int = summary["foreign"]
        self.stamped: int = summary["stamped"]  # records whose time is the broker's

    def table(self, tp: TopicPartition) -> pa.Table:
        if tp not in self._files:
            return _SCHEMA.empty_table()
        with pa.OSFile(str(self._folder / self._files[tp])) as file:
            return pa.ipc.open_stream(file).read_all()


class _SpillWriter:
    """``marked``: records say which one they came from. If not, all of them go into one file."""

    def __init__(self, folder: Path, *, marked: bool) -> None:
        self._folder = folder
        self._marked = marked
        self._waiting: list[tuple[Any, ...]] = []  # rows of ``_WAITING``
        self._files: dict[TopicPartition, tuple[str, Any, pa.ipc.RecordBatchStreamWriter]] = {}
        self._counts: defaultdict[TopicPartition, int] = defaultdict(int)
        self._foreign = 0
        self._stamped = 0

    def add(self, record: client.Message, place: int) -> None:
        headers = headers_of(record)
        # Most have this header and no other: nothing else is looked at then.
        alone = self._marked and len(headers) == 1 and headers[0][0] == ORIGIN
        if alone:
            origin = headers[0][1]
        else:
            last = (value for name, value in reversed(headers) if name == ORIGIN)
            origin = next(last, None) if self._marked else None
        redriven = not alone and any(name == REDRIVEN for name, _ in headers)
        spelled = "" if alone else _spelled(headers, marked=self._marked)
        kind, stamp = record.timestamp()
        stamped = kind == client.TIMESTAMP_LOG_APPEND_TIME
        key, value = _short(_bytes(record.key())), _short(_bytes(record.value()))
        self._waiting.append((origin, stamped, place, redriven, record.topic(), key, value, spelled, stamp))
        if len(self._waiting) >= SPILL_ROWS:
            self._write()

    def _write(self) -> None:
        """What waits into the files of the partitions it came from."""
        columns = [list(column) for column in zip(*self._waiting, strict=True)] or [[] for _ in _WAITING]
        rows = pa.RecordBatch.from_arrays(list(map(pa.array, columns, _WAITING.types)), schema=_WAITING)
        self._waiting = []
        if not self._marked:
            offsets = pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)
            self._append(UNMARKED, rows, offsets)
            return
        origins = pc.extract_regex(rows.column("origin"), ORIGIN_PATTERN)
        self._foreign += origins.null_count
        rows, origins = rows.filter(origins.is_valid()), origins.drop_null()
        offsets = pc.struct_field(origins, "offset").cast(pa.string()).cast(pa.int64())
        partitions = pc.struct_field(origins, "partition").dictionary_encode()
        for number, text in enumerate(partitions.dictionary.to_pylist()):
            topic, _, partition = text.decode().partition("/")
            ours = pc.equal(partitions.indices, number)
            self._append(TopicPartition(topic, int(partition)), rows.filter(ours), offsets.filter(ours))

    def _append(self, tp: TopicPartition, rows: pa.RecordBatch, offsets: pa.Int64Array) -> None:
        if tp not in self._files:
            name = f"{len(self._files)}.arrow"
            file = pa.OSFile(str(self._folder / name), "wb")
            self._files[tp] = (name, file, pa.ipc.new_stream(file, _SCHEMA))
        self._counts[tp] += rows.num_rows
        self._stamped += rows.column("stamped").true_count
        stored = pa.RecordBatch.from_arrays([offsets, *rows.columns[2:]], schema=_SCHEMA)
        self._files[tp][2].write_batch(stored)

    def close(self, dead_letters: dict[str, list[int]]) -> None:
        self._write()
        for _, file, writer in self._files.values():
            writer.close()
            file.close()
        summary = {
            "files": [(tp.topic, tp.partition, name) for tp, (name, _, _) in self._files.items()],
            "counts": [(tp.topic, tp.partition, count) for tp, count in self._counts.items()],
            "letters": dead_letters,
            "foreign": self._foreign,
            "stamped": self._stamped,
        }
        (self._folder / "done").write_text(json.dumps(summary))


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
