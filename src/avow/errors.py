"""The errors, by whose fault it is. Owns their tree and their exit codes; knows nothing else.

::

    AvowError                 exit 1   anything avow raises on purpose
    ├── ConfigError           exit 2   the pipeline file or the command line is not valid, or access is denied
    │   ├── PositionGone      -        the ledger has lost a position that a run had: say why at the next start
    │   ├── RegistryRefused   -        the schema registry refuses: access, or a schema that it does not take
    │   └── UnknownSubject    -        the schema registry has no such subject or version
    ├── LocalError            exit 3   this machine: no Java, a port is taken, a jar cannot be fetched
    ├── SourceError           exit 4   a Kafka request failed, also after retries
    │   ├── TopicRecreated    exit 10  the topic is not the one the ledger knows
    │   ├── LogTruncated      exit 11  the log ends before the position, or holds another record there
    │   ├── RetentionLoss     exit 12  records were deleted before they were claimed
    │   ├── RegistryUnavailable -      the schema registry gives no answer: no record is to blame
    │   └── TooManyDeadLetters exit 14 more bad records than dead_letters.max_share allows
    ├── SinkError             exit 5   the sink failed, also after retries
    │   ├── PositionMoved     -        another attempt claimed first: read the position and judge again
    │   ├── PositionBehind    -        the ledger has lost claims: begin again from where it stands
    │   ├── SinkUnavailable   -        nothing can be written now, or not to this place: no record is to blame
    │   └── Superseded        exit 13  a newer run owns the pipeline
    ├── ColumnsChanged        -        records have other columns than the attempt began with: renew them, begin anew
    ├── UnknownSchema         -        a record names a schema that the registry does not have: a dead letter
    ├── HandlerFailed         exit 18  a consumer's handler failed, and failures stop it
    ├── NotDrained            exit 19  a run that was to drain (--once) was stopped before it had
    ├── TopicsStopped         exit 20  with a table for each topic: some topics stopped by name, the others went on
    └── ProtocolViolation     exit 70  internal error: continuing would break the guarantee

A message says what happened; ``advice`` says what the reader can do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

LINE_MAX = 300  # of what is shown of an error


class AvowError(Exception):
    """Anything avow raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class ConfigError(AvowError):
    """The pipeline file or the command line is not valid, or access is denied."""

    exit_code = 2


class PositionGone(ConfigError):
    """The ledger has lost the position of a partition while a run delivers it."""


class RegistryRefused(ConfigError):
    """The schema registry refuses what it was asked: who asks, or a schema that is invalid or incompatible."""


class UnknownSubject(ConfigError):
    """The schema registry has no such subject, or not this version of it."""


class LocalError(AvowError):
    """Something is missing or taken on this machine."""

    exit_code = 3


class SourceError(AvowError):
    """A Kafka request failed, also after retries."""

    exit_code = 4


class RegistryUnavailable(SourceError):
    """The schema registry gives no usable answer, which may pass. Whatever the record."""


class TopicRecreated(SourceError):
    """The topic was deleted and recreated: its offsets no longer mean the claimed records."""

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
    """The sink failed, also after retries."""

    exit_code = 5


class PositionMoved(SinkError):
    """Another attempt claimed first. Not a failure: read the position again and judge the range anew."""


class PositionBehind(SinkError):
    """The ledger stands before what was planned: it has lost claims that were made (a standby was promoted that lacked
    them), and the rows with them. Nothing was written: another attempt begins where the ledger stands."""


class SinkUnavailable(SinkError):
    """The sink, or a part of it, takes nothing now: no leader, a lock, a full disk. Whatever the record."""


class Superseded(SinkError):
    """A newer run of the same pipeline owns the ledger."""

    exit_code = 13


class UnknownSchema(AvowError):
    """A record names a schema that the registry does not have. That record is to blame, and nothing else."""


class ColumnsChanged(AvowError):
    """Records have other columns than the attempt has begun with. Not a failure: the format says which columns there
    are now, and the next attempt prepares the table for them."""


class HandlerFailed(AvowError):
    """A consumer's handler failed as often as it may, and a failure is to stop it."""

    exit_code = 18


class NotDrained(AvowError):
    """A run that was to drain was stopped before it had. Nothing failed; some records are not delivered yet."""

    exit_code = 19


class TopicsStopped(AvowError):
    """Of a pipeline with a table for each topic, some topics have stopped by name; the others were delivered. Raised
    at the end of a run."""

    exit_code = 20

    def __init__(self, stopped: Mapping[str, AvowError]) -> None:
        lines = [f"  {topic}: {first_line(error)}" for topic, error in sorted(stopped.items())]
        count = f"{len(lines)} topic{'s' if lines[1:] else ''}"
        super().__init__(
            "\n".join([f"{count} stopped; the others were delivered", *lines]),
            advice=" ".join(dict.fromkeys(error.advice for _, error in sorted(stopped.items()) if error.advice))
            or "Start again when the cause is fixed: each topic continues from its position.",
        )
        self.stopped = stopped


class ProtocolViolation(AvowError):
    """An internal error. The run stops, because continuing could lose or duplicate records."""

    exit_code = 70


def first_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:LINE_MAX]
