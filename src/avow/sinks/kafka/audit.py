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
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import confluent_kafka as client
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException

from avow.errors import SinkError, TopicRecreated
from avow.findings import Finding, Kind, Offsets, Span, Spans
from avow.kafka.headers import headers_of
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.base import Selection
from avow.sinks.kafka import letters as dead
from avow.sinks.kafka import register
from avow.sinks.kafka.clients import PATIENCE_S, Clients, as_ours, several
from avow.sinks.kafka.config import KafkaConfig, dead_letter_topic
from avow.sinks.kafka.messages import ORIGIN, REDRIVEN, Mapper, output_topics, read_origin
from avow.sinks.kafka.store import Store
from avow.sinks.reading import CONTENT, Contents, Known

SHORT_BYTES = 40
SPILL_ROWS = 50_000
COLUMNS = ("topic", "key", "value", "headers", "timestamp")
UNMARKED = TopicPartition("", 0)  # where records stand that do not say which one they came from


class KafkaReading:
    """The output of one pipeline, up to where it ended at one moment."""

    def __init__(self, pipeline: PipelineConfig, snapshot: str | None = None) -> None:
        assert isinstance(pipeline.sink, KafkaConfig)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._offset = pipeline.sink.lineage[2]
        self._mapper = Mapper(pipeline)
        self._clients = Clients(pipeline)
        self._spill: _Spill | None = None
        self._moment = json.loads(snapshot) if snapshot else None
        self._joined = snapshot is not None
        self._let_go: list[str] = []  # by the output, as far as it says
        self._made_again = ""  # which topic is not the one that was written to
        try:
            self.snapshot = snapshot or self._look()
        except BaseException:
            self.__exit__()  # nobody else ends what was never entered
            raise

    def _look(self) -> str:
        """Choose the moment: the ledger first, then everything that it counts is in the output."""
        with Store(self._pipeline) as store:
            self._kept = store.kept(stable=True)
            ends = self._output_ends()
            try:
                written_to = [*ends, dead_letter_topic(self._pipeline)]
                self._clients.topic_ids(written_to, *(kept.topics for kept in self._kept.values()))
            except TopicRecreated as error:
                self._made_again = str(error)
            folder = tempfile.mkdtemp(prefix="avow-audit-")
            self._moment = {"ends": ends, "folder": folder, "machine": os.uname().nodename}
            self._spill = self._filled(Path(folder), ends)
            self._let_go = [*self._forgetful(ends)]
            after = store.kept(stable=True)
        claimed = {
            str(where): (self._kept[where].entry.position if where in self._kept else kept.start, kept.entry.position)
            for where, kept in after.items()
        }
        self._moment["meanwhile"] = claimed
        return json.dumps(self._moment)

    def _output_ends(self) -> dict[str, dict[int, int]]:
        with Log(self._pipeline.source, self._pipeline.name) as log:
            topics = output_topics(self._sink, {where.topic for where in log.partitions()})
        return {topic: self._clients.settled_ends(topic) for topic in topics}

    def _forgetful(self, ends: dict[str, dict[int, int]]) -> Iterator[str]:
        """Why the output may lack what was in it. Asked when it has been read: retention goes on meanwhile."""
        for topic in (*(topic for topic, parts in ends.items() if parts), dead_letter_topic(self._pipeline)):
            gone = {number: start for number, start in self._clients.starts(topic).items() if start > 0}
            for number, start in sorted(gone.items()):
                yield f"{topic}/{number} begins at offset {start:,}"
            if topic in ends and self._clients.limits(topic).compacted:
                yield f"{topic} is compacted"

    def _claimed_meanwhile(self, where: TopicPartition, offsets: Offsets) -> npt.NDArray[np.bool_]:
        assert self._moment is not None
        begin, until = self._moment["meanwhile"].get(str(where), (0, 0))
        within: npt.NDArray[np.bool_] = (offsets >= begin) & (offsets < until)
        return within

    def _letters(self) -> dict[str, list[int]]:
        found: defaultdict[str, list[int]] = defaultdict(list)
        for letter, _ in dead.standing(self._clients, dead_letter_topic(self._pipeline), Selection()).values():
            found[f"{letter.topic}/{letter.partition}"].append(letter.offset)
        return {where: sorted(offsets) for where, offsets in found.items()}

    def _filled(self, folder: Path, ends: dict[str, dict[int, int]]) -> _Spill:
        return _Spill.fill(_Writing(folder, marked=self._sink.origin), self._clients, ends, self._letters())

    @property
    def _spilled(self) -> _Spill:
        if self._spill is None:
            assert self._moment is not None
            folder = Path(self._moment["folder"])
            if self._moment["machine"] == os.uname().nodename and (folder / "done").exists():
                self._spill = _Spill(folder)
            else:
                ends = {t: {int(p): end for p, end in parts.items()} for t, parts in self._moment["ends"].items()}
                own = Path(tempfile.mkdtemp(prefix="avow-audit-"))
                self._own = own
                self._spill = self._filled(own, ends)
        return self._spill

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        if not self._joined and self._moment is not None:
            shutil.rmtree(self._moment["folder"], ignore_errors=True)
        if own := getattr(self, "_own", None):
            shutil.rmtree(own, ignore_errors=True)

    def known(self) -> dict[TopicPartition, Known]:
        found = {}
        for where, kept in self._kept.items():
            claimed = kept.entry.position > kept.claimed_from
            # Of the claims, Kafka keeps the last.
            starts, untils = (
                np.array([n] if claimed else [], np.int64) for n in (kept.claimed_from, kept.entry.position)
            )
            found[where] = Known(kept.entry, kept.start, starts, untils)
        begun = register.read(self._clients, dead_letter_topic(self._pipeline))
        lost = {where: began for where, began in begun.items() if where not in found}
        self._refuse_lost(lost)
        for where, began in lost.items():
            none = np.empty(0, np.int64)
            found[where] = Known(Entry(began.start, began.topic_id, 0), began.start, none, none)
        return found

    def _refuse_lost(self, lost: dict[TopicPartition, register.Began]) -> None:
        """Partitions that were begun and have no position: it was forgotten, and nobody can say what was claimed; or
        their topic was made again, of which the rest of the audit tells; or they were begun just now."""
        if not lost:
            return
        begun_since, _ = self._clients.positions(PATIENCE_S, lost)
        with Log(self._pipeline.source, self._pipeline.name) as log:
            ids = log.partitions()
        for where in lost.keys() & ids.keys() - begun_since.keys():
            why = register.lost(where, lost[where], ids[where])
            if not isinstance(why, TopicRecreated):
                raise SinkError(str(why), advice=why.advice)

    def letters(self, where: TopicPartition) -> Offsets:
        offsets = np.array(self._spilled.letters.get(str(where), []), np.int64)
        return offsets[~self._claimed_meanwhile(where, offsets)]

    def row_counts(self) -> dict[TopicPartition, int]:
        return self._spilled.counts

    def rows_below(self, where: TopicPartition, offset: int) -> int:
        return int((self._spilled.table(where)["offset"].to_numpy() < offset).sum())

    def rows(self, where: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:
        found = self._spilled.table(where)
        offsets = found["offset"].to_numpy()
        wanted = np.flatnonzero((offsets >= start) & ~self._claimed_meanwhile(where, offsets))
        order = wanted[np.argsort(offsets[wanted], kind="stable")]
        found = found.take(pa.array(order)).select(["offset", *COLUMNS])
        found = found.rename_columns([self._offset, *COLUMNS]).select(list(columns))
        yield from found.combine_chunks().to_batches(max_chunksize=SPILL_ROWS)

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        timed = self._sink.timestamps == "keep" and not self._spilled.stamped
        return (*(name for name in COLUMNS if timed or name != "timestamp"), self._offset)

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        """What the records in the output should be. Those that are refused are dead letters, and are not due."""
        messages = self._mapper.messages(due)
        columns = [
            pa.array(messages.topics, pa.string()),
            pa.array([_short(key) for key in messages.keys], pa.binary()),
            pa.array([_short(value) for value in messages.values], pa.binary()),
            pa.array([_spelled(headers, marked=self._sink.origin) for headers in messages.headers], pa.string()),
            pa.array([stamp or None for stamp in messages.timestamps_ms], pa.int64()),
            due.column(self._offset),
        ]
        return pa.RecordBatch.from_arrays(columns, names=[*COLUMNS, self._offset])

    def comparable(self, due: pa.RecordBatch, there: pa.RecordBatch) -> pa.RecordBatch:
        """A record without a timestamp got the producer's: whatever that is, it is right."""
        none = due.column(self._offset).filter(due.column("timestamp").is_null())
        if "timestamp" not in there.schema.names or not len(none):
            return there
        at = there.schema.get_field_index("timestamp")
        mine = pc.is_in(there.column(self._offset), value_set=none)
        return there.set_column(at, "timestamp", pc.if_else(mine, pa.scalar(None, pa.int64()), there.column(at)))

    def lets_go(self) -> str:
        return several(self._let_go)

    def order_findings(self) -> Iterator[Finding]:
        """Records of one input partition stand in each output partition in the order of their offsets."""
        yield from self._other_topics()
        for where in self._spilled.counts:
            found = self._spilled.table(where)
            if not found.num_rows:
                continue
            offsets, places = found["offset"].to_numpy(), found["place"].to_numpy()
            late = found["redriven"].to_numpy(zero_copy_only=False)
            spans = Spans()
            wrong = [_out_of_order(offsets[(places == place) & ~late]) for place in np.unique(places)]
            spans.add(np.unique(np.concatenate(wrong)))
            if spans.count:
                yield Finding(Kind.REORDERED, where.topic, where.partition, spans.joined(), spans.count)

    def _other_topics(self) -> Iterator[Finding]:
        """What was claimed went into a topic that is no more."""
        for where, kept in self._kept.items() if self._made_again else ():
            span = Span(kept.start, kept.entry.position, kept.entry.position - kept.start)
            if span.count:
                kind = Kind.TOPIC_RECREATED
                yield Finding(kind, where.topic, where.partition, (span,), span.count, (), self._made_again)

    def contents(self) -> Contents | None:
        return None

    def notes(self) -> Iterator[str]:
        if self._let_go:
            yield f"The output lets records go (retention, compaction): {self.lets_go()}."
        if self._spilled.foreign:
            yield f"{self._spilled.foreign:,} records of the output have no {ORIGIN}: somebody else writes there too."
        if self._sink.timestamps == "now" or self._spilled.stamped:
            yield "The output has timestamps of its own (sink.timestamps, or LogAppendTime), so they were not compared."

    def json_columns(self, fields: tuple[Field, ...]) -> frozenset[str]:  # noqa: ARG002
        return frozenset()


class KafkaUnmarked(KafkaReading):
    """The same of records that do not say which one they came from (``sink.origin = false``): no row is known by its
    offset, and ``contents`` has all of them."""

    def row_counts(self) -> dict[TopicPartition, int]:
        return {}

    def rows(self, where: TopicPartition, columns: Sequence[str], start: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        return iter(())

    def columns(self, payload: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        return (CONTENT, self._offset)

    @property
    def _compared(self) -> tuple[str, ...]:
        return super().columns(())[:-1]

    def stored(self, due: pa.RecordBatch) -> pa.RecordBatch:
        contents = _digests(super().stored(due).select(self._compared))
        return pa.RecordBatch.from_arrays([contents, due.column(self._offset)], names=[CONTENT, self._offset])

    def comparable(self, due: pa.RecordBatch, there: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG002
        return there

    def order_findings(self) -> Iterator[Finding]:
        return self._other_topics()

    def contents(self) -> Contents:
        found = self._spilled.table(UNMARKED)
        digests = [_digests(batch.select(self._compared)) for batch in found.to_batches()]
        return Contents(
            pa.chunked_array(digests, pa.int64()).to_numpy(),
            found["place"].to_numpy().astype(np.int64),
            found["redriven"].to_numpy(),
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


def _spelled(headers: Sequence[tuple[str, bytes | str | None]], *, marked: bool) -> str:
    """Headers in one spelling, ours left out. Where records are ``marked`` the last of its name is ours; others came
    with the record."""
    names = [name for name, _ in headers]
    own = {len(names) - 1 - names[::-1].index(ORIGIN)} if marked and ORIGIN in names else set()
    own |= {number for number, name in enumerate(names) if name == REDRIVEN}
    kept = [(name, value) for number, (name, value) in enumerate(headers) if number not in own]
    if not kept:
        return ""
    text = json.dumps([(n, v.hex() if isinstance(v, bytes) else v and v.encode().hex()) for n, v in kept])
    return hashlib.blake2b(text.encode(), digest_size=SHORT_BYTES // 2).hexdigest() if len(text) > SHORT_BYTES else text


_SCHEMA = pa.schema(
    [("offset", pa.int64()), ("place", pa.int32()), ("redriven", pa.bool_())]
    + [
        (name, type_)
        for name, type_ in zip(COLUMNS, (pa.string(), pa.binary(), pa.binary(), pa.string(), pa.int64()), strict=True)
    ]
)


class _Spill:
    """What was read, on disk: a file per input partition."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        told = json.loads((folder / "done").read_text())
        self._files = {TopicPartition(t, p): name for t, p, name in told["files"]}
        self.counts = {TopicPartition(t, p): count for t, p, count in told["counts"]}
        self.letters: dict[str, list[int]] = told["letters"]
        self.foreign: int = told["foreign"]
        self.stamped: int = told["stamped"]  # records whose time is the broker's

    def table(self, where: TopicPartition) -> pa.Table:
        if where not in self._files:
            return _SCHEMA.empty_table()
        with pa.OSFile(str(self._folder / self._files[where])) as file:
            return pa.ipc.open_stream(file).read_all()

    @classmethod
    def fill(
        cls, writing: _Writing, clients: Clients, ends: dict[str, dict[int, int]], letters: dict[str, list[int]]
    ) -> _Spill:
        places = {where: n for n, where in enumerate((t, p) for t, parts in ends.items() for p in parts)}
        with as_ours("the reading of the output topics"):
            for record in _records(clients, ends):
                writing.add(record, places[str(record.topic()), int(record.partition() or 0)])
        writing.close(letters)
        return cls(writing.folder)


class _Writing:
    """``marked``: records say which one they came from. If not, all of them go into one file."""

    def __init__(self, folder: Path, *, marked: bool) -> None:
        self.folder = folder
        self._marked = marked
        self._rows: defaultdict[TopicPartition, list[tuple[Any, ...]]] = defaultdict(list)
        self._files: dict[TopicPartition, tuple[str, Any, pa.ipc.RecordBatchStreamWriter]] = {}
        self._counts: defaultdict[TopicPartition, int] = defaultdict(int)
        self._foreign = 0
        self._stamped = 0

    def add(self, record: client.Message, place: int) -> None:
        headers = headers_of(record)
        where, offset = UNMARKED, 0
        if self._marked:
            said = next((value for name, value in reversed(headers) if name == ORIGIN), None)
            origin = read_origin(said) if said is not None else None
            if origin is None:
                self._foreign += 1
                return
            where, offset = TopicPartition(*origin[:2]), origin[2]
        key, value = _bytes(record.key()), _bytes(record.value())
        redriven = any(name == REDRIVEN for name, _ in headers)
        kind, stamp = record.timestamp()
        self._stamped += kind == client.TIMESTAMP_LOG_APPEND_TIME
        rows = self._rows[where]
        spelled = _spelled(headers, marked=self._marked)
        rows.append((offset, place, redriven, record.topic(), _short(key), _short(value), spelled, stamp))
        self._counts[where] += 1
        if len(rows) >= SPILL_ROWS:
            self._write(where)

    def _write(self, where: TopicPartition) -> None:
        if where not in self._files:
            name = f"{len(self._files)}.arrow"
            file = pa.OSFile(str(self.folder / name), "wb")
            self._files[where] = (name, file, pa.ipc.new_stream(file, _SCHEMA))
        columns = zip(*self._rows.pop(where), strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
        self._files[where][2].write_batch(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))

    def close(self, letters: dict[str, list[int]]) -> None:
        for where in list(self._rows):
            self._write(where)
        for _, file, writer in self._files.values():
            writer.close()
            file.close()
        told = {
            "files": [(where.topic, where.partition, name) for where, (name, _, _) in self._files.items()],
            "counts": [(where.topic, where.partition, count) for where, count in self._counts.items()],
            "letters": letters,
            "foreign": self._foreign,
            "stamped": self._stamped,
        }
        (self.folder / "done").write_text(json.dumps(told))


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _records(clients: Clients, ends: dict[str, dict[int, int]]) -> Iterator[client.Message]:
    """Committed records of these topics, up to these offsets."""
    left = {(topic, number) for topic, parts in ends.items() for number, end in parts.items() if end}
    reader = clients.output_reader()
    try:
        reader.assign([client.TopicPartition(topic, number, client.OFFSET_BEGINNING) for topic, number in left])
        heard = time.monotonic()
        while left:
            for record in reader.consume(10_000, 0.2):
                heard = time.monotonic()
                where = (str(record.topic()), int(record.partition() or 0))
                error = record.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if where not in left:
                    continue
                # A leader that is new, or a follower that is late, may say that the partition ends before this.
                if (record.offset() or 0) >= ends[where[0]][where[1]]:
                    left.discard(where)
                elif error is None:
                    yield record
            if time.monotonic() - heard > PATIENCE_S:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    finally:
        reader.close()
