"""``avow topics | groups | lag``: what is in a Kafka cluster, for people and machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from avow.cli.local import folder_option
from avow.errors import ConfigError
from avow.plan import load_checked
from avow.settings import Source


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


def source_of(brokers: str | None, pipeline: Path | None, folder: Path) -> Source:
    if brokers and pipeline:
        raise ConfigError("--brokers and --pipeline both say which cluster", advice="Give one of the two.")
    if pipeline:
        return load_checked(pipeline).source
    if not brokers:
        from avow.local.cluster import Cluster

        cluster = Cluster(folder)
        if not cluster.exists:
            raise ConfigError(
                f"which cluster? There is none in {folder}",
                advice="--brokers host:port, --pipeline FILE, or `avow up` for a local one.",
            )
        brokers = cluster.bootstrap
    return Source(brokers=brokers, topics_pattern=".*")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--internal", is_flag=True, help="Kafka's own topics too.")
@cluster_options
def topics(
    names: tuple[str, ...], internal: bool, brokers: str | None, pipeline: Path | None, folder: Path, as_json: bool
) -> None:
    """List all topics, or describe the NAMES.

    Leaders, replicas in sync, what is configured, and how many offsets each log has.
    """
    from avow.kafka import topics as looking

    source = source_of(brokers, pipeline, folder)
    if names:
        described = looking.describe(source, names)
        if as_json:
            whole = [
                {**asdict(one), "offsets": one.offsets, "under_replicated": one.under_replicated} for one in described
            ]
            click.echo(json.dumps(whole, indent=2))
        else:
            for one in described:
                _print_topic(Console(highlight=False), one)
        return
    found = looking.names(source, internal=internal)
    if as_json:
        click.echo(json.dumps([{"name": name, "partitions": len(parts)} for name, parts in found.items()], indent=2))
        return
    table = Table("topic", "partitions", "replicas", "in sync", box=None, pad_edge=False)
    for name, parts in found.items():
        replicas, in_sync = sum(len(p.replicas) for p in parts), sum(len(p.in_sync) for p in parts)
        health = Text(f"{in_sync} of {replicas}", style="green" if in_sync == replicas else "red")
        table.add_row(Text(name), str(len(parts)), str(max(len(p.replicas) for p in parts)), health)
    Console(highlight=False).print(table)


def _print_topic(console: Console, one: Any) -> None:
    console.print(Text(one.name, style="bold"), Text(f"id {one.topic_id}, {one.offsets:,} offsets"))
    for name, value in one.config.items():
        console.print(Text(f"  {name} = {value}"))
    table = Table("partition", "leader", "replicas", "in sync", "earliest", "stable end", "end", box=None)
    for part in one.partitions:
        whole = len(part.in_sync) == len(part.replicas)
        table.add_row(
            str(part.partition),
            Text("none", style="red") if part.leader < 0 else str(part.leader),
            ", ".join(map(str, part.replicas)),
            Text(", ".join(map(str, part.in_sync)), style="green" if whole else "red"),
            f"{part.earliest:,}",
            Text(f"{part.stable_end:,}", style="yellow" if part.open_offsets else ""),
            f"{part.end:,}",
        )
    console.print(table, "")
    if any(part.open_offsets for part in one.partitions):
        console.print("  where the stable end lies before the end, a transaction is open\n")


@click.command()
@click.argument("names", nargs=-1)
@cluster_options
def groups(names: tuple[str, ...], brokers: str | None, pipeline: Path | None, folder: Path, as_json: bool) -> None:
    """List all consumer groups, or describe the NAMES: members, positions, lag."""
    from avow.kafka import groups as looking

    source = source_of(brokers, pipeline, folder)
    console = Console(highlight=False)
    if not names:
        found = looking.names(source)
        if as_json:
            click.echo(json.dumps([{"name": name, "state": state} for name, state in found.items()], indent=2))
            return
        table = Table("group", "state", box=None, pad_edge=False)
        for name, state in found.items():
            table.add_row(Text(name), state)
        console.print(table)
        return
    described = [(one, looking.lag(source, one.name)) for one in looking.describe(source, names)]
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


@click.command(epilog="Markers of transactions and records of open ones are not lag.")
@click.argument("names", nargs=-1)
@cluster_options
def lag(names: tuple[str, ...], brokers: str | None, pipeline: Path | None, folder: Path, as_json: bool) -> None:
    """How far groups are behind, in records and in seconds. All groups, those of the NAMES, or a pipeline's own."""
    from avow.kafka import groups as looking

    source = source_of(brokers, pipeline, folder)
    if not names:
        names = (load_checked(pipeline).name,) if pipeline else tuple(looking.names(source))
    lags = [one for name in names for one in looking.lag(source, name)]
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
            "-" if one.stable_end is None else f"{one.stable_end:,}",
            "-" if one.records is None else f"{one.records:,}",
            "-" if one.seconds is None else f"{one.seconds:,.1f}",
            Text(one.note, style="yellow"),
        ]
        table.add_row(*([Text(one.group)] if with_group else []), *cells)
    console.print(table)
