"""Any exception as one of ours: whose fault it is, and its root cause in one line, whatever it is wrapped in.

Owns: reading tracebacks, Python's and Java's. Must not know: what is done about it. Its neighbours are ``driver``
(which tries again, or stops) and ``avow.errors`` (the tree).
"""

from __future__ import annotations

import re
import traceback

from avow import errors
from avow.errors import LINE_MAX, AvowError, SinkError, SourceError, first_line
from avow.extras import missing

_TRACEBACK = "Traceback (most recent call last):"
_CRASHED = "Python worker exited unexpectedly"
_OUR_FRAME = re.compile(r'File ".*[/\\]avow[/\\](\w+)')
_PACKAGE = re.compile(r"^(?:\w+\.)+(?=[A-Z])")


def cause_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long. Of an error that Spark reports: its root cause."""
    return _root_cause(trace(error))[:LINE_MAX] if _is_sparks(error) else first_line(error)


def translated(error: Exception) -> AvowError:
    """Any exception as one of ours, by whose fault it is: the innermost function of ours that was running says it,
    also where the exception was raised in one of Spark's Python workers and came here as text."""
    if (raised := own_error(error)) is not None:
        return raised
    if isinstance(error, ModuleNotFoundError) and (extra := missing(error.name)):
        return extra
    text = trace(error)
    cause = _root_cause(text)
    ours = _OUR_FRAME.findall(text)
    kind = {"sinks": SinkError, "kafka": SourceError}.get(ours[-1] if ours else "", AvowError)
    if kind is AvowError and "KafkaException" in cause:
        kind = SourceError
    return kind(cause[:LINE_MAX])


def own_error(error: Exception) -> AvowError | None:
    """The error of ours that this is, or that a Spark worker raised and Spark reports as text."""
    if isinstance(error, AvowError):
        return error
    named = re.match(r"avow\.errors\.(\w+): (.*)", _last_traceback(trace(error)))
    if named and isinstance(kind := getattr(errors, named[1], None), type) and issubclass(kind, AvowError):
        return kind(named[2][:LINE_MAX])
    return None


def trace(error: BaseException) -> str:
    """The whole trace, with Java's where Spark has one."""
    if not _is_sparks(error):
        return "".join(traceback.format_exception(error))
    try:
        java = getattr(error, "_stackTrace", None) or getattr(error, "_stacktrace", None)  # by Spark Connect
        return f"{error}\n{java or ''}"
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        return type(error).__name__


def _is_sparks(error: BaseException) -> bool:
    """By its attributes: not everybody who asks has Spark."""
    return any(hasattr(error, name) for name in ("_stackTrace", "_stacktrace", "java_exception"))


def _root_cause(text: str) -> str:
    """Of a trace: what the Python exception says, or else the last of Java's causes."""
    if exception_line := _last_traceback(text):
        return _PACKAGE.sub("", exception_line)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(_CRASHED in line for line in lines):  # more telling than Java's cause, which is the closed connection
        return f"a {_CRASHED}: it crashed or was killed, for example because memory ran out"
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    # The first line of a Py4JJavaError names a call of py4j's own; Java's words begin with a colon.
    causes = causes or [line.removeprefix(": ") for line in lines if line.startswith(": ")] or lines or [""]
    return _PACKAGE.sub("", re.sub(r"( SQLSTATE: \w+)+$", "", causes[-1] if "Caused by" in text else causes[0]))


def _last_traceback(text: str) -> str:
    """The exception's own line of the last Python traceback in a text; empty if there is none."""
    _, marker, rest = text.rpartition(_TRACEBACK)
    lines = (line for line in rest.splitlines() if marker and line and not line[0].isspace())
    return next(lines, "").strip()
