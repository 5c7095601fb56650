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

from confluent_kafka import KafkaException, Producer

from avow import ledger
from avow.errors import PositionMoved, ProtocolViolation, SinkError, SourceError
from avow.kafka.connect import flushed
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, Fingerprint, OffsetRange
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetter, LedgerUpdate, RowChanges, Selection, TaskSink, Written, refuse_whole
from avow.sinks.kafka import clients as kafka_clients
from avow.sinks.kafka import dead_letters as dead
from avow.sinks.kafka.clients import PATIENCE_S, KafkaClients, PartitionProducer, expect, give_way, is_fenced
from avow.sinks.kafka.config import config_of, dead_letter_topic
from avow.sinks.kafka.entries import StoredEntry
from avow.sinks.kafka.messages import RecordMapper, output_topics, refuse_unfit
from avow.sinks.kafka.produce import send, send_all

ABORT_PATIENCE_S = 10.0
FLUSH_S = 5.0  # then the topic is checked: is it still there? A record has a time-out of its own


class KafkaTask(TaskSink):
    """The sink as one task sees it. One act at a time."""

    def __init__(
        self, pipeline: PipelineConfig, run: int, clients: KafkaClients | None = None, *, redriving: bool = False
    ) -> None:
        self._sink = config_of(pipeline)
        self._source = pipeline.source
        self._dead_letter_topic = dead_letter_topic(pipeline)
        self._run = run
        self._clients = clients or kafka_clients.cached(pipeline)
        self._redriving = redriving
        self._mapper = RecordMapper(pipeline, redriven=redriving)
        self._tp: TopicPartition | None = None
        self._topics: list[str] = []  # that the act may write to
        self._claimed: StoredEntry | None = None  # by an act before this one
        self._scan: dead.DeadLetterScan[DeadLetter] | None = None  # as far as they were read
        self._clear()

    def _clear(self) -> None:
        self._transaction: PartitionProducer | None = None  # the transaction's producer
        self._stored: StoredEntry | None = None
        self._next_entry: StoredEntry | None = None  # what the act leaves in the ledger
        self._counted: tuple[Counts, Fingerprint | None] | None = None
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
        if self._counted is not None:
            self._store_counts(*self._counted)
        if self._transaction is None:
            return
        assert self._tp is not None
        if self._next_entry is None:
            self._transaction.client.abort_transaction(PATIENCE_S)  # a replay: nothing to commit
            return
        # A topic that was made again is empty: what was delivered before is gone, and to go on would hide it. The ids
        # are compared when the records are in a topic: those that still wait would go into the new one.
        left = 1
        while left:
            left = flushed(self._transaction.client, FLUSH_S)
            self._clients.topic_ids(self._topics, self._next_entry.topics)
        self._clients.send(self._transaction, self._tp, self._next_entry)
        self._transaction.client.commit_transaction(PATIENCE_S)
        self._claimed = self._next_entry

    def _store_counts(self, counts: Counts, last: Fingerprint | None) -> None:
        """What was written after its claim is counted in a transaction of its own."""
        assert self._tp is not None
        self._transaction = self._clients.begin_transaction(self._tp)
        stored = expect(self._transaction.last, self._tp)
        self._next_entry = stored.with_entry(ledger.tallied(stored.entry, counts, last))

    def _undo(self) -> None:
        if self._transaction is not None:
            assert self._tp is not None
            # Else readers of committed records would wait for the time-out, or for the next who takes the id.
            with suppress(KafkaException):
                self._transaction.client.abort_transaction(ABORT_PATIENCE_S)
            self._clients.discard(self._tp)
        if self._wrote_plain:
            self._clients.discard_plain()
        self._clients.clear_limits()

    def _failed(self, error: KafkaException) -> Exception:
        open_s = time.monotonic() - self._began
        if is_fenced(error) and open_s * 1000 > self._clients.timeout_ms:
            return SinkError(
                f"the transaction of {self._tp} was open for {open_s:.0f} s and was aborted by Kafka after its "
                f"transaction.timeout.ms of {self._clients.timeout_ms}",
                advice="Nothing of it is visible. If it happens again, lower batch.max_records or raise [sink.kafka] "
                "transaction.timeout.ms.",
            )
        if is_fenced(error):
            if not self._redriving:
                give_way()  # the next attempt takes the id back
            return PositionMoved(
                f"the producer of {self._tp} was fenced: a run of the pipeline, or a redrive, has taken its "
                "transactional.id",
                advice="Nothing of this transaction is visible. Try again.",
            )
        return self._clients.connection.translate(f"write and claim {self._tp}", error.args[0])

    # The ledger

    def entries(self, partitions: Sequence[TopicPartition], *, lock: bool) -> list[Entry]:
        (tp,) = partitions  # a transaction has one producer, whose name is the partition's
        self._tp = tp
        outputs = output_topics(self._sink, [tp.topic])
        self._topics = [*outputs, self._dead_letter_topic]
        for name in self._topics:
            self._clients.limits(name)  # before a producer is made: no batch may be larger than these
        if lock:
            self._transaction = self._clients.begin_transaction(tp)
            self._began = time.monotonic()
            self._stored = expect(self._transaction.last, tp)
        else:
            # Also without ``lock`` a position is certain only for who has fenced the others, as this task has if it
            # has claimed before.
            self._stored = self._claimed or expect(self._clients.new_producer(tp).last, tp)
        self._clients.refuse_other_outputs(tp, self._stored, outputs)
        return [self._stored.entry]

    def claim(self, updates: Sequence[LedgerUpdate], batch: int) -> None:  # noqa: ARG002
        (update,) = updates
        if self._stored is None or self._stored.entry != update.before or self._transaction is None:
            raise ProtocolViolation(f"{update.done} is claimed outside the act in which its entry was read")
        self._next_entry = replace(self._stored, entry=update.after, claimed_from=update.done.start)

    def change(self, after: Entry) -> None:
        """Store another change of the entry that was read with ``lock``."""
        assert self._stored is not None
        self._next_entry = self._stored.with_entry(after)

    def add_counts(self, done: OffsetRange, counts: Counts, last: Fingerprint | None) -> None:  # noqa: ARG002
        self._counted = (counts, last)

    # Records

    @property
    def _writes_in_transaction(self) -> bool:
        return self._transaction is not None and not self._clients.elsewhere

    @property
    def _producer(self) -> Producer:
        if self._writes_in_transaction:
            assert self._transaction is not None
            return self._transaction.client
        self._wrote_plain = True
        return self._clients.plain

    def write(self, rows: RowChanges) -> Written:
        """Hand the rows to the producer. What an output topic would not take is refused here."""
        batch = rows.rows
        if not batch.num_rows:
            return Written()
        messages = self._mapper.messages(batch)
        limits = {topic: self._clients.limits(topic) for topic in messages.topics}
        refuse_unfit(messages, limits)
        if messages.refused:
            messages.refused = refuse_whole(messages.refused, batch.column(self._sink.lineage.offset).to_pylist())
        partition = batch.column(self._sink.lineage.partition)[0].as_py()
        # Without a key there is no order but the input partition's own: records stay together to keep it.
        unkeyed = {topic: partition % limit.partitions for topic, limit in limits.items()}
        send_all(self._producer, messages, unkeyed, in_transaction=self._writes_in_transaction)
        return Written(refused=messages.refused)

    # Dead letters

    def add_dead_letters(self, dead_letters: list[DeadLetter]) -> None:
        if not dead_letters:
            return
        producer = self._producer
        bytes_max = self._clients.limits(self._dead_letter_topic).message_bytes_max
        for dead_letter in dead_letters:
            value, headers = dead.message(dead_letter, bytes_max)
            send(producer, self._dead_letter_topic, value, dead.key(dead_letter), headers=headers)

    def dead_letters(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Selected dead letters of the act's partition. Whoever would remove one must first fence this act."""
        # An act that is fenced is done anew: then only what came since is read, before it is fenced again.
        every = replace(selection, from_offset=None, until_offset=None)
        if self._scan is None or self._scan.selection != every:
            self._scan = dead.DeadLetterScan(self._clients, self._dead_letter_topic, every, dead.whole)
        current = self._scan.read().values()
        wanted = [dead_letter for dead_letter, died in current if dead.matches(dead_letter, died, selection)]
        chosen = sorted(wanted, key=lambda dead_letter: dead_letter.offset)[:limit]
        if all(dead_letter.full_bytes is None for dead_letter in chosen):
            return chosen
        with Log(self._source, self._clients.group) as log:
            return [
                dead_letter if dead_letter.full_bytes is None else self._read_again(dead_letter, log)
                for dead_letter in chosen
            ]

    def _read_again(self, dead_letter: DeadLetter, log: Log) -> DeadLetter:
        """A shortened dead letter as the record that it was, if that is still in its topic; else it stays shortened."""
        tp = TopicPartition(dead_letter.topic, dead_letter.partition)
        assert self._stored is not None
        if log.partitions().get(tp) != self._stored.entry.topic_id:
            return dead_letter
        try:
            (record,) = log.records(tp, [dead_letter.offset])
        except SourceError:
            return dead_letter
        whole = replace(dead_letter, key=record.key, value=record.value, headers=record.headers, full_bytes=None)
        value = record.value or b""
        same = len(value) == dead_letter.full_bytes and value.startswith(dead_letter.value or b"")
        return whole if same else dead_letter

    def remove_dead_letters(self, dead_letters: list[DeadLetter], written: int, skipped: int) -> None:
        """Remove dead letters, in the act that is open, and count their records anew."""
        if self._stored is None or len(dead_letters) != written + skipped:
            raise ProtocolViolation(f"{len(dead_letters)} dead letters are not {written} written and {skipped} skipped")
        producer = self._producer
        for dead_letter in dead_letters:
            send(producer, self._dead_letter_topic, None, dead.key(dead_letter))
        entry = self._stored.entry
        self.change(replace(entry, counts=ledger.redriven(entry.counts, written, skipped)))
