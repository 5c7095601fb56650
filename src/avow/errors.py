"""The errors, by whose fault it is. Owns their tree and their exit codes; knows nothing else.

::

    AvowError                 exit 1   anything avow raises on purpose
    ├── ConfigError           exit 2   the pipeline file or the command line asks for what cannot be
    ├── LocalError            exit 3   this machine: no Java, a port is taken, a jar cannot be fetched
    ├── SourceError           exit 4   Kafka did not do what was asked, and trying again did not help
    │   ├── TopicRecreated    exit 10  the topic is not the one the ledger knows
    │   ├── LogTruncated      exit 11  the log ends before the position, or holds another record there
    │   ├── RetentionLoss     exit 12  records were deleted before they were claimed
    │   └── TooManyDeadLetters exit 14 more bad records than dead_letters.max_share allows
    ├── SinkError             exit 5   the sink did not do what was asked, and trying again did not help
    │   ├── PositionMoved     -        another attempt claimed first: read the position and judge again
    │   ├── PositionBehind    -        the ledger has lost claims: begin again from where it stands
    │   └── Superseded        exit 13  a newer run owns the pipeline
    ├── HandlerFailed         exit 18  a consumer's handler failed, and failures stop it
    ├── NotDrained            exit 19  a run that was to drain (--once) was stopped before it had
    └── ProtocolViolation     exit 70  our bug: going on would break the promise

A message says what happened; ``advice`` says what the reader can do next.
"""

from __future__ import annotations

import re
import traceback
from typing import ClassVar

LINE_MAX = 300  # of what is shown of an error


class AvowError(Exception):
    """Anything avow raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class ConfigError(AvowError):
    """The pipeline file or the command line asks for something that cannot be."""

    exit_code = 2


class LocalError(AvowError):
    """Something is missing or taken on this machine."""

    exit_code = 3


class SourceError(AvowError):
    """Kafka did not do what was asked, and trying again did not help."""

    exit_code = 4


class TopicRecreated(SourceError):
    """The topic was deleted and made again: its offsets no longer mean the records we claimed."""

    exit_code = 10


class LogTruncated(SourceError):
    """The log ends before the position, or holds another record where the last claimed one was."""

    exit_code = 11


class RetentionLoss(SourceError):
    """Records were deleted by retention before they were claimed."""

    exit_code = 12


class TooManyDeadLetters(SourceError):
    """More records of a range are bad than ``dead_letters.max_share`` allows. Nothing of the range was claimed."""

    exit_code = 14


class SinkError(AvowError):
    """The sink did not do what was asked, and trying again did not help."""

    exit_code = 5


class PositionMoved(SinkError):
    """Another attempt claimed first. Not a failure: read the position again and judge the range anew."""


class PositionBehind(SinkError):
    """The ledger stands before what was planned: it has lost claims that were made (a standby was promoted that lacked
    them), and the rows with them. Nothing was written: another attempt begins where the ledger stands."""


class Superseded(SinkError):
    """A newer run of the same pipeline owns the ledger."""

    exit_code = 13


class HandlerFailed(AvowError):
    """A consumer's handler failed as often as it may, and a failure is to stop it."""

    exit_code = 18


class NotDrained(AvowError):
    """A run that was to drain was stopped before it had. Nothing failed; some records are not delivered yet."""

    exit_code = 19


class ProtocolViolation(AvowError):
    """Our bug. Going on would lose or double records, so nothing goes on."""

    exit_code = 70


_TRACEBACK = "Traceback (most recent call last):"
_CRASHED = "Python worker exited unexpectedly"
_OUR_FRAME = re.compile(r'File ".*[/\\]avow[/\\](\w+)')
# What Kafka's Java client, with which Spark plans, says of settings and rights. Trying again does not help.
_JAVA_REFUSAL = re.compile(r"ConfigException|AuthenticationException|AuthorizationException|KafkaClient' entry|JAAS")
_JAVA_ADVICE = (
    "Spark reads offsets with Kafka's Java client, which takes the same source.kafka settings and may want other names "
    "for some. The consumer engine (--engine consumer) does without it."
)
_PACKAGE = re.compile(r"^(?:\w+\.)+(?=[A-Z])")


def first_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long. Of an error that Spark reports: its root cause."""
    if _is_sparks(error):
        return _root_cause(trace(error))[:LINE_MAX]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:LINE_MAX]


def translated(error: Exception) -> AvowError:
    """Any exception as one of ours, by whose fault it is: the innermost function of ours that was running says it,
    also where the exception was raised in one of Spark's Python workers and came here as text."""
    if isinstance(error, AvowError):
        return error
    text = trace(error)
    cause = _root_cause(text)
    named = re.match(r"avow\.errors\.(\w+): (.*)", _last_traceback(text))
    if named and isinstance(kind := globals().get(named[1]), type) and issubclass(kind, AvowError):
        return kind(named[2][:LINE_MAX])
    ours = _OUR_FRAME.findall(text)
    if "org.apache.kafka." in text and _JAVA_REFUSAL.search(cause):
        return ConfigError(f"Kafka's Java client: {cause[:LINE_MAX]}", advice=_JAVA_ADVICE)
    kind = {"sinks": SinkError, "kafka": SourceError}.get(ours[-1] if ours else "", AvowError)
    if kind is AvowError and ("KafkaException" in cause or "org.apache.kafka." in text):
        kind = SourceError
    return kind(cause[:LINE_MAX])


def trace(error: BaseException) -> str:
    """The whole trace, with Java's where Spark has one."""
    if not _is_sparks(error):
        return "".join(traceback.format_exception(error))
    try:
        return f"{error}\n{getattr(error, '_stackTrace', '')}"
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        return type(error).__name__


def _is_sparks(error: BaseException) -> bool:
    """By its attributes: not everybody who asks has Spark."""
    return hasattr(error, "_stackTrace") or hasattr(error, "java_exception")


def _root_cause(text: str) -> str:
    """Of a trace: what the Python exception says, or else the last of Java's causes."""
    if said := _last_traceback(text):
        return _PACKAGE.sub("", said)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(_CRASHED in line for line in lines):  # more telling than Java's cause, which is the closed connection
        return f"a {_CRASHED}: it crashed or was killed, for example because memory ran out"
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    # The first line of a Py4JJavaError names a call of py4j's own; Java's words begin with a colon.
    causes = causes or [line.removeprefix(": ") for line in lines if line.startswith(": ")] or lines or [""]
    return _PACKAGE.sub("", re.sub(r"( SQLSTATE: \w+)+$", "", causes[-1] if "Caused by" in text else causes[0]))


def _last_traceback(text: str) -> str:
    """The exception's own line of the last Python traceback in a text; empty if there is none."""
    _, found, rest = text.rpartition(_TRACEBACK)
    lines = (line for line in rest.splitlines() if found and line and not line[0].isspace())
    return next(lines, "").strip()
