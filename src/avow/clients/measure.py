"""What each durability costs on somebody's own cluster: latency and throughput, side by side.

Latency is of one record at a time: from ``send`` until it has ended, with nothing else on its way and no lingering; for
transactional, a transaction of that one record. Throughput is of many: from the first ``send`` until all have ended;
for transactional, a thousand a transaction. The durabilities take turns, round by round, so that a busy moment of the
machine meets all of them; the figures are over all rounds.

Owns: the measuring. Must not know: how it is shown. Its neighbours are ``picture`` and the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from avow.clients.cluster import PATIENCE_S, as_ours
from avow.clients.durability import Choice, Durability
from avow.clients.producer import Producer
from avow.errors import ConfigError
from avow.guarantee import Guarantee
from avow.kafka.connect import made, settings_at

CHOICES = (
    Choice(Guarantee.AT_MOST_ONCE, Durability.FIRE_AND_FORGET),
    Choice(Guarantee.AT_MOST_ONCE, Durability.LEADER),
    Choice(Guarantee.AT_LEAST_ONCE, Durability.ALL),
    Choice(Guarantee.EXACTLY_ONCE, Durability.IDEMPOTENT),
    Choice(Guarantee.EXACTLY_ONCE, Durability.TRANSACTIONAL),
)
ROUNDS = 3
PARTITIONS = 3
PER_TRANSACTION = 1_000


@dataclass(slots=True)
class Measured:
    """One durability. Latencies in milliseconds."""

    choice: Choice
    latencies_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # records per second, one a round

    @property
    def records_per_s(self) -> float:
        return median(self.rates)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def as_dict(self) -> dict[str, object]:
        return {
            "durability": str(self.choice.durability),
            "guarantee": str(self.choice.guarantee),
            "acks": self.choice.level.acks,
            **{f"p{share}_ms": round(self.percentile(share / 100), 3) for share in (50, 95, 99)},
            "max_ms": round(max(self.latencies_ms), 3),
            "records_per_s": round(self.records_per_s),
        }


@dataclass(frozen=True, slots=True)
class Load:
    """How much is sent for each durability, over all rounds."""

    records: int = 20_000
    record_bytes: int = 200

    @property
    def singles(self) -> int:
        """Of those that are sent one at a time, which takes long."""
        return max(30, min(600, self.records // 20))


def measure(
    brokers: str,
    load: Load,
    *,
    topic: str | None = None,
    kafka: Mapping[str, str] | None = None,
    event: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Measure in a topic that is made for it and deleted afterwards."""
    given = dict(kafka or {})
    found = [Measured(choice) for choice in CHOICES]
    with _own_topic(brokers, given, topic or f"avow-measure-{uuid4().hex[:12]}") as name:
        for number in range(ROUNDS):
            for one in found:
                event(f"round {number + 1} of {ROUNDS}: {one.choice.durability}")
                _singles(brokers, given, name, one, load)
                _many(brokers, given, name, one, load)
    return found


@contextmanager
def _own_topic(brokers: str, given: dict[str, str], name: str) -> Iterator[str]:
    admin = made(AdminClient, settings_at(brokers, given), given, "kafka")
    with as_ours(f"the making of topic {name}", given):
        try:
            # The cluster's own number of replicas: that is what is measured.
            made_one = admin.create_topics([NewTopic(name, PARTITIONS)], operation_timeout=PATIENCE_S)
            made_one[name].result(PATIENCE_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            raise ConfigError(
                f"topic {name} is there already: nothing is measured in a topic that may be somebody's",
                advice="Name one that is not there, or none: then one is made up.",
            ) from None
    try:
        yield name
    finally:
        with as_ours(f"the deleting of topic {name}", given):
            admin.delete_topics([name], operation_timeout=PATIENCE_S)[name].result(PATIENCE_S)


def _producer(brokers: str, given: dict[str, str], one: Measured, **own: str) -> Producer:
    return Producer(brokers, guarantee=one.choice.guarantee, durability=one.choice.durability, kafka={**own, **given})


def _singles(brokers: str, given: dict[str, str], topic: str, one: Measured, load: Load) -> None:
    value = b"x" * load.record_bytes
    with _producer(brokers, given, one, **{"linger.ms": "0"}) as producer:

        def send() -> None:
            if not one.choice.transactional:
                producer.send(topic, value).wait()
                return
            with producer.transaction():
                producer.send(topic, value)

        for _ in range(5):  # connections and metadata
            send()
        for _ in range(load.singles // ROUNDS):
            before = time.perf_counter()
            send()
            one.latencies_ms.append((time.perf_counter() - before) * 1000)


def _many(brokers: str, given: dict[str, str], topic: str, one: Measured, load: Load) -> None:
    value = b"x" * load.record_bytes
    count = load.records // ROUNDS
    with _producer(brokers, given, one) as producer:
        _send_many(producer, topic, value, 100)
        before = time.perf_counter()
        _send_many(producer, topic, value, count)
        one.rates.append(count / (time.perf_counter() - before))


def _send_many(producer: Producer, topic: str, value: bytes, count: int) -> None:
    if not producer.choice.transactional:
        for _ in range(count):
            producer.send(topic, value)
        producer.flush()
        return
    for start in range(0, count, PER_TRANSACTION):
        with producer.transaction():
            for _ in range(start, min(start + PER_TRANSACTION, count)):
                producer.send(topic, value)
