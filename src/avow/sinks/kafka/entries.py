"""The ledger as Kafka keeps it: one committed offset of the reserved group per partition, the rest in its metadata.

The offset is the position. The metadata is a short JSON text (a broker takes 4,096 bytes unless told otherwise) with
what else an ``Entry`` has, where the first position was, when the last claim was made, and of what, and the ids of the
topics that are written to: one that was deleted and made again under the same name has another.

An offset without this text was committed by somebody else. It says nothing about what is in the output topic, so it is
never taken for a position.

Owns: that text. Must not know: clients. Its neighbours are ``clients``, which reads and writes it, and ``ledger``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2s

from avow.errors import ConfigError, ProtocolViolation
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint

VERSION = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """One partition's entry, with what only this ledger has beside it."""

    entry: Entry
    start: int  # the first position
    claimed_from: int  # where the last claim began; the position, if there was none
    at_ms: int  # when it was written
    topics: Mapping[str, str] = field(default_factory=dict)  # written to: ``topic_key`` -> the topic's ``short_id``

    def with_entry(self, entry: Entry) -> Kept:
        """The same after a change that is no claim: a fence, or counts."""
        return replace(self, entry=entry)


def topic_key(name: str) -> str:
    """A topic's name in ten letters: many output topics must fit into the metadata."""
    return blake2s(name.encode(), digest_size=5).hexdigest()


def short_id(topic_id: str) -> str:
    """Enough of a topic's id to tell two topics apart."""
    return topic_id[:8]


def written(kept: Kept) -> str:
    """The metadata of the committed offset."""
    entry, counts, last = kept.entry, kept.entry.counts, kept.entry.last
    return json.dumps(
        {
            "avow": VERSION,
            "run": entry.run,
            "topic_id": entry.topic_id,
            "start": kept.start,
            "from": kept.claimed_from,
            "counts": [counts.read, counts.written, counts.dead, counts.skipped],
            "last": [last.offset, last.timestamp_ms, last.crc32] if last else None,
            "at": kept.at_ms,
            "topics": dict(kept.topics),
        },
        separators=(",", ":"),
    )


def read(
    group: str, where: TopicPartition, position: int, metadata: str | None, present: Callable[[], str] = lambda: ""
) -> Kept:
    """What a committed offset says, if it is ours. ``present``: who is in the group, asked if it is not."""
    try:
        said = json.loads(metadata or "")
        version = int(said["avow"])
        if version > VERSION:
            raise ConfigError(
                f"the ledger of {group} is of version {version}, and this avow knows {VERSION}",
                advice="A newer avow has run here. Use that version, or a newer one.",
            )
        entry = Entry(
            position=position,
            topic_id=str(said["topic_id"]),
            run=int(said["run"]),
            counts=Counts(*map(int, said["counts"])),
            last=Fingerprint(*map(int, said["last"])) if said["last"] else None,
        )
        topics = {str(key): str(id_) for key, id_ in said.get("topics", {}).items()}  # an earlier ledger has none
        return Kept(entry, int(said["start"]), int(said["from"]), int(said["at"]), topics)
    except (ValueError, TypeError, KeyError, AttributeError, ProtocolViolation):
        who = present()
        raise ConfigError(
            f"the group {group} is this pipeline's ledger, and offset {position} of {where} was committed to it by "
            f"somebody else{f'; {who}' if who else ''}",
            advice="Nothing was written. Find who uses the group and stop it. Then give the pipeline a new name, or, "
            "if the output topic can be emptied, delete the group and the topic and begin anew.",
        ) from None
