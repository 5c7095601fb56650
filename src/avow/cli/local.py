"""``avow up | down | status``: the local cluster."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from avow.cli import json_option, print_json
from avow.kafka.metadata import Partition
from avow.local.cluster import Cluster, ClusterStatus, Progress
from avow.local.part import PartState

COLOURS = {PartState.UP: "green", PartState.PAUSED: "yellow", PartState.DOWN: "red"}
FOLDER = Path(".avow")
PORT = click.IntRange(1024, 65000)


def folder_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--dir",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        default=FOLDER,
        envvar="AVOW_DIR",
        help="The cluster's folder; each folder is a cluster of its own.",
    )(command)


@click.command(epilog="`down` and `up` keep the data. Loopback only, without passwords: not for production.")
@folder_option
@click.option("--brokers", type=click.IntRange(1, 9), help="How many Kafka nodes.  [default: 3]")
@click.option("--postgres/--no-postgres", default=None, help="With or without PostgreSQL.  [default: with]")
@click.option("--registry/--no-registry", default=None, help="With or without a schema registry.  [default: without]")
@click.option("--kafka-port", type=PORT, help="The first node's port, the next ones count up.  [default: free ones]")
@click.option("--postgres-port", type=PORT, help="PostgreSQL's port.  [default: a free one]")
@click.option("--registry-port", type=PORT, help="The schema registry's port.  [default: a free one]")
@click.option("--fresh", is_flag=True, help="Erase the existing data and start empty.")
def up(folder: Path, **options: Any) -> None:
    """Start the local cluster, or those of its processes that are not running.

    Three Kafka nodes (replication factor 3, min.insync.replicas 2, transactions ready) and PostgreSQL 18, as
    background processes of this machine. With --registry also a schema registry, Apicurio, with Confluent's API; the
    first time, 109 MB are fetched for it.
    """
    cluster = Cluster(folder)
    started = time.monotonic()
    cluster.up(**options, progress=_progress_lines(started))
    console = Console(highlight=False)
    console.print(f"\n[bold green]up[/] in {time.monotonic() - started:.1f} s")
    _print_addresses(console, cluster.bootstrap, cluster.postgres_url, cluster.registry_url)
    dir_option = "" if folder == FOLDER else f" --dir {shlex.quote(str(folder))}"
    console.print(f"  status      avow status{dir_option}", soft_wrap=True, markup=False)
    console.print(f"  stop        avow down{dir_option}", soft_wrap=True, markup=False)


@click.command()
@folder_option
def down(folder: Path) -> None:
    """Stop the local cluster. The data stays.

    Ends exactly the processes it started, by pid.
    """
    started = time.monotonic()
    Cluster(folder).down(_progress_lines(started))


@click.command(epilog="Exit code 0 if all parts are up, 1 if not.")
@folder_option
@json_option
def status(folder: Path, as_json: bool) -> None:
    """Addresses, pids, versions, leaders, in-sync replicas and disk use."""
    status_ = Cluster(folder).status()
    if as_json:
        print_json({**asdict(status_), "all_up": status_.all_up})
    else:
        _print_status(Console(highlight=False), status_)
    if not status_.all_up:
        raise SystemExit(1)


def _progress_lines(started: float) -> Progress:
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(part: str, text: str) -> None:
        console.print(f"  {part:<11} {text:<60} {time.monotonic() - started:5.1f} s")

    return line


def _print_addresses(console: Console, bootstrap: str, postgres_url: str | None, registry_url: str | None) -> None:
    console.print(f"  bootstrap   {bootstrap}", soft_wrap=True)
    if postgres_url:
        console.print(f"  postgres    {postgres_url}", soft_wrap=True)
    if registry_url:
        console.print(f"  registry    {registry_url}", soft_wrap=True)


def _print_status(console: Console, status: ClusterStatus) -> None:
    parts = Table("part", "state", "address", "pid", "version", "disk", box=None, pad_edge=False)
    for part in status.parts:
        parts.add_row(
            part.name,
            f"[{COLOURS[part.state]}]{part.state}[/]",
            part.address,
            str(part.pid or "-"),
            part.version or "-",
            f"{part.disk_bytes / 1e6:.1f} MB",
        )
    console.print(parts)
    console.print()
    _print_addresses(console, status.bootstrap, status.postgres_url, status.registry_url)
    if status.problem:
        console.print(f"  kafka       [red]{status.problem}[/]", soft_wrap=True)
        return
    under = sum(partition.under_replicated for partition in status.partitions)
    health = "[green]all in sync[/]" if not under else f"[red]{under} under-replicated[/]"
    console.print(f"  controller  broker-{status.controller}")
    console.print(f"  partitions  {len(status.partitions)}, {health}\n")
    console.print(_topics(status.partitions))


def _topics(partitions: tuple[Partition, ...]) -> Table:
    by_topic = defaultdict(list)
    for partition in partitions:
        by_topic[partition.topic].append(partition)
    table = Table("topic", "partitions", "leaders", "in sync", box=None, pad_edge=False)
    for topic, members in by_topic.items():
        leaders = sorted({p.leader for p in members})
        in_sync, replicas = sum(len(p.in_sync) for p in members), sum(len(p.replicas) for p in members)
        table.add_row(
            topic,
            str(len(members)),
            ", ".join(f"broker-{n}" if n > 0 else "[red]none[/]" for n in leaders),
            f"[{'green' if in_sync == replicas else 'red'}]{in_sync} of {replicas}[/]",
        )
    return table
