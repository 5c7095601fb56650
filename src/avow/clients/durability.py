"""The five durabilities of a send, as data: which guarantees each can keep, and what it costs.

Theory of operation
-------------------
A guarantee says what may happen to a message between the producer and the log: lost, doubled, neither. Two settings
decide it. *acks* is how many replicas have a record when the broker acknowledges it: none, the leader, all that are in
sync. *Retries* are what the producer does without an acknowledgement: sending again may double, not sending may lose.
An idempotent producer numbers its records, so that a broker recognises the second copy of one; a transactional one also
makes several sends, to any topics, visible together or not at all.

So not every pair can be: with acks below all, a record that was acknowledged is lost with its leader, and a producer
that also retries may both lose and double. No guarantee permits that, and ``choose`` refuses it.

Owns: these words, the settings they come to and the sentences that explain them. Must not know: clients, clusters. Its
neighbour is ``producer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from avow.errors import ConfigError
from avow.guarantee import Anomaly, Guarantee

Word = TypeVar("Word", bound=StrEnum)


class Durability(StrEnum):
    """When a send counts as done."""

    FIRE_AND_FORGET = "fire-and-forget"
    LEADER = "leader"
    ALL = "all"
    IDEMPOTENT = "idempotent"
    TRANSACTIONAL = "transactional"


@dataclass(frozen=True, slots=True)
class Level:
    """One row of the table."""

    acks: str
    meaning: str  # one sentence, shown to users as it is
    numbered: bool = False  # a broker recognises the second copy of a record


LEVELS: Mapping[Durability, Level] = MappingProxyType(
    {
        Durability.FIRE_AND_FORGET: Level(
            "0",
            "No acknowledgement: a send counts as done when it has left this machine; whether it arrived is unknown.",
        ),
        Durability.LEADER: Level(
            "1", "The partition's leader has the record; maybe no follower has, and it may not be on disk."
        ),
        Durability.ALL: Level("all", "Every in-sync replica has the record."),
        Durability.IDEMPOTENT: Level(
            "all",
            "Every in-sync replica has the record, and brokers discard duplicates that a retry causes.",
            numbered=True,
        ),
        Durability.TRANSACTIONAL: Level(
            "all",
            "As idempotent; the sends of one transaction, to any topics, become visible together or not at all.",
            numbered=True,
        ),
    }
)

# Which durabilities can keep a guarantee's word. The first is taken if none is named.
OFFERS: Mapping[Guarantee, tuple[Durability, ...]] = MappingProxyType(
    {
        Guarantee.AT_MOST_ONCE: (Durability.FIRE_AND_FORGET, Durability.LEADER, Durability.ALL),
        Guarantee.AT_LEAST_ONCE: (Durability.ALL,),
        Guarantee.EXACTLY_ONCE: (Durability.IDEMPOTENT, Durability.TRANSACTIONAL),
    }
)

# Bounds, and what every producer of ours has. The user's own settings come after these.
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "linger.ms": "5",
        "batch.size": "1000000",  # the broker's own limit is a little above it
        "message.max.bytes": str(104_857_600 - 65_536),  # the topic's limit decides, and a broker's socket takes this
        "queue.buffering.max.messages": "100000",
        "queue.buffering.max.kbytes": "65536",
        # As Java's default partitioner: a key goes to the partition in which a Java producer would put it.
        "partitioner": "murmur2_random",
    }
)

# Set by the durability: no option may override these.
OWNED = frozenset(
    {
        "acks",
        "bootstrap.servers",
        "delivery.report.only.error",
        "delivery.timeout.ms",
        "enable.idempotence",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.send.max.retries",
        "message.timeout.ms",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A guarantee and the durability that keeps it."""

    guarantee: Guarantee
    durability: Durability

    @property
    def level(self) -> Level:
        return LEVELS[self.durability]

    @property
    def retries(self) -> bool:
        return self.guarantee is not Guarantee.AT_MOST_ONCE

    @property
    def answered(self) -> bool:
        """Whether brokers acknowledge records."""
        return self.durability is not Durability.FIRE_AND_FORGET

    @property
    def transactional(self) -> bool:
        return self.durability is Durability.TRANSACTIONAL

    def settings(self) -> dict[str, str]:
        """As librdkafka spells them."""
        settings = {**COMMON, "acks": self.level.acks, "enable.idempotence": str(self.level.numbered).lower()}
        if not self.retries:
            # What a broker certainly did not take is still sent again: that doubles nothing.
            settings["message.send.max.retries"] = "0"
        elif not self.level.numbered:
            # With more than one request on its way, the second could be written before the first is sent again.
            settings["max.in.flight"] = "1"
        return settings


def choose(guarantee: Guarantee | str, durability: Durability | str | None = None) -> Choice:
    """The pair, or a ``ConfigError`` that says why the durability cannot keep the guarantee."""
    word = _word(Guarantee, guarantee, "guarantee")
    if durability is None:
        return Choice(word, OFFERS[word][0])
    level = _word(Durability, durability, "durability")
    if level not in OFFERS[word]:
        raise ConfigError(
            f"{word} cannot be kept with durability {level}: {_why_not(word, level)}",
            advice=f"With {word} use {' or '.join(OFFERS[word])}. `avow produce --explain` explains each.",
        )
    return Choice(word, level)


def _why_not(word: Guarantee, level: Durability) -> str:
    if word is Guarantee.AT_MOST_ONCE:
        return "this durability never retries"
    if not LEVELS[level].numbered and word is Guarantee.EXACTLY_ONCE:
        return "brokers would not recognise a retried record"
    if LEVELS[level].numbered:
        return "an idempotent producer does not duplicate either, so declare exactly-once"
    return "an acknowledged record is lost if its leader is"


def _word(kind: type[Word], value: str, option: str) -> Word:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{option} {value!r} is not known", advice=f"Use one of {', '.join(kind)}.") from None


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The topic's replicas and min.insync.replicas."""

    name: str
    partitions: int
    replicas: int  # of the partition that has fewest
    in_sync: int  # likewise
    min_in_sync: int  # as configured

    @property
    def needed(self) -> int:
        """Brokers do not ask for more replicas than there are."""
        return min(self.min_in_sync, self.replicas)


def explain(choice: Choice, topic: TopicFacts | None = None) -> Iterator[str]:
    """What the choice means, one sentence each."""
    level = choice.level
    yield f"{choice.guarantee}, durability {choice.durability}: acks {level.acks}. {level.meaning}"
    if not choice.retries:
        yield "A failed send is not retried, unless a broker certainly did not write it."
    elif level.numbered:
        yield "A failed send is retried until it times out; records are numbered, so retries do not duplicate them."
    else:
        yield (
            "A failed send is retried until it times out. If only its acknowledgement was lost, the record is in the "
            "log twice."
        )
    yield _lost(choice)
    yield _doubled(choice)
    if choice.answered:
        yield (
            "A send ends as acknowledged, failed (certainly not in the log) or unknown (no response: it may be in "
            "the log)."
        )
    else:
        yield "Every send ends as unknown: there is no acknowledgement."
    if topic is not None:
        yield from _about(choice, topic)


def _lost(choice: Choice) -> str:
    if not choice.answered:
        return "Lost: records that a broker rejects, and records sent on a connection that breaks, without an error."
    if choice.durability is Durability.LEADER:
        return "Lost: failed sends; and acknowledged records, if the leader dies before a follower has copied them."
    if not choice.retries:
        return "Lost: sends that end as failed or unknown. Acknowledged records stay while one in-sync replica is left."
    return "Lost: nothing acknowledged, while one in-sync replica is left."


def _doubled(choice: Choice) -> str:
    if Anomaly.DUPLICATED in choice.guarantee.permits:
        return "Duplicated: records whose acknowledgement was lost."
    if not choice.retries:
        return "Duplicated: nothing."
    if choice.transactional:
        return "Duplicated: nothing, for consumers with isolation.level=read_committed."
    return (
        "Duplicated: nothing by this producer. A program that restarts and sends again writes new records; an "
        "idempotency key lets readers deduplicate them."
    )


def _about(choice: Choice, topic: TopicFacts) -> Iterator[str]:
    yield (
        f"Topic {topic.name}: {topic.partitions} partition{'s' * (topic.partitions > 1)}, {topic.replicas} replicas "
        f"({topic.in_sync} in sync), min.insync.replicas {topic.min_in_sync}."
    )
    if choice.level.acks != "all":
        yield "min.insync.replicas has no effect with these acks."
        return
    spare = topic.replicas - topic.needed
    if topic.in_sync < topic.needed:
        yield "NOT MET: fewer replicas are in sync than min.insync.replicas, so nothing can be sent now."
    elif spare > 0:
        yield f"Sends succeed with up to {spare} replicas down; with more down, sends wait and then fail."
    else:
        yield "No replica may be down: without any one of them, sends fail."
    if topic.needed == 1:
        yield "The leader may be the only in-sync replica: losing it then loses records, as with acks=1."
