"""``avow setup``: everything that is done once per machine."""

from __future__ import annotations

from importlib.util import find_spec

import click
from rich.console import Console

from avow.errors import LocalError
from avow.local import jars, spark


@click.command()
def setup() -> None:
    """Fetch the jars of Kafka and Spark, and prepare Spark for quick starts. Once per machine, or in an image's build.

    Without it `avow up` and `avow run` fetch what they need themselves; runs then start in twice the time, because
    Spark's Java classes are not kept ready (in ~/.cache/avow, or $XDG_CACHE_HOME/avow; about 180 MB).
    """
    console = Console(highlight=False, soft_wrap=True)
    for name in jars.ROOTS:
        console.print(f"  {name:<10} {len(jars.classpath(name))} jars, verified")
    if not find_spec("pyspark"):
        console.print(f"  {'Spark':<10} not installed, and needed by the Spark engine only", markup=False)
        return
    made = spark.archive()
    if made is None:
        try:
            with console.status("preparing Spark for quick starts: half a minute, once"):
                made = spark.make_archive()
        except LocalError as error:
            # Everything works without it, so this is told and is no failure.
            console.print(f"  [yellow]{'archive':<10}[/] {error}\n  {error.advice}", markup=True)
            return
    console.print(f"  {'archive':<10} {made}")
