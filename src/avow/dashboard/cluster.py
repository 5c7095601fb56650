"""The pages about the cluster: brokers, topics, groups, transactions.

Owns: these answers. Must not know: how they are shown, or any pipeline's inside. Its neighbour is ``avow.kafka``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field

from avow.dashboard.fields import GroupName, TopicName
from avow.dashboard.requests import NoParams, NotFound, Params
from avow.dashboard.state import AppState
from avow.kafka import groups as kafka_groups
from avow.kafka import topics as kafka_topics
from avow.kafka.admin import NEWS_S
from avow.kafka.brokers import Disk, Holder
from avow.kafka.groups import Lag, Member
from avow.kafka.log import Log, TopicPartition
from avow.kafka.metadata import ClusterView, Partition
from avow.retry import poll_until

SHOWN_MAX = 100  # topics or groups on a page
PARTITIONS_MAX = 200  # on a topic's page
BAD_MAX = 200  # partitions in trouble that are listed
OFFSETS_MAX = 2_000  # partitions whose offsets are asked for at once
GROUPS_MAX = 60  # whose positions are asked for at once
HANGING_S = 15 * 60  # Kafka's default transaction.max.timeout.ms
ORPHAN_S = 60  # a transaction of which no coordinator knows; one that just ended is such a one for a moment

Item = TypeVar("Item")


def _page(items: list[Item], number: int, size: int) -> tuple[list[Item], int]:
    """One page of a list, and the number of pages."""
    return items[(number - 1) * size : number * size], max(1, -(-len(items) // size))


# Brokers


@dataclass(frozen=True, slots=True)
class BrokerView:
    id: int
    address: str
    rack: str
    up: bool
    controller: bool
    leads: int  # partitions
    replicas: int
    in_sync: int  # of its replicas
    version: str  # derived from its API versions; empty: not known
    no_disk: str  # why the next three are not known, if the broker answered; empty otherwise
    disk_bytes: int | None  # of its replicas
    free_bytes: int | None
    total_bytes: int | None
    failed: tuple[str, ...]  # folders that it cannot use any more


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    what: str  # offline, under-min-isr or under-replicated


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    cluster_id: str
    brokers: tuple[BrokerView, ...]
    topics: int
    partitions: int
    under_replicated: int
    under_min_isr: int
    offline: int
    problems: tuple[PartitionProblem, ...]  # the worst first


def cluster(state: AppState, _: NoParams) -> ClusterAnswer:
    """Brokers, and partitions with problems."""
    with state.log() as log:
        view = log.cluster()
        racks = log.admin.racks()
        lacking = sorted({p.topic for p in view.partitions if p.under_replicated})
        least = kafka_topics.min_in_sync(log, lacking[:BAD_MAX])
    disks = state.ask_brokers(lambda brokers: brokers.disks()) or {}
    problems = sorted(
        (
            PartitionProblem(p.topic, p.partition, p.leader, p.replicas, p.in_sync, what)
            for p in view.partitions
            if (what := _problem(p, least))
        ),
        key=lambda p: (("offline", "under-min-isr", "under-replicated").index(p.what), p.topic, p.partition),
    )
    count = Counter(p.what for p in problems)
    return ClusterAnswer(
        cluster_id=view.cluster_id or "",
        brokers=_brokers(view, racks, disks),
        topics=len({p.topic for p in view.partitions if not p.topic.startswith("__")}),
        partitions=len(view.partitions),
        under_replicated=len(problems),
        under_min_isr=count["under-min-isr"],
        offline=count["offline"],
        problems=tuple(problems[:BAD_MAX]),
    )


def _problem(partition: Partition, least: dict[str, int]) -> str:
    if partition.leader < 0:
        return "offline"
    if len(partition.in_sync) < least.get(partition.topic, 0):
        return "under-min-isr"
    return "under-replicated" if partition.under_replicated else ""


def _brokers(view: ClusterView, racks: dict[int, str], disks: dict[int, Disk]) -> tuple[BrokerView, ...]:
    leads = Counter(partition.leader for partition in view.partitions)
    replicas = Counter(number for partition in view.partitions for number in partition.replicas)
    in_sync = Counter(number for partition in view.partitions for number in partition.in_sync)
    brokers = []
    # A broker that is gone is known by the replicas it should have.
    for number in sorted({*view.brokers, *replicas}):
        disk = disks.get(number)
        brokers.append(
            BrokerView(
                id=number,
                address=view.brokers.get(number, ""),
                rack=racks.get(number, ""),
                up=number in view.brokers,
                controller=number == view.controller,
                leads=leads[number],
                replicas=replicas[number],
                in_sync=in_sync[number],
                version=disk.version if disk else "",
                no_disk="not permitted" if disk and disk.used_bytes is None else "",
                disk_bytes=disk.used_bytes if disk else None,
                free_bytes=disk.usable_bytes if disk else None,
                total_bytes=disk.total_bytes if disk else None,
                failed=disk.offline if disk else (),
            )
        )
    return tuple(brokers)


# Topics


class TopicsParams(Params):
    q: Annotated[str, Field(max_length=249, description="part of a topic's name")] = ""
    internal: Annotated[bool, Field(description="also list Kafka's internal topics")] = False
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


@dataclass(frozen=True, slots=True)
class TopicRow:
    name: str
    partitions: int
    replicas: int
    under_replicated: int
    offline: int
    offsets: int | None  # in its logs, markers among them; None: too many partitions to ask
    disk_bytes: int | None  # with its replicas; None: not known
    open: bool  # a transaction is open


@dataclass(frozen=True, slots=True)
class TopicsAnswer:
    topics: tuple[TopicRow, ...]
    matches: int
    page: int
    pages: int
    hidden: int  # Kafka's own


def topics(state: AppState, params: TopicsParams) -> TopicsAnswer:
    """All topics, by name, a hundred at a time."""
    with state.log() as log:
        everything = kafka_topics.names(log, internal=True)
        wanted = {name: parts for name, parts in everything.items() if params.internal or not name.startswith("__")}
        found = (name for name in wanted if params.q.lower() in name.lower())
        matches = sorted(found, key=lambda name: (name.startswith("__"), name.lower()))
        names, pages = _page(matches, params.page, SHOWN_MAX)
        tps = [TopicPartition(p.topic, p.partition) for name in names for p in wanted[name] if p.leader >= 0]
        affordable = len(tps) <= OFFSETS_MAX
        # What is deleted while this is asked is left out.
        offsets = log.offsets(tps, skip_deleted=True) if affordable else {}
        stable = log.stable_ends(offsets, skip_deleted=True)
        if affordable:
            deleted = {tp.topic for tp in tps if tp not in stable}
            names = [name for name in names if name not in deleted]
    disks = state.ask_brokers(lambda brokers: brokers.disks(names)) if names else None
    sums: Counter[str] = Counter()
    opened = set()
    for tp, (first, end) in offsets.items():
        sums[tp.topic] += end - first
        if stable.get(tp, end) < end:
            opened.add(tp.topic)
    rows = tuple(
        TopicRow(
            name=name,
            partitions=len(wanted[name]),
            replicas=max(len(p.replicas) for p in wanted[name]),
            under_replicated=sum(p.under_replicated for p in wanted[name]),
            offline=sum(p.leader < 0 for p in wanted[name]),
            offsets=sums[name] if affordable else None,
            disk_bytes=kafka_topics.bytes_of(wanted[name], disks) if disks else None,
            open=name in opened,
        )
        for name in names
    )
    return TopicsAnswer(rows, len(matches), params.page, pages, len(everything) - len(wanted))


class TopicParams(Params):
    topic: TopicName
    page: Annotated[int, Field(ge=1, le=100_000, description="page of the partition list")] = 1


@dataclass(frozen=True, slots=True)
class PartitionRow:
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    earliest: int
    stable_end: int
    end: int
    bytes: int | None  # its leader's log; None: not known


@dataclass(frozen=True, slots=True)
class TopicAnswer:
    name: str
    topic_id: str
    internal: bool
    partitions: tuple[PartitionRow, ...]
    all_partitions: int
    page: int
    pages: int
    offsets: int  # of the partitions on this page
    open_offsets: int
    under_replicated: int
    disk_bytes: int | None  # with its replicas; None: not known
    config: dict[str, str] | None  # None: not permitted
    read_by: tuple[str, ...]  # pipelines
    written_by: tuple[str, ...]


def topic(state: AppState, params: TopicParams) -> TopicAnswer:
    """One topic: leaders, replicas in sync, offsets, what is configured for it."""
    with state.log() as log:
        partitions = _partitions(log, params.topic)
        if not partitions:
            raise NotFound(
                f"topic {params.topic} does not exist", advice="It may have been deleted. See the list of topics."
            )
        shown, pages = _page(partitions, params.page, PARTITIONS_MAX)
        led = [TopicPartition(params.topic, p.partition) for p in shown if p.leader >= 0]
        offsets, stable = log.offsets(led), log.stable_ends(led)
        ids = log.partitions_of([params.topic])
        config = kafka_topics.config(log, params.topic)
    disks = state.ask_brokers(lambda brokers: brokers.disks([params.topic])) or {}
    rows = []
    for p in shown:
        tp = TopicPartition(params.topic, p.partition)
        first, end = offsets.get(tp, (0, 0))
        last = stable.get(tp, 0)
        size = kafka_topics.size_of(p, disks)
        rows.append(PartitionRow(p.partition, p.leader, p.replicas, p.in_sync, first, last, max(end, last), size))
    return TopicAnswer(
        name=params.topic,
        topic_id=next(iter(ids.values())),
        internal=params.topic.startswith("__"),
        partitions=tuple(rows),
        all_partitions=len(partitions),
        page=params.page,
        pages=pages,
        offsets=sum(p.end - p.earliest for p in rows),
        open_offsets=sum(p.end - p.stable_end for p in rows),
        under_replicated=sum(p.under_replicated for p in partitions),
        disk_bytes=kafka_topics.bytes_of(partitions, disks) if disks else None,
        config=config,
        read_by=tuple(p.name for p in state.watch.pipelines() if params.topic in p.reads),
        written_by=tuple(p.name for p in state.watch.pipelines() if params.topic in p.writes),
    )


def _partitions(log: Log, topic: str) -> list[Partition]:
    """In order. A broker learns of a new topic a moment after the one that made it, and either may be asked."""
    partitions = poll_until(lambda: [p for p in log.cluster().partitions if p.topic == topic], NEWS_S)
    return sorted(partitions, key=lambda p: p.partition)


@dataclass(frozen=True, slots=True)
class TopicGroup:
    group: str
    state: str
    partitions: int
    lag: int  # offsets up to the last stable one
    pipeline: str  # the pipeline with these positions; empty: none


@dataclass(frozen=True, slots=True)
class TopicGroupsAnswer:
    topic: str
    groups: tuple[TopicGroup, ...]
    page: int
    pages: int
    first: int  # by name, of all groups of the cluster: from this one
    last: int  # to this one they were searched
    all_groups: int


class TopicGroupsParams(Params):
    topic: TopicName
    page: Annotated[int, Field(ge=1, le=10_000, description="page of the list of all groups, by name")] = 1


def topic_groups(state: AppState, params: TopicGroupsParams) -> TopicGroupsAnswer:
    """The groups that have positions in a topic. Each of the cluster's is asked, sixty at a time."""
    with state.log() as log:
        states = kafka_groups.names(log)
        names, pages = _page(list(states), params.page, GROUPS_MAX)
        positions = {
            group: {tp: offset for tp, offset in committed.items() if tp.topic == params.topic}
            for group, committed in kafka_groups.positions(log, names).items()
        }
        ends = log.stable_ends({tp for committed in positions.values() for tp in committed})
    owners = state.watch.groups()
    rows = [
        TopicGroup(
            group,
            states[group],
            len(committed),
            sum(max(0, ends[tp] - offset) for tp, offset in committed.items()),
            owners.get(group, ""),
        )
        for group, committed in positions.items()
        if committed
    ]
    before = (params.page - 1) * GROUPS_MAX
    return TopicGroupsAnswer(
        params.topic,
        tuple(sorted(rows, key=lambda row: -row.lag)),
        params.page,
        pages,
        before + 1,
        before + len(names),
        len(states),
    )


# Groups


class GroupsParams(Params):
    q: Annotated[str, Field(max_length=255, description="part of a group's name")] = ""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1


@dataclass(frozen=True, slots=True)
class GroupRow:
    name: str
    state: str
    members: int
    topics: tuple[str, ...]
    lag: int | None  # None: too many partitions to ask
    pipeline: str


@dataclass(frozen=True, slots=True)
class GroupsAnswer:
    groups: tuple[GroupRow, ...]
    matches: int
    page: int
    pages: int


def groups(state: AppState, params: GroupsParams) -> GroupsAnswer:
    """All consumer groups, sixty at a time."""
    with state.log() as log:
        matches = [name for name in kafka_groups.names(log) if params.q.lower() in name.lower()]
        names, pages = _page(matches, params.page, GROUPS_MAX)
        described = kafka_groups.describe(log, names)
        positions = kafka_groups.positions(log, names)
        led = {TopicPartition(p.topic, p.partition) for p in log.cluster().partitions if p.leader >= 0}
        tps = {tp for committed in positions.values() for tp in committed} & led
        affordable = len(tps) <= OFFSETS_MAX
        ends = log.stable_ends(tps, skip_deleted=True) if affordable else {}
    owners = state.watch.groups()
    rows = []
    for g in described:
        committed = positions[g.name]
        lag = sum(max(0, ends[tp] - offset) for tp, offset in committed.items() if tp in ends) if affordable else None
        read = tuple(sorted({tp.topic for tp in committed}))
        rows.append(GroupRow(g.name, g.state, len(g.members), read, lag, owners.get(g.name, "")))
    return GroupsAnswer(tuple(rows), len(matches), params.page, pages)


class GroupParams(Params):
    group: GroupName


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    name: str
    state: str
    members: tuple[Member, ...]
    lags: tuple[Lag, ...]
    records: int  # of lag, in all
    seconds: float | None  # of the oldest record that waits
    pipeline: str
    reserved: str  # why its positions cannot be set here; empty if they can


def group(state: AppState, params: GroupParams) -> GroupAnswer:
    """One group: members, positions and lag by partition."""
    with state.log() as log:
        if params.group not in kafka_groups.names(log):
            raise NotFound(
                f"consumer group {params.group} does not exist",
                advice="Kafka removes a group when its offsets have expired.",
            )
        (described,) = kafka_groups.describe(log, [params.group])
        lags = kafka_groups.lag(log, params.group)
    return GroupAnswer(
        described.name,
        described.state,
        described.members,
        tuple(lags),
        sum(lag.records or 0 for lag in lags),
        max((lag.seconds for lag in lags if lag.seconds is not None), default=None),
        state.watch.groups().get(described.name, ""),
        reserved(state, described.name, len(described.members), [lag.metadata for lag in lags]),
    )


def reserved(state: AppState, name: str, members: int, metadata: Iterable[str]) -> str:
    """Why this group's positions may not be set here."""
    owner = state.watch.groups().get(name)
    if owner:
        return f"it belongs to pipeline {owner}, which starts from its ledger and not from the group's offsets"
    if any(text.startswith('{"avow":') for text in metadata):
        return "it is the ledger of a pipeline with a Kafka sink: its offsets are claims"
    if members:
        return "it has active members; stop its consumers first"
    return ""


# Transactions


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    topic: str
    partition: int
    first_offset: int  # the last stable offset: readers of committed records stand here
    waiting: int  # offsets from there on
    since: float | None  # seconds since 1970: the timestamp of its first record
    hanging: bool  # older than a transaction may be, or without a coordinator
    holder: Holder | None  # who has it open; None: not known
    pipelines: tuple[str, ...]  # that wait for its end


@dataclass(frozen=True, slots=True)
class TransactionsAnswer:
    transactions: tuple[OpenTransaction, ...]
    partitions: int  # that were searched
    not_asked: int
    hanging_after_s: int


def transactions(state: AppState, _: NoParams) -> TransactionsAnswer:
    """Partitions in which a transaction is open, the oldest first."""
    with state.log() as log:
        every = [TopicPartition(p.topic, p.partition) for p in log.cluster().partitions if p.leader >= 0]
        tps = [tp for tp in every if not tp.topic.startswith("__")][:OFFSETS_MAX]
        # The stable ends first: an end only grows, so what is open between the two was open at the first question.
        stable = log.stable_ends(tps, skip_deleted=True)
        ends = {tp: end for tp, (_, end) in log.offsets(stable, skip_deleted=True).items()}
        waiting = {tp: stable[tp] for tp in ends if stable[tp] < ends[tp]}
        # Records appended between the two requests look like an open transaction: request again.
        again = log.stable_ends(waiting, skip_deleted=True)
        opened = {tp: offset for tp, offset in waiting.items() if again.get(tp) == offset}
        stamps = log.first_timestamps(dict(list(opened.items())[:SHOWN_MAX]))
    holders = state.ask_brokers(lambda brokers: brokers.holders(list(opened)[:SHOWN_MAX])) if opened else None
    readers = defaultdict(list)
    for pipeline in state.watch.pipelines():
        for name in pipeline.reads:
            readers[name].append(pipeline.name)
    now = time.time()
    rows = []
    for tp, offset in opened.items():
        stamp = stamps.get(tp)
        since = stamp / 1000 if stamp is not None and stamp >= 0 else None
        # The oldest one is where readers stand; it may have ended between the two questions.
        holder = next((holder for holder in (holders or {}).get(tp, []) if holder.first_offset == offset), None)
        hanging, waiters = _hangs(since, holder, now), tuple(readers[tp.topic])
        rows.append(OpenTransaction(tp.topic, tp.partition, offset, ends[tp] - offset, since, hanging, holder, waiters))
    rows.sort(key=lambda row: (row.since is None, row.since or 0))
    return TransactionsAnswer(tuple(rows), len(tps), len(every) - len(tps), HANGING_S)


def _hangs(since: float | None, holder: Holder | None, now: float) -> bool:
    """Whether nothing will end it."""
    if holder is not None and holder.timeout_ms is not None:
        return False  # its coordinator does, at the latest after that time
    return since is not None and now - since > (HANGING_S if holder is None else ORPHAN_S)
