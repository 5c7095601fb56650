"""``avow dashboard``: the web pages for a cluster and its pipelines.

Owns: the command line, and who may reach the pages. Must not know: what they show; ``avow.dashboard`` does.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from avow.cli import plain
from avow.cli.kafka import given_settings
from avow.cli.local import folder_option
from avow.errors import ConfigError, LocalError
from avow.local.cluster import Cluster
from avow.settings import Source, cluster

if TYPE_CHECKING:  # it brings Kafka's client, which a bad option need not wait for
    from avow.dashboard.watch import Watch

PORT = 8642
# How long a page waits for PostgreSQL, unless the environment says otherwise. For this process alone: jobs get the
# environment as it was.
DATABASE = {"PGCONNECT_TIMEOUT": "3", "PGOPTIONS": "-c statement_timeout=6000"}


@click.command(
    epilog="Loopback only, unless --host says otherwise; that needs a token. Ctrl-C ends it.",
)
@click.argument("pipelines", nargs=-1, type=click.Path(path_type=Path))
@click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several with commas.")
@click.option(
    "--kafka",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A client setting, several times. A secret as '${env:NAME}': a command line can be seen.",
)
@folder_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: a free one.")
@click.option(
    "--token",
    envvar="AVOW_DASHBOARD_TOKEN",
    help="What a visitor has to know. Better by the variable AVOW_DASHBOARD_TOKEN: a command line can be seen.",
)
@click.option("--allow-host", multiple=True, help="A name by which visitors call this server, such as a proxy's.")
@click.option("--read-only", is_flag=True, help="Nothing can be changed or started from the pages.")
@click.option(
    "--evidence",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where proofs and audits are; audits from here are kept in the first.  [default: .avow]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.5, 60),
    default=4,
    show_default=True,
    help="Seconds that a page waits for Kafka.",
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
def dashboard(
    pipelines: tuple[Path, ...],
    brokers: str | None,
    settings: tuple[str, ...],
    folder: Path,
    host: str,
    port: int,
    token: str | None,
    allow_host: tuple[str, ...],
    read_only: bool,
    evidence: tuple[Path, ...],
    timeout_s: float,
    opened: bool,
) -> None:
    """Look at a cluster and its pipelines in the browser.

    PIPELINES are files, or folders of them; without any, this folder. The cluster is --brokers with --kafka, else that
    of the first pipeline with its client settings, else the local one of `avow up`.
    """
    from avow.dashboard.guard import TOKEN_CHARS_MIN

    if not _loopback(host) and not token:
        raise ConfigError(
            f"{host} can be reached from other machines, and there is no token",
            advice="Set AVOW_DASHBOARD_TOKEN (such as `openssl rand -hex 16`), or stay at 127.0.0.1.",
        )
    if token is not None and len(token) < TOKEN_CHARS_MIN:
        raise ConfigError(f"the token has fewer than {TOKEN_CHARS_MIN} characters", advice="Take a longer one.")
    for path in pipelines:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
    environment = dict(os.environ)
    for name, value in DATABASE.items():
        os.environ.setdefault(name, value)

    import uvicorn

    from avow.dashboard.app import make
    from avow.dashboard.guard import Rules
    from avow.dashboard.house import House
    from avow.dashboard.jobs import Jobs
    from avow.dashboard.watch import Watch

    watch = Watch(pipelines or (Path(),), timeout_s=timeout_s)
    source = _cluster(brokers, given_settings(settings), watch, folder)
    rules = Rules(frozenset(name.lower() for name in allow_host), token, read_only)
    house = House(rules, source, watch, Jobs(environment), evidence or (Path(".avow"),), timeout_s)
    listening = _listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]avow dashboard[/] at {address}")
    console.print(f"  cluster    {plain(str(source.shown('brokers'))) if source else 'none is known'}")
    console.print(f"  pipelines  {plain(', '.join(one.name for one in watch.pipelines())) or 'none'}")
    console.print(f"  changes    {'refused: --read-only' if read_only else 'allowed'}")
    if opened:
        webbrowser.open(address)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            house.closing.set()  # the live parts end by themselves; uvicorn would wait for them
            await super().shutdown(sockets)

    config = uvicorn.Config(
        make(house), log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=10
    )
    Server(config).run([listening])


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise LocalError(
            f"cannot listen at {host}:{port}: {error.strerror}", advice="Another --port? 0 takes a free one."
        ) from None
    listening.listen(128)
    return listening


def _cluster(brokers: str | None, given: dict[str, str], watch: Watch, folder: Path) -> Source | None:
    """Which cluster, with the client settings that were given; None: none is known."""
    known = [one.pipeline.source for one in watch.pipelines() if one.pipeline]
    own = Cluster(folder)
    if known and not brokers:
        more = cluster(known[0].brokers, given).kafka
        return known[0].model_copy(update={"kafka": {**known[0].kafka, **more}})
    address = brokers or (own.bootstrap if own.exists else "")
    return cluster(address, given) if address else None
