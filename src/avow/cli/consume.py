"""``avow consume``: records to a handler function, or as JSON lines, under a declared guarantee."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from avow.cli import hooks_of_caller, plain
from avow.cli.kafka import given_settings, settings_option, source_of
from avow.cli.local import folder_option
from avow.cli.run import stop_on_signals
from avow.clients.terms import checked, explain
from avow.errors import ConfigError, NotDrained
from avow.guarantee import Guarantee
from avow.settings import revealed

if TYPE_CHECKING:
    from avow.clients.consumer import Consumer, Record


@click.command(
    epilog="Exit codes: 0 done or stopped · 1 failed · 2 refused · 4 Kafka · 5 the database or the dead letters · "
    "11 log-truncated · 12 retention-loss · 13 superseded · 18 the handler failed · "
    "19 --once was stopped before the end · 70 a bug of ours"
)
@click.argument("topics", nargs=-1, required=True)
@click.option("--group", default="avow-consume", show_default=True, help="Whose positions these are.")
@click.option(
    "--guarantee", default="at-least-once", show_default=True, type=click.Choice([str(word) for word in Guarantee])
)
@click.option("--handler", help="MODULE:FUNCTION, called with each record; exactly-once calls it with (record, tx).")
@click.option("--database", envvar="DATABASE_URL", help="PostgreSQL, for exactly-once. Or export DATABASE_URL.")
@click.option("--commit", type=click.Choice(["auto", "sync", "async"]), help="auto, and sync for at-most-once.")
@click.option("--commit-interval", default=5.0, show_default=True, help="Seconds between automatic commits.")
@click.option("--per", default="batch", show_default=True, type=click.Choice(["record", "batch"]))
@click.option("--start", default="earliest", show_default=True, help="earliest, latest or a time, for a new group.")
@click.option("--on-failure", default="stop", show_default=True, type=click.Choice(["stop", "dead-letter"]))
@click.option("--dead-letters", metavar="TOPIC", help="Where they go. [default: GROUP.dead-letters]")
@click.option("--retries", type=int, help="Of a record whose handler fails. [default: 3; at-most-once: 0]")
@click.option("--longest", default=3600.0, show_default=True, help="Seconds that a batch may take.")
@click.option("--assignment", default="cooperative", show_default=True, type=click.Choice(["cooperative", "eager"]))
@click.option("--batch", "max_records", default=500, show_default=True, help="Records of a batch, at most.")
@click.option("--max", "limit", type=click.IntRange(min=1), help="End after so many records.")
@click.option("--once", is_flag=True, help="End at the end of the log as it is now.")
@settings_option
@click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several with commas.")
@click.option(
    "--pipeline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The source's cluster of this file, with its client settings.",
)
@folder_option
@click.option("--explain", "only_explain", is_flag=True, help="Say what the choices mean, and end. Touches nothing.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def consume(
    topics: tuple[str, ...],
    group: str,
    guarantee: str,
    handler: str | None,
    database: str | None,
    commit: str | None,
    commit_interval: float,
    per: str,
    start: str,
    on_failure: str,
    dead_letters: str | None,
    retries: int | None,
    longest: float,
    assignment: str,
    max_records: int,
    limit: int | None,
    once: bool,
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    only_explain: bool,
    as_json: bool,
) -> None:
    """Give every record of TOPICS to a handler, or print it as a line of JSON.

    Consumers of one group share the partitions; each record of a partition comes in order. SIGTERM or Ctrl-C end it
    after the record in hand (at-most-once: after the batch that is claimed), with the position right.
    """
    terms: dict[str, Any] = {
        "per": per,
        "on_failure": on_failure,
        "retries": retries,
        "commit_interval_s": commit_interval,
        "assignment": assignment,
        "max_records": max_records,
        "longest_s": longest,
    }
    exactly = guarantee == Guarantee.EXACTLY_ONCE
    if exactly and handler is None:
        raise ConfigError(
            "exactly-once needs a --handler: printing is not part of any transaction",
            advice="--handler MODULE:FUNCTION, which is called with (record, tx); or another guarantee.",
        )
    found = checked(guarantee, commit, **terms, back_off_s=0.1, database=exactly and database is not None)
    if only_explain:
        for line in explain(found):
            click.echo(line)
        return
    function = _function(handler) if handler else _print
    source = source_of(brokers, pipeline, folder)
    # Imported here: Kafka's client takes a moment, and a slip of the pen should be told at once.
    from avow.clients.consumer import Consumer

    console = Console(stderr=True, highlight=False)
    consumer = Consumer(
        source.brokers,
        topics,
        group,
        guarantee,
        commit=commit,
        start=start,
        dead_letters=dead_letters,
        database=database if exactly else None,
        once=once,
        limit=limit,
        kafka=revealed(source.kafka) | given_settings(settings),
        on_event=lambda text: console.print(plain(text), soft_wrap=True),
        hooks=hooks_of_caller(),
        **terms,
    )
    stop_on_signals(consumer.stop, lambda _: console.print("stopping after the record in hand"))
    try:
        with consumer:
            consumer.run(function)
            positions = consumer.positions
    finally:
        _summary(consumer, as_json, console)
    if not as_json:
        for where, position in sorted(positions.items()):
            console.print(f"  {where} at {position}")
    if once and not consumer.finished:
        raise NotDrained(
            f"group {group} was stopped before it had handled all records that were there when it started",
            advice="Nothing failed. Run it again: it continues from the group's positions.",
        )


def _function(name: str) -> Callable[..., object]:
    """A handler by its name. Modules of the folder we are in are found, as with ``python -m``."""
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--handler {name}: {error}", advice="MODULE:FUNCTION, of a module that Python finds from here."
        ) from error
    if not callable(found):
        raise ConfigError(f"--handler {name}: that is no function", advice="MODULE:FUNCTION.")
    return found  # type: ignore[no-any-return]


def _print(record: Record) -> None:
    headers = [[name, *_text("", value).values()] for name, value in record.headers]
    line = {
        **{"topic": record.topic, "partition": record.partition, "offset": record.offset},
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
        **({"headers": headers} if headers else {}),
    }
    print(json.dumps(line, ensure_ascii=False), flush=True)


def _text(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as text under their name; under another one, as base64, if they are no text."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def _summary(consumer: Consumer, as_json: bool, console: Console) -> None:
    totals = consumer.totals
    if as_json:
        said = {"handled": totals.handled, "dead_letters": totals.dead, "retried": totals.retried}
        print(json.dumps(said), file=sys.stderr, flush=True)  # records, or a handler's own lines, are on the other one
        return
    console.print(
        f"handled {totals.handled:,} · dead letters {totals.dead:,} · tried again {totals.retried:,}", soft_wrap=True
    )
