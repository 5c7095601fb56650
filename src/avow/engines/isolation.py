"""Which record makes attempts fail, where an attempt cannot say so itself: a killed worker, a sink that raises.

Theory of operation
-------------------
``task`` makes a dead letter of a record that it can name. What it cannot name ends the attempt: the process died, or
the sink failed on a whole range. A range that has failed twice is delivered in pieces, a 32nd of it at a time, the one
that fails in pieces of that, down to a single offset. If that offset fails again, its record is kept as a dead letter,
not decoded, and this at once: a sink that is unreachable does not take the dead letter either, and one that is back by
the next attempt takes the record. So an outage sets no record aside. Where only the place of rows is away, and dead
letters could be stored, the sink's error says so (``SinkUnavailable``). Pieces around it are delivered as usual.

A transform that fails for everything looks the same as a bad record. It is known by what comes next: after a few
records of a partition in a row, with none delivered in between, the run stops by name.

Owns: which ranges to try next. Must not know: how they are delivered, or why they fail. Neighbours: ``driver``
(attempts), ``spark`` and ``consumer`` (which ask for each batch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from avow.engines.causes import cause_line, own_error
from avow.errors import SourceError, TooManyDeadLetters
from avow.kafka.log import TopicPartition
from avow.ledger import OffsetRange

PIECES = 32
TRIES = 2  # of the same range, before it is delivered in pieces or set aside
IN_A_ROW_MAX = 3


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What of a batch is delivered at once."""

    ranges: Mapping[TopicPartition, OffsetRange]
    set_aside: str = ""  # why its single record is to be a dead letter without being decoded
    last_try: bool = False  # if it fails, it is set aside at once


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A range that has failed, with nothing of it delivered."""

    range: OffsetRange
    failures: int
    error: str


class Isolation:
    """Lives as long as a run, over its attempts."""

    def __init__(self, blameless: tuple[type[Exception], ...], event: Callable[[str], None]) -> None:
        self._blameless = blameless  # these say themselves what is wrong, and it is not a record
        self._event = event
        self._suspects: dict[TopicPartition, _Suspect] = {}
        self._in_a_row: Counter[TopicPartition] = Counter()
        self._failed_last: dict[TopicPartition, str] = {}  # what was said to a last try, until it is set aside

    def parts(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Iterator[BatchPart]:
        """A batch as it is to be delivered: at once, or after a failure one range after the other."""
        if not self._suspects.keys() & ranges.keys():
            yield BatchPart(ranges)
            return
        for tp, planned in sorted(ranges.items()):
            start = planned.start
            while start < planned.until:
                part = self._next(tp, replace(planned, start=start))
                yield part
                if why := self._failed_last.pop(tp, ""):
                    yield replace(part, set_aside=why, last_try=False)
                start = part.ranges[tp].until

    def _next(self, tp: TopicPartition, left: OffsetRange) -> BatchPart:
        suspect = self._suspects.get(tp)
        if suspect is None or not suspect.range.start <= left.start < suspect.range.until:
            self._suspects.pop(tp, None)
            return BatchPart({tp: left})
        if suspect.failures < TRIES:
            return BatchPart({tp: left})
        if len(suspect.range) == 1:
            self._check_in_a_row(tp, suspect)
            return BatchPart({tp: suspect.range}, last_try=True)
        until = min(left.start + max(1, len(suspect.range) // PIECES), suspect.range.until, left.until)
        return BatchPart({tp: replace(left, until=until)})

    def _check_in_a_row(self, tp: TopicPartition, suspect: _Suspect) -> None:
        if self._in_a_row[tp] >= IN_A_ROW_MAX:
            raise TooManyDeadLetters(
                f"dead-letters: the last {IN_A_ROW_MAX} records of {tp} were set aside one after the other, and the "
                f"one at offset {suspect.range.start} fails too: {suspect.error}",
                advice="So it is hardly the records. Fix the transform or the sink, redrive the dead letters "
                "(unprocessable), and start again. Nothing of this offset was claimed.",
            )

    @contextmanager
    def trying(self, part: BatchPart) -> Iterator[None]:
        """Around the delivery of a part: remembers what came of it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised there
            self.failed(part, error)
            return
        for tp, done in part.ranges.items():
            self._done(tp, done, part.set_aside)

    def failed(self, part: BatchPart, error: Exception) -> None:
        """Remembers the failure of a part and raises it, unless its single record is set aside next."""
        if isinstance(own_error(error), self._blameless):
            raise error
        if part.set_aside:
            (tried,) = part.ranges.values()
            raise SourceError(
                f"the record at offset {tried.start} of {tried.topic}/{tried.partition} can neither be delivered "
                f"({part.set_aside}) nor kept as a dead letter: {cause_line(error)}"
            ) from error
        for tp, tried in part.ranges.items():
            self._failed(tp, tried, cause_line(error))
            if part.last_try:
                self._failed_last[tp] = cause_line(error)
        if not part.last_try:
            raise error

    def _failed(self, tp: TopicPartition, tried: OffsetRange, error: str) -> None:
        before = self._suspects.get(tp)
        again = before is not None and before.range.start == tried.start
        if not again or before is None:
            failures = 1
        elif len(tried) < len(before.range):
            failures = TRIES if len(tried) > 1 else 1
        else:  # the same range, or more of the log by now
            failures = before.failures + 1
            tried = before.range
        self._suspects[tp] = _Suspect(tried, failures, error)
        if failures >= TRIES:
            self._event(f"{tried} fails: {'it is' if len(tried) == 1 else 'what makes it fail is'} isolated")

    def _done(self, tp: TopicPartition, done: OffsetRange, set_aside: str) -> None:
        if set_aside:
            self._in_a_row[tp] += 1
            # Where its last try was claimed and the answer lost, nothing is done with it now.
            became = "is a dead letter, unless it was claimed before"
            self._event(f"offset {done.start} of {tp} could not be processed, and {became}: {set_aside}")
        else:
            self._in_a_row.pop(tp, None)
        suspect = self._suspects.get(tp)
        if suspect is not None and done.until >= suspect.range.until:
            del self._suspects[tp]
        elif suspect is not None:
            self._suspects[tp] = replace(suspect, range=replace(suspect.range, start=done.until))
