"""What each durability costs on the user's own cluster: latency and throughput, side by side.

Latency is of one record at a time: from ``send`` until it has ended, with nothing else on its way and no lingering; for
transactional, a transaction of that one record. Throughput is of many: from the first ``send`` until all have ended;
for transactional, a thousand a transaction. The durabilities take turns, round by round, so that a busy moment of the
machine meets all of them; the figures are over all rounds.

Owns: the measuring. Must not know: how it is shown. Its neighbours are ``chart`` and the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from uuid import uuid4

from avow.clients.cluster import PATIENCE_S
from avow.clients.durability import Choice, Durability
from avow.clients.producer import Producer
from avow.errors import ConfigError
from avow.guarantee import Guarantee
from avow.kafka.admin import Admin
from avow.kafka.connect import Connection

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
    connection: Connection,
    load: Load,
    *,
    topic: str | None = None,
    event: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Measure in a topic that is made for it and deleted afterwards."""
    measurements = [Measured(choice) for choice in CHOICES]
    with _own_topic(connection, topic or f"avow-measure-{uuid4().hex[:12]}") as name:
        for number in range(ROUNDS):
            for measured in measurements:
                event(f"round {number + 1} of {ROUNDS}: {measured.choice.durability}")
                _singles(connection, name, measured, load)
                _many(connection, name, measured, load)
    return measurements


@contextmanager
def _own_topic(connection: Connection, name: str) -> Iterator[str]:
    connection = replace(connection, topics=[name], rights=("Create", "Write", "Describe", "Delete"))
    with Admin(connection, timeout_s=PATIENCE_S) as admin:
        # The cluster's own number of replicas: that is what is measured.
        if not admin.create_topic(name, PARTITIONS):
            raise ConfigError(
                f"topic {name} already exists: avow does not measure in a topic that may be in use",
                advice="Name a topic that does not exist, or none to use a generated name.",
            )
        try:
            yield name
        finally:
            admin.delete_topic(name)


def _producer(connection: Connection, measured: Measured, **own: str) -> Producer:
    guarantee, durability = measured.choice.guarantee, measured.choice.durability
    config = {**own, **connection.config}
    return Producer(connection.bootstrap_servers, guarantee=guarantee, durability=durability, config=config)


def _singles(connection: Connection, topic: str, measured: Measured, load: Load) -> None:
    value = b"x" * load.record_bytes
    with _producer(connection, measured, **{"linger.ms": "0"}) as producer:

        def send() -> None:
            if not measured.choice.transactional:
                producer.send(topic, value).wait()
                return
            with producer.transaction():
                producer.send(topic, value)

        for _ in range(5):  # connections and metadata
            send()
        for _ in range(load.singles // ROUNDS):
            before = time.perf_counter()
            send()
            measured.latencies_ms.append((time.perf_counter() - before) * 1000)


def _many(connection: Connection, topic: str, measured: Measured, load: Load) -> None:
    value = b"x" * load.record_bytes
    count = load.records // ROUNDS
    with _producer(connection, measured) as producer:
        _send_many(producer, topic, value, 100)
        before = time.perf_counter()
        _send_many(producer, topic, value, count)
        measured.rates.append(count / (time.perf_counter() - before))


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
