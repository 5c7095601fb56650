"""``avow wait``: what became of records that were sent, or wait until something has. Owns the looks and exit codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from avow.cli import file_argument, json_option, print_json
from avow.cli.dead_letters import visible
from avow.pipeline import Pipeline
from avow.settings.values import Refused, duration

if TYPE_CHECKING:  # it brings Kafka's client, which a bad file need not wait for
    from avow.clients.receipts import Answer

DEAD_LETTERED, NOT_IN_TIME, OTHERWISE = 15, 16, 17
COLOURS = {"written": "green", "dead-lettered": "red", "not-yet": "yellow", "claimed": "yellow"}


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    try:
        return duration(value).total_seconds()
    except Refused:
        raise click.BadParameter(f"{value!r} is not a duration: a number and ms, s, m or h, at most 1h") from None


def _identity(value: str) -> tuple[str, int, int]:
    topic, *numbers = value.split("/")  # no topic's name has a slash
    if not topic or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise click.BadParameter(f"{value!r} is not TOPIC/PARTITION/OFFSET, such as payments/0/17")
    return topic, int(numbers[0]), int(numbers[1])


@click.command(
    epilog=f"Exit codes: 0 all written · {DEAD_LETTERED} dead letters among them · {NOT_IN_TIME} not yet, or claimed "
    f"and not known to be written · {OTHERWISE} otherwise (skipped, no such record, or the ledger cannot say) · "
    "2 refused · 4 Kafka · 5 the sink. With --all, what was skipped as declared is no failure, nor "
    "are dead letters from before the position at the start."
)
@file_argument
@click.argument("records", metavar="[TOPIC/PARTITION/OFFSET]...", nargs=-1, type=_identity)
@click.option("--all", "everything", is_flag=True, help="Wait for all records up to the topics' last stable offsets.")
@click.option("--timeout", "timeout_s", callback=_seconds, default="30s", help="How long to wait; 0s checks once.")
@json_option
def wait(
    file: Path, records: tuple[tuple[str, int, int], ...], everything: bool, timeout_s: float, as_json: bool
) -> None:
    """Wait until the given records are in the sink, or report what else happened to them.

    Reads the pipeline's ledger, not its table. The pipeline itself must be running elsewhere.
    """
    if everything == bool(records):
        raise click.UsageError("give records as TOPIC/PARTITION/OFFSET, or --all")
    pipeline = Pipeline.load(file)
    from avow.clients.receipts import Receipt

    with pipeline.receipts() as receipts, _status() as notify:
        if everything:
            # Dead letters that were there before are not what is waited for: else it could never succeed again.
            since = receipts.positions()
            answers = receipts.wait_up_to(receipts.newest(), timeout_s, notify, since=since)
        else:
            answers = receipts.wait_all([Receipt(*record) for record in records], timeout_s, notify)
    if as_json:
        print_json({"answers": [answer.as_json() for answer in answers]})
    else:
        _show(Console(highlight=False), answers, everything)
    raise SystemExit(exit_code([str(answer.state) for answer in answers], everything=everything))


def exit_code(states: Sequence[str], *, everything: bool) -> int:
    """The worst that was found."""
    fine = {"written", "handled", "before-start"} if everything else {"written"}
    if "dead-lettered" in states:
        return DEAD_LETTERED
    if not {"not-yet", "claimed"}.isdisjoint(states):
        return NOT_IN_TIME
    return 0 if fine.issuperset(states) else OTHERWISE


@contextmanager
def _status() -> Iterator[Callable[[Sequence[Answer]], None]]:
    """Says how far it is, if a person is there to read it."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("reading the ledger") as status:

        def notify(answers: Sequence[Answer]) -> None:
            states = Counter(str(answer.state) for answer in answers)
            status.update(", ".join(f"{count:,} {state}" for state, count in states.most_common()) or "nothing sent")

        yield notify


def _show(console: Console, answers: Sequence[Answer], everything: bool) -> None:
    """All of it as ``Text``, never as markup: names and errors may hold square brackets."""
    table = Table("record", "state", "", box=None, pad_edge=False, header_style="dim")
    for answer in answers:
        detail = f"{answer.reason}: {visible(answer.error)}" if answer.reason else answer.detail
        table.add_row(
            Text(f"{'up to ' if everything else ''}{answer.receipt}", overflow="fold"),
            Text(str(answer.state), COLOURS.get(str(answer.state), ""), no_wrap=True),
            Text(detail),
        )
    console.print(table if answers else "the topics are empty")
