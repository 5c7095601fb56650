"""``avow topics | groups | lag``: what is in a Kafka cluster, for people and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from avow.cli import PIPELINE_FILE, from_environment, json_option, plain, print_json
from avow.cli.local import folder_option
from avow.cli.registry import RegistrySelection, registry_options
from avow.errors import AvowError, ConfigError, SourceError
from avow.plan import load_checked
from avow.settings import Source, cluster

if TYPE_CHECKING:  # it brings Kafka's client, which a bad option need not wait for
    from avow.kafka.brokers import Disk, Holder
    from avow.kafka.log import TopicPartition
    from avow.kafka.metadata import Partition
    from avow.kafka.topics import TopicView
    from avow.schema_registry import Registered, TopicSchemas

settings_option = click.option(
    "--kafka", "settings", multiple=True, metavar="NAME=VALUE", help="A client setting; may be repeated."
)
brokers_option = click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several separated by commas.")
pipeline_option = click.option(
    "--pipeline",
    type=PIPELINE_FILE,
    help="Use the source cluster and the client settings of this pipeline file.",
)


def given_settings(options: tuple[str, ...]) -> dict[str, str]:
    """What ``--kafka`` says."""
    settings = {}
    for setting in options:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--kafka {name}: the value is missing", advice="Write --kafka NAME=VALUE.")
        settings[name] = value
    return settings


def with_settings(source: Source, settings: dict[str, str]) -> Source:
    """A pipeline's cluster, with more client settings."""
    checked = cluster(source.brokers, settings).kafka
    return source.model_copy(update={"kafka": {**source.kafka, **checked}})


@dataclass(frozen=True)
class ClusterSelection:
    """Which cluster: one by address, a pipeline's with its client settings, or the local one."""

    brokers: str | None
    pipeline: Path | None
    folder: Path
    settings: tuple[str, ...] = ()

    def source(self) -> Source:
        brokers = self.brokers
        if brokers and self.pipeline and from_environment("brokers"):
            brokers = None  # it says which cluster unless an option does
        if brokers and self.pipeline:
            raise ConfigError("--brokers and --pipeline are mutually exclusive", advice="Give one of the two.")
        more = given_settings(self.settings)
        if self.pipeline:
            return with_settings(load_checked(self.pipeline).source, more)
        if not brokers:
            from avow.local.cluster import Cluster

            local = Cluster(self.folder)
            if not local.exists:
                raise ConfigError(
                    f"no Kafka cluster was given, and {self.folder} has no local cluster",
                    advice="Give --brokers host:port or --pipeline FILE, or start a local cluster with `avow up`.",
                )
            brokers = local.bootstrap
        return cluster(brokers, more)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a ``ClusterSelection``, which the command gets as ``selection``."""

    @wraps(command)
    def select(
        brokers: str | None, pipeline: Path | None, folder: Path, settings: tuple[str, ...], **others: Any
    ) -> Any:
        return command(selection=ClusterSelection(brokers, pipeline, folder, settings), **others)

    return settings_option(brokers_option(pipeline_option(folder_option(select))))


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _size(count: int | None) -> str:
    return "-" if count is None else decimal(count)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--internal", is_flag=True, help="Also list Kafka's internal topics.")
@cluster_options
@registry_options
@json_option
def topics(
    names: tuple[str, ...], internal: bool, selection: ClusterSelection, registry: RegistrySelection, as_json: bool
) -> None:
    """List all topics, or describe the NAMES.

    Leaders, in-sync replicas, configuration, offsets and size; for open transactions, their producers. Partitions
    without a leader or with too few replicas are red. With a schema registry, also the newest version of the subjects
    TOPIC-value and TOPIC-key.
    """
    from avow.kafka import topics as kafka_topics
    from avow.kafka.brokers import try_query as ask_brokers
    from avow.kafka.log import Log, TopicPartition

    source = selection.source()
    with Log(source, "avow") as log:
        if not names:
            partitions = kafka_topics.names(log, internal=internal)
            disks = ask_brokers(source, lambda brokers_: brokers_.disks())
            least: dict[str, int] = {}
            with suppress(SourceError, ConfigError):  # not everybody may see configurations
                least = kafka_topics.min_in_sync(log, partitions)
        else:
            described = kafka_topics.describe(log, names, ask_brokers(source, lambda brokers_: brokers_.disks(names)))
    schemas = _newest_schemas(registry, names or partitions)
    if not names:
        listed = [_listed(name, parts, least.get(name), disks) for name, parts in partitions.items()]
        _list_topics([topic | _schemas(schemas, topic["name"]) for topic in listed], as_json=as_json)
        return
    if as_json:
        print_json([_described(topic) | _schemas(schemas, topic.name) for topic in described])
        return
    waits = [
        TopicPartition(topic.name, part.partition)
        for topic in described
        for part in topic.partitions
        if part.open_offsets
    ]
    holders = ask_brokers(source, lambda brokers_: brokers_.holders(waits)) if waits else None
    console = Console(highlight=False)
    for topic in described:
        _print_topic(console, topic, _schemas(schemas, topic.name))
        if any(part.open_offsets for part in topic.partitions):
            _print_holders(console, {tp: holding for tp, holding in (holders or {}).items() if tp.topic == topic.name})


def _newest_schemas(registry: RegistrySelection, topics: Iterable[str]) -> dict[str, TopicSchemas] | None:
    """What a registry has for topics. One that nobody has named must not withhold the topics themselves."""
    try:
        client = registry.client()
        return client.newest_of(topics) if client else None
    except AvowError as error:
        if registry.is_given:
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(plain(f"without schemas: {error}"))
        return None


def _schemas(schemas: Mapping[str, TopicSchemas] | None, topic: str) -> dict[str, Any]:
    """The subjects of a topic, as far as a registry was asked."""
    if schemas is None:
        return {}
    of_topic = schemas[topic]
    return {"value_schema": _registered(of_topic.value), "key_schema": _registered(of_topic.key)}


def _registered(schema: Registered | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"subject": schema.subject, "version": schema.version, "id": schema.id, "type": schema.kind}


def _described(topic: TopicView) -> dict[str, Any]:
    computed = ("bytes", "offsets", "under_replicated", "under_min_in_sync")
    return {**asdict(topic), **{name: getattr(topic, name) for name in computed}}


def _listed(name: str, parts: list[Partition], least: int | None, disks: dict[int, Disk] | None) -> dict[str, Any]:
    """A topic in the list. ``least``: its min.insync.replicas, if that is known."""
    from avow.kafka.topics import bytes_of

    return {
        "name": name,
        "partitions": len(parts),
        "replicas": max(len(p.replicas) for p in parts),
        "in_sync": min(len(p.in_sync) for p in parts),  # of the partition that has the fewest
        "under_replicated": sum(p.under_replicated for p in parts),
        "under_min_in_sync": None if least is None else sum(len(p.in_sync) < least for p in parts),
        "without_leader": sum(p.leader < 0 for p in parts),
        "replica_bytes": None if disks is None else bytes_of(parts, disks),
    }


def _list_topics(topics: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(topics)
        return
    counted = ("under_replicated", "under_min_in_sync", "without_leader")
    heads = ("topic", "partitions", "replicas", "under-replicated", "under min in sync", "without leader", "on disk")
    with_schemas = any("value_schema" in topic for topic in topics)
    table = Table(*heads, *(("value", "key") if with_schemas else ()), box=None, pad_edge=False)
    table.columns[len(heads) - 1].justify = "right"
    for topic in topics:
        bad = [
            Text("-" if topic[name] is None else str(topic[name]), style="red" if topic[name] else "")
            for name in counted
        ]
        found = [topic[name] for name in ("value_schema", "key_schema") if with_schemas]
        schemas = [Text(f"v{one['version']} {one['type']}" if one else "-") for one in found]
        counts = str(topic["partitions"]), str(topic["replicas"])
        table.add_row(Text(topic["name"]), *counts, *bad, _size(topic["replica_bytes"]), *schemas)
    Console(highlight=False).print(table)


def _print_topic(console: Console, topic: TopicView, schemas: Mapping[str, Any]) -> None:
    replicas = "" if topic.replica_bytes is None else f" ({_size(topic.replica_bytes)} with its replicas)"
    console.print(
        Text(topic.name, style="bold"),
        Text(f"id {topic.topic_id}, {topic.offsets:,} offsets, {_size(topic.bytes)}{replicas}"),
    )
    for name, value in (topic.config or {}).items():
        console.print(Text(f"  {name} = {value}"))
    for name, schema in schemas.items():
        text = f"subject {schema['subject']}, version {schema['version']}, {schema['type']}" if schema else "no subject"
        console.print(Text(f"  {name.removesuffix('_schema')}: {text}"))
    if topic.under_min_in_sync:
        lacking = f"  {topic.under_min_in_sync} partitions have fewer replicas in sync than min.insync.replicas = "
        console.print(Text(f"{lacking}{topic.min_in_sync}: producers with acks=all are refused", style="red"))
    table = Table("partition", "leader", "replicas", "in sync", "earliest", "stable end", "end", "size", box=None)
    for part in topic.partitions:
        whole = len(part.in_sync) == len(part.replicas)
        table.add_row(
            str(part.partition),
            Text("none", style="red") if part.leader < 0 else str(part.leader),
            ", ".join(map(str, part.replicas)),
            Text(", ".join(map(str, part.in_sync)), style="green" if whole else "red"),
            _number(part.earliest),
            Text(_number(part.stable_end), style="yellow" if part.open_offsets else ""),
            _number(part.end),
            _size(part.bytes),
        )
    console.print(table, "")


def _print_holders(console: Console, holders: Mapping[TopicPartition, list[Holder]]) -> None:
    console.print("  stable end below end: a transaction is open")
    for tp, holding in holders.items():
        for holder in holding:
            console.print(Text(f"  {tp}: from offset {holder.first_offset:,}, {holder.describe()}"))
    console.print()


@click.command()
@click.argument("names", nargs=-1)
@cluster_options
@json_option
def groups(names: tuple[str, ...], selection: ClusterSelection, as_json: bool) -> None:
    """List all consumer groups, or describe the NAMES: members, positions, lag."""
    from avow.kafka import groups as kafka_groups
    from avow.kafka.log import Log

    with Log(selection.source(), "avow") as log:
        states = {} if names else kafka_groups.names(log)
        if names:
            kafka_groups.refuse_missing(log, names)
        described = [(group, kafka_groups.lag(log, group.name)) for group in kafka_groups.describe(log, names)]
    console = Console(highlight=False)
    if not names:
        if as_json:
            print_json([{"name": name, "state": state} for name, state in states.items()])
            return
        table = Table("group", "state", box=None, pad_edge=False)
        for name, state in states.items():
            table.add_row(Text(name), state)
        console.print(table)
        return
    if as_json:
        print_json([{**asdict(group), "positions": [asdict(lag) for lag in lags]} for group, lags in described])
        return
    for group, lags in described:
        console.print(Text(group.name, style="bold"), Text(group.state))
        for member in group.members:
            console.print(Text(f"  {member.client_id} at {member.host}: {', '.join(member.partitions) or 'nothing'}"))
        _print_lags(console, lags, with_group=False)
        console.print()


@click.command(
    epilog="Lag in records is an upper bound: it includes transaction markers and aborted records that are followed by "
    "a committed record, but none of open transactions."
)
@click.argument("names", nargs=-1)
@cluster_options
@json_option
def lag(names: tuple[str, ...], selection: ClusterSelection, as_json: bool) -> None:
    """Lag in records and seconds: of all groups, of the NAMES, or of a pipeline."""
    from avow.kafka import groups as kafka_groups
    from avow.kafka.log import Log

    with Log(selection.source(), "avow") as log:
        if selection.pipeline and not names:
            names = (load_checked(selection.pipeline).name,)
        kafka_groups.refuse_missing(log, names)
        lags = [row for name in names or kafka_groups.names(log) for row in kafka_groups.lag(log, name)]
    if as_json:
        print_json([asdict(row) for row in lags])
        return
    _print_lags(Console(highlight=False), lags, with_group=True)


def _print_lags(console: Console, lags: list[Any], *, with_group: bool) -> None:
    first = ["group"] if with_group else []
    table = Table(*first, "topic/partition", "position", "stable end", "lag", "seconds", "", box=None, pad_edge=False)
    for row in lags:
        cells: list[Text | str] = [
            Text(f"{row.topic}/{row.partition}"),
            f"{row.position:,}",
            _number(row.stable_end),
            _number(row.records),
            "-" if row.seconds is None else f"{row.seconds:,.1f}",
            Text(row.note, style="yellow"),
        ]
        table.add_row(*([Text(row.group)] if with_group else []), *cells)
    console.print(table)
