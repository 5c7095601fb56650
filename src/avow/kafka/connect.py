"""Clients of Kafka, made from the pipeline's settings, and what they say made fit to be shown.

Owns: the settings that all clients have in common, and that no value of the environment or of a setting is shown. Must
not know: what a client is used for. Its neighbours are ``log``, ``reader`` and the Kafka sink.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
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


# What no broker and no time will mend: settings and rights.
_PERMANENT = (
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
# A handshake is also broken off by a broker that is going down, and a login by a token server that is away.
_TLS_CODES = (KafkaError._SSL, KafkaError._TRANSPORT)  # librdkafka (2.16) has most of them as the latter
_TLS_REFUSED = re.compile(
    r"certificate|unknown ca|wrong version|unsupported protocol|no shared cipher|handshake failure", re.I
)
_SASL_PASSING = re.compile(r"transport failure|timed out|disconnect|token", re.I)
_ACLS = "kafka-acls.sh --add --allow-principal User:NAME"

Answer = TypeVar("Answer")
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


def is_permanent(error: KafkaError) -> bool:
    """Whether it stays until somebody changes settings or rights. Anything else may pass, and is tried again."""
    if error.code() in _TLS_CODES:
        return _TLS_REFUSED.search(error.str()) is not None
    if error.code() == KafkaError._AUTHENTICATION:
        return _SASL_PASSING.search(error.str()) is None
    return error.code() in _PERMANENT


def of_the_group(error: KafkaError | None) -> bool:
    """librdkafka looks for the coordinator of its group even if partitions are only assigned. A user without a right to
    the group gets this error among the records, which come all the same."""
    return error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def words(error: KafkaError) -> str:
    """What it says, without the client's own bookkeeping."""
    return re.sub(r" \(after \d+ms in state \w+.*\)$", "", error.str())


def first_permanent(complaints: Iterable[KafkaError]) -> KafkaError | None:
    """Of what a client's connections complained of (its ``error_cb``). A request over them only says that it timed out,
    after as long as it may take."""
    return next((error for error in list(complaints) if is_permanent(error)), None)


def grant(
    error: KafkaError,
    key: str = "source.kafka",
    *,
    topics: Collection[str] = (),
    rights: Iterable[str] = ("Read", "Describe"),
    group: str = "GROUP",
    transactional_ids: str = "PREFIX",
) -> str:
    """What ends a permanent error. ``key``: where the file has the client's settings. ``rights``: what is
    done to the topics."""
    match error.code():
        case KafkaError._SSL | KafkaError._TRANSPORT:
            return (
                f"Check security.protocol and the ssl.* settings in {key}: ssl.ca.location must hold the CA that "
                "signed the brokers' certificates."
            )
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            words = [
                *(f"--operation {right}" for right in rights),
                *(f"--topic {name}" for name in topics or ["TOPIC"]),
            ]
            return f"Grant the user its topics: {_ACLS} {' '.join(words)}"
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            return f"Grant the user the consumer group: {_ACLS} --operation Read --group {group}"
        case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return (
                f"Grant the user its transactional ids: {_ACLS} --operation Write --operation Describe "
                f"--resource-pattern-type prefixed --transactional-id {transactional_ids}"
            )
        case KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            return f"Grant the user the cluster: {_ACLS} --operation IdempotentWrite --cluster"
        case _:
            return f"Check security.protocol and the sasl.* settings in {key}: mechanism, user and password."


def in_time(timeout_s: float, call: Callable[[], Answer], watch: Callable[[], None] = lambda: None) -> Answer:
    """The call's answer, or the error that it timed out. Meanwhile ``watch`` is called now and then, and may raise.

    ``send_offsets_to_transaction`` of librdkafka (2.16) does not keep the time-out that it is given: while the
    coordinator of the group is dead it waits, however long that is. It is then left to itself, in a thread of its own.
    """
    ended: Future[Answer] = Future()

    def attempt() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            ended.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait([ended], max(0.0, min(_SHORT_S, deadline - time.monotonic()))).done:
        watch()
        if time.monotonic() >= deadline:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return ended.result()


def unless_refused(
    one: AdminClient | client.Producer, complaints: Iterable[KafkaError], timeout_s: float, call: Callable[[], Answer]
) -> Answer:
    """The answer of a call that waits for this client; or, at once, what its connections complain of if it stays so.
    ``complaints`` is where its ``error_cb`` puts them."""

    def watch() -> None:
        one.poll(0)
        if (complaint := first_permanent(complaints)) is not None:
            raise KafkaException(complaint)

    return in_time(timeout_s, call, watch)


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


# Values of settings that hide nothing, and that Kafka's messages are full of.
_PUBLIC = {"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL", "PLAIN", "GSSAPI", "OAUTHBEARER", "TRUE", "FALSE", "NONE"}
_PUBLIC |= {"SCRAM-SHA-256", "SCRAM-SHA-512", "HTTPS", "DEFAULT", "OIDC", "ALL", "READ_COMMITTED", "EARLIEST", "LATEST"}


def strike(values: Iterable[str], text: str) -> str:
    """The text with every value that may be a secret, and every word that stands in one, struck out."""
    known = sorted((value for value in values if value and value.upper() not in _PUBLIC), key=len, reverse=True)
    for value in known:
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    hide = re.compile(r"[^\s\"'`:,=]{3,}")
    return hide.sub(lambda word: "***" if any(word[0] in value for value in known) else word[0], text)
