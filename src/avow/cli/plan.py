"""``avow plan``: print what a pipeline promises, hop by hop. Touches nothing.

Owns: the colours. Must not know: what any promise means; ``avow.plan`` says it.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from avow.cli import print_json
from avow.pipeline import Pipeline

HEADINGS = {r"\A.*$": "bold", r"^\d+\. .*$": "bold cyan", r"^Warnings$": "bold yellow"}
LABELS = r"^   (promises|permits |assumes |!) "


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(file: Path, as_json: bool) -> None:
    """Explain what each hop of the pipeline FILE promises, and refuse what cannot be kept.

    Reads the file and the environment variables that it names, and touches nothing else: no broker, no database.
    """
    explained = Pipeline.load(file).explain()
    if as_json:
        print_json(explained.as_json())
        return
    console = Console(soft_wrap=True)
    text = Text(explained.text(console.width))  # not markup: a table's name may hold square brackets
    for pattern, style in {**HEADINGS, LABELS: "dim"}.items():
        text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(text)
