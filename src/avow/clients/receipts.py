"""Receipts: what became of records that were sent, asked of the ledger of the pipeline that reads them.

A service that has sent a record knows its topic, partition and offset from Kafka's acknowledgement. ``Receipts`` says
what the pipeline has made of it, or waits until it has made something: one read of the ledger for all records that are
asked about, again and again with a growing pause. The table of rows is never read. Dead letters are looked up where the
ledger counts some; Kafka is asked where the ledger's counts leave a doubt, and which topic bears the name.

The ledger and Kafka are queried one after the other, each under its own lock, and Kafka for no longer than the caller's
time-out. If Kafka does not answer, the ledger still does: the topic is then assumed to be the one that it was.

Owns: querying and waiting. Must not know: what follows from the answers (``outcome`` judges), any one sink.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import confluent_kafka as client

from avow import sinks
from avow.clients.outcome import TIMEOUT_S, Answer, Ask, Receipt, ReceiptEvidence, State, judge, judge_up_to
from avow.errors import ConfigError, SinkError, SourceError
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.plan import load_checked
from avow.retry import backoff
from avow.settings import PipelineConfig
from avow.sinks.base import (
    Claimed,
    ClosingContext,
    DeadLetter,
    DeadLetterReader,
    DriverSink,
    PartitionState,
    Selection,
)

__all__ = ["Answer", "Receipt", "Receipts", "State"]

PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 1.0
DOUBT_S = 1.0  # unsettled for so long: is there such a record at all?
IDS_KEPT_S = 10.0  # how long a topic is taken for the same
IDS_WAIT_S = 3.0  # for Kafka to return the topic's id
ASK_S = 30.0  # a request to Kafka without a time-out of the caller's
ASK_MIN_S = 1.0  # and where no time is left: one that answers at all does so within it
DEAD_LETTERS_AT_ONCE = 1_000
GAP_MAX = 1_000  # offsets that are read through rather than jumped over

Found = TypeVar("Found")
Watch = Callable[[Sequence[Answer]], None]


class Placed(Protocol):
    """Where a record stands."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...


class Receipts(ClosingContext):
    """What became of records, for one pipeline. Threads may share it. Close it, or use it as a context manager."""

    def __init__(self, pipeline: PipelineConfig | Path | str) -> None:
        self._pipeline = pipeline if isinstance(pipeline, PipelineConfig) else load_checked(Path(pipeline))
        self._lock = threading.Lock()  # of the sink's connections: each is for one at a time
        self._store: DriverSink | None = None
        self._dead_letters: DeadLetterReader | None = None
        self._log_lock = threading.Lock()  # of Kafka's
        self._log: Log | None = None
        self._ids: dict[TopicPartition, str] = {}
        self._ids_at = self._no_answer_at = float("-inf")

    def close(self) -> None:
        with self._lock:
            self._close_clients()
        with self._log_lock:
            self._close_log()

    def receipt(self, sent: client.Message | Placed) -> Receipt:
        """Of a record that Kafka has acknowledged: the message that a delivery callback of confluent_kafka is given, or
        anything else that has topic, partition and offset."""
        if not isinstance(sent, client.Message):
            return Receipt(sent.topic, sent.partition, sent.offset, self)
        offset = sent.offset()
        if sent.error() is not None or offset is None or offset < 0:
            raise ConfigError(
                "a record without an offset has no receipt",
                advice="Send with acknowledgements (acks other than 0), and create receipts of delivered records only.",
            )
        return Receipt(str(sent.topic()), int(sent.partition() or 0), offset, self)

    # Asking

    def look(self, receipt: Receipt) -> Answer:
        """What is known now."""
        return self.look_all([receipt])[0]

    def look_all(self, receipts: Collection[Receipt]) -> list[Answer]:
        """What is known now, in the order of the receipts."""
        now = time.monotonic()
        return self._judged(list(receipts), now, now + ASK_S, doubt=True)

    def wait(self, receipt: Receipt, timeout_s: float = TIMEOUT_S) -> Answer:
        """Until it is settled; when the time is over, what is known then."""
        return self.wait_all([receipt], timeout_s)[0]

    def wait_all(
        self, receipts: Collection[Receipt], timeout_s: float = TIMEOUT_S, watch: Watch = lambda _: None
    ) -> list[Answer]:
        """Until all are settled, in the order of the receipts. ``watch`` is called after every query."""
        return self._waited(list(receipts), self._judged, timeout_s, watch)

    def wait_up_to(
        self,
        receipts: Collection[Receipt],
        timeout_s: float = TIMEOUT_S,
        watch: Watch = lambda _: None,
        *,
        since: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> list[Answer]:
        """Until all records of these partitions, up to the highest of these, are settled: an answer for each partition.
        All that somebody sent so far is all up to the last receipt of each partition. ``since``: dead letters below
        these offsets are not counted."""
        highest = {_tp(receipt): receipt for receipt in sorted(receipts)}
        return self._waited(list(highest.values()), partial(self._judged_up_to, since=since), timeout_s, watch)

    def positions(self) -> dict[TopicPartition, int]:
        """How far the pipeline is."""
        ledger = self._query_sink(lambda: self._open_store().ledger_snapshot())
        return {tp: partition.entry.position for tp, partition in ledger.items()}

    def newest(self) -> list[Receipt]:
        """The last offset of each partition below which all is committed: up to these is everything there is now."""
        by = time.monotonic() + ASK_S
        tps = self._query_log(Log.partitions, by)
        ends = self._query_log(lambda log: log.stable_ends(tps), by)
        return [Receipt(w.topic, w.partition, end - 1, self) for w, end in sorted(ends.items()) if end]

    # Waiting

    def _waited(
        self, wanted: list[Receipt], judged: Callable[..., list[Answer]], timeout_s: float, watch: Watch
    ) -> list[Answer]:
        """Answers for all. One that is settled is not asked about again."""
        answers: dict[Receipt, Answer] = {}
        began = time.monotonic()
        deadline, doubt_at = began + timeout_s, began + DOUBT_S
        for pause in backoff(PAUSE_MIN_S, PAUSE_MAX_S, factor=1.5):
            now = time.monotonic()
            last, doubt = now >= deadline, now >= doubt_at
            unsettled = [receipt for receipt in wanted if receipt not in answers or not answers[receipt].state.settled]
            try:
                results = judged(unsettled, began, deadline, doubt=doubt or last)
                answers |= zip(unsettled, results, strict=True)
                watch([answers[receipt] for receipt in wanted])
                if last or all(answers[receipt].state.settled for receipt in wanted):
                    return [answers[receipt] for receipt in wanted]
                doubt_at = float("inf") if doubt else doubt_at
            except (SinkError, SourceError):
                # A server that is restarted meanwhile need not trouble those who wait.
                if last:
                    raise
            # Not all at the same moment, if many wait.
            time.sleep(max(0.0, min(pause * random.uniform(0.8, 1.2), deadline - time.monotonic())))
        raise AssertionError

    def _query_sink(self, question: Callable[[], Found]) -> Found:
        """The sink's answer, over connections that are kept for the next question; those that failed are not."""
        with self._lock:
            try:
                return question()
            except (SinkError, ConfigError):
                self._close_clients()
                raise

    def _query_log(self, question: Callable[[Log], Found], by: float) -> Found:
        """Kafka's answer, the same way, by that time."""
        started = time.monotonic()
        left_s = max(ASK_MIN_S, by - started)
        if not self._log_lock.acquire(timeout=left_s):
            raise SourceError(
                f"Kafka at {self._pipeline.source.shown('brokers')} does not answer an earlier request",
                advice="Check that the cluster is up.",
            )
        try:
            self._log = self._log or Log(self._pipeline.source, self._pipeline.name)
            self._log.admin.timeout_s = max(ASK_MIN_S, left_s - (time.monotonic() - started))
            return question(self._log)
        except (SourceError, ConfigError):
            self._close_log()
            raise
        finally:
            self._log_lock.release()

    # Queries

    def _judged(self, wanted: Sequence[Receipt], asked_at: float, by: float, *, doubt: bool) -> list[Answer]:
        """``asked_at``, ``by``: when the caller asked, and its deadline. ``doubt``: also ask whether
        the log has got such records."""
        answers = {receipt: answer for receipt in wanted if (answer := self._not_ours(receipt)) is not None}
        # The ledger first, and dead letters after it: what is below the position is then among them, or never will be.
        ledger = self._query_sink(lambda: self._open_store().ledger_snapshot())
        answers |= self._recreated([receipt for receipt in wanted if receipt not in answers], ledger, asked_at, by)
        known = {receipt: ReceiptEvidence(ledger.get(_tp(receipt))) for receipt in wanted if receipt not in answers}
        if doubt:
            behind = [r for r, facts in known.items() if facts.held is None or facts.held.entry.position <= r.offset]
            known |= {receipt: replace(known[receipt], log=log) for receipt, log in self._logs(behind, by).items()}
        while len(answers) < len(set(wanted)):
            asks: dict[Ask, list[Receipt]] = defaultdict(list)
            for receipt in known.keys() - answers.keys():
                judgement = judge(receipt, self._pipeline.guarantee, self._pipeline.sink.mode, known[receipt])
                if isinstance(judgement, Answer):
                    answers[receipt] = judgement
                else:
                    asks[judgement].append(receipt)
            for ask, receipts in asks.items():
                facts = self._found(ask, receipts, by)
                known |= {receipt: known[receipt].having(ask, facts.get(receipt)) for receipt in receipts}
        return [answers[receipt] for receipt in wanted]

    def _judged_up_to(
        self,
        wanted: Sequence[Receipt],
        asked_at: float,
        by: float,
        *,
        doubt: bool,  # noqa: ARG002
        since: Mapping[TopicPartition, int],
    ) -> list[Answer]:
        ledger = self._query_sink(lambda: self._open_store().ledger_snapshot())
        again = self._recreated(wanted, ledger, asked_at, by)
        return [
            again.get(receipt) or self._up_to(receipt, ledger.get(_tp(receipt)), since.get(_tp(receipt), 0))
            for receipt in wanted
        ]

    def _up_to(self, receipt: Receipt, partition: PartitionState | None, since: int) -> Answer:
        judgement = self._not_ours(receipt) or judge_up_to(receipt, self._pipeline.guarantee, partition, None)
        if isinstance(judgement, Ask):
            until = receipt.offset + 1
            selection = Selection(
                topic=receipt.topic, partition=receipt.partition, from_offset=since, until_offset=until
            )
            counted = self._query_sink(lambda: self._open_dead_letters().by_reason(selection)) if since < until else []
            judgement = judge_up_to(receipt, self._pipeline.guarantee, partition, sum(count for _, count, _ in counted))
        assert isinstance(judgement, Answer)
        if since and partition is not None and partition.entry.counts.dead and judgement.state is State.WRITTEN:
            return replace(
                judgement,
                state=State.HANDLED,
                detail=f"all were claimed; dead letters below offset {since} were not counted",
            )
        return judgement

    def _not_ours(self, receipt: Receipt) -> Answer | None:
        """Of a topic that this pipeline does not read."""
        source = self._pipeline.source
        pattern = source.topics_pattern
        read_by_us = receipt.topic in source.topics if pattern is None else re.fullmatch(pattern, receipt.topic)
        if read_by_us:
            return None
        return Answer(receipt, State.UNKNOWN, f"topic {receipt.topic} is not read by this pipeline")

    def _recreated(
        self, wanted: Sequence[Receipt], ledger: Mapping[TopicPartition, PartitionState], since: float, by: float
    ) -> dict[Receipt, Answer]:
        """Of a topic that is not the one the ledger knows: the same offsets are other records."""
        self._refresh_topic_ids(since, min(by, time.monotonic() + IDS_WAIT_S))
        answers = {}
        for receipt in wanted:
            tp = _tp(receipt)
            if tp in ledger and tp in self._ids and ledger[tp].entry.topic_id != self._ids[tp]:
                detail = f"topic {receipt.topic} was deleted and recreated: the ledger's position is of the old topic"
                answers[receipt] = Answer(receipt, State.UNKNOWN, detail)
        return answers

    def _refresh_topic_ids(self, since: float, by: float) -> None:
        """Which topics bear the names: not before ``since``, because a record may have been sent to a topic that was
        created a moment ago; then now and then. Without an answer, the last known ids stay valid for as long again."""

        def read_ids(log: Log) -> None:
            if not self._ids_are_old(since):  # another thread has asked meanwhile
                return
            now = time.monotonic()
            try:
                self._ids = log.partitions()
            except (SourceError, ConfigError):
                self._no_answer_at = time.monotonic()
                raise
            self._ids_at = now

        if self._ids_are_old(since):
            with suppress(SourceError, ConfigError):
                self._query_log(read_ids, by)

    def _ids_are_old(self, since: float) -> bool:
        now = time.monotonic()
        old = self._ids_at < since or now - self._ids_at > IDS_KEPT_S
        return old and now - self._no_answer_at > IDS_KEPT_S

    def _logs(self, wanted: Collection[Receipt], by: float) -> dict[Receipt, tuple[int, int]]:
        """Where their partitions begin and end; an empty log where there is no such partition. Nothing if nobody
        answers: it is no more than a doubt."""
        if not wanted:
            return {}
        with suppress(SourceError, ConfigError):
            view = self._query_log(Log.cluster, by)  # and not of the declared topics, one of which may be gone
            existing = {TopicPartition(partition.topic, partition.partition) for partition in view.partitions}
            tps = {_tp(receipt) for receipt in wanted} & existing
            offsets = self._query_log(lambda log: log.offsets(tps), by)
            return {receipt: offsets.get(_tp(receipt), (0, 0)) for receipt in wanted}
        return {}

    def _found(self, ask: Ask, wanted: Sequence[Receipt], by: float) -> dict[Receipt, Any]:
        """What is asked, for as many as there is an answer."""
        facts: dict[Receipt, Any] = {}
        by_partition: dict[TopicPartition, list[Receipt]] = defaultdict(list)
        for receipt in wanted:
            by_partition[_tp(receipt)].append(receipt)
        for tp, receipts in by_partition.items():
            offsets = {receipt.offset for receipt in receipts}
            by_offset: Mapping[int, Any]
            match ask:
                case Ask.DEAD_LETTER:
                    by_offset = self._query_sink(partial(self._dead_letters_at, tp, offsets))
                case Ask.CLAIM:
                    by_offset = self._query_sink(partial(self._claims_at, tp, offsets))
                case Ask.RECORD:
                    by_offset = self._records_at(tp, offsets, by)
            facts |= {receipt: by_offset[receipt.offset] for receipt in receipts if receipt.offset in by_offset}
        return facts

    def _claims_at(self, tp: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:
        return self._open_store().claims_of(tp, offsets)

    def _dead_letters_at(self, tp: TopicPartition, offsets: Collection[int]) -> dict[int, DeadLetter]:
        dead_letters: dict[int, DeadLetter] = {}
        start = min(offsets)
        while True:
            selection = Selection(
                topic=tp.topic, partition=tp.partition, from_offset=start, until_offset=max(offsets) + 1
            )
            page = self._open_dead_letters().select(selection, DEAD_LETTERS_AT_ONCE)
            dead_letters |= {dead_letter.offset: dead_letter for dead_letter in page if dead_letter.offset in offsets}
            if len(page) < DEAD_LETTERS_AT_ONCE:
                return dead_letters
            start = page[-1].offset + 1

    def _records_at(self, tp: TopicPartition, offsets: Collection[int], by: float) -> dict[int, bool]:
        """Whether there is a committed record; no item below the log's beginning."""
        offsets_of = self._query_log(lambda log: log.offsets([tp], skip_deleted=True), by)
        earliest = offsets_of[tp][0] if tp in offsets_of else max(offsets) + 1
        left = sorted(offset for offset in offsets if offset >= earliest)
        seen: set[int] = set()
        if left:
            silence_s = max(ASK_MIN_S, by - time.monotonic())
            with closing(Reader(self._pipeline.source, self._pipeline.name, silence_s=silence_s)) as reader:
                for span in _spans(tp, left):
                    for batch in reader.read(span):
                        seen.update(batch.column("offset").to_pylist())
        return {offset: offset in seen for offset in left}

    # Connections, opened when they are needed

    def _open_store(self) -> DriverSink:
        self._store = self._store or sinks.driver_sink(self._pipeline)
        return self._store

    def _open_dead_letters(self) -> DeadLetterReader:
        self._dead_letters = self._dead_letters or sinks.dead_letters(self._pipeline)
        return self._dead_letters

    def _close_clients(self) -> None:
        opened = (self._store, self._dead_letters)
        self._store = self._dead_letters = None
        for part in opened:
            if part is not None:
                part.close()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()


def _tp(receipt: Receipt) -> TopicPartition:
    return TopicPartition(receipt.topic, receipt.partition)


def _spans(tp: TopicPartition, offsets: Sequence[int]) -> Iterator[OffsetRange]:
    """Ascending offsets as few ranges, without long ways between them."""
    start = last = offsets[0]
    for offset in offsets[1:]:
        if offset - last > GAP_MAX:
            yield OffsetRange(tp.topic, tp.partition, start, last + 1)
            start = offset
        last = offset
    yield OffsetRange(tp.topic, tp.partition, start, last + 1)
