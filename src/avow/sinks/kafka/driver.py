"""The driver's side of the Kafka sink: topics, runs and positions.

Every change of the ledger is a transaction under the partition's own id, also here: a plain commit of an offset could
put back a position that a task has moved a moment before.

Owns: making and checking the topics, and the reserved group. The rules are ``ledger``'s; here they are only stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

from confluent_kafka import Producer

from avow import ledger
from avow.errors import ConfigError, SinkError, Superseded
from avow.kafka.admin import several
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Entry
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.base import DriverSink, PartitionState
from avow.sinks.kafka import start_records
from avow.sinks.kafka.clients import MESSAGE_BYTES_MAX, PATIENCE_S, KafkaClients
from avow.sinks.kafka.config import config_of, dead_letter_topic, on_other_cluster
from avow.sinks.kafka.dead_letters import LEAST_BYTES
from avow.sinks.kafka.entries import StoredEntry, topic_key
from avow.sinks.kafka.messages import output_topics
from avow.sinks.kafka.start_records import StartRecord

PARALLELISM = 8  # partitions whose entries are changed side by side
SHOWS_S = 1.0  # a commit is answered a moment before it shows
AGE_MAX_MS = 24 * 3_600_000  # by default Kafka keeps positions for seven days (offsets.retention.minutes)

Change = Callable[[TopicPartition, StoredEntry | None], StoredEntry | None]  # None: nothing is to change


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The source's topics, as far as topics that are made take after them."""

    topics: frozenset[str]
    partitions: int  # of the largest
    replicas: int  # of the one with the most; -1: not known


class KafkaDriver(DriverSink):
    def __init__(self, pipeline: PipelineConfig) -> None:
        self._pipeline = pipeline
        self._sink = config_of(pipeline)
        self._clients = KafkaClients(pipeline)
        self._fenced: frozenset[TopicPartition] = frozenset()  # had a position when this run began

    def close(self) -> None:
        self._clients.close()

    # Topics and the group

    def prepare(self) -> None:
        """Refuse a group that others use and an output that would be read; make the dead-letter topic, or refuse one
        that would lose dead letters."""
        self.refuse_members()
        inputs = self._inputs()
        self._outputs(inputs.topics)
        name = dead_letter_topic(self._pipeline)
        if name in self._existing([name]):
            self._refuse_lossy_topic(name)
        else:
            self._refuse_gone([name])
            # Compacted: a dead letter stays until it is removed. And as large as the largest record that can come.
            config = {"cleanup.policy": "compact", "max.message.bytes": str(MESSAGE_BYTES_MAX)}
            self._create_topic(name, 1, inputs.replicas, config)

    def _inputs(self) -> _Inputs:
        with Log(self._pipeline.source, self._pipeline.name) as log:
            partitions = log.partitions()
            described = [
                partition
                for partition in log.cluster().partitions
                if TopicPartition(partition.topic, partition.partition) in partitions
            ]
        return _Inputs(
            frozenset(tp.topic for tp in partitions),
            max(tp.partition + 1 for tp in partitions),
            max((len(partition.replicas) for partition in described), default=-1),
        )

    def _outputs(self, topics: Collection[str]) -> list[str]:
        """Where records of these topics go. Of topics that match a pattern it is known only now whether one would be
        read again."""
        wanted = output_topics(self._sink, topics)
        pattern = None if on_other_cluster(self._pipeline) else self._pipeline.source.topics_pattern
        for name in wanted:
            if pattern is not None and re.fullmatch(pattern, name):
                raise ConfigError(
                    f"sink.topic: {name} matches source.topics_pattern: this pipeline would read its own output",
                    advice="Change the pattern so that it does not match, or rename the output topic.",
                )
            if name == dead_letter_topic(self._pipeline):
                raise ConfigError(
                    f"sink.topic: {name} is both an output topic and the dead-letter topic",
                    advice="Name another sink.dead_letter_topic.",
                )
        return wanted

    def _create_output_topics(self, topics: Collection[str]) -> bool:
        """Make the output topics for these that are not there. True if one was made."""
        wanted = self._outputs(topics)
        existing = self._existing(wanted)
        missing = [name for name in wanted if name not in existing]
        if missing:
            self._refuse_gone(missing)
            inputs = self._inputs()
            for name in missing:
                self._create_topic(name, inputs.partitions, inputs.replicas, {})
        return bool(missing)

    def _refuse_gone(self, missing: Collection[str]) -> None:
        """A topic that the pipeline has written to is not recreated: that would hide that its records are lost."""
        self._clients.topic_ids(missing, *(stored.topics for stored in self.stored_entries().values()))

    def _written_to(self, topics: Collection[str]) -> list[str]:
        """The topics that records of these may go to, and that of dead letters."""
        return [*output_topics(self._sink, topics), dead_letter_topic(self._pipeline)]

    def _refuse_lossy_topic(self, name: str) -> None:
        """A dead-letter topic that somebody else has made may lose dead letters, or take none."""
        limits = self._clients.limits(name)
        alter = f"kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name {name}"
        if limits.message_bytes_max < LEAST_BYTES:
            raise ConfigError(
                f"the dead-letter topic {name} has max.message.bytes = {limits.message_bytes_max}, too small even "
                "for a shortened dead letter",
                advice=f"{alter} --add-config max.message.bytes={MESSAGE_BYTES_MAX}",
            )
        policy = limits.cleanup_policy
        if policy != "compact":
            raise ConfigError(
                f"the dead-letter topic {name} has cleanup.policy = {policy}, so Kafka would delete dead "
                "letters and start records",
                advice=f"{alter} --add-config cleanup.policy=compact",
            )

    def refuse_members(self) -> None:
        members = self._clients.members()
        if members:
            raise ConfigError(
                f"consumer group {self._clients.group} is this pipeline's ledger, but a consumer has joined it: "
                f"{several(members)}",
                advice="It could overwrite the pipeline's positions. Stop it, or rename its group or the pipeline.",
            )

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Check the columns that the sink names and that the output is the one that the positions are of, and make the
        output topics that are not there. True if one was."""
        self._check_columns({field.name for field in fields} | {*self._sink.lineage} | ({"_rest"} if rest else set()))
        for tp, stored in self.stored_entries().items():
            self._clients.refuse_other_outputs(tp, stored, output_topics(self._sink, [tp.topic]))
        with Log(self._pipeline.source, self._pipeline.name) as log:
            topics = {tp.topic for tp in log.partitions()}
        made = self._create_output_topics(topics)
        for name in self._outputs(topics):
            self._clients.limits(name)  # that it can be described is known before anything is read
        return made

    def _check_columns(self, columns: set[str]) -> None:
        named = {"key_column": self._sink.key_column, "value_column": self._sink.value_column}
        named |= {"topic": None} | {f"topic {{{name}}}": name for name in self._sink.routed_by}
        for setting, name in named.items():
            if name is not None and name not in columns:
                raise ConfigError(
                    f"sink.{setting}: {name!r} is not a column of the transform's result",
                    advice=f"It has {', '.join(sorted(columns))}.",
                )

    def _existing(self, names: Iterable[str]) -> set[str]:
        return set(names) & set(self._clients.admin.topic_names())

    def _create_topic(self, name: str, partitions: int, replicas: int, config: dict[str, str]) -> None:
        admin = self._clients.admin
        # Another cluster may have fewer brokers than the source's topics have replicas.
        most = len(admin.cluster().brokers) if on_other_cluster(self._pipeline) else replicas
        admin.create_topic(name, partitions, min(replicas, most), config)

    # The ledger

    def stored_entries(self, *, stable: bool = False) -> dict[TopicPartition, StoredEntry]:
        """Every entry. One that a transaction is about to change is waited for. Unless ``stable``, only as long as a
        commit takes to show that was answered already: a dead writer's transaction stays open until a new run fences
        it, or until its time-out, and then the entry is as it was before."""
        wait_s = self._clients.ends_within_s if stable else SHOWS_S
        entries, left = self._clients.positions(wait_s)
        if left:
            entries |= self._clients.positions(PATIENCE_S, left, stable=False)[0]  # or it says what else is wrong
            if stable:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise SinkError(
                    f"hanging-transaction: an open transaction on the position of {left[0]}{more} in consumer group "
                    f"{self._clients.group} does not end. The pipeline's own transactional.id there is "
                    f"{self._clients.transactional_id(left[0])}",
                    advice="Find and abort it with kafka-transactions.sh. Or start the pipeline, which aborts its "
                    "own transactions.",
                )
        return entries

    def keepalive(self) -> None:
        """Write positions anew that have not changed for long: Kafka forgets those."""
        self._refreshed()

    def _refreshed(self) -> dict[TopicPartition, StoredEntry]:
        known = self.stored_entries()
        oldest_ms = time.time() * 1000 - AGE_MAX_MS
        self._update_entries([tp for tp, stored in known.items() if stored.at_ms < oldest_ms], lambda _, stored: stored)
        return known

    def ledger_snapshot(self) -> dict[TopicPartition, PartitionState]:
        return {tp: PartitionState(stored.entry, stored.start) for tp, stored in self.stored_entries().items()}

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number, and fence the older ones: their open transactions end here."""
        self.refuse_members()
        known = self._refreshed()
        run = ledger.next_run(stored.entry for stored in known.values())
        ours = known.keys() if partitions is None else known.keys() & set(partitions)
        topics = self._clients.topic_ids(
            self._written_to({tp.topic for tp in ours}), *(known[tp].topics for tp in ours)
        )

        def fenced(tp: TopicPartition, stored: StoredEntry | None) -> StoredEntry | None:
            if stored is None:
                return None
            topic_ids = self._topic_ids_for(tp, topics)
            return replace(stored, entry=ledger.fence(stored.entry, run), topics=topic_ids)

        self._update_entries(ours, fenced)
        self._fenced = frozenset(ours)
        return run

    def _topic_ids_for(self, tp: TopicPartition, topics: Mapping[str, str]) -> dict[str, str]:
        """Those of the ids that belong into a partition's entry."""
        keys = map(topic_key, self._written_to([tp.topic]))
        return {key: topics[key] for key in keys if key in topics}

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays. A topic that has
        come to match the pattern may have no output topic yet."""
        if not entries:
            return
        self._create_output_topics({tp.topic for tp in entries})
        started = start_records.read(self._clients, dead_letter_topic(self._pipeline))
        topics = self._clients.topic_ids(self._written_to({tp.topic for tp in entries}))

        def adopted(tp: TopicPartition, stored: StoredEntry | None) -> StoredEntry | None:
            first = entries[tp]
            if stored is None and tp in started:
                raise start_records.lost(tp, started[tp], first.topic_id)
            if stored is None:
                return StoredEntry(first, first.position, first.position, 0, self._topic_ids_for(tp, topics))
            if stored.entry.run >= first.run and tp not in self._fenced:
                raise Superseded(
                    f"superseded by run {stored.entry.run}: it has started to read {tp}",
                    advice="Another run of this pipeline has started at the same time. Stop one of the two.",
                )
            return None

        self._update_entries(entries, adopted, begin=True)

    def _update_entries(self, partitions: Iterable[TopicPartition], changed: Change, *, begin: bool = False) -> None:
        """Change the entries of many partitions, where there is something to change. ``begin``: also write their
        start records."""
        with ThreadPoolExecutor(PARALLELISM) as pool:
            for done in [pool.submit(self._update_entry, tp, changed, begin) for tp in partitions]:
                done.result()

    def _update_entry(self, tp: TopicPartition, changed: Change, begin: bool) -> None:
        """Under the partition's own transactional id, with clients that are closed afterwards."""
        with closing(KafkaClients(self._pipeline)) as clients:
            producer = clients.new_producer(tp)
            after = changed(tp, producer.last)
            if after is None:
                return
            with clients.connection.translate_errors(f"change the position of {tp}"):
                producer.client.begin_transaction()
                if begin and not clients.elsewhere:
                    self._register(producer.client, tp, after)
                clients.send(producer, tp, after)
                producer.client.commit_transaction(PATIENCE_S)
            clients.stored_entry(tp)  # waits until it shows: a commit is answered a moment before
            if begin and clients.elsewhere:
                self._register(clients.plain, tp, after)
                clients.flush_plain()

    def _register(self, producer: Producer, tp: TopicPartition, stored: StoredEntry) -> None:
        key, value = start_records.message(tp, StartRecord(stored.entry.topic_id, stored.start), self._pipeline.name)
        producer.produce(dead_letter_topic(self._pipeline), value, key)
