"""``avow topics | groups | lag``: what is in a Kafka cluster, for people and machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from avow.cli.local import folder_option
from avow.errors import ConfigError, SourceError
from avow.plan import load_checked
from avow.settings import Source, cluster

if TYPE_CHECKING:  # it brings Kafka's client, which a bad option need not wait for
    from avow.kafka.brokers import Disk, Holder
    from avow.kafka.log import TopicPartition
    from avow.kafka.metadata import Partition
    from avow.kafka.topics import TopicView


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which cluster: one by address, a pipeline's with its client settings, or the local one."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For machines."),
        folder_option,
        click.option(
            "--pipeline",
            type=click.Path(dir_okay=False, path_type=Path),
            help="The source's cluster of this file, with its client settings.",
        ),
        click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several with commas."),
    ):
        command = option(command)
    return command


settings_option = click.option(
    "--kafka", "settings", multiple=True, metavar="NAME=VALUE", help="A client setting; several times."
)


def given_settings(given: tuple[str, ...]) -> dict[str, str]:
    """What ``--kafka`` says."""
    found = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--kafka {name}: a value is missing", advice="--kafka NAME=VALUE.")
        found[name] = value
    return found


def source_of(brokers: str | None, pipeline: Path | None, folder: Path, settings: tuple[str, ...] = ()) -> Source:
    """The cluster that is meant."""
    if brokers and pipeline and _from_environment("brokers"):
        brokers = None  # it says which cluster unless an option does
    if brokers and pipeline:
        raise ConfigError("--brokers and --pipeline both say which cluster", advice="Give one of the two.")
    more = given_settings(settings)
    if pipeline:
        source = load_checked(pipeline).source
        checked = cluster(source.brokers, more).kafka
        return source.model_copy(update={"kafka": {**source.kafka, **checked}})
    if not brokers:
        from avow.local.cluster import Cluster

        local = Cluster(folder)
        if not local.exists:
            raise ConfigError(
                f"which cluster? There is none in {folder}",
                advice="--brokers host:port, --pipeline FILE, or `avow up` for a local one.",
            )
        brokers = local.bootstrap
    return cluster(brokers, more)


def _from_environment(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.ENVIRONMENT


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _size(count: int | None) -> str:
    return "-" if count is None else decimal(count)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--internal", is_flag=True, help="Kafka's own topics too.")
@settings_option
@cluster_options
def topics(
    names: tuple[str, ...],
    internal: bool,
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    as_json: bool,
) -> None:
    """List all topics, or describe the NAMES.

    Leaders, replicas in sync, what is configured, how many offsets each log has and how many bytes; where a
    transaction is open, who holds it. Red is what lacks replicas or a leader.
    """
    from avow.kafka import topics as looking
    from avow.kafka.brokers import about
    from avow.kafka.log import Log, TopicPartition

    source = source_of(brokers, pipeline, folder, settings)
    with Log(source, "avow") as log:
        if not names:
            found = looking.names(log, internal=internal)
            disks = about(source, lambda told: told.disks())
            least: dict[str, int] = {}
            with suppress(SourceError, ConfigError):  # not everybody may see configurations
                least = looking.min_in_sync(log, found)
        else:
            described = looking.describe(log, names, about(source, lambda told: told.disks(names)))
    if not names:
        _list_topics([_listed(name, parts, least.get(name), disks) for name, parts in found.items()], as_json=as_json)
        return
    if as_json:
        click.echo(json.dumps([_described(one) for one in described], indent=2))
        return
    waits = [
        TopicPartition(one.name, part.partition) for one in described for part in one.partitions if part.open_offsets
    ]
    holders = about(source, lambda told: told.holders(waits)) if waits else None
    console = Console(highlight=False)
    for one in described:
        _print_topic(console, one)
        if any(part.open_offsets for part in one.partitions):
            _print_holders(console, {where: some for where, some in (holders or {}).items() if where.topic == one.name})


def _described(one: TopicView) -> dict[str, Any]:
    return {
        **asdict(one),
        "bytes": one.bytes,
        "offsets": one.offsets,
        "under_replicated": one.under_replicated,
        "under_min_in_sync": one.under_min_in_sync,
    }


def _listed(name: str, parts: list[Partition], least: int | None, disks: dict[int, Disk] | None) -> dict[str, Any]:
    """A topic in the list. ``least``: its min.insync.replicas, if that is known."""
    from avow.kafka.topics import bytes_of

    return {
        "name": name,
        "partitions": len(parts),
        "replicas": max(len(one.replicas) for one in parts),
        "in_sync": min(len(one.in_sync) for one in parts),  # of the partition that has the fewest
        "under_replicated": sum(one.under_replicated for one in parts),
        "under_min_in_sync": None if least is None else sum(len(one.in_sync) < least for one in parts),
        "without_leader": sum(one.leader < 0 for one in parts),
        "replica_bytes": None if disks is None else bytes_of(parts, disks),
    }


def _list_topics(found: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    counted = ("under_replicated", "under_min_in_sync", "without_leader")
    heads = ("topic", "partitions", "replicas", "under-replicated", "under min in sync", "without leader", "on disk")
    table = Table(*heads, box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for one in found:
        bad = [Text("-" if one[name] is None else str(one[name]), style="red" if one[name] else "") for name in counted]
        table.add_row(
            Text(one["name"]), str(one["partitions"]), str(one["replicas"]), *bad, _size(one["replica_bytes"])
        )
    Console(highlight=False).print(table)


def _print_topic(console: Console, one: TopicView) -> None:
    replicas = "" if one.replica_bytes is None else f" ({_size(one.replica_bytes)} with its replicas)"
    console.print(
        Text(one.name, style="bold"), Text(f"id {one.topic_id}, {one.offsets:,} offsets, {_size(one.bytes)}{replicas}")
    )
    for name, value in (one.config or {}).items():
        console.print(Text(f"  {name} = {value}"))
    if one.under_min_in_sync:
        few = f"  {one.under_min_in_sync} partitions have fewer replicas in sync than min.insync.replicas = "
        console.print(Text(f"{few}{one.min_in_sync}: they refuse what is sent with acks=all", style="red"))
    table = Table("partition", "leader", "replicas", "in sync", "earliest", "stable end", "end", "size", box=None)
    for part in one.partitions:
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
    console.print("  where the stable end lies before the end, a transaction is open")
    for where, some in holders.items():
        for one in some:
            console.print(Text(f"  {where}: from offset {one.first_offset:,}, {one.says()}"))
    console.print()


@click.command()
@click.argument("names", nargs=-1)
@settings_option
@cluster_options
def groups(
    names: tuple[str, ...],
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    as_json: bool,
) -> None:
    """List all consumer groups, or describe the NAMES: members, positions, lag."""
    from avow.kafka import groups as looking
    from avow.kafka.log import Log

    with Log(source_of(brokers, pipeline, folder, settings), "avow") as log:
        found = {} if names else looking.names(log)
        looking.refuse_missing(log, names)
        described = [(one, looking.lag(log, one.name)) for one in looking.describe(log, names)]
    console = Console(highlight=False)
    if not names:
        if as_json:
            click.echo(json.dumps([{"name": name, "state": state} for name, state in found.items()], indent=2))
            return
        table = Table("group", "state", box=None, pad_edge=False)
        for name, state in found.items():
            table.add_row(Text(name), state)
        console.print(table)
        return
    if as_json:
        whole = [{**asdict(one), "positions": [asdict(lag) for lag in lags]} for one, lags in described]
        click.echo(json.dumps(whole, indent=2))
        return
    for one, lags in described:
        console.print(Text(one.name, style="bold"), Text(one.state))
        for member in one.members:
            console.print(Text(f"  {member.client_id} at {member.host}: {', '.join(member.partitions) or 'nothing'}"))
        _print_lags(console, lags, with_group=False)
        console.print()


@click.command(
    epilog="Lag in records is an upper bound: markers of transactions and aborted records count where a record follows "
    "them. Those at the end do not, nor do records of open transactions."
)
@click.argument("names", nargs=-1)
@settings_option
@cluster_options
def lag(
    names: tuple[str, ...],
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    as_json: bool,
) -> None:
    """How far groups are behind, in records and in seconds. All groups, those of the NAMES, or a pipeline's own."""
    from avow.kafka import groups as looking
    from avow.kafka.log import Log

    with Log(source_of(brokers, pipeline, folder, settings), "avow") as log:
        if pipeline and not names:
            names = (load_checked(pipeline).name,)
        looking.refuse_missing(log, names)
        lags = [one for name in names or looking.names(log) for one in looking.lag(log, name)]
    if as_json:
        click.echo(json.dumps([asdict(one) for one in lags], indent=2))
        return
    _print_lags(Console(highlight=False), lags, with_group=True)


def _print_lags(console: Console, lags: list[Any], *, with_group: bool) -> None:
    first = ["group"] if with_group else []
    table = Table(*first, "topic/partition", "position", "stable end", "lag", "seconds", "", box=None, pad_edge=False)
    for one in lags:
        cells: list[Text | str] = [
            Text(f"{one.topic}/{one.partition}"),
            f"{one.position:,}",
            _number(one.stable_end),
            _number(one.records),
            "-" if one.seconds is None else f"{one.seconds:,.1f}",
            Text(one.note, style="yellow"),
        ]
        table.add_row(*([Text(one.group)] if with_group else []), *cells)
    console.print(table)
