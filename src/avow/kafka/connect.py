"""Clients of Kafka, made from the pipeline's settings, and what they say made fit to be shown.

Owns: the settings that all clients have in common, and that no value of the environment or of a setting is shown. Must
not know: what a client is used for. Its neighbours are ``log``, ``reader`` and the Kafka sink.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from avow.errors import ConfigError
from avow.kafka.metadata import QUIET
from avow.settings import Source, revealed

_SHORT_S = 0.1  # from 0.2 on, confluent-kafka makes several of one wait


def settings_of(source: Source) -> dict[str, Any]:
    return settings_at(source.brokers, revealed(source.kafka))


def settings_at(brokers: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What a client of a cluster has, with the user's own settings."""
    settings: dict[str, Any] = {"bootstrap.servers": brokers}
    if not any(name.startswith("reconnect.backoff.") for name in given):
        # Looks again soon after a refused connection: librdkafka's own back-off grows to ten seconds.
        settings["reconnect.backoff.max.ms"] = 250
    return {**settings, **given}


Client = TypeVar("Client", AdminClient, client.Consumer, client.Producer)


def made(kind: type[Client], settings: dict[str, Any], given: Mapping[str, str], key: str = "source.kafka") -> Client:
    """A client with these settings. What it does not take of the user's own (``given``, which the file has under
    ``key``) is a ``ConfigError`` that names it."""
    try:
        return kind(settings, logger=QUIET)
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        text = _complaint(error)
        keys = [f"{key}.{name}" for name in _culprits(given, text)] or [key]
        # Not "from error": librdkafka quotes values.
        raise ConfigError(
            f"{', '.join(keys)}: librdkafka, Kafka's C client, says: {strike(given.values(), text)}",
            advice="Client settings are spelled as librdkafka spells them; some of Java's are not among them.",
        ) from None


def in_time(timeout_s: float, call: Callable[[], None]) -> None:
    """The call, or the error that it timed out.

    ``send_offsets_to_transaction`` of librdkafka (2.16) does not keep the time-out that it is given: while the
    coordinator of the group is dead it waits, however long that is. It is then left to itself, in a thread of its own.
    """
    ended: Future[None] = Future()

    def attempt() -> None:
        try:
            call()
            ended.set_result(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            ended.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        ended.result(timeout_s)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None


def flushed(producer: client.Producer, timeout_s: float) -> int:
    """Wait until all that was given to the producer has ended, or for so long. How much has not.

    In short waits. A longer one confluent-kafka (2.16) goes on with after a fatal error, and calls our functions while
    the error is Python's to raise: they fail in the middle, the error vanishes, or one comes out that no ``except``
    can catch.
    """
    deadline = time.monotonic() + timeout_s
    while (left := producer.flush(_SHORT_S)) and time.monotonic() < deadline:
        pass
    return left


def _complaint(error: Exception) -> str:
    cause = error.args[0] if error.args else ""
    return cause.str() if isinstance(cause, KafkaError) else str(cause)


def _culprits(given: Mapping[str, str], text: str) -> list[str]:
    named = [name for name in given if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)]
    return named or [name for name, value in given.items() if _complains(name, value, text)]


def _complains(name: str, value: str, text: str) -> bool:
    """Whether this setting alone gives the same complaint. Of Java's settings, librdkafka does not say the name."""
    try:
        AdminClient({name: value}, logger=QUIET)
    except (KafkaException, TypeError, ValueError, AttributeError) as error:
        return _complaint(error) == text
    return False


def strike(values: Iterable[str], text: str) -> str:
    """The text with every value, and every word that stands in one, struck out."""
    known = sorted(filter(None, values), key=len, reverse=True)
    for value in known:
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    hide = re.compile(r"[^\s\"'`:,=]{3,}")
    return hide.sub(lambda word: "***" if any(word[0] in value for value in known) else word[0], text)
