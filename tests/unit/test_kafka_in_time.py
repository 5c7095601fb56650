"""A call of librdkafka's that does not keep its own time-out."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException

from avow.kafka.connect import in_time


def test_a_call_that_ends_in_time() -> None:
    done = threading.Event()
    in_time(60, done.set)
    assert done.is_set()


def test_what_goes_wrong_in_it_is_raised_whatever_it_is() -> None:
    def wrong() -> None:
        raise ValueError("no such offset")

    with pytest.raises(ValueError, match="no such offset"):
        in_time(60, wrong)


def test_a_call_that_does_not_end_is_left_to_itself() -> None:
    end, ended = threading.Event(), threading.Event()

    def endless() -> None:
        end.wait()
        ended.set()

    with pytest.raises(KafkaException) as caught:
        in_time(0.01, endless)
    assert caught.value.args[0].code() == KafkaError._TIMED_OUT
    end.set()
    assert ended.wait(60), "it went on by itself"
