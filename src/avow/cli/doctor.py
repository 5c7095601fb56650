"""``avow doctor``: is this machine ready?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from avow.cli import json_option, print_json
from avow.cli.local import folder_option
from avow.local.doctor import checks


@click.command(epilog="Exit code 0 if nothing is wrong, 3 if something is.")
@folder_option
@json_option
def doctor(folder: Path, as_json: bool) -> None:
    """Check that this machine has what avow needs, and say what to do where it has not."""
    console = Console(highlight=False, soft_wrap=True)
    done = []
    for check in checks(folder):
        done.append(check)
        if as_json:
            continue
        mark = "[green]ok[/]     " if check.ok else "[red]problem[/]"
        console.print(f"  {mark} {check.name:<16}{check.found}")
        if not check.ok:
            console.print(f"  {'':<24}[bold]what to do:[/] {check.advice}")
    if as_json:
        print_json([asdict(check) for check in done])
    if not all(check.ok for check in done):
        raise SystemExit(3)
