"""The ledger as Kafka keeps it: one committed offset of the reserved group per partition, the rest in its metadata.

The offset is the position. The metadata is a short JSON text (offset.metadata.max.bytes is 4,096 by default) with
what else an ``Entry`` has, where the first position was, when the last claim was made, and of what, and the ids of the
topics that are written to: one that was deleted and made again under the same name has another.

An offset without this text was committed by another client. It says nothing about what is in the output topic, so it is
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
class StoredEntry:
    """One partition's entry, with what only this ledger has beside it."""

    entry: Entry
    start: int  # the first position
    claimed_from: int  # where the last claim began; the position, if there was none
    at_ms: int  # when it was written
    topics: Mapping[str, str] = field(default_factory=dict)  # written to: ``topic_key`` -> the topic's ``short_id``

    def with_entry(self, entry: Entry) -> StoredEntry:
        """The same after a change that is no claim: a fence, or counts."""
        return replace(self, entry=entry)


def topic_key(name: str) -> str:
    """A topic's name in ten letters: many output topics must fit into the metadata."""
    return blake2s(name.encode(), digest_size=5).hexdigest()


def short_id(topic_id: str) -> str:
    """Enough of a topic's id to distinguish two topics."""
    return topic_id[:8]


def serialize(stored: StoredEntry) -> str:
    """The metadata of the committed offset."""
    entry, counts, last = stored.entry, stored.entry.counts, stored.entry.last
    return json.dumps(
        {
            "avow": VERSION,
            "run": entry.run,
            "topic_id": entry.topic_id,
            "start": stored.start,
            "from": stored.claimed_from,
            "counts": [counts.read, counts.written, counts.dead, counts.skipped],
            "last": [last.offset, last.timestamp_ms, last.crc32] if last else None,
            "at": stored.at_ms,
            "topics": dict(stored.topics),
        },
        separators=(",", ":"),
    )


def parse(
    group: str, tp: TopicPartition, position: int, metadata: str | None, present: Callable[[], str] = lambda: ""
) -> StoredEntry:
    """What a committed offset says, if it is ours. ``present``: who is in the group, asked if it is not."""
    try:
        parsed = json.loads(metadata or "")
        version = int(parsed["avow"])
        if version > VERSION:
            raise ConfigError(
                f"the ledger of {group} has version {version}, but this version of avow supports only {VERSION}",
                advice="A newer version of avow has written it. Use that version or a newer one.",
            )
        entry = Entry(
            position=position,
            topic_id=str(parsed["topic_id"]),
            run=int(parsed["run"]),
            counts=Counts(*map(int, parsed["counts"])),
            last=Fingerprint(*map(int, parsed["last"])) if parsed["last"] else None,
        )
        topics = {str(key): str(id_) for key, id_ in parsed.get("topics", {}).items()}  # an earlier ledger has none
        return StoredEntry(entry, int(parsed["start"]), int(parsed["from"]), int(parsed["at"]), topics)
    except (ValueError, TypeError, KeyError, AttributeError, ProtocolViolation):
        who = present()
        raise ConfigError(
            f"consumer group {group} is this pipeline's ledger, but another client committed offset {position} of {tp} "
            f"to it{f'; {who}' if who else ''}",
            advice="Nothing was written. Find and stop the client that uses the group. Then give the pipeline a new "
            "name, or, if the output topic can be emptied, delete the group and the topic and start over.",
        ) from None
