"""Waiting and retrying: the one place that decides how long to sleep between two attempts.

Must not know: what is attempted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

Answer = TypeVar("Answer")


def backoff(first_s: float, max_s: float, *, factor: float = 2.0, attempts: int | None = None) -> Iterator[float]:
    """Pauses that grow from ``first_s`` to ``max_s``; one less than ``attempts``, if these are bounded."""

    def pauses() -> Iterator[float]:
        pause = first_s
        while True:
            yield min(pause, max_s)
            pause = min(pause * factor, max_s)

    return islice(pauses(), None if attempts is None else attempts - 1)


def random_pauses(first_s: float, max_s: float, attempts: int) -> Iterator[float]:
    """As many pauses as lie between so many attempts, each up to a bound that grows by ``first_s``: several processes
    that failed over each other do not do so again."""
    return (random.random() * min(first_s * (number + 1), max_s) for number in range(attempts - 1))


def retry(
    call: Callable[[], Answer],
    on: type[Exception] | tuple[type[Exception], ...],
    pauses: Iterable[float],
    *,
    retriable: Callable[[Exception], bool] = lambda _: True,
) -> Answer:
    """The call's answer. After an error of these it is called again behind each of the ``pauses``, and the last
    error is raised."""
    for pause in pauses:
        try:
            return call()
        except on as error:
            if not retriable(error):
                raise
        time.sleep(pause)
    return call()


def poll_until(probe: Callable[[], Answer], timeout_s: float, *, every_s: float = 0.1) -> Answer:
    """Polls the probe until its result is true or the time is over. Returns the last result."""
    deadline = time.monotonic() + timeout_s
    while not (answer := probe()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return answer
