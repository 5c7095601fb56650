"""``avow lake clean | compact``: files that belong to nothing, and files that are too small."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from avow.pipeline import Pipeline


@click.group()
def lake() -> None:
    """Keep a Delta or Iceberg table in order."""


@lake.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--remove", is_flag=True, help="Remove them. Without it they are only listed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def clean(file: Path, remove: bool, as_json: bool) -> None:
    """List files that a crash left behind, and remove them if asked.

    Only files that this pipeline wrote, that no readable version of the table refers to, and whose run was followed by
    others in all of its partitions: those of a run in progress and those of other writers are never touched.
    """
    found = Pipeline.load(file).orphans(remove=remove)
    if as_json:
        told = [{"path": one.path, "bytes": one.size, "run": one.run} for one in found]
        click.echo(json.dumps({"removed": remove, "files": told}, indent=2))
        return
    for one in found:
        click.echo(f"{one.size:>12,}  run {one.run}  {one.path}")
    total = f"{len(found):,} files, {sum(one.size for one in found):,} bytes"
    click.echo(f"{total} removed" if remove else f"{total}; --remove removes them" if found else "nothing to clean")


@lake.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def compact(file: Path, as_json: bool) -> None:
    """Merge small files into files of about sink.file_mb. The positions stay; the pipeline may run on meanwhile."""
    done = Pipeline.load(file).compact()
    click.echo(json.dumps(asdict(done)) if as_json else f"{done.files_before:,} files are {done.files_after:,} now")
