"""Pauses between attempts, and waiting for something."""

from __future__ import annotations

from itertools import islice

import pytest

from avow.retry import backoff, poll_until, random_pauses, retry


def test_pauses_grow_up_to_their_bound() -> None:
    assert list(islice(backoff(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert list(backoff(1, 30, attempts=3)) == [1, 2]
    assert list(backoff(1, 30, attempts=1)) == []


def test_random_pauses_lie_between_attempts_and_below_a_bound_that_grows() -> None:
    pauses = list(random_pauses(0.1, 0.3, attempts=50))
    assert len(pauses) == 49
    assert all(0 <= pause <= min(0.1 * (number + 1), 0.3) for number, pause in enumerate(pauses))


def test_a_call_is_retried_and_its_last_error_raised() -> None:
    calls: list[int] = []

    def fails(times: int) -> str:
        calls.append(times)
        if len(calls) <= times:
            raise OSError(str(len(calls)))
        return "done"

    assert retry(lambda: fails(2), OSError, [0, 0, 0]) == "done"
    assert len(calls) == 3
    calls.clear()
    with pytest.raises(OSError, match="3"):
        retry(lambda: fails(9), OSError, [0, 0])
    calls.clear()
    with pytest.raises(OSError, match="1"):
        retry(lambda: fails(9), OSError, [0, 0], retriable=lambda _: False)
    with pytest.raises(OSError, match="2"):
        retry(lambda: fails(9), ValueError, [0, 0])


def test_waiting_ends_with_the_first_true_answer_or_with_the_time() -> None:
    answers = iter([[], [], [7], [8]])
    assert poll_until(lambda: next(answers), 60, every_s=0) == [7]
    assert poll_until(lambda: False, 0.01, every_s=0.001) is False
