"""``avow setup``: everything that is done once per machine."""

from __future__ import annotations

from importlib.util import find_spec

import click
from rich.console import Console

from avow.dashboard import assets
from avow.errors import LocalError
from avow.local import broker, jars, spark


@click.command()
def setup() -> None:
    """Fetch Kafka's jars and the dashboard's JavaScript, and prepare Kafka and Spark for quick starts.

    Once per machine, or in an image's build. Without it `avow up` and `avow run` fetch what they need themselves;
    brokers and runs then take twice the time to start, because their Java classes are not kept ready (in ~/.cache/avow,
    or $XDG_CACHE_HOME/avow; about 190 MB).
    """
    console = Console(highlight=False, soft_wrap=True)
    for name in jars.ROOTS:
        console.print(f"  {name:<10} {len(jars.classpath(name))} jars, verified")
    console.print(f"  {'dashboard':<10} {assets.install()}", markup=False)
    archives = [broker.class_archive()]
    if find_spec("pyspark"):
        archives.append(spark.class_archive())
    else:
        console.print(f"  {'Spark':<10} not installed; only the Spark engine needs it", markup=False)
    for archive in archives:
        try:
            with console.status(f"creating the class archive of {archive.name}: half a minute, once"):
                path = archive.made() or archive.make()
            console.print(f"  {'archive':<10} {path}")
        except LocalError as error:
            # Everything works without it, so this is a warning and no failure.
            console.print(f"  [yellow]{'archive':<10}[/] {error}\n  {error.advice}", markup=True)
