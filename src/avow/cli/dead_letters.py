"""``avow dead-letters list | show | redrive``: inspect dead letters, and write them into the sink."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from avow.cli import file_argument, hooks_of_caller, json_option, print_json
from avow.errors import ConfigError
from avow.pipeline import Pipeline
from avow.sinks.base import DeadLetter

SHOWN_CHARS = 60
HEX_BYTES = 512


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    when = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])
    for option in reversed(
        [
            click.option("--reason", help="Only this reason, such as wrong-type."),
            click.option("--topic", help="Only this topic."),
            click.option("--partition", type=click.IntRange(0), help="Only this partition."),
            click.option("--from-offset", type=click.IntRange(0), help="From this offset on."),
            click.option("--until-offset", type=click.IntRange(0), help="Up to this offset, without it."),
            click.option("--since", type=when, help="Dead-lettered at this time or later (UTC unless it has a zone)."),
            click.option("--until", type=when, help="Dead-lettered before this time."),
        ]
    ):
        command = option(command)
    return command


@click.group("dead-letters")
def dead_letters() -> None:
    """List, show or redrive dead letters: records that could not be decoded or written."""


@dead_letters.command("list")
@file_argument
@selection_options
@click.option("--limit", type=click.IntRange(1), default=20, help="How many to show.")
@click.option("--json", "as_json", is_flag=True, help="For machines; values in hex.")
def list_dead_letters(file: Path, limit: int, as_json: bool, **which: Any) -> None:
    """Count dead letters by reason, and list the first of them."""
    dead_letters = Pipeline.load(file).dead_letters()
    reasons = dead_letters.counts(**which)
    if as_json:
        whole = [_as_json(dead_letter) for dead_letter in dead_letters.list(limit=limit, **which)]
        by_reason = [{**asdict(reason), "last": reason.last.isoformat()} for reason in reasons]
        print_json({"by_reason": by_reason, "letters": whole})
        return
    shown = dead_letters.preview(limit=limit, **which)
    console = Console(highlight=False)
    if not reasons:
        console.print("no dead letters")
        return
    summary = Table("reason", "count", "newest", box=None, pad_edge=False)
    for reason in reasons:
        count = Text(f"{reason.count:,}", justify="right")
        summary.add_row(Text(reason.reason), count, f"{reason.last:%Y-%m-%d %H:%M:%S}Z")
    console.print(summary, "")
    rows = Table("topic/partition", "offset", "reason", "detail", "value", box=None, pad_edge=False)
    for dead_letter in shown:
        rows.add_row(
            Text(f"{dead_letter.topic}/{dead_letter.partition}"),
            Text(str(dead_letter.offset), justify="right"),
            Text(dead_letter.reason),
            Text(visible(dead_letter.detail)),
            Text(_short(dead_letter.head)),
        )
    console.print(rows)
    total = sum(reason.count for reason in reasons)
    if total > len(shown):
        console.print(f"\nthe first {len(shown)} of {total:,}; --limit shows more")


@dead_letters.command()
@file_argument
@click.argument("topic")
@click.argument("partition", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@click.option("--json", "as_json", is_flag=True, help="For machines; values in hex.")
def show(file: Path, topic: str, partition: int, offset: int, as_json: bool) -> None:
    """Show one dead letter: reason, headers, key and value as text and in hex."""
    dead_letter = Pipeline.load(file).dead_letters().get(topic, partition, offset)
    if dead_letter is None:
        raise ConfigError(
            f"no dead letter at {topic}/{partition} offset {offset}",
            advice="`avow dead-letters list` shows those that exist.",
        )
    if as_json:
        print_json(_as_json(dead_letter))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{topic}/{partition} offset {offset}, {_when(dead_letter.timestamp_ms)}", style="bold"))
    console.print(Text(f"{dead_letter.reason}: {visible(dead_letter.detail)}"))
    for name, value in dead_letter.headers:
        console.print(Text(f"header {visible(name)}: {_short(value)}"))
    full = dead_letter.full_bytes
    beginning = "" if full is None else f", the beginning of {full:,}: the sink could not store the whole record"
    for title, value, note in (("key", dead_letter.key, ""), ("value", dead_letter.value, beginning)):
        size = "null" if value is None else f"{len(value):,} bytes"
        console.print(Text(f"\n{title}, {size}{note}", style="bold"))
        if value:
            console.print(Text(visible(value.decode(errors="replace"))))
            console.print(Text(_hex(value[:HEX_BYTES]), style="dim"))


@dead_letters.command()
@file_argument
@selection_options
@click.option("--dry-run", is_flag=True, help="Only print how many dead letters would be redriven.")
@json_option
def redrive(file: Path, dry_run: bool, as_json: bool, **which: Any) -> None:
    """Write dead letters into the sink, for example after a schema change.

    Each keeps the topic, partition and offset of its record. Its row is written and the dead letter is removed in one
    transaction, so repeating or interrupting a redrive cannot duplicate a row. Records that are still bad stay dead
    letters.
    """
    dead_letters = Pipeline.load(file).dead_letters()
    selected = sum(reason.count for reason in dead_letters.counts(**which))
    console = Console(highlight=False)
    if dry_run:
        click.echo(json.dumps({"meant": selected}) if as_json else f"{selected:,} dead letters match")
        return
    doing = f"redriving {selected:,} dead letters"
    with console.status(doing) as status:
        done = dead_letters.redrive(
            on_progress=lambda so_far: status.update(
                f"{doing}: {so_far.written:,} written, {so_far.still_dead:,} still bad"
            ),
            hooks=hooks_of_caller(),
            **which,
        )
    if as_json:
        click.echo(json.dumps(asdict(done)))
    else:
        console.print(f"{done.written:,} written, {done.skipped:,} skipped, {done.still_dead:,} still dead letters")


def visible(text: str) -> str:
    """Safe on a terminal: control codes and direction marks are shown, not obeyed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _short(value: bytes | None) -> str:
    if value is None:
        return "null"
    text = visible(value[: SHOWN_CHARS * 4].decode(errors="replace"))
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _hex(data: bytes) -> str:
    lines = (data[start : start + 16] for start in range(0, len(data), 16))
    return "\n".join(f"{16 * n:06x}  {line.hex(' ')}" for n, line in enumerate(lines))


def _as_json(dead_letter: DeadLetter) -> dict[str, Any]:
    def as_hex(value: bytes | None) -> str | None:
        return None if value is None else value.hex()

    return {
        **asdict(dead_letter),
        "key": as_hex(dead_letter.key),
        "value": as_hex(dead_letter.value),
        "headers": [[name, as_hex(value)] for name, value in dead_letter.headers],
    }


def _when(timestamp_ms: int) -> str:
    """A record's timestamp, which may be any number."""
    try:
        return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return f"timestamp {timestamp_ms} ms"
