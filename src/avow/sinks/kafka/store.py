"""The driver's side of the Kafka sink: topics, runs and positions.

Every change of the ledger is a transaction under the partition's own id, also here: a plain commit of an offset could
put back a position that a task has moved a moment before.

Owns: making and checking the topics, and the reserved group. The rules are ``ledger``'s; here they are only stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from avow import ledger
from avow.errors import ConfigError, SinkError, Superseded
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.schema import Field
from avow.settings import Kafka, Pipeline
from avow.sinks.base import Claimed, Held
from avow.sinks.kafka import entries as kept_entries
from avow.sinks.kafka import register
from avow.sinks.kafka.clients import MESSAGE_BYTES_MAX, PATIENCE_S, Clients, as_ours
from avow.sinks.kafka.entries import Kept
from avow.sinks.kafka.messages import output_topics
from avow.sinks.kafka.register import Began
from avow.sinks.kafka.task import KafkaTask

AT_ONCE = 8  # partitions whose entries are changed side by side
SHOWS_S = 0.25  # a commit is answered a moment before it shows
AGE_MAX_MS = 24 * 3_600_000  # Kafka keeps positions for seven days unless told otherwise


class Store:
    """What the driver asks of the sink. Not for use by two threads at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        assert isinstance(pipeline.sink, Kafka)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._clients = Clients(pipeline)
        self._fenced: frozenset[TopicPartition] = frozenset()  # had a position when this run began

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def brief(self) -> bytes:
        return b""  # a task asks Kafka itself

    def close(self) -> None:
        self._clients.close()

    # Topics and the group

    def prepare(self) -> None:
        """Refuse a group that others use; make the dead-letter topic."""
        self.refuse_members()
        name = self._pipeline.dead_letter_topic
        if name not in self._there([name]):
            # Compacted: a letter stays until it is taken back. And as large as the largest record that can come.
            self._make(name, 1, {"cleanup.policy": "compact", "max.message.bytes": str(MESSAGE_BYTES_MAX)})

    def refuse_members(self) -> None:
        group = self._clients.group

        def request(admin: AdminClient) -> list[Any]:
            asked = admin.describe_consumer_groups([group], request_timeout=PATIENCE_S)
            return list(asked[group].result(PATIENCE_S).members)

        members = self._clients.ask(f"the describing of group {group}", request, ledger=True)
        if members:
            named = ", ".join(f"{member.client_id} at {member.host.lstrip('/')}" for member in members[:3])
            raise ConfigError(
                f"the group {group} is this pipeline's ledger, and a consumer has joined it: {named}"
                f"{f' and {len(members) - 3} more' if len(members) > 3 else ''}",
                advice="Kafka would let it commit offsets over ours. Stop it, or give it or the pipeline another name.",
            )

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Check the columns that the sink names, and make the output topics that are not there. True if one was."""
        self._check_columns({field.name for field in fields} | {*self._sink.lineage} | ({"_rest"} if rest else set()))
        with Log(self._pipeline.source, self._pipeline.name) as log:
            partitions = log.partitions()
        wanted = output_topics(self._sink, {where.topic for where in partitions})
        there = self._there(wanted)
        most = max(where.partition + 1 for where in partitions)
        for name in wanted:
            if name not in there:
                self._make(name, most, {})
        for name in wanted:
            self._clients.limits(name)  # that it can be described is known before anything is read
        return len(there) < len(wanted)

    def _check_columns(self, columns: set[str]) -> None:
        named = {"key_column": self._sink.key_column, "value_column": self._sink.value_column}
        named |= {"topic": None} | {f"topic {{{name}}}": name for name in self._sink.routed_by}
        for setting, name in named.items():
            if name is not None and name not in columns:
                raise ConfigError(
                    f"sink.{setting}: {name!r} is not a column of the transform's result",
                    advice=f"It has {', '.join(sorted(columns))}.",
                )

    def _there(self, names: Iterable[str]) -> set[str]:
        found = self._clients.ask("the listing of topics", lambda admin: admin.list_topics(timeout=PATIENCE_S).topics)
        return {name for name in names if name in found}

    def _make(self, name: str, partitions: int, config: dict[str, str]) -> None:
        topic = NewTopic(name, partitions, config=config)

        def request(admin: AdminClient) -> None:
            try:
                admin.create_topics([topic], operation_timeout=30, request_timeout=PATIENCE_S)[name].result(PATIENCE_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # somebody else was quicker
                    raise

        self._clients.ask(f"the making of topic {name}", request)

    # The ledger

    def kept(self, *, stable: bool = False) -> dict[TopicPartition, Kept]:
        """Every entry. One that a transaction is about to change is waited for. Unless ``stable``, only as long as a
        commit takes to show that was answered already: a dead writer's transaction stays open until a new run fences
        it, or until its time-out, and then the entry is as it was before."""
        deadline = time.monotonic() + (self._clients.timeout_ms / 1000 + PATIENCE_S if stable else SHOWS_S)
        what = f"the reading of the positions of group {self._clients.group}"
        wait = True
        while (answer := self._clients.ask(what, partial(self._committed, stable=wait), ledger=True)) is None:
            if time.monotonic() < deadline:
                time.sleep(0.01)
            elif stable:
                raise SinkError(
                    f"hanging-transaction: one is about to change the positions of group {self._clients.group}, and "
                    "does not end",
                    advice="kafka-transactions.sh finds and aborts it. Or start the pipeline, which ends its own.",
                )
            else:
                wait = False
        found = {TopicPartition(one.topic, one.partition): one for one in answer if one.offset >= 0}
        return {
            where: kept_entries.read(self._clients.group, where, one.offset, one.metadata)
            for where, one in sorted(found.items())
        }

    def _committed(self, admin: AdminClient, *, stable: bool) -> list[Any] | None:
        """None: with ``stable``, an open transaction is about to change one."""
        group = self._clients.group
        asked = admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group)], require_stable=stable, request_timeout=PATIENCE_S
        )
        try:
            answer = asked[group].result(PATIENCE_S).topic_partitions or []
            for one in answer:
                if one.error is not None:
                    raise KafkaException(one.error)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNSTABLE_OFFSET_COMMIT:
                raise
            return None
        return answer

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position of the pipeline. One that has not changed for long is written anew: Kafka forgets those."""
        known = self.kept()
        oldest_ms = time.time() * 1000 - AGE_MAX_MS
        self._change([where for where, kept in known.items() if kept.at_ms < oldest_ms], lambda _, kept: kept)
        return {where: kept.entry for where, kept in known.items()}

    def look(self) -> dict[TopicPartition, Held]:
        return {where: Held(kept.entry, kept.start) for where, kept in self.kept().items()}

    def claims_of(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:  # noqa: ARG002
        return {}  # one offset and its text are all that a group keeps of a partition

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number, and fence the older ones: their open transactions end here."""
        self.refuse_members()
        known = self.entries()
        run = ledger.next_run(known.values())

        def fenced(_: TopicPartition, kept: Kept | None) -> Kept | None:
            return kept and kept.with_entry(ledger.fence(kept.entry, run))

        ours = known.keys() if partitions is None else known.keys() & set(partitions)
        self._change(ours, fenced)
        self._fenced = frozenset(ours)
        return run

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays."""
        began = register.read(self._clients, self._pipeline.dead_letter_topic) if entries else {}

        def adopted(where: TopicPartition, kept: Kept | None) -> Kept | None:
            first = entries[where]
            if kept is None and where in began:
                raise register.lost(where, began[where], first.topic_id)
            if kept is None:
                return Kept(first, first.position, first.position, 0)
            if kept.entry.run >= first.run and where not in self._fenced:
                raise Superseded(
                    f"superseded by run {kept.entry.run}: it has begun to read {where} meanwhile",
                    advice="Another run of this pipeline has started at the same time. Stop one of the two.",
                )
            return None

        self._change(entries, adopted, begin=True)

    def _change(
        self,
        partitions: Iterable[TopicPartition],
        changed: Callable[[TopicPartition, Kept | None], Kept | None],
        *,
        begin: bool = False,
    ) -> None:
        """Change the entries of many partitions, where there is something to change. Each has a producer of its own,
        which nobody needs afterwards."""

        def change(where: TopicPartition) -> None:
            clients = Clients(self._pipeline)
            try:
                producing = clients.fresh(where)
                after = changed(where, producing.last)
                if after is not None:
                    with as_ours(f"the change of the position of {where}"):
                        producing.client.begin_transaction()
                        if begin and not clients.elsewhere:
                            self._register(producing.client, where, after)
                        clients.send(producing, where, after)
                        producing.client.commit_transaction(PATIENCE_S)
                    # It is answered a moment before it shows, and a first position that does not show is not even
                    # waited for by who lists all of them.
                    clients.kept(where)
                    if begin and clients.elsewhere:
                        self._register(clients.plain, where, after)
                        clients.flush_plain()
            finally:
                clients.close()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(change, where) for where in partitions]:
                done.result()

    def _register(self, producer: Producer, where: TopicPartition, kept: Kept) -> None:
        key, value = register.message(where, Began(kept.entry.topic_id, kept.start))
        producer.produce(self._pipeline.dead_letter_topic, value, key)

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = ledger.NOTHING) -> None:
        """Claim a range that no task will claim: it holds no visible record, or is given up to retention."""
        task = KafkaTask(self._pipeline, run, self._clients)
        with task.act():
            entry = task.entry(done.topic, done.partition, lock=True)
            todo = ledger.judge(entry.position, done)
            if todo:
                task.claim(entry, ledger.claim(entry, todo, run, counts), todo, batch)
