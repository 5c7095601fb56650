"""The thread that makes the next batch while this one is written: same items, same errors, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from avow.engines.task import one_ahead


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "one-ahead"]


def test_the_same_items_in_the_same_order() -> None:
    with one_ahead(iter(range(1_000))) as ready:
        assert list(ready) == list(range(1_000))
    assert not alive()


def test_the_next_one_is_made_while_this_one_is_used() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        made.set()
        yield 2

    with one_ahead(items()) as ready:
        assert next(ready) == 1
        assert made.wait(10)  # though nobody has asked for the second


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("broken")

    with one_ahead(items()) as ready:
        assert next(ready) == 1
        with pytest.raises(LookupError, match="broken"):
            next(ready)
    assert not alive()


def test_who_stops_early_gets_the_rest_of_the_source_back() -> None:
    """The thread has taken at most two more than were used, and takes no more once the block has ended."""
    source = iter(range(1_000))
    with one_ahead(source) as ready:
        assert next(ready) == 0
    assert not alive()
    assert next(source) <= 4
