"""Import of a JSON lines file into a topic, exactly once across crashes and restarts.

Theory of operation
-------------------
Lines go out in transactions, and each transaction also commits how far the file has been read: an offset of a consumer
group that belongs to the import alone. So lines and position are one act, as in a pipeline. Whoever starts the import
again asks for its transactional id first, which ends what the last one left open and fences it, and only then reads the
position. A commit with unknown outcome needs nothing special: the position shows it.

The offset is the number of lines; beside it, as the offset's metadata, are the bytes they take and a digest of those. A
file whose beginning is not what was sent is refused. One that has grown is continued.

The group keeps the offset as long as the cluster's ``offsets.retention.minutes`` says (a week, unless it was changed),
and as long as the topic is there. Owns: that act. Must not know: progress bars. Neighbours: ``producer`` and ``jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import confluent_kafka as client

from avow.clients.cluster import PATIENCE_S, translate_errors
from avow.clients.jsonl import BadLine, Line, Message, MessageFormat, read
from avow.clients.producer import DELIVERY_TIMEOUT_MS, Producer, ProducerTransaction
from avow.errors import ConfigError, SourceError
from avow.guarantee import Guarantee
from avow.kafka.committed import committed, reader
from avow.kafka.connect import Connection

LINES_PER_TRANSACTION = 10_000
BYTES_PER_TRANSACTION = 16 << 20
ATTEMPTS_MAX = 5  # without progress in between
_VERSION = 1
_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Position:
    """How far a file has been sent."""

    lines: int = 0
    bytes: int = 0
    digest: str = ""  # of those bytes

    def written(self) -> str:
        return json.dumps({"avow-import": _VERSION, "bytes": self.bytes, "digest": self.digest})

    @classmethod
    def read(cls, lines: int, text: str | None, name: str) -> Position:
        try:
            document = json.loads(text or "")
            if document["avow-import"] == _VERSION:
                return cls(lines, int(document["bytes"]), str(document["digest"]))
        except (ValueError, KeyError, TypeError):
            pass
        raise ConfigError(
            f"consumer group {name} has offset {lines}, which was not written by an import of this version of avow",
            advice="Give the import another name with --name.",
        )


@dataclass(slots=True)
class Imported:
    """What an import has come to. Lines are those of the file, blank ones too."""

    lines_before: int = 0  # sent by earlier runs
    lines: int = 0  # the position
    bytes: int = 0
    acknowledged: int = 0  # records committed by this run
    bad: int = 0  # lines left out by this run
    stopped: bool = False  # before the file's end, because it was asked to


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of one transaction."""

    messages: list[Message]
    bad: int
    position: Position  # behind them


@dataclass(eq=False, repr=False)
class Import:
    """One file into one topic. ``name`` is who it is: another name is another import, and sends all again."""

    connection: Connection
    topic: str
    path: Path
    form: MessageFormat
    name: str
    skip_bad: bool = False
    lines_per_transaction: int = LINES_PER_TRANSACTION
    delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    progress: Callable[[Imported], None] = lambda _: None
    event: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.done = Imported()
        self._enough = False
        self._begun = False
        self._doubtful: _Part | None = None  # being committed: the position tells what became of it

    def stop(self) -> None:
        """End after the transaction that is under way."""
        self._enough = True

    def execute(self) -> Imported:
        """Send what has not been sent. What fails is tried again from the position, a few times."""
        if not self.path.is_file():
            raise ConfigError(
                f"{self.path} is not a regular file, so it cannot be read again after a crash",
                advice="exactly-once needs a regular file. For a stream, leave FILE out: standard input is sent with "
                "durability idempotent.",
            )
        failures = 0
        while True:
            before = self.done.lines
            try:
                self._attempt()
                return self.done
            except SourceError as error:
                failures = 1 if self.done.lines > before else failures + 1
                if failures >= ATTEMPTS_MAX or self._enough:
                    raise
                self.event(f"{error}; retrying from the last committed line")
                time.sleep(min(0.5 * 2**failures, 10))

    def _attempt(self) -> None:
        producer = Producer(
            self.connection.bootstrap_servers,
            guarantee=Guarantee.EXACTLY_ONCE,
            transactional_id=self.name,
            delivery_timeout_ms=self.delivery_timeout_ms,
            config=self.connection.config,
        )
        # Stable: an offset that an open transaction is about to change is waited for.
        group = reader(self.connection, self.name, stable=True)
        try:
            position = self._position(group)
            if not self._begun:  # else what is committed may be an earlier attempt's
                self._begun = True
                self.done.lines_before = position.lines
                if position.lines:
                    self.event(f"{position.lines:,} lines were committed earlier; continuing after them")
            if self._doubtful is not None and self._doubtful.position == position:
                self._committed(self._doubtful)  # by an attempt of ours that did not hear of it
            self._reach(position)
            self._send_all(producer, group, position)
        finally:
            producer.close()
            group.close()

    def _send_all(self, producer: Producer, group: client.Consumer, position: Position) -> None:
        with self.path.open("rb") as stream:
            digest = self._digest(stream, position)
            lines = read(stream, Line(position.lines, b"", position.bytes))
            while True:
                part, bad = self._part(lines, digest)
                if part is not None and self._enough:
                    self.done.stopped = True
                    return
                if part is not None:
                    self._doubtful = part
                    with producer.transaction() as opened:
                        self._send(producer, opened, group, part)
                    self._committed(part)
                if bad is not None:
                    raise bad
                if part is None:
                    return

    def _part(self, lines: Iterator[Line], digest: hashlib.blake2b) -> tuple[_Part | None, BadLine | None]:
        """The lines of the next transaction, None if none is left; and, if a bad one ends them, that."""
        messages: list[Message] = []
        skipped, size = 0, 0
        last: Line | None = None
        bad: BadLine | None = None
        for line in lines:
            if not line.blank:
                try:
                    messages.append(self.form.message(line))
                except BadLine as error:
                    if not self.skip_bad:
                        bad = error
                        break
                    self.event(str(error))
                    skipped += 1
            digest.update(line.raw)
            size += len(line.raw)
            last = line
            if len(messages) >= self.lines_per_transaction or size >= BYTES_PER_TRANSACTION:
                break
        if last is None:
            return None, bad
        return _Part(messages, skipped, Position(last.number, last.until, digest.hexdigest())), bad

    def _send(self, producer: Producer, opened: ProducerTransaction, group: client.Consumer, part: _Part) -> None:
        for message in part.messages:
            producer.send(
                self.topic,
                message.value,
                key=message.key,
                idempotency_key=message.idempotency_key,
                tag=f"{self.form.name}:{message.line.number}",
            )
        reached = client.TopicPartition(self.topic, 0, part.position.lines, part.position.written())
        opened.send_offsets([reached], group.consumer_group_metadata())

    def _committed(self, part: _Part) -> None:
        self._doubtful = None
        self.done.acknowledged += len(part.messages)
        self.done.bad += part.bad
        self._reach(part.position)

    def _reach(self, position: Position) -> None:
        self.done.lines, self.done.bytes = position.lines, position.bytes
        self.progress(self.done)

    def _digest(self, stream: BinaryIO, position: Position) -> hashlib.blake2b:
        """Of what was sent, if it is still there; the stream stands behind it then."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        left = position.bytes
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if left or (position.bytes and digest.hexdigest() != position.digest):
            raise ConfigError(
                f"{self.path} has changed: its first {position.lines:,} lines are not those that were sent. Nothing "
                "was sent now",
                advice="Restore the old file, or import this one under another --name, which sends all of it.",
            )
        return digest

    def _position(self, group: client.Consumer) -> Position:
        with translate_errors(self.connection, f"read the committed offset of group {self.name}"):
            committed_ = committed(group, PATIENCE_S, [client.TopicPartition(self.topic, 0)])
        return Position.read(committed_[0].offset, committed_[0].metadata, self.name) if committed_ else Position()
