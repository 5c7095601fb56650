"""``avow lake clean | compact``: remove orphaned files, merge small ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from avow.cli import file_argument, json_option, print_json
from avow.pipeline import Pipeline


@click.group()
def lake() -> None:
    """Maintain a Delta or Iceberg table."""


@lake.command()
@file_argument
@click.option("--remove", is_flag=True, help="Remove the files. Without it they are only listed.")
@json_option
def clean(file: Path, remove: bool, as_json: bool) -> None:
    """List files that a crash left behind; with --remove, delete them.

    Selects only files that this pipeline wrote, that no readable version of the table refers to, and whose run was
    fenced by newer runs in all of its partitions. Files of a run in progress and of other writers are never touched.
    """
    orphans = Pipeline.load(file).orphans(remove=remove)
    if as_json:
        files = [{"path": orphan.path, "bytes": orphan.size, "run": orphan.run} for orphan in orphans]
        print_json({"removed": remove, "files": files})
        return
    for orphan in orphans:
        click.echo(f"{orphan.size:>12,}  run {orphan.run}  {orphan.path}")
    total = f"{len(orphans):,} files, {sum(orphan.size for orphan in orphans):,} bytes"
    click.echo(f"{total} removed" if remove else f"{total}; --remove removes them" if orphans else "no orphaned files")


@lake.command()
@file_argument
@json_option
def compact(file: Path, as_json: bool) -> None:
    """Merge small files into files of about sink.file_mb. The positions stay; the pipeline may keep running."""
    done = Pipeline.load(file).compact()
    click.echo(
        json.dumps(asdict(done)) if as_json else f"{done.files_before:,} files compacted into {done.files_after:,}"
    )
