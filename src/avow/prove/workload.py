"""A steady producer of numbered, checksummed records, which tracks the fate of every one it sent.

Optionally in transactions, of which every third is aborted. Owns: the producer and these fates. Must not know: faults
or pipelines. Its neighbour is ``check``, which defines the records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from avow.errors import SourceError
from avow.kafka import metadata
from avow.prove import raw_producer
from avow.prove.check import HEADER, Fate, Sent, value

TICK_S = 0.1
FLUSH_S = 90
PER_KEY = 3  # in the modes with a key: so many records of a key, one after the other, in one partition
TRANSACTION_RECORDS = 60


class Workload:
    """Sends ``rate`` records a second from ``start`` to ``stop``, and ``records`` at least."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        partitions: int,
        records: int,
        rate: int,
        keyed: bool = False,
        transactions: bool = False,
        first: int = 0,
        value: Callable[[int, int], bytes] = value,
        message: Callable[[int, int], dict[str, Any]] = lambda _number, _key: {},
    ) -> None:
        self._settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "message.timeout.ms": 120_000,
            "reconnect.backoff.max.ms": 500,
            "topic.metadata.refresh.interval.ms": 1000,  # partitions may be added
        }
        self._topic, self._value = topic, value
        self._message = message  # arguments of a record that replace the usual ones
        self._partitions = self.partitions = partitions  # the second may be raised while it runs
        self._records, self._rate, self._keyed, self._transactions = records, rate, keyed, transactions
        self._sent: dict[int, Sent] = {}
        self._first = first  # number
        self._next = first
        self._extra = 0  # to be sent at once
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="workload", daemon=True)
        self._failure: BaseException | None = None
        self.aborted = 0  # transactions

    def start(self) -> None:
        self._thread.start()

    def give_up(self) -> None:
        """End soon; the fates are not needed."""
        self._ending.set()

    def stop(self) -> None:
        """End once all records are sent, and every acknowledgement has arrived or timed out."""
        self._ending.set()
        self._thread.join()
        if self._failure is not None:
            raise SourceError(f"the workload ended early: {self._failure}") from self._failure

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def next(self) -> int:
        """The number that another workload may begin with: of a fresh key, for a key belongs to one partition."""
        return -(-self._next // PER_KEY) * PER_KEY

    def sent(self) -> list[Sent]:
        return list(self._sent.values())

    @property
    def transactional_id(self) -> str:
        return f"prove-{self._topic}"

    def burst(self, count: int) -> None:
        """So many at once: by the steady producer, so that numbers rise within a partition, or after its end."""
        if self._thread.is_alive():
            self._extra = count
        else:
            producer = self._producer()
            self._send(producer, count)
            producer.flush(FLUSH_S)

    def _producer(self, **more: str | int) -> Producer:
        return Producer(self._settings | more, logger=metadata.QUIET)

    def _work(self) -> None:
        try:
            if self._transactions:
                self._in_transactions()
            else:
                self._steadily()
        except (KafkaException, RuntimeError, ValueError) as error:
            self._failure = error

    def _steadily(self) -> None:
        producer = self._producer()
        began, paced = time.monotonic(), 0
        while not self._done():
            due = int((time.monotonic() - began) * self._rate)
            extra, self._extra = self._extra, 0
            self._send(producer, due - paced + extra)
            paced = due
            producer.poll(0)
            time.sleep(TICK_S)
        producer.flush(FLUSH_S)

    def _done(self) -> bool:
        return self._ending.is_set() and not self._extra and self._next >= self._first + self._records

    def _send(self, producer: Producer, count: int) -> list[int]:
        numbers = list(range(self._next, self._next + count))
        self._next += count
        for number in numbers:
            key = number // PER_KEY if self._keyed else number
            if number % PER_KEY == 0:  # in between, a key would come to two partitions, which have no order
                self._partitions = self.partitions
            partition = key % self._partitions
            self._sent[number] = Sent(number, key, Fate.UNKNOWN, partition, -1)
            overrides = self._message(number, key)
            if "raw_headers" in overrides:
                self._send_raw(number, key, partition, overrides["raw_headers"])
                continue
            record: dict[str, Any] = {
                "value": self._value(number, key),
                "key": str(key).encode(),
                "partition": partition,
                **overrides,
                "headers": [(HEADER, str(number).encode()), *overrides.get("headers", [])],
            }
            while True:
                try:
                    producer.produce(self._topic, **record, on_delivery=partial(self._answered, number))
                    break
                except BufferError:
                    producer.poll(TICK_S)
        return numbers

    def _send_raw(self, number: int, key: int, partition: int, headers: list[tuple[bytes, bytes | None]]) -> None:
        """A record that the client cannot send. It may overtake others: it never becomes a row."""
        all_headers = ((HEADER.encode(), b"%d" % number), *headers)
        record = raw_producer.RawRecord(self._value(number, key), b"%d" % key, all_headers, int(time.time() * 1000))
        try:
            (offset,) = raw_producer.produce(self._settings["bootstrap.servers"], self._topic, [record], partition)
        except TimeoutError:
            return  # it stays unknown
        self._sent[number] = self._sent[number]._replace(fate=Fate.ACKNOWLEDGED, offset=offset)

    def _answered(self, number: int, error: KafkaError | None, message: Message) -> None:
        record = self._sent[number]
        if error is None:
            fate, offset = (Fate.UNKNOWN if self._transactions else Fate.ACKNOWLEDGED), message.offset()
            self._sent[number] = record._replace(fate=fate, offset=-1 if offset is None else offset)
        # Any error leaves it unknown: after a time-out the broker may have written it or not.

    def _in_transactions(self) -> None:
        """Each transaction is committed or aborted as a whole, and so is the fate of its records."""
        producer: Producer | None = None
        round_ = 0
        settings: dict[str, str | int] = {
            "transactional.id": self.transactional_id,
            "transaction.timeout.ms": 60_000,
            "message.timeout.ms": 30_000,  # no longer than the transaction's, or librdkafka refuses
        }
        while not self._done():
            fresh = producer is None
            if producer is None:
                producer = self._producer(**settings)
            try:
                if fresh:
                    producer.init_transactions(FLUSH_S)
                round_ += 1
                producer.begin_transaction()
                numbers = self._send(producer, TRANSACTION_RECORDS)
                producer.flush(FLUSH_S)
                if round_ % 3 == 0:
                    producer.abort_transaction(FLUSH_S)
                    self.aborted += 1
                    fate = Fate.ABORTED
                else:
                    producer.commit_transaction(FLUSH_S)
                    fate = Fate.ACKNOWLEDGED
                for number in numbers:
                    self._sent[number] = self._sent[number]._replace(fate=fate)
            except KafkaException:
                # Its records stay unknown until the log is read. A new producer aborts the open transaction.
                producer = None
            time.sleep(TRANSACTION_RECORDS / self._rate)
