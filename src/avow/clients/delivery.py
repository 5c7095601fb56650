"""The outcome of one send, and of all of them: states, counts, and how Kafka's errors map to them.

A send ends as *acknowledged*, *failed* or *unknown*. librdkafka, Kafka's C client, keeps for each message whether it
may have been written although it failed, but its Python binding does not expose that; so the error code decides. An
error is *failed* only if it says that a broker refused the record or that it never left. Everything else, a time-out
above all, is *unknown*: the record may be in the log. So a record that never left because no broker could be reached is
unknown too, though it is certainly not there.

Owns: these rules. Must not know: clients. Its neighbour is ``producer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from confluent_kafka import KafkaError

from avow.errors import SourceError


class Outcome(StrEnum):
    """How a send ends."""

    PENDING = "pending"  # it has not ended
    ACKNOWLEDGED = "acknowledged"  # as many replicas have it as was asked for; in a transaction: it is committed
    FAILED = "failed"  # it is certainly not in the log, or only in an aborted transaction
    UNKNOWN = "unknown"  # no acknowledgement: it may be in the log


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where a record is: what a receipt is asked about."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True)
class ProducerTotals:
    """What has become of all sends: sent = acknowledged + failed + unknown + pending."""

    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    pending: int = 0

    @property
    def adds_up(self) -> bool:
        return self.sent == self.acknowledged + self.failed + self.unknown + self.pending

    def __str__(self) -> str:
        parts = [f"{self.acknowledged:,} acknowledged", f"{self.failed:,} failed", f"{self.unknown:,} unknown"]
        parts += [f"{self.pending:,} pending"] if self.pending else []
        return f"{self.sent:,} sent: {', '.join(parts)}"


@dataclass(slots=True, eq=False, repr=False)
class Delivery:
    """The future of one send: its outcome is written here."""

    topic: str
    number: int  # which send of its producer, from 0
    tag: str  # what the sender calls it
    _wait_for: Callable[[Delivery, float | None], None]
    _answered: bool  # whether anybody says that it arrived
    idempotency_key: str | None = None
    arrived: bool = False  # a broker has it; in a transaction that is not the end
    outcome: Outcome = Outcome.PENDING
    place: LogPosition | None = None  # once it is known; never with fire-and-forget
    error: str = ""  # why it is failed or unknown

    def wait(self, timeout_s: float | None = None) -> LogPosition | None:
        """Wait for the end. Returns the record's position, or raises a ``SourceError``: failed, or outcome unknown.

        With fire-and-forget it gives None once the record has left.
        """
        self._wait_for(self, timeout_s)
        if self.outcome is Outcome.ACKNOWLEDGED or (self.outcome is Outcome.UNKNOWN and not self._answered):
            return self.place
        raise SourceError(f"{self.tag} to {self.topic}: {self.outcome}: {self.error}")

    def __repr__(self) -> str:
        return f"<{self.tag} to {self.place or self.topic}: {self.outcome}>"


# Refused by a broker before anything was written, or by the client before anything was sent.
_REFUSED = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.MSG_SIZE_TOO_LARGE,
        # Counted before the write. What is found short only after it has a code of its own, and is unknown.
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    }
)

_WORDS = {
    KafkaError._MSG_TIMED_OUT: "no acknowledgement came in time; it may be in the log",
    KafkaError._TIMED_OUT: "no acknowledgement came in time; it may be in the log",
    KafkaError._TRANSPORT: "the connection broke before an acknowledgement came; it may be in the log",
    KafkaError.NOT_ENOUGH_REPLICAS: "fewer replicas are in sync than min.insync.replicas; it was not written",
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: "replicas fell out of sync meanwhile; it may be in the log",
    KafkaError.MSG_SIZE_TOO_LARGE: "it is larger than the topic's max.message.bytes",
    KafkaError._UNKNOWN_TOPIC: "the topic does not exist",
    KafkaError._UNKNOWN_PARTITION: "the partition does not exist",
}


def outcome_of(error: KafkaError) -> Outcome:
    """What an error says about the record."""
    return Outcome.FAILED if error.code() in _REFUSED else Outcome.UNKNOWN


def words_of(error: KafkaError) -> str:
    """What an error says, for a person."""
    text = error.str().removeprefix("Broker: ").removeprefix("Local: ")
    known = _WORDS.get(error.code())
    return f"{known} ({text})" if known else text
