"""The independent check: what the producer sent against what the sink holds, by number and checksum.

It shares no code with the sinks or the audit (the import linter sees to that): ``oracles`` read the sink, a plain
consumer reads the topic, and ``compare`` is a few loops over plain values. Where the audit believes the log and the
ledger, this believes the producer: every record carries its own number and a checksum of its content.

Owns: the records' content, and this comparison. Must not know: pipelines, sinks, the audit. Anomalies are named by
``avow.guarantee``'s.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import methodcaller
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from avow.guarantee import Anomaly

READ_TIMEOUT_S = 60
HEADER = "avow-number"  # every record carries its number here too, whatever its value is
SCHEMA = "n long not null, k long not null, crc long not null, body string not null"
COLUMNS = ("n", "k", "crc", "body", "_kafka_partition", "_kafka_offset")  # of a row
_QUIET = logging.getLogger("avow.prove.check")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class Fate(StrEnum):
    """What the producer knows of a record."""

    ACKNOWLEDGED = "acknowledged"  # and its transaction committed, if it had one
    ABORTED = "aborted"  # its transaction was
    FAILED = "failed"  # never left the producer
    UNKNOWN = "unknown"  # no answer came: it may be in the log or not


class Sent(NamedTuple):
    number: int
    key: int
    fate: Fate
    partition: int
    offset: int  # -1: not known


class Row(NamedTuple):
    number: int
    key: int
    crc: int
    body: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class CheckResult:
    anomalies: Mapping[str, int]  # anomaly -> how many records
    examples: Mapping[str, list[int]]  # anomaly -> the first numbers
    records: int  # that had to be there


EXAMPLES_MAX = 5


def checksum(number: int, key: int, body: str) -> int:
    return zlib.crc32(f"{number}:{key}:{body}".encode())


def value(number: int, key: int) -> bytes:
    """A record's bytes."""
    body = f"record {number} " + "x" * (number % 40)
    return json.dumps({"n": number, "k": key, "crc": checksum(number, key, body), "body": body}).encode()


def compare(
    sent: Iterable[Sent],
    rows: Iterable[Row],
    mode: str = "append",
    *,
    in_log: set[int] | None = None,
    stopped_at: Mapping[int, int] | None = None,
    dead_letters: Iterable[tuple[int, int]] = (),
) -> CheckResult:
    """Name what is wrong.

    ``in_log``: the numbers that a fresh reader finds in the topic; it settles the fate of records without an answer.
    ``stopped_at``: the positions where the pipeline stopped for good; records from there on are not expected.
    ``dead_letters``: (partition, offset) of dead letters, which are accounted for and not lost.
    """
    by_number = {record.number: record for record in sent}
    dead_places = set(dead_letters)
    good = {
        record.number
        for record in by_number.values()
        if record.fate is Fate.ACKNOWLEDGED
        or (record.fate is Fate.UNKNOWN and in_log is not None and record.number in in_log)
    }
    expected = {
        number
        for number in good
        if (stopped_at is None or by_number[number].offset < stopped_at.get(by_number[number].partition, 0))
        and (by_number[number].partition, by_number[number].offset) not in dead_places
    }
    stored = list(rows)
    anomalies: dict[Anomaly, list[int]] = {anomaly: [] for anomaly in Anomaly}
    for row in stored:
        record = by_number.get(row.number)
        if record is None or record.fate is Fate.FAILED:
            anomalies[Anomaly.PHANTOM].append(row.number)
        elif record.fate is Fate.ABORTED:
            anomalies[Anomaly.ABORTED_READ].append(row.number)
        elif record.fate is Fate.UNKNOWN and in_log is not None and row.number not in in_log:
            anomalies[Anomaly.PHANTOM].append(row.number)
        if row.crc != checksum(row.number, row.key, row.body) or (record is not None and record.key != row.key):
            anomalies[Anomaly.CORRUPTED].append(row.number)
    anomalies[Anomaly.REORDERED] = _reordered(stored, by_number)
    if mode == "append":
        copies = Counter(row.number for row in stored)
        anomalies[Anomaly.DUPLICATED] = [number for number, count in copies.items() if count > 1]
        anomalies[Anomaly.LOST] = sorted(expected - copies.keys())
    else:
        copies = Counter(row.key for row in stored)
        anomalies[Anomaly.DUPLICATED] = [row.number for row in stored if copies[row.key] > 1]
        anomalies[Anomaly.LOST] = _lost_by_key(stored, expected, by_number, first=mode == "dedupe")
    present = {anomaly: numbers for anomaly, numbers in anomalies.items() if numbers}
    return CheckResult(
        anomalies={str(anomaly): len(numbers) for anomaly, numbers in present.items()},
        examples={str(anomaly): sorted(numbers)[:EXAMPLES_MAX] for anomaly, numbers in present.items()},
        records=len(expected),
    )


def _reordered(rows: list[Row], sent: Mapping[int, Sent]) -> list[int]:
    """Rows whose place in the log is not the one their number has: within a partition numbers rise with offsets."""
    reordered = []
    highest: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row.partition, row.offset)):
        record = sent.get(row.number)
        moved = record is not None and record.offset >= 0 and (record.partition, record.offset) != row[4:6]
        if moved or row.number < highest.get(row.partition, -1):
            reordered.append(row.number)
        highest[row.partition] = max(highest.get(row.partition, -1), row.number)
    return reordered


def _lost_by_key(rows: list[Row], expected: set[int], sent: Mapping[int, Sent], *, first: bool) -> list[int]:
    """Of each key the record that should have won, where it did not: all of a key go to one partition, in order."""
    winners: dict[int, int] = {}
    for number in sorted(expected, reverse=first):
        winners[sent[number].key] = number
    stored = {row.key: row.number for row in rows}
    return sorted(number for key, number in winners.items() if stored.get(key) != number)


def read_log(bootstrap: str, topic: str) -> dict[tuple[int, int], int]:
    """(partition, offset) -> number, for a reader of committed records that has read nothing before."""
    numbers: dict[tuple[int, int], int] = {}
    for message in read_messages(bootstrap, topic):
        number = _number(message)
        position = (message.partition(), message.offset())
        assert position[0] is not None
        assert position[1] is not None
        numbers[position[0], position[1]] = number
    return numbers


# Not ``message.headers()``: where a name is not UTF-8, the interpreter's shortcut for such a call ends the process.
_headers = methodcaller("headers")


def _number(message: Message) -> int:
    try:
        return int(dict(_headers(message))[HEADER])
    except (SystemError, UnicodeDecodeError):  # such a record has its usual value
        return int(json.loads(message.value() or b"")["n"])


def read_places(bootstrap: str, topic: str) -> list[tuple[int, int]]:
    """(partition, offset) of every committed record of a topic."""
    return [(message.partition() or 0, message.offset() or 0) for message in read_messages(bootstrap, topic)]


def read_messages(bootstrap: str, topic: str) -> Iterator[Message]:
    """Every committed record of a topic. A transaction that ended a moment ago is waited for."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "prove-check",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",  # a new leader may not know its end yet, and deny any offset
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        },
        logger=_QUIET,
    )
    try:
        partitions = consumer.list_topics(topic, timeout=READ_TIMEOUT_S).topics[topic].partitions
        ends = _ends(bootstrap, topic, set(partitions))
        unfinished = {number for number, end in ends.items() if end}
        consumer.assign([TopicPartition(topic, number, 0) for number in unfinished])
        deadline = time.monotonic() + READ_TIMEOUT_S
        while unfinished:
            message = consumer.poll(1)
            if message is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{topic} could not be read to its end within {READ_TIMEOUT_S} s")
                continue
            deadline = time.monotonic() + READ_TIMEOUT_S
            error = message.error()
            number = message.partition() or 0
            if error is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                # An end with a transaction still open behind it is not the end that was seen.
                if (message.offset() or 0) >= ends[number]:
                    unfinished.discard(number)
            elif not error.retriable():
                raise KafkaException(error)
    finally:
        consumer.close()


def _ends(bootstrap: str, topic: str, partitions: set[int]) -> dict[int, int]:
    """The log end offsets, open transactions included: as an uncommitted reader sees them."""
    reader = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "prove-check", "isolation.level": "read_uncommitted"},
        logger=_QUIET,
    )
    try:
        return {
            number: reader.get_watermark_offsets(TopicPartition(topic, number), timeout=READ_TIMEOUT_S)[1]
            for number in partitions
        }
    finally:
        reader.close()
