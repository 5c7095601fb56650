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
from dataclasses import dataclass, replace

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from avow import ledger
from avow.errors import ConfigError, SinkError, Superseded
from avow.kafka.log import Log, TopicPartition
from avow.ledger import Counts, Entry, OffsetRange
from avow.schema import Field
from avow.settings import PipelineConfig
from avow.sinks.base import Claimed, Held, Move
from avow.sinks.kafka import register
from avow.sinks.kafka.clients import MESSAGE_BYTES_MAX, PATIENCE_S, Clients, as_ours, several
from avow.sinks.kafka.config import KafkaConfig, dead_letter_topic, on_other_cluster
from avow.sinks.kafka.entries import Kept, topic_key
from avow.sinks.kafka.letters import LEAST_BYTES
from avow.sinks.kafka.messages import output_topics
from avow.sinks.kafka.register import Began
from avow.sinks.kafka.task import KafkaTask

AT_ONCE = 8  # partitions whose entries are changed side by side
SHOWS_S = 1.0  # a commit is answered a moment before it shows
AGE_MAX_MS = 24 * 3_600_000  # Kafka keeps positions for seven days unless told otherwise


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The source's topics, as far as topics that are made take after them."""

    topics: frozenset[str]
    partitions: int  # of the largest
    replicas: int  # of the one with the most; -1: not known


class Store:
    """What the driver asks of the sink. Not for use by two threads at once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        assert isinstance(pipeline.sink, KafkaConfig)
        self._pipeline = pipeline
        self._sink = pipeline.sink
        self._clients = Clients(pipeline)
        self._fenced: frozenset[TopicPartition] = frozenset()  # had a position when this run began

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def task_context(self) -> None:
        return None  # a task asks Kafka itself

    def close(self) -> None:
        self._clients.close()

    # Topics and the group

    def prepare(self) -> None:
        """Refuse a group that others use and an output that would be read; make the dead-letter topic, or refuse one
        that lets letters go."""
        self.refuse_members()
        inputs = self._inputs()
        self._outputs(inputs.topics)
        name = dead_letter_topic(self._pipeline)
        if name in self._there([name]):
            self._refuse_forgetful(name)
        else:
            self._refuse_gone([name])
            # Compacted: a letter stays until it is taken back. And as large as the largest record that can come.
            config = {"cleanup.policy": "compact", "max.message.bytes": str(MESSAGE_BYTES_MAX)}
            self._make(name, 1, inputs.replicas, config)

    def _inputs(self) -> _Inputs:
        with Log(self._pipeline.source, self._pipeline.name) as log:
            partitions = log.partitions()
            there = [one for one in log.cluster().partitions if TopicPartition(one.topic, one.partition) in partitions]
        return _Inputs(
            frozenset(where.topic for where in partitions),
            max(where.partition + 1 for where in partitions),
            max((len(one.replicas) for one in there), default=-1),
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
                    advice="Let the pattern leave it out, or name the output otherwise.",
                )
            if name == dead_letter_topic(self._pipeline):
                raise ConfigError(
                    f"sink.topic: {name} is an output topic and the one for dead letters",
                    advice="Name another sink.dead_letter_topic.",
                )
        return wanted

    def _make_outputs(self, topics: Collection[str]) -> bool:
        """Make the output topics for these that are not there. True if one was made."""
        wanted = self._outputs(topics)
        there = self._there(wanted)
        missing = [name for name in wanted if name not in there]
        if missing:
            self._refuse_gone(missing)
            inputs = self._inputs()
            for name in missing:
                self._make(name, inputs.partitions, inputs.replicas, {})
        return bool(missing)

    def _refuse_gone(self, missing: Collection[str]) -> None:
        """A topic that the pipeline has written to is not made anew: what it held is lost, and nobody would see it."""
        self._clients.topic_ids(missing, *(kept.topics for kept in self.kept().values()))

    def _written_to(self, topics: Collection[str]) -> list[str]:
        """The topics that records of these may go to, and that of dead letters."""
        return [*output_topics(self._sink, topics), dead_letter_topic(self._pipeline)]

    def _refuse_forgetful(self, name: str) -> None:
        """A dead-letter topic that somebody else has made may let letters go, or take none."""
        limits = self._clients.limits(name)
        if limits.message_bytes_max < LEAST_BYTES:
            raise ConfigError(
                f"the dead-letter topic {name} has max.message.bytes = {limits.message_bytes_max}: not even a "
                "shortened letter fits",
                advice="kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name "
                f"{name} --add-config max.message.bytes={MESSAGE_BYTES_MAX}",
            )
        policy = limits.cleanup_policy
        if policy != "compact":
            raise ConfigError(
                f"the dead-letter topic {name} has cleanup.policy = {policy}, so that Kafka would delete letters, and "
                "which partitions were begun",
                advice="kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics --entity-name "
                f"{name} --add-config cleanup.policy=compact",
            )

    def refuse_members(self) -> None:
        members = self._clients.members()
        if members:
            raise ConfigError(
                f"the group {self._clients.group} is this pipeline's ledger, and a consumer has joined it: "
                f"{several(members)}",
                advice="Kafka would let it commit offsets over ours. Stop it, or give it or the pipeline another name.",
            )

    def prepare_table(self, fields: tuple[Field, ...], *, rest: bool) -> bool:
        """Check the columns that the sink names and that the output is the one that the positions are of, and make the
        output topics that are not there. True if one was."""
        self._check_columns({field.name for field in fields} | {*self._sink.lineage} | ({"_rest"} if rest else set()))
        for where, kept in self.kept().items():
            self._clients.refuse_other_outputs(where, kept, output_topics(self._sink, [where.topic]))
        with Log(self._pipeline.source, self._pipeline.name) as log:
            topics = {where.topic for where in log.partitions()}
        made = self._make_outputs(topics)
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

    def _there(self, names: Iterable[str]) -> set[str]:
        found = self._clients.ask("the listing of topics", lambda admin: admin.list_topics(timeout=PATIENCE_S).topics)
        return {name for name in names if name in found}

    def _make(self, name: str, partitions: int, replicas: int, config: dict[str, str]) -> None:
        def request(admin: AdminClient) -> None:
            # Another cluster may have fewer brokers than the source's topics have replicas.
            most = len(admin.list_topics(timeout=PATIENCE_S).brokers) if on_other_cluster(self._pipeline) else replicas
            topic = NewTopic(name, partitions, min(replicas, most), config=config)
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
        wait_s = self._clients.ends_within_s if stable else SHOWS_S
        found, left = self._clients.positions(wait_s)
        if left:
            found |= self._clients.positions(PATIENCE_S, left, stable=False)[0]  # or it says what else is wrong
            if stable:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise SinkError(
                    f"hanging-transaction: one is about to change the position of {left[0]}{more} in group "
                    f"{self._clients.group}, and does not end. The pipeline's own there is that of transactional.id "
                    f"{self._clients.transactional_id(left[0])}",
                    advice="kafka-transactions.sh finds and aborts it. Or start the pipeline, which ends its own.",
                )
        return found

    def entries(self) -> dict[TopicPartition, Entry]:
        return {where: kept.entry for where, kept in self.kept().items()}

    def keepalive(self) -> None:
        """Write positions anew that have not changed for long: Kafka forgets those."""
        self._refreshed()

    def _refreshed(self) -> dict[TopicPartition, Kept]:
        known = self.kept()
        oldest_ms = time.time() * 1000 - AGE_MAX_MS
        self._change([where for where, kept in known.items() if kept.at_ms < oldest_ms], lambda _, kept: kept)
        return known

    def look(self) -> dict[TopicPartition, Held]:
        return {where: Held(kept.entry, kept.start) for where, kept in self.kept().items()}

    def claims_of(self, where: TopicPartition, offsets: Collection[int]) -> dict[int, Claimed]:  # noqa: ARG002
        return {}  # one offset and its text are all that a group keeps of a partition

    def claims(self, limit: int) -> None:  # noqa: ARG002
        return None

    def open_run(self, partitions: Collection[TopicPartition] | None = None) -> int:
        """Begin a run: take its number, and fence the older ones: their open transactions end here."""
        self.refuse_members()
        known = self._refreshed()
        run = ledger.next_run(kept.entry for kept in known.values())
        ours = known.keys() if partitions is None else known.keys() & set(partitions)
        topics = self._clients.topic_ids(
            self._written_to({where.topic for where in ours}), *(known[where].topics for where in ours)
        )

        def fenced(where: TopicPartition, kept: Kept | None) -> Kept | None:
            if kept is None:
                return None
            mine = self._of(where, topics)
            return replace(kept, entry=ledger.fence(kept.entry, run), topics=mine)

        self._change(ours, fenced)
        self._fenced = frozenset(ours)
        return run

    def _of(self, where: TopicPartition, topics: Mapping[str, str]) -> dict[str, str]:
        """Those of the ids that belong into a partition's entry."""
        keys = map(topic_key, self._written_to([where.topic]))
        return {key: topics[key] for key in keys if key in topics}

    def adopt(self, entries: Mapping[TopicPartition, Entry]) -> None:
        """Write first positions, before anything is read from them. One that is there already stays. A topic that has
        come to match the pattern may have no output topic yet."""
        if not entries:
            return
        self._make_outputs({where.topic for where in entries})
        began = register.read(self._clients, dead_letter_topic(self._pipeline))
        topics = self._clients.topic_ids(self._written_to({where.topic for where in entries}))

        def adopted(where: TopicPartition, kept: Kept | None) -> Kept | None:
            first = entries[where]
            if kept is None and where in began:
                raise register.lost(where, began[where], first.topic_id)
            if kept is None:
                return Kept(first, first.position, first.position, 0, self._of(where, topics))
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
                    with as_ours(f"the change of the position of {where}", self._pipeline):
                        producing.client.begin_transaction()
                        if begin and not clients.elsewhere:
                            self._register(producing.client, where, after)
                        clients.send(producing, where, after)
                        producing.client.commit_transaction(PATIENCE_S)
                    # It is answered a moment before it shows.
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
        key, value = register.message(where, Began(kept.entry.topic_id, kept.start), self._pipeline.name)
        producer.produce(dead_letter_topic(self._pipeline), value, key)

    def claim(self, done: OffsetRange, run: int, batch: int, counts: Counts = ledger.NOTHING) -> None:
        """Claim a range that no task will claim: it holds no visible record, or is given up to retention."""
        task = KafkaTask(self._pipeline, run, self._clients)
        with task.act():
            (entry,) = task.entries([TopicPartition(done.topic, done.partition)], lock=True)
            todo = ledger.judge(entry.position, done)
            if todo:
                task.claim([Move(entry, ledger.claim(entry, todo, run, counts), todo)], batch)
