"""``avow consume``: records to a handler function, or as JSON lines, under a declared guarantee."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from avow.cli import GUARANTEES, hooks_of_caller, plain
from avow.cli.kafka import ClusterSelection, given_settings, pipeline_option, settings_option
from avow.cli.local import folder_option
from avow.cli.registry import RegistrySelection, registry_options
from avow.cli.run import stop_on_signals
from avow.clients.config import (
    COOPERATIVE,
    CommitConfig,
    CommitMode,
    CommitUnit,
    ConsumerConfig,
    PollConfig,
    RetryConfig,
    explain,
)
from avow.errors import ConfigError, NotDrained, RegistryUnavailable
from avow.guarantee import Guarantee
from avow.retry import backoff, retry
from avow.settings import unwrap_secrets

if TYPE_CHECKING:
    from avow.clients.consumer import Consumer, Record
    from avow.formats.documents import Documents

ATTEMPTS = 4  # to ask a registry that does not answer, before it is an error
STRATEGIES = {"cooperative": COOPERATIVE, "eager": "range,roundrobin"}


@click.command(
    epilog="Exit codes: 0 done or stopped · 1 failed · 2 refused · 4 Kafka · 5 the database or the dead letters · "
    "11 log-truncated · 12 retention-loss · 13 superseded · 18 the handler failed · "
    "19 --once was stopped before the end · 70 internal error"
)
@click.argument("topics", nargs=-1, required=True)
@click.option("--group", default="avow-consume", help="The consumer group.")
@click.option("--guarantee", default=str(Guarantee.AT_LEAST_ONCE), type=GUARANTEES)
@click.option("--handler", help="MODULE:FUNCTION, called with each record; exactly-once calls it with (record, tx).")
@click.option("--database", envvar="DATABASE_URL", help="PostgreSQL URL, for exactly-once. Or export DATABASE_URL.")
@click.option(
    "--commit",
    type=click.Choice([*map(str, CommitMode)]),
    help="When offsets are committed.  [default: auto; at-most-once: sync]",
)
@click.option("--commit-interval", default=5.0, help="Seconds between automatic commits.")
@click.option("--per", default="batch", type=click.Choice([*map(str, CommitUnit)]))
@click.option("--start", default="earliest", help="earliest, latest or a time, for a new group.")
@click.option("--on-failure", default="stop", type=click.Choice(["stop", "dead-letter"]))
@click.option("--dead-letters", metavar="TOPIC", help="The dead-letter topic. [default: GROUP.dead-letters]")
@click.option("--retries", type=int, help="Retries of a record whose handler fails. [default: 3; at-most-once: 0]")
@click.option(
    "--longest", default=3600.0, help="The longest time that a batch may take, in seconds (max.poll.interval.ms)."
)
@click.option("--assignment", default="cooperative", type=click.Choice(list(STRATEGIES)))
@click.option("--batch", "max_records", default=500, help="The most records in a batch.")
@click.option("--max", "limit", type=click.IntRange(min=1), help="End after this many records.")
@click.option("--once", is_flag=True, help="End at the end offsets as they are at the start.")
@settings_option
@click.option("--brokers", envvar="AVOW_BROKERS", help="host:port, several with commas.")
@pipeline_option
@folder_option
@registry_options
@click.option(
    "--explain", "only_explain", is_flag=True, help="Explain what the options mean, and exit. Touches nothing."
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def consume(
    topics: tuple[str, ...],
    group: str,
    guarantee: str,
    handler: str | None,
    database: str | None,
    start: str,
    limit: int | None,
    once: bool,
    settings: tuple[str, ...],
    brokers: str | None,
    pipeline: Path | None,
    folder: Path,
    registry: RegistrySelection,
    only_explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Pass every record of TOPICS to a handler, or print it as a line of JSON.

    With a schema registry, keys and values that begin with the id of a schema are printed decoded, with all fields of
    that schema, and the id beside them. What cannot be decoded is printed as it is, with the reason. A registry that
    does not answer is tried again, then it is an error: the record is not passed over.

    Consumers of one group share the partitions; the records of a partition are handled in order. SIGTERM or Ctrl-C stop
    it after the current record (at-most-once: after the claimed batch) and commit the position.
    """
    if guarantee != Guarantee.EXACTLY_ONCE:
        database = None  # the environment may have one
    elif handler is None:
        raise ConfigError(
            "exactly-once needs a --handler: printed lines are not part of a transaction",
            advice="Give --handler MODULE:FUNCTION, which is called with (record, tx), or choose another guarantee.",
        )
    configs, dead_letters = _configs(**options)
    config = ConsumerConfig.resolve(
        guarantee, **configs, dead_letters=bool(dead_letters), database=database is not None
    )
    if only_explain:
        click.echo("\n".join(explain(config)))
        return
    if handler and registry.is_given:
        raise ConfigError(
            "--registry is for printed records, and --handler gets the bytes", advice="Leave out one of the two."
        )
    function = _function(handler) if handler else None
    printer = Printer(None if handler else _documents(registry))
    source = ClusterSelection(brokers, pipeline, folder).source()
    # Imported here: Kafka's client takes a moment, and a typing error should be reported at once.
    from avow.clients.consumer import Consumer

    console = Console(stderr=True, highlight=False)
    consumer = Consumer(
        topics,
        bootstrap_servers=source.brokers,
        group_id=group,
        guarantee=guarantee,
        database=database,
        auto_offset_reset=start,
        dead_letters=dead_letters,
        once=once,
        limit=limit,
        config=unwrap_secrets(source.kafka) | given_settings(settings),
        on_event=lambda text: console.print(plain(text), soft_wrap=True),
        hooks=hooks_of_caller(),
        **configs,
    )
    stop_on_signals(consumer.stop, lambda _: console.print("stopping after the current record"))
    try:
        with consumer:
            if function is None:
                printer.print_all(consumer)
            else:
                consumer.run(function)
            positions = consumer.positions
    finally:
        _summary(consumer, as_json, console)
    if not as_json:
        for tp, position in sorted(positions.items()):
            console.print(f"  {tp} at {position}")
    if once and not consumer.finished:
        raise NotDrained(
            f"the consumer of group {group} was stopped before it reached the end offsets seen at its start",
            advice="Nothing failed. Run it again: it continues from the committed offsets.",
        )


def _configs(
    *,
    commit: str | None,
    commit_interval: float,
    per: str,
    retries: int | None,
    on_failure: str,
    dead_letters: str | None,
    longest: float,
    assignment: str,
    max_records: int,
) -> tuple[dict[str, Any], bool | str]:
    """The options as a consumer's configuration, and what becomes of records that keep failing."""
    configs = {
        "commit": CommitConfig(commit, per, int(commit_interval * 1000)),
        "retry": RetryConfig(retries),
        "poll": PollConfig(max_records, int(longest * 1000), STRATEGIES[assignment]),
    }
    return configs, (dead_letters or True) if on_failure == "dead-letter" else False


def _function(name: str) -> Callable[..., object]:
    """A handler by its name. Modules of the folder we are in are found, as with ``python -m``."""
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function_ = getattr(import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--handler {name}: {error}",
            advice="Write MODULE:FUNCTION; the module must be importable from this folder.",
        ) from error
    if not callable(function_):
        raise ConfigError(f"--handler {name} is not a function", advice="Write MODULE:FUNCTION.")
    return function_  # type: ignore[no-any-return]


def _documents(registry: RegistrySelection) -> Documents | None:
    client = registry.client()
    if client is None:
        return None
    from avow.formats.documents import Documents

    return Documents(client)


class Printer:
    """Records as lines of JSON. ``documents``: those that a registry has a schema for are decoded."""

    def __init__(self, documents: Documents | None) -> None:
        self._documents = documents

    def print_all(self, consumer: Consumer) -> None:
        """Without a handler's retries and dead letters: whatever fails here is no record's fault."""
        with closing(iter(consumer)) as records:
            for record in records:
                try:
                    retry(partial(self._print, record), RegistryUnavailable, backoff(0.5, 4, attempts=ATTEMPTS))
                except BrokenPipeError:  # such as `| head`: nobody reads on
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    return

    def _print(self, record: Record) -> None:
        from avow.formats.documents import named

        headers = [[name, *named("", value).values()] for name, value in record.headers]
        line = {
            **{"topic": record.topic, "partition": record.partition, "offset": record.offset},
            "timestamp_ms": record.timestamp_ms,
            **self._part("key", record.key),
            **self._part("value", record.value),
            **({"headers": headers} if headers else {}),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)

    def _part(self, name: str, data: bytes | None) -> dict[str, Any]:
        from avow.formats.documents import named

        return named(name, data, self._documents.read(data) if self._documents else None)


def _summary(consumer: Consumer, as_json: bool, console: Console) -> None:
    totals = consumer.totals
    if as_json:
        summary = {"handled": totals.handled, "dead_letters": totals.dead, "retried": totals.retried}
        # Standard output has the records, or a handler's own lines.
        print(json.dumps(summary), file=sys.stderr, flush=True)
        return
    console.print(
        f"handled {totals.handled:,} · dead letters {totals.dead:,} · retries {totals.retried:,}", soft_wrap=True
    )
