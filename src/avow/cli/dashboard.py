"""``avow dashboard``: the web pages for a cluster and its pipelines.

Owns: the command line, and who may reach the pages. Must not know: what they show; ``avow.dashboard`` does.
"""

from __future__ import annotations

import ipaddress
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from avow.cli import plain
from avow.cli.kafka import given_settings, with_settings
from avow.cli.local import folder_option
from avow.cli.registry import RegistrySelection, registry_options
from avow.errors import ConfigError, LocalError
from avow.local.cluster import Cluster
from avow.settings import Source, cluster

if TYPE_CHECKING:  # it brings Kafka's client, which a bad option need not wait for
    from avow.dashboard.watch import Watch

PORT = 8642


@click.command(
    epilog="Listens on the loopback address by default; any other --host needs a token. Ctrl-C ends it.",
)
@click.argument("pipelines", nargs=-1, type=click.Path(path_type=Path))
@click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several with commas.")
@click.option(
    "--kafka",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A client setting; may be repeated. Give a secret as '${env:NAME}'.",
)
@folder_option
@registry_options
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="The port to listen on; 0: any free port.")
@click.option(
    "--token",
    envvar="AVOW_DASHBOARD_TOKEN",
    help="Required from visitors. Prefer the variable AVOW_DASHBOARD_TOKEN: command lines are visible to others.",
)
@click.option("--allow-host", multiple=True, help="A host name under which this server is reached, such as a proxy's.")
@click.option("--read-only", is_flag=True, help="Refuse every change and every job from the pages.")
@click.option(
    "--evidence",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with proofs and audits; new audits are stored in the first.  [default: .avow]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.5, 60),
    default=4,
    help="Seconds that a page waits for Kafka, or for a query to the sink.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open it in the browser.")
def dashboard(
    pipelines: tuple[Path, ...],
    brokers: str | None,
    settings: tuple[str, ...],
    folder: Path,
    registry: RegistrySelection,
    host: str,
    port: int,
    token: str | None,
    allow_host: tuple[str, ...],
    read_only: bool,
    evidence: tuple[Path, ...],
    timeout_s: float,
    open_browser: bool,
) -> None:
    """Show a cluster and its pipelines in the browser.

    PIPELINES are files, or folders of them; without any, this folder. The cluster is --brokers with --kafka, else that
    of the first pipeline with its client settings, else the local one of `avow up`. Records that have a schema are
    decoded by the registry of a pipeline that reads their topic, else by --registry.
    """
    from avow.dashboard.guard import TOKEN_CHARS_MIN

    if not _loopback(host) and not token:
        raise ConfigError(
            f"{host} is reachable from other machines, and no token is set",
            advice="Set AVOW_DASHBOARD_TOKEN (for example to the output of `openssl rand -hex 16`), or use 127.0.0.1.",
        )
    if token is not None and len(token) < TOKEN_CHARS_MIN:
        raise ConfigError(f"the token has fewer than {TOKEN_CHARS_MIN} characters", advice="Use a longer token.")
    for path in pipelines:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")

    import uvicorn

    from avow.dashboard import assets
    from avow.dashboard.app import make
    from avow.dashboard.guard import AccessRules
    from avow.dashboard.jobs import Jobs
    from avow.dashboard.state import AppState
    from avow.dashboard.watch import Watch

    assets.check()
    watch = Watch(pipelines or (Path(),), timeout_s=timeout_s)
    source = _cluster(brokers, given_settings(settings), watch, folder)
    rules = AccessRules(frozenset(name.lower() for name in allow_host), token, read_only)
    schemas = registry.found()
    state = AppState(rules, source, watch, Jobs(), evidence or (Path(".avow"),), timeout_s, schemas)
    listening = _listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]avow dashboard[/] at {address}")
    console.print(f"  cluster    {plain(str(source.shown('brokers'))) if source else 'none'}")
    console.print(f"  pipelines  {plain(', '.join(watched.name for watched in watch.pipelines())) or 'none'}")
    if schemas is not None:
        console.print(f"  registry   {plain(str(schemas.shown('url')))}")
    console.print(f"  changes    {'refused: --read-only' if read_only else 'allowed'}")
    if open_browser:
        webbrowser.open(address)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            state.closing.set()  # the live parts end by themselves; uvicorn would wait for them
            await super().shutdown(sockets)

    config = uvicorn.Config(
        make(state), log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=10
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
            f"cannot listen on {host}:{port}: {error.strerror}", advice="Choose another --port; 0 takes a free one."
        ) from None
    listening.listen(128)
    return listening


def _cluster(brokers: str | None, settings: dict[str, str], watch: Watch, folder: Path) -> Source | None:
    """The cluster, with the client settings; None if none is configured."""
    sources = [watched.pipeline.source for watched in watch.pipelines() if watched.pipeline]
    local = Cluster(folder)
    if sources and not brokers:
        return with_settings(sources[0], settings)
    address = brokers or (local.bootstrap if local.exists else "")
    return cluster(address, settings) if address else None
