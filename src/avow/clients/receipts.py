"""Receipts: what became of records that were sent, asked of the ledger of the pipeline that reads them.

A service that has sent a record knows its topic, partition and offset from Kafka's acknowledgement. ``Receipts`` says
what the pipeline has made of it, or waits until it has made something: one read of the ledger for all records that are
asked about, again and again with a growing pause. The table of rows is never read. Dead letters are looked up where the
ledger counts some; Kafka is asked where the ledger's counts leave a doubt, and which topic bears the name.

The ledger and Kafka are asked one by one, each under a lock of its own, and Kafka for no longer than whoever waits has
time. A Kafka that does not answer is no reason not to say what the ledger knows: the topic is then taken for the one
that it was.

Owns: the asking and the waiting. Must not know: what follows from the answers (``outcome`` judges), any one sink.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

import confluent_kafka as client

from avow import sinks
from avow.clients.outcome import TIMEOUT_S, Answer, Ask, Evidence, Receipt, State, judge, judge_up_to
from avow.errors import ConfigError, SinkError, SourceError
from avow.kafka.log import Log, TopicPartition
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.base import Claimed, DeadLetter, DriverSink, Held, Letters, Selection

__all__ = ["Answer", "Receipt", "Receipts", "State"]

PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 1.0
DOUBT_S = 1.0  # unsettled for so long: is there such a record at all?
IDS_KEPT_S = 10.0  # how long a topic is taken for the same
IDS_WAIT_S = 3.0  # for Kafka to say which topic bears the name
ASK_S = 30.0  # a question to Kafka, where nobody has said how long it may take
ASK_MIN_S = 1.0  # and where no time is left: one that answers at all does so within it
LETTERS_AT_ONCE = 1_000
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


class Receipts:
    """What became of records, for one pipeline. Threads may share it. Close it, or use it as a context manager."""

    def __init__(self, pipeline: PipelineConfig | Path | str) -> None:
        self._pipeline = pipeline if isinstance(pipeline, PipelineConfig) else load_checked(Path(pipeline))
        self._lock = threading.Lock()  # of the sink's connections: each is for one at a time
        self._store: DriverSink | None = None
        self._letters: Letters | None = None
        self._log_lock = threading.Lock()  # of Kafka's
        self._log: Log | None = None
        self._ids: dict[TopicPartition, str] = {}
        self._ids_at = self._no_answer_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._let_go()
        with self._log_lock:
            self._let_log_go()

    def receipt(self, sent: client.Message | Placed) -> Receipt:
        """Of a record that Kafka has acknowledged: the message that a delivery callback of confluent_kafka is given, or
        anything else that has topic, partition and offset."""
        if not isinstance(sent, client.Message):
            return Receipt(sent.topic, sent.partition, sent.offset, self)
        offset = sent.offset()
        if sent.error() is not None or offset is None or offset < 0:
            raise ConfigError(
                "there is no receipt for a record without an offset",
                advice="Ask for acknowledgements (acks other than 0), and only about records that were delivered.",
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
        """Until all are settled, in the order of the receipts. ``watch`` is told after every look."""
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
        highest = {TopicPartition(one.topic, one.partition): one for one in sorted(receipts)}
        return self._waited(list(highest.values()), partial(self._judged_up_to, since=since), timeout_s, watch)

    def positions(self) -> dict[TopicPartition, int]:
        """How far the pipeline is."""
        ledger = self._asked(lambda: self._the_store().look())
        return {where: held.entry.position for where, held in ledger.items()}

    def newest(self) -> list[Receipt]:
        """The last offset of each partition below which all is committed: up to these is everything there is now."""

        by = time.monotonic() + ASK_S
        there = self._asked_log(Log.partitions, by)
        ends = self._asked_log(lambda log: log.stable_ends(there), by)
        return [Receipt(w.topic, w.partition, end - 1, self) for w, end in sorted(ends.items()) if end]

    # Waiting

    def _waited(
        self, wanted: list[Receipt], judged: Callable[..., list[Answer]], timeout_s: float, watch: Watch
    ) -> list[Answer]:
        """Answers for all. One that is settled is not asked about again."""
        answers: dict[Receipt, Answer] = {}
        began = time.monotonic()
        deadline, pause, doubt_at = began + timeout_s, PAUSE_MIN_S, began + DOUBT_S
        while True:
            now = time.monotonic()
            last, doubt = now >= deadline, now >= doubt_at
            unsettled = [one for one in wanted if one not in answers or not answers[one].state.settled]
            try:
                found = judged(unsettled, began, deadline, doubt=doubt or last)
                answers |= zip(unsettled, found, strict=True)
                watch([answers[one] for one in wanted])
                if last or all(answers[one].state.settled for one in wanted):
                    return [answers[one] for one in wanted]
                doubt_at = float("inf") if doubt else doubt_at
            except (SinkError, SourceError):
                # A server that is restarted meanwhile need not trouble those who wait.
                if last:
                    raise
            # Not all at the same moment, if many wait.
            time.sleep(max(0.0, min(pause * random.uniform(0.8, 1.2), deadline - time.monotonic())))
            pause = min(pause * 1.5, PAUSE_MAX_S)

    def _asked(self, question: Callable[[], Found]) -> Found:
        """The sink's answer, over connections that are kept for the next question; those that failed are not."""
        with self._lock:
            try:
                return question()
            except (SinkError, ConfigError):
                self._let_go()
                raise

    def _asked_log(self, question: Callable[[Log], Found], by: float) -> Found:
        """Kafka's answer, the same way, by that time."""
        started = time.monotonic()
        left_s = max(ASK_MIN_S, by - started)
        if not self._log_lock.acquire(timeout=left_s):
            raise SourceError(
                f"Kafka at {self._pipeline.source.shown('brokers')} does not answer those who asked before",
                advice="Check that the cluster is up.",
            )
        try:
            self._log = self._log or Log(self._pipeline.source, self._pipeline.name)
            self._log.timeout_s = max(ASK_MIN_S, left_s - (time.monotonic() - started))
            return question(self._log)
        except (SourceError, ConfigError):
            self._let_log_go()
            raise
        finally:
            self._log_lock.release()

    # Looking

    def _judged(self, wanted: Sequence[Receipt], asked_at: float, by: float, *, doubt: bool) -> list[Answer]:
        """``asked_at``, ``by``: when whoever waits has asked, and when an answer is wanted. ``doubt``: also ask whether
        the log has got such records."""
        answers = {one: answer for one in wanted if (answer := self._foreign(one)) is not None}
        # The ledger first, and dead letters after it: what is below the position is then among them, or never will be.
        ledger = self._asked(lambda: self._the_store().look())
        answers |= self._made_again([one for one in wanted if one not in answers], ledger, asked_at, by)
        known = {one: Evidence(ledger.get(_place(one))) for one in wanted if one not in answers}
        if doubt:
            behind = [one for one in known if _is_behind(one, known[one].held)]
            known |= {one: replace(known[one], log=log) for one, log in self._logs(behind, by).items()}
        while len(answers) < len(set(wanted)):
            asks: dict[Ask, list[Receipt]] = defaultdict(list)
            for one in known.keys() - answers.keys():
                said = judge(one, self._pipeline.guarantee, self._pipeline.sink.mode, known[one])
                if isinstance(said, Answer):
                    answers[one] = said
                else:
                    asks[said].append(one)
            for ask, some in asks.items():
                found = self._found(ask, some, by)
                known |= {one: known[one].having(ask, found.get(one)) for one in some}
        return [answers[one] for one in wanted]

    def _judged_up_to(
        self,
        wanted: Sequence[Receipt],
        asked_at: float,
        by: float,
        *,
        doubt: bool,  # noqa: ARG002
        since: Mapping[TopicPartition, int],
    ) -> list[Answer]:
        ledger = self._asked(lambda: self._the_store().look())
        again = self._made_again(wanted, ledger, asked_at, by)
        return [
            again.get(one) or self._up_to(one, ledger.get(_place(one)), since.get(_place(one), 0)) for one in wanted
        ]

    def _up_to(self, one: Receipt, held: Held | None, since: int) -> Answer:
        said = self._foreign(one) or judge_up_to(one, self._pipeline.guarantee, held, None)
        if isinstance(said, Ask):
            until = one.offset + 1
            some = Selection(topic=one.topic, partition=one.partition, from_offset=since, until_offset=until)
            counted = self._asked(lambda: self._the_letters().by_reason(some)) if since < until else []
            said = judge_up_to(one, self._pipeline.guarantee, held, sum(count for _, count, _ in counted))
        assert isinstance(said, Answer)
        if since and held is not None and held.entry.counts.dead and said.state is State.WRITTEN:
            return replace(said, state=State.HANDLED, detail=f"all were passed; dead letters below {since} not counted")
        return said

    def _foreign(self, one: Receipt) -> Answer | None:
        """Of a topic that this pipeline does not read."""
        source = self._pipeline.source
        pattern = source.topics_pattern
        ours = one.topic in source.topics if pattern is None else re.fullmatch(pattern, one.topic)
        return None if ours else Answer(one, State.UNKNOWN, f"topic {one.topic} is not read by this pipeline")

    def _made_again(
        self, wanted: Sequence[Receipt], ledger: Mapping[TopicPartition, Held], since: float, by: float
    ) -> dict[Receipt, Answer]:
        """Of a topic that is not the one the ledger knows: the same offsets are other records."""
        self._look_at_ids(since, min(by, time.monotonic() + IDS_WAIT_S))
        found = {}
        for one in wanted:
            where = _place(one)
            if where in ledger and where in self._ids and ledger[where].entry.topic_id != self._ids[where]:
                said = f"topic {one.topic} was deleted and made again: the ledger knows the one before"
                found[one] = Answer(one, State.UNKNOWN, said)
        return found

    def _look_at_ids(self, since: float, by: float) -> None:
        """Which topics bear the names: not before ``since``, because a record may have been sent to a topic that was
        made a moment ago; then now and then. If nobody answers, it is those that did, for as long again."""

        def asked(log: Log) -> None:
            if not self._ids_are_old(since):  # somebody else has asked meanwhile
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
                self._asked_log(asked, by)

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
            view = self._asked_log(Log.cluster, by)  # and not of the declared topics, one of which may be gone
            there = {TopicPartition(one.topic, one.partition) for one in view.partitions}
            asked = {_place(one) for one in wanted} & there
            offsets = self._asked_log(lambda log: log.offsets(asked), by)
            return {one: offsets.get(_place(one), (0, 0)) for one in wanted}
        return {}

    def _found(self, ask: Ask, wanted: Sequence[Receipt], by: float) -> dict[Receipt, Any]:
        """What is asked, for as many as there is an answer."""
        found: dict[Receipt, Any] = {}
        for where, some in _by_partition(wanted).items():
            offsets = {one.offset for one in some}
            by_offset: Mapping[int, Any]
            match ask:
                case Ask.LETTER:
                    by_offset = self._asked(partial(self._letters_at, where, offsets))
                case Ask.CLAIM:
                    by_offset = self._asked(partial(self._claims_at, where, offsets))
                case Ask.RECORD:
                    by_offset = self._records_at(where, offsets, by)
            found |= {one: by_offset[one.offset] for one in some if one.offset in by_offset}
        return found

    def _claims_at(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:
        return self._the_store().claims_of(where, offsets)

    def _letters_at(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, DeadLetter]:
        found: dict[int, DeadLetter] = {}
        start = min(offsets)
        while True:
            some = Selection(
                topic=where.topic, partition=where.partition, from_offset=start, until_offset=max(offsets) + 1
            )
            page = self._the_letters().select(some, LETTERS_AT_ONCE)
            found |= {letter.offset: letter for letter in page if letter.offset in offsets}
            if len(page) < LETTERS_AT_ONCE:
                return found
            start = page[-1].offset + 1

    def _records_at(self, where: TopicPartition, offsets: Collection[int], by: float) -> dict[int, bool]:
        """Whether there is a committed record; no item below the log's beginning."""
        there = where in self._asked_log(Log.partitions, by)
        earliest = self._asked_log(lambda log: log.offsets([where])[where][0], by) if there else max(offsets) + 1
        left = sorted(offset for offset in offsets if offset >= earliest)
        seen: set[int] = set()
        if left:
            with _reading(self._pipeline, max(ASK_MIN_S, by - time.monotonic())) as reader:
                for span in _spans(where, left):
                    for batch in reader.read(span):
                        seen.update(batch.column("offset").to_pylist())
        return {offset: offset in seen for offset in left}

    # Connections, opened when they are needed

    def _the_store(self) -> DriverSink:
        self._store = self._store or sinks.driver_sink(self._pipeline)
        return self._store

    def _the_letters(self) -> Letters:
        self._letters = self._letters or sinks.dead_letters(self._pipeline)
        return self._letters

    def _let_go(self) -> None:
        store, letters = self._store, self._letters
        self._store = self._letters = None
        if store is not None:
            store.close()
        if letters is not None:
            letters.__exit__(None, None, None)

    def _let_log_go(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()


@contextmanager
def _reading(pipeline: PipelineConfig, silence_s: float) -> Iterator[Reader]:
    reader = Reader(pipeline.source, pipeline.name, silence_s=silence_s)
    try:
        yield reader
    finally:
        reader.close()


def _place(one: Receipt) -> TopicPartition:
    return TopicPartition(one.topic, one.partition)


def _is_behind(one: Receipt, held: Held | None) -> bool:
    """Whether it lies where the position has not come."""
    return held is None or held.entry.position <= one.offset


def _by_partition(wanted: Iterable[Receipt]) -> dict[TopicPartition, list[Receipt]]:
    found: dict[TopicPartition, list[Receipt]] = defaultdict(list)
    for one in wanted:
        found[_place(one)].append(one)
    return found


def _spans(where: TopicPartition, offsets: Sequence[int]) -> Iterator[OffsetRange]:
    """Ascending offsets as few ranges, without long ways between them."""
    start = last = offsets[0]
    for offset in offsets[1:]:
        if offset - last > GAP_MAX:
            yield OffsetRange(where.topic, where.partition, start, last + 1)
            start = offset
        last = offset
    yield OffsetRange(where.topic, where.partition, start, last + 1)
