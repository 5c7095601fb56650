"""How surely a send is kept, as data: the five durabilities, which guarantee each can serve, and what it costs.

Theory of operation
-------------------
A guarantee says what may happen to a message between the producer and the log: lost, doubled, neither. Two settings
decide it. *acks* is how many replicas have the record when the producer is told: none, the leader, all that are in
sync. *Retries* are what the producer does when it is not told: sending again may double, not sending again may lose.
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
            "0", "Nobody answers: a send is over when it has left this machine, and nobody knows whether it arrived."
        ),
        Durability.LEADER: Level("1", "The partition's leader has the record, maybe alone, and not yet on its disk."),
        Durability.ALL: Level("all", "Every replica that is in sync has the record."),
        Durability.IDEMPOTENT: Level(
            "all",
            "Every replica that is in sync has the record, and a record that is sent again is recognised.",
            numbered=True,
        ),
        Durability.TRANSACTIONAL: Level(
            "all",
            "As idempotent; and the sends of one transaction, to any topics, become visible together or not at all.",
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

# The word's own: nobody may set these beside it.
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
        """Whether anybody says that a record arrived."""
        return self.durability is not Durability.FIRE_AND_FORGET

    @property
    def transactional(self) -> bool:
        return self.durability is Durability.TRANSACTIONAL

    def settings(self) -> dict[str, str]:
        """As librdkafka spells them."""
        found = {**COMMON, "acks": self.level.acks, "enable.idempotence": str(self.level.numbered).lower()}
        if not self.retries:
            # What a broker certainly did not take is still sent again: that doubles nothing.
            found["message.send.max.retries"] = "0"
        elif not self.level.numbered:
            # With more than one request on its way, the second could be written before the first is sent again.
            found["max.in.flight"] = "1"
        return found


def choose(guarantee: Guarantee | str, durability: Durability | str | None = None) -> Choice:
    """The pair, or a ``ConfigError`` that says why it cannot be."""
    word = _word(Guarantee, guarantee, "guarantee")
    if durability is None:
        return Choice(word, OFFERS[word][0])
    level = _word(Durability, durability, "durability")
    if level not in OFFERS[word]:
        raise ConfigError(
            f"{word} cannot be kept with durability {level}: {_why_not(word, level)}",
            advice=f"With {word}: {' or '.join(OFFERS[word])}. `avow produce --explain` says what each means.",
        )
    return Choice(word, level)


def _why_not(word: Guarantee, level: Durability) -> str:
    if word is Guarantee.AT_MOST_ONCE:
        return "it rests on sending again"
    if not LEVELS[level].numbered and word is Guarantee.EXACTLY_ONCE:
        return "a record that is sent again would not be recognised"
    if LEVELS[level].numbered:
        return "it does not double either, and that is exactly-once"
    return "a record that was acknowledged is lost with its leader"


def _word(kind: type[Word], given: str, what: str) -> Word:
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"{what} {given!r} is not known", advice=f"One of {', '.join(kind)}.") from None


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What decides about a topic's records beside the producer."""

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
    """What the choice means, a sentence at a time."""
    level = choice.level
    yield f"{choice.guarantee}, durability {choice.durability}: acks {level.acks}. {level.meaning}"
    if not choice.retries:
        yield "A send that fails is not tried again, unless a broker certainly did not take it."
    elif level.numbered:
        yield "A send that fails is tried again until it times out; records are numbered, so it is not doubled by that."
    else:
        yield (
            "A send that fails is tried again until it times out. One whose answer was lost is then in the log twice."
        )
    yield _lost(choice)
    yield _doubled(choice)
    if choice.answered:
        yield "A send ends as acknowledged, failed (certainly not in the log) or unknown (no answer: it may be there)."
    else:
        yield "Every send that leaves this machine ends as unknown: nobody answers."
    if topic is not None:
        yield from _about(choice, topic)


def _lost(choice: Choice) -> str:
    if not choice.answered:
        return "Lost: whatever a broker does not take, and nobody is told; also with a connection that breaks."
    if choice.durability is Durability.LEADER:
        return "Lost: what fails; and what was acknowledged, if the leader dies before a follower has copied it."
    if not choice.retries:
        return "Lost: what fails or ends as unknown. What was acknowledged stays while one replica in sync is left."
    return "Lost: nothing that was acknowledged, while one replica that is in sync is left."


def _doubled(choice: Choice) -> str:
    if Anomaly.DUPLICATED in choice.guarantee.permits:
        return "Doubled: a record whose acknowledgement was lost on its way."
    if not choice.retries:
        return "Doubled: nothing."
    if choice.transactional:
        return "Doubled: nothing, for readers of committed records (isolation.level read_committed)."
    return (
        "Doubled: nothing by this producer. A program that is started again and sends again makes new records; an "
        "idempotency key tells readers which are the same."
    )


def _about(choice: Choice, topic: TopicFacts) -> Iterator[str]:
    yield (
        f"Topic {topic.name}: {topic.partitions} partition{'s' * (topic.partitions > 1)}, {topic.replicas} replicas "
        f"({topic.in_sync} in sync), min.insync.replicas {topic.min_in_sync}."
    )
    if choice.level.acks != "all":
        yield "min.insync.replicas plays no part with these acks."
        return
    spare = topic.replicas - topic.needed
    if topic.in_sync < topic.needed:
        yield "NOT MET: fewer replicas are in sync than that, so nothing can be sent now."
    elif spare > 0:
        yield f"{spare} of the replicas may be away, and sending goes on; with more away, sends wait and then fail."
    else:
        yield "None of the replicas may be away: without one of them nothing can be sent."
    if topic.needed == 1:
        yield "All that are in sync may be the leader alone: its death then loses as with acks 1."
