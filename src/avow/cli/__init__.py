"""The command line, one module for each group of commands. Owns exit codes and the display of errors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from rich.console import Console

from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import AvowError
from avow.extras import missing
from avow.guarantee import Guarantee

LOGGER = logging.getLogger("avow.cli")

# The commands, by what a person wants to do. Each is a module of this folder with a function of that name;
# it is imported when it is used, so that `avow status` does not wait for what only `avow run` needs.
COMMANDS = {
    "Try it here": {
        "up": ("local", "Start the local cluster: three Kafka nodes and PostgreSQL."),
        "down": ("local", "Stop it. The data stays."),
        "status": ("local", "Addresses, pids, leaders, in-sync replicas, disk use."),
        "demo": ("demo", "90 seconds: a pipeline is killed three times with kill -9, then audited."),
        "setup": ("setup", "Fetch jars and JavaScript, prepare Spark for quick starts. Once per machine."),
        "doctor": ("doctor", "Check that this machine has everything that avow needs."),
    },
    "Pipelines": {
        "plan": ("plan", "Explain what a pipeline guarantees, hop by hop, without any I/O."),
        "run": ("run", "Move records from Kafka into the sink, under the declared guarantee."),
        "wait": ("wait", "Wait until given records are in the sink, or report what happened to them."),
        "audit": ("audit", "Check the sink against the topic, offset by offset: held, broken or unknown."),
        "prove": ("prove", "Inject faults into real processes and check whether the guarantee holds."),
        "dead-letters": ("dead_letters", "List, show or redrive records that could not be decoded or written."),
        "lake": ("lake", "Maintain a Delta or Iceberg table: clean, compact."),
    },
    "Clients": {
        "produce": ("produce", "Send JSON lines to a topic with a declared guarantee; explain or measure the choices."),
        "consume": ("consume", "Pass records to a handler, or print them, under a declared guarantee."),
    },
    "Inspect": {
        "dashboard": ("dashboard", "Cluster and pipelines in the browser."),
        "topics": ("kafka", "List or describe topics: leaders, replicas in sync, configuration, offsets."),
        "groups": ("kafka", "List or describe consumer groups: members, positions, lag."),
        "lag": ("kafka", "Lag of consumer groups, in records and seconds."),
    },
}
MODULES = {name: module for group in COMMANDS.values() for name, (module, _) in group.items()}

EXIT_CODES = """\
Exit codes: 0 done · 1 failed · 2 refused: bad command line or pipeline file · 3 missing on this machine \
· 4 Kafka failed · 5 the sink failed · 70 internal error: stopped to keep the guarantee"""


class Avow(click.Group):
    """Commands in groups, imported when used. Errors of avow are shown without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in MODULES:
            return None
        command = getattr(import_module(f"avow.cli.{MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, group in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in group.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AvowError as error:
            fail(error)
        except ModuleNotFoundError as error:
            if (problem := missing(error.name)) is None:
                raise
            fail(problem)


def fail(error: AvowError) -> NoReturn:
    """Show an error and end with its exit code."""
    LOGGER.debug("it ended with", exc_info=error)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {plain(str(error))}")
    if error.advice:
        console.print(f"[bold]what to do:[/] {plain(error.advice)}")
    sys.exit(error.exit_code)


def verbose_option(command: Callable[..., Any]) -> Callable[..., Any]:
    def listen(_ctx: click.Context, _param: click.Parameter, enabled: bool) -> None:
        if enabled:
            logger = logging.getLogger("avow")
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logging.DEBUG)

    return click.option(
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=listen,
        help="Print full tracebacks to standard error.",
    )(command)


GUARANTEES = click.Choice([str(word) for word in Guarantee])
PIPELINE_FILE = click.Path(dir_okay=False, path_type=Path)
file_argument = click.argument("file", type=PIPELINE_FILE)
json_option = click.option("--json", "as_json", is_flag=True, help="For machines.")
native_option = click.option(
    "--native/--no-native",
    default=None,
    help="Use the C library of avow-native if it is installed. It changes the speed and nothing else.",
)


def hooks_of_caller() -> Hooks:
    """Test hooks of a program that invokes this command line, such as the proof; none by default."""
    return click.get_current_context().find_object(Hooks) or NO_HOOKS


def from_environment(option: str) -> bool:
    """Whether the option's value is an environment variable's: another option may take its place."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.ENVIRONMENT


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))


def printable(text: str) -> str:
    """Without control codes: names and errors come from users, brokers and records."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def plain(text: str) -> str:
    """Safe to print: no rich markup, no control codes."""
    return printable(text).replace("[", r"\[")


@click.group(
    cls=Avow,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(package_name="avow", message="%(prog)s %(version)s")
def main() -> None:
    """avow moves Kafka topics into PostgreSQL, a data lake or another topic, on Spark or
    without a JVM.

    The delivery guarantee is one declared word (at-most-once, at-least-once, exactly-once), kept by the
    protocol, proven by fault injection, and checked by an audit.
    """
