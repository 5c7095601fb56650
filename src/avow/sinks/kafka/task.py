"""One task's side of the Kafka sink: rows, dead letters and claim, as records and offsets of one transaction.

An act that reads the position with ``lock`` is a transaction under the partition's transactional id, whatever the
guarantee: only so is a claim compare-and-set, and a zombie's late claim refused. Under exactly-once the rows are in it
too. Under the weaker words they are written by a plain idempotent producer, and the act ends when all of them are
acknowledged.

Owns: how an act is made of Kafka's calls. Must not know: which act comes first (``engines.task`` asks for them in the
guarantee's order) or what a row looks like outside (``messages``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException, Producer

from avow import ledger
from avow.errors import PositionMoved, ProtocolViolation, SinkError, SourceError
from avow.kafka.connect import flushed
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, Move, Rows, Selection, Written, refuse_whole
from avow.sinks.kafka import clients as kafka_clients
from avow.sinks.kafka import letters as dead
from avow.sinks.kafka.clients import FENCED_PAUSE_S, PATIENCE_S, Clients, Producing, expect, failure, is_fenced
from avow.sinks.kafka.config import KafkaConfig, dead_letter_topic
from avow.sinks.kafka.entries import Kept
from avow.sinks.kafka.messages import Mapper, output_topics, refuse_unfit

ABORT_PATIENCE_S = 10.0
FLUSH_S = 5.0  # then it is looked whether the topic is still there; a record has a time-out of its own


class KafkaTask:
    """The sink as one task sees it. One act at a time."""

    def __init__(
        self, pipeline: PipelineConfig, run: int, clients: Clients | None = None, *, redriving: bool = False
    ) -> None:
        assert isinstance(pipeline.sink, KafkaConfig)
        self._sink = pipeline.sink
        self._source = pipeline.source
        self._letters_topic = dead_letter_topic(pipeline)
        self._run = run
        self._clients = clients or kafka_clients.cached(pipeline)
        self._redriving = redriving
        self._mapper = Mapper(pipeline, redriven=redriving)
        self._where: TopicPartition | None = None
        self._topics: list[str] = []  # that the act may write to
        self._claimed: Kept | None = None  # by an act before this one
        self._standing: dead.Standing[DeadLetter] | None = None  # as far as they were read
        self._clear()

    def _clear(self) -> None:
        self._held: Producing | None = None  # the transaction's producer
        self._kept: Kept | None = None
        self._next: Kept | None = None  # what the act leaves in the ledger
        self._tallied: tuple[Counts, Fingerprint | None] | None = None
        self._wrote_plain = False
        self._began = time.monotonic()

    @contextmanager
    def act(self) -> Iterator[None]:
        """One atomic act. After an error nothing of it is known to be done or undone: whoever comes next reads that
        from the ledger, with a producer of its own."""
        self._clear()
        try:
            yield
            self._end()
        except KafkaException as error:
            self._undo()
            raise self._failed(error) from None
        except BaseException:
            self._undo()
            raise

    def _end(self) -> None:
        if self._wrote_plain:
            self._clients.flush_plain()
        if self._tallied is not None:
            self._tally(*self._tallied)
        if self._held is None:
            return
        assert self._where is not None
        if self._next is None:
            self._held.client.abort_transaction(PATIENCE_S)  # a replay: there is nothing to say
            return
        # A topic that was made again is empty: what was delivered before is gone, and to go on would hide it. The ids
        # are compared when the records are in a topic: those that still wait would go into the new one.
        left = 1
        while left:
            left = flushed(self._held.client, FLUSH_S)
            self._clients.topic_ids(self._topics, self._next.topics)
        self._clients.send(self._held, self._where, self._next)
        self._held.client.commit_transaction(PATIENCE_S)
        self._claimed = self._next

    def _tally(self, counts: Counts, last: Fingerprint | None) -> None:
        """What was written after its claim is counted in a transaction of its own."""
        assert self._where is not None
        self._held = self._clients.begun(self._where)
        kept = expect(self._held.last, self._where)
        entry = kept.entry
        self._next = kept.with_entry(replace(entry, counts=entry.counts + counts, last=last or entry.last))

    def _undo(self) -> None:
        if self._held is not None:
            assert self._where is not None
            # Else readers of committed records would wait for the time-out, or for the next who takes the id.
            with suppress(KafkaException):
                self._held.client.abort_transaction(ABORT_PATIENCE_S)
            self._clients.forget(self._where)
        if self._wrote_plain:
            self._clients.forget_plain()
        self._clients.forget_limits()

    def _failed(self, error: KafkaException) -> Exception:
        open_s = time.monotonic() - self._began
        if is_fenced(error) and open_s * 1000 > self._clients.timeout_ms:
            return SinkError(
                f"the transaction of {self._where} was open for {open_s:.0f} s and was aborted by Kafka after its "
                f"transaction.timeout.ms of {self._clients.timeout_ms}",
                advice="Nothing of it is visible. If it happens again, lower batch.max_records or raise [sink.kafka] "
                "transaction.timeout.ms.",
            )
        if is_fenced(error):
            if not self._redriving:
                time.sleep(FENCED_PAUSE_S)  # the next attempt takes the id back
            return PositionMoved(
                f"the producer of {self._where} was fenced: a run of the pipeline, or a redrive, has taken its "
                "transactional.id",
                advice="Nothing of this transaction is visible. Try again.",
            )
        return failure(f"the act on {self._where}", error, self._clients.pipeline)

    # The ledger

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        (where,) = partitions  # a transaction has one producer, whose name is the partition's
        self._where = where
        outputs = output_topics(self._sink, [where.topic])
        self._topics = [*outputs, self._letters_topic]
        for name in self._topics:
            self._clients.limits(name)  # before a producer is made: no batch may be larger than these
        if lock:
            self._held = self._clients.begun(where)
            self._began = time.monotonic()
            self._kept = expect(self._held.last, where)
        else:
            # Also without ``lock`` a position is certain only for who has fenced the others, as this task has if it
            # has claimed before.
            self._kept = self._claimed or expect(self._clients.fresh(where).last, where)
        self._clients.refuse_other_outputs(where, self._kept, outputs)
        return [self._kept.entry]

    def claim(self, moves: Sequence[Move], batch: int) -> None:  # noqa: ARG002
        (move,) = moves
        if self._kept is None or self._kept.entry != move.before or self._held is None:
            raise ProtocolViolation(f"{move.done} is claimed outside the act in which its entry was read")
        self._next = replace(self._kept, entry=move.after, claimed_from=move.done.start)

    def change(self, after: Entry) -> None:
        """Store another change of the entry that was read with ``lock``."""
        assert self._kept is not None
        self._next = self._kept.with_entry(after)

    def tally(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:  # noqa: ARG002
        self._tallied = (counts, last)

    # Records

    @property
    def _producer(self) -> Producer:
        if self._held is not None and not self._clients.elsewhere:
            return self._held.client
        self._wrote_plain = True
        return self._clients.plain

    def write(self, rows: Rows) -> Written:
        """Hand the rows to the producer. What an output topic would not take is refused here."""
        batch = rows.rows
        if not batch.num_rows:
            return Written()
        messages = self._mapper.messages(batch)
        topics = {topic for topic in messages.topics if topic is not None}
        limits = {topic: self._clients.limits(topic) for topic in topics}
        if limits:
            refuse_unfit(messages, limits)
        if messages.refused:
            messages.refused = refuse_whole(messages.refused, batch.column(self._sink.lineage[2]).to_pylist())
        partition = batch.column(self._sink.lineage[1])[0].as_py()
        # Without a key there is no order but the input partition's own: it is kept by staying together.
        unkeyed = {topic: partition % limit.partitions for topic, limit in limits.items()}
        producer, refused = self._producer, messages.refused
        produce, by_key = producer.produce, -1
        columns = zip(
            messages.topics, messages.keys, messages.values, messages.headers, messages.timestamps_ms, strict=True
        )
        for row, (topic, key, value, headers, stamp) in enumerate(columns):
            if row in refused:
                continue
            assert topic is not None
            to = by_key if key is not None else unkeyed[topic]
            try:
                produce(topic, value, key, to, headers=headers, timestamp=stamp)
            except BufferError:
                self._produce(producer, topic, value, key, to, headers=headers, timestamp=stamp)
        producer.poll(0)
        return Written(refused=refused)

    def _produce(self, producer: Producer, *message: object, **more: object) -> None:
        """As ``produce``, when the queue was full: wait until there is room."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            producer.poll(0.01)
            try:
                return producer.produce(*message, **more)  # type: ignore[arg-type]
            except BufferError:
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None

    def finish(self, done: OffsetRange) -> Written:  # noqa: ARG002
        return Written()

    # Dead letters

    def bury(self, letters: list[DeadLetter]) -> None:
        if not letters:
            return
        producer = self._producer
        bytes_max = self._clients.limits(self._letters_topic).message_bytes_max
        for letter in letters:
            value, headers = dead.message(letter, bytes_max)
            self._produce(producer, self._letters_topic, value, dead.key(letter), headers=headers)

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Chosen dead letters of the act's partition. Whoever would take one back must first fence this act."""
        # An act that is fenced is done anew: then only what came since is read, before it is fenced again.
        every = replace(selection, from_offset=None, until_offset=None)
        if self._standing is None or self._standing.selection != every:
            self._standing = dead.Standing(self._clients, self._letters_topic, every, lambda letter: letter)
        found = self._standing.read().values()
        wanted = [letter for letter, died in found if dead.meant(letter, died, selection)]
        chosen = sorted(wanted, key=lambda letter: letter.offset)[:limit]
        if all(letter.full_bytes is None for letter in chosen):
            return chosen
        with Log(self._source, self._clients.group) as log:
            return [letter if letter.full_bytes is None else self._read_again(letter, log) for letter in chosen]

    def _read_again(self, letter: DeadLetter, log: Log) -> DeadLetter:
        """A shortened letter as the record that it was, if that is still in its topic; else it stays shortened."""
        where = TopicPartition(letter.topic, letter.partition)
        assert self._kept is not None
        if log.partitions().get(where) != self._kept.entry.topic_id:
            return letter
        try:
            (record,) = log.records(where, [letter.offset])
        except SourceError:
            return letter
        whole = replace(letter, key=record.key, value=record.value, headers=record.headers, full_bytes=None)
        same = len(record.value or b"") == letter.full_bytes and (record.value or b"").startswith(letter.value or b"")
        return whole if same else letter

    def unbury(self, letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Take letters back, in the act that is open, and count their records anew."""
        if self._kept is None or len(letters) != written + skipped:
            raise ProtocolViolation(f"{len(letters)} dead letters are not {written} written and {skipped} skipped")
        producer = self._producer
        for letter in letters:
            self._produce(producer, self._letters_topic, None, dead.key(letter))
        entry = self._kept.entry
        self.change(replace(entry, counts=ledger.redriven(entry.counts, written, skipped)))
