"""``avow plan``: print what a pipeline promises, hop by hop. Touches nothing.

Owns: the report's looks. Must not know: what any promise means; ``avow.plan`` says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from avow import plan as planning


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(file: Path, as_json: bool) -> None:
    """Explain what each hop of the pipeline FILE promises, and refuse what cannot be kept.

    Reads the file and the environment variables that it names, and touches nothing else: no broker, no database.
    """
    made = planning.plan(planning.load_checked(file))
    if as_json:
        click.echo(json.dumps(made.as_json(), indent=2))
    else:
        Console().print(_report(made))


def _report(made: planning.Plan) -> RenderableType:
    """All of it as ``Text``, never as markup: a table's name may hold square brackets."""
    permits = ", ".join(made.permits) or "nothing"
    parts: list[RenderableType] = [
        Text.assemble((made.pipeline, "bold"), ": ", (made.guarantee, "bold green")),
        Text(made.meaning),
        Text(f"Permitted anomalies: {permits}."),
    ]
    for number, hop in enumerate(made.hops, start=1):
        parts += [
            Text(),
            Text.assemble((f"{number}. {hop.name}", "bold cyan")),
            Padding(_hop(hop), (0, 0, 0, 3), expand=False),
        ]
    if made.warnings:
        parts += [
            Text(),
            Text("Mind", style="bold yellow"),
            Padding(_rows(("!", text) for text in made.warnings), (0, 0, 0, 3), expand=False),
        ]
    return Group(*parts)


def _hop(hop: planning.Hop) -> RenderableType:
    lines = [("promises", hop.promises), ("permits", hop.permits), ("assumes", hop.assumes)]
    return Group(Text(hop.does), _rows((label, text) for label, texts in lines for text in texts))


def _rows(rows: Iterator[tuple[str, str]]) -> Table:
    """Label and text side by side, the text wrapped within its own column."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    previous = ""
    for label, text in rows:
        table.add_row(Text(label if label != previous or label == "!" else ""), Text(text))
        previous = label
    return table
