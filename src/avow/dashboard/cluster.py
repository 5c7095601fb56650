"""The pages about the cluster: brokers, topics, groups, transactions.

Owns: these answers. Must not know: how they are shown, or any pipeline's inside. Its neighbour is ``avow.kafka``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from avow.dashboard.asking import Ask, Nothing, NotThere
from avow.dashboard.house import House
from avow.kafka import groups as kafka_groups
from avow.kafka import topics as kafka_topics
from avow.kafka.brokers import Disk, Holder
from avow.kafka.groups import Lag, Member
from avow.kafka.log import Log, TopicPartition, answers
from avow.kafka.metadata import ClusterView, Partition

SHOWN_MAX = 100  # topics or groups on a page
PARTITIONS_MAX = 200  # on a topic's page
BAD_MAX = 200  # partitions in trouble that are listed
OFFSETS_MAX = 2_000  # partitions whose offsets are asked for at once
GROUPS_MAX = 60  # whose positions are asked for at once
HANGING_S = 15 * 60  # Kafka's own bound of a transaction, unless the brokers are told otherwise
NEWS_S = 2.0
ORPHAN_S = 60  # a transaction of which no coordinator knows; one that just ended is such a one for a moment


# Brokers


@dataclass(frozen=True, slots=True)
class Broker:
    id: int
    address: str
    rack: str
    up: bool
    controller: bool
    leads: int  # partitions
    replicas: int
    in_sync: int  # of its replicas
    version: str  # as far as its requests tell; empty: not known
    no_disk: str  # why the next three are not known, if the broker answered; empty otherwise
    disk_bytes: int | None  # of its replicas
    free_bytes: int | None
    total_bytes: int | None
    failed: tuple[str, ...]  # folders that it cannot use any more


@dataclass(frozen=True, slots=True)
class Trouble:
    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    what: str  # offline, under-min-isr or under-replicated


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    cluster_id: str
    brokers: tuple[Broker, ...]
    topics: int
    partitions: int
    under_replicated: int
    under_min_isr: int
    offline: int
    troubles: tuple[Trouble, ...]  # the worst first


def cluster(house: House, _: Nothing) -> ClusterAnswer:
    """Brokers, and partitions in trouble."""
    with house.log() as log:
        view = log.cluster()
        racks = _racks(log)
        lacking = sorted({one.topic for one in view.partitions if one.under_replicated})
        least = kafka_topics.min_in_sync(log, lacking[:BAD_MAX])
    disks = house.told(lambda brokers: brokers.disks()) or {}
    troubles = sorted(
        (
            Trouble(one.topic, one.partition, one.leader, one.replicas, one.in_sync, what)
            for one in view.partitions
            if (what := _trouble(one, least))
        ),
        key=lambda one: (("offline", "under-min-isr", "under-replicated").index(one.what), one.topic, one.partition),
    )
    count = Counter(one.what for one in troubles)
    return ClusterAnswer(
        cluster_id=view.cluster_id or "",
        brokers=_brokers(view, racks, disks),
        topics=len({one.topic for one in view.partitions if not one.topic.startswith("__")}),
        partitions=len(view.partitions),
        under_replicated=len(troubles),
        under_min_isr=count["under-min-isr"],
        offline=count["offline"],
        troubles=tuple(troubles[:BAD_MAX]),
    )


def _trouble(one: Partition, least: dict[str, int]) -> str:
    if one.leader < 0:
        return "offline"
    if len(one.in_sync) < least.get(one.topic, 0):
        return "under-min-isr"
    return "under-replicated" if one.under_replicated else ""


def _racks(log: Log) -> dict[int, str]:
    told = log.ask(
        "for its brokers",
        lambda timeout_s: answers({"": log.admin.describe_cluster(request_timeout=timeout_s)}, timeout_s)[""],
    )
    return {node.id: node.rack or "" for node in told.nodes}


def _brokers(view: ClusterView, racks: dict[int, str], disks: dict[int, Disk]) -> tuple[Broker, ...]:
    leads = Counter(one.leader for one in view.partitions)
    replicas = Counter(number for one in view.partitions for number in one.replicas)
    in_sync = Counter(number for one in view.partitions for number in one.in_sync)
    found = []
    # A broker that is gone is known by the replicas it should have.
    for number in sorted({*view.brokers, *replicas}):
        disk = disks.get(number)
        found.append(
            Broker(
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
    return tuple(found)


# Topics


class TopicsAsk(Ask):
    q: Annotated[str, Field(max_length=249, description="part of a topic's name")] = ""
    internal: Annotated[bool, Field(description="Kafka's own topics too")] = False
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
    found: int
    page: int
    pages: int
    hidden: int  # Kafka's own


def topics(house: House, ask: TopicsAsk) -> TopicsAnswer:
    """All topics, by name, a hundred at a time."""
    with house.log() as log:
        everything = kafka_topics.names(log, internal=True)
        wanted = {name: parts for name, parts in everything.items() if ask.internal or not name.startswith("__")}
        found = sorted((name for name in wanted if ask.q.lower() in name.lower()), key=_by_name)
        here = found[(ask.page - 1) * SHOWN_MAX : ask.page * SHOWN_MAX]
        asked = [TopicPartition(one.topic, one.partition) for name in here for one in wanted[name] if one.leader >= 0]
        few = len(asked) <= OFFSETS_MAX
        offsets = log.offsets(asked) if few else {}
        stable = log.stable_ends(asked) if few else {}
    disks = house.told(lambda brokers: brokers.disks(here)) if here else None
    sums: Counter[str] = Counter()
    opened = set()
    for where, (first, end) in offsets.items():
        sums[where.topic] += end - first
        if stable[where] < end:
            opened.add(where.topic)
    rows = tuple(
        TopicRow(
            name=name,
            partitions=len(wanted[name]),
            replicas=max(len(one.replicas) for one in wanted[name]),
            under_replicated=sum(one.under_replicated for one in wanted[name]),
            offline=sum(one.leader < 0 for one in wanted[name]),
            offsets=sums[name] if few else None,
            disk_bytes=kafka_topics.bytes_of(wanted[name], disks) if disks else None,
            open=name in opened,
        )
        for name in here
    )
    pages = max(1, -(-len(found) // SHOWN_MAX))
    return TopicsAnswer(rows, len(found), ask.page, pages, len(everything) - len(wanted))


def _by_name(name: str) -> tuple[bool, str]:
    return name.startswith("__"), name.lower()


class TopicAsk(Ask):
    topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
    page: Annotated[int, Field(ge=1, le=100_000, description="of the partitions")] = 1


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


def topic(house: House, ask: TopicAsk) -> TopicAnswer:
    """One topic: leaders, replicas in sync, offsets, what is configured for it."""
    with house.log() as log:
        every = _partitions(log, ask.topic)
        if not every:
            raise NotThere(
                f"there is no topic {ask.topic}", advice="It may have been deleted. The list has the others."
            )
        some = every[(ask.page - 1) * PARTITIONS_MAX : ask.page * PARTITIONS_MAX]
        led = [TopicPartition(ask.topic, one.partition) for one in some if one.leader >= 0]
        offsets, stable = log.offsets(led), log.stable_ends(led)
        ids = log.partitions_of([ask.topic])
        config = kafka_topics.config(log, ask.topic)
    disks = house.told(lambda brokers: brokers.disks([ask.topic])) or {}
    rows = []
    for one in some:
        where = TopicPartition(ask.topic, one.partition)
        first, end = offsets.get(where, (0, 0))
        last = stable.get(where, 0)
        size = kafka_topics.size_of(one, disks)
        rows.append(
            PartitionRow(one.partition, one.leader, one.replicas, one.in_sync, first, last, max(end, last), size)
        )
    return TopicAnswer(
        name=ask.topic,
        topic_id=next(iter(ids.values())),
        internal=ask.topic.startswith("__"),
        partitions=tuple(rows),
        all_partitions=len(every),
        page=ask.page,
        pages=max(1, -(-len(every) // PARTITIONS_MAX)),
        offsets=sum(one.end - one.earliest for one in rows),
        open_offsets=sum(one.end - one.stable_end for one in rows),
        under_replicated=sum(one.under_replicated for one in every),
        disk_bytes=kafka_topics.bytes_of(every, disks) if disks else None,
        config=config,
        read_by=tuple(one.name for one in house.watch.pipelines() if ask.topic in one.reads),
        written_by=tuple(one.name for one in house.watch.pipelines() if ask.topic in one.writes),
    )


def _partitions(log: Log, topic: str) -> list[Partition]:
    """In order. A broker learns of a new topic a moment after the one that made it, and either may be asked."""
    deadline = time.monotonic() + NEWS_S
    while True:
        found = [one for one in log.cluster().partitions if one.topic == topic]
        if found or time.monotonic() > deadline:
            return sorted(found, key=lambda one: one.partition)
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class TopicGroup:
    group: str
    state: str
    partitions: int
    lag: int  # offsets up to the last stable one
    pipeline: str  # whose positions these are; empty: nobody's


@dataclass(frozen=True, slots=True)
class TopicGroupsAnswer:
    topic: str
    groups: tuple[TopicGroup, ...]
    page: int
    pages: int
    first: int  # by name, of all groups of the cluster: from this one
    last: int  # to this one they were asked
    all_groups: int


class TopicGroupsAsk(Ask):
    topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
    page: Annotated[int, Field(ge=1, le=10_000, description="of all groups, by name")] = 1


def topic_groups(house: House, ask: TopicGroupsAsk) -> TopicGroupsAnswer:
    """The groups that have positions in a topic. Each of the cluster's is asked, sixty at a time."""
    with house.log() as log:
        states = kafka_groups.names(log)
        some = list(states)[(ask.page - 1) * GROUPS_MAX : ask.page * GROUPS_MAX]
        positions = {
            group: {where: at for where, at in committed.items() if where.topic == ask.topic}
            for group, committed in kafka_groups.positions(log, some).items()
        }
        ends = log.stable_ends({where for committed in positions.values() for where in committed})
    owners = house.watch.groups()
    found = [
        TopicGroup(
            group,
            states[group],
            len(committed),
            sum(max(0, ends[where] - at) for where, at in committed.items()),
            owners.get(group, ""),
        )
        for group, committed in positions.items()
        if committed
    ]
    before = (ask.page - 1) * GROUPS_MAX
    return TopicGroupsAnswer(
        ask.topic,
        tuple(sorted(found, key=lambda one: -one.lag)),
        ask.page,
        max(1, -(-len(states) // GROUPS_MAX)),
        before + 1,
        before + len(some),
        len(states),
    )


# Groups


class GroupsAsk(Ask):
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
    found: int
    page: int
    pages: int


def groups(house: House, ask: GroupsAsk) -> GroupsAnswer:
    """All consumer groups, sixty at a time."""
    with house.log() as log:
        found = [name for name in kafka_groups.names(log) if ask.q.lower() in name.lower()]
        here = found[(ask.page - 1) * GROUPS_MAX : ask.page * GROUPS_MAX]
        described = kafka_groups.describe(log, here)
        positions = kafka_groups.positions(log, here)
        there = {TopicPartition(one.topic, one.partition) for one in log.cluster().partitions if one.leader >= 0}
        asked = {where for committed in positions.values() for where in committed} & there
        few = len(asked) <= OFFSETS_MAX
        ends = log.stable_ends(asked) if few else {}
    owners = house.watch.groups()
    rows = tuple(
        GroupRow(
            one.name,
            one.state,
            len(one.members),
            tuple(sorted({where.topic for where in positions[one.name]})),
            sum(max(0, ends[where] - at) for where, at in positions[one.name].items() if where in ends)
            if few
            else None,
            owners.get(one.name, ""),
        )
        for one in described
    )
    return GroupsAnswer(rows, len(found), ask.page, max(1, -(-len(found) // GROUPS_MAX)))


class GroupAsk(Ask):
    group: Annotated[str, Field(min_length=1, max_length=255)]


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


def group(house: House, ask: GroupAsk) -> GroupAnswer:
    """One group: members, positions and lag by partition."""
    with house.log() as log:
        if ask.group not in kafka_groups.names(log):
            raise NotThere(f"there is no group {ask.group}", advice="Kafka forgets a group whose positions are gone.")
        (one,) = kafka_groups.describe(log, [ask.group])
        lags = kafka_groups.lag(log, ask.group)
    return GroupAnswer(
        one.name,
        one.state,
        one.members,
        tuple(lags),
        sum(lag.records or 0 for lag in lags),
        max((lag.seconds for lag in lags if lag.seconds is not None), default=None),
        house.watch.groups().get(one.name, ""),
        reserved(house, one.name, len(one.members), [lag.metadata for lag in lags]),
    )


def reserved(house: House, name: str, members: int, metadata: Iterable[str]) -> str:
    """Why nobody may set this group's positions from here."""
    owner = house.watch.groups().get(name)
    if owner:
        return f"it belongs to pipeline {owner}, whose ledger alone says where it stands"
    if any(text.startswith('{"avow":') for text in metadata):
        return "it is the ledger of a pipeline into Kafka: its positions are claims"
    if members:
        return "it has members: Kafka refuses it while they are there"
    return ""


# Transactions


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    topic: str
    partition: int
    first_offset: int  # the last stable offset: readers of committed records stand here
    waiting: int  # offsets from there on
    since: float | None  # seconds since 1970: the timestamp of its first record
    hanging: bool  # older than a transaction may be, or of nobody
    holder: Holder | None  # who has it open; None: not known
    pipelines: tuple[str, ...]  # that wait for its end


@dataclass(frozen=True, slots=True)
class TransactionsAnswer:
    transactions: tuple[OpenTransaction, ...]
    partitions: int  # that were asked
    not_asked: int
    hanging_after_s: int


def transactions(house: House, _: Nothing) -> TransactionsAnswer:
    """Partitions in which a transaction is open, the oldest first."""
    with house.log() as log:
        every = [TopicPartition(one.topic, one.partition) for one in log.cluster().partitions if one.leader >= 0]
        asked = [where for where in every if not where.topic.startswith("__")][:OFFSETS_MAX]
        # The stable ends first: an end only grows, so what is open between the two was open at the first question.
        stable = log.stable_ends(asked)
        ends = {where: end for where, (_, end) in log.offsets(asked).items()}
        waiting = {where: stable[where] for where in asked if stable[where] < ends[where]}
        # What was appended between the two questions is open to nobody: ask once more.
        again = log.stable_ends(waiting)
        opened = {where: at for where, at in waiting.items() if again[where] == at}
        stamps = log.first_timestamps(dict(list(opened.items())[:SHOWN_MAX]))
    holders = house.told(lambda brokers: brokers.holders(list(opened)[:SHOWN_MAX])) if opened else None
    readers = defaultdict(list)
    for one in house.watch.pipelines():
        for name in one.reads:
            readers[name].append(one.name)
    now = time.time()
    found = []
    for where, at in opened.items():
        stamp = stamps.get(where)
        since = stamp / 1000 if stamp is not None and stamp >= 0 else None
        # The oldest one is where readers stand; it may have ended between the two questions.
        holder = next((one for one in (holders or {}).get(where, []) if one.first_offset == at), None)
        found.append(
            OpenTransaction(
                where.topic,
                where.partition,
                at,
                ends[where] - at,
                since,
                _hangs(since, holder, now),
                holder,
                tuple(readers[where.topic]),
            )
        )
    found.sort(key=lambda one: (one.since is None, one.since or 0))
    return TransactionsAnswer(tuple(found), len(asked), len(every) - len(asked), HANGING_S)


def _hangs(since: float | None, holder: Holder | None, now: float) -> bool:
    """Whether nobody is going to end it."""
    if holder is not None and holder.timeout_ms is not None:
        return False  # its coordinator does, at the latest after that time
    return since is not None and now - since > (HANGING_S if holder is None else ORPHAN_S)
