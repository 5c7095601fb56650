"""Connections to Kafka: clients made from the user's settings, and librdkafka's errors translated into avow's.

Owns: the settings that all clients share, which errors are permanent, and that no message shows a value of the
environment or of a client setting. Must not know: what a client is used for. Its neighbours are ``admin``, ``log``,
``reader``, ``group`` and the Kafka sink.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from avow.errors import AvowError, ConfigError, SinkError, SinkUnavailable, SourceError
from avow.kafka.metadata import QUIET
from avow.settings import Source, unwrap_secrets

REPORTED_S = 60.0  # librdkafka reports an error that stays every 30 s
_SHORT_S = 0.1  # from 0.2 on, confluent-kafka makes several of one wait

# What no broker and no time will change: settings and rights.
_PERMANENT = (
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
# The broker says why the request itself cannot be fulfilled; retrying does not help. With what does, where we know.
_REFUSED = {
    KafkaError.INVALID_CONFIG: "",
    KafkaError.INVALID_PARTITIONS: "",
    KafkaError.INVALID_REPLICATION_FACTOR: "",
    KafkaError.POLICY_VIOLATION: "",
    KafkaError.TOPIC_EXCEPTION: "",  # a name that no topic may have
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "The brokers' transaction.max.timeout.ms is lower: lower "
    "transaction.timeout.ms in the client's settings.",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "The ledger needs about 400 bytes and 24 for each output topic: raise the "
    "brokers' offset.metadata.max.bytes.",
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: "The cluster does not support transactions: upgrade it.",
}
_ADVICE = {
    KafkaError.NOT_ENOUGH_REPLICAS: "Too few replicas of the topic are in sync: check the brokers.",
    KafkaError.UNKNOWN_MEMBER_ID: "A consumer has joined the pipeline's consumer group: stop that consumer.",
}
_CHECK_TOPICS = "Check that the topics exist: one may have just been deleted."
_ADVICE |= dict.fromkeys((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT), _CHECK_TOPICS)

# Of a broker that is away, or whose work another one is about to take over.
BROKER_AWAY = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}
# Of brokers and replicas that are away, whatever is sent to them.
_UNAVAILABLE = BROKER_AWAY | {
    KafkaError._RESOLVE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
}

# A handshake is also broken off by a broker that is going down, and a login by a token server that is away.
_TLS_CODES = (KafkaError._SSL, KafkaError._TRANSPORT)  # librdkafka (2.16) has most of them as the latter
_TLS_REFUSED = re.compile(
    r"certificate|unknown ca|wrong version|unsupported protocol|no shared cipher|handshake failure", re.I
)
_SASL_PASSING = re.compile(r"transport failure|timed out|disconnect|token", re.I)
_ACLS = "kafka-acls.sh --add --allow-principal User:NAME"

Answer = TypeVar("Answer")
Client = TypeVar("Client", AdminClient, client.Consumer, client.Producer)


@dataclass(frozen=True, slots=True)
class Connection:
    """A cluster, the user's client settings for it, and how messages speak of them."""

    bootstrap_servers: str
    config: Mapping[str, str] = field(default_factory=dict)  # as librdkafka names them
    shown: str = ""  # bootstrap_servers as the user wrote them; empty: they are no secret
    key: str = "source.kafka"  # where the user writes the config
    error: type[AvowError] = SourceError  # for a failure that may pass
    # For the advice on rights that are missing:
    topics: Collection[str] = ()
    rights: Collection[str] = ("Read", "Describe")
    group: str = "GROUP"
    transactional_ids: str = "PREFIX"

    @classmethod
    def of(cls, source: Source, group: str = "GROUP", *, key: str = "source.kafka") -> Connection:
        shown, topics = source.shown("brokers"), source.topics
        return cls(source.brokers, unwrap_secrets(source.kafka), shown, key, topics=topics, group=group)

    def __str__(self) -> str:
        return self.shown or self.bootstrap_servers

    @property
    def settings(self) -> dict[str, Any]:
        """What every client of the cluster has, the user's own settings last."""
        settings: dict[str, Any] = {"bootstrap.servers": self.bootstrap_servers}
        if not any(name.startswith("reconnect.backoff.") for name in self.config):
            # Reconnects soon after a refused connection: librdkafka's own back-off grows to ten seconds.
            settings["reconnect.backoff.max.ms"] = 250
        return {**settings, **self.config}

    def make_client(
        self, kind: type[Client], own: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
    ) -> Client:
        """A client with the user's settings, over these ``defaults`` and below our ``own``. A setting of the user's
        that librdkafka refuses is a ``ConfigError`` that names it."""
        try:
            return kind({**(defaults or {}), **self.settings, **own}, logger=QUIET)
        except (KafkaException, TypeError, ValueError, AttributeError) as error:
            text = _complaint(error)
            keys = [f"{self.key}.{name}" for name in _culprits(self.config, text)] or [self.key]
            # Not "from error": librdkafka quotes values.
            raise ConfigError(
                f"{', '.join(keys)}: librdkafka, Kafka's C client, refused it: {redact(self.config.values(), text)}",
                advice="Use librdkafka's setting names; some settings of the Java client do not exist there.",
            ) from None

    def redact(self, text: str) -> str:
        """Without any value that a client setting or the environment gave."""
        secrets = list(self.config.values())
        if str(self) != self.bootstrap_servers:
            for broker in self.bootstrap_servers.split(","):
                secrets += [broker, broker.rpartition(":")[0]]
        return redact(secrets, text)

    def translate(self, action: str, error: KafkaError, advice: str = "") -> AvowError:
        """librdkafka's error as ours. ``what`` was tried, as a verb: "create topic t"."""
        reason = self.redact(words(error))
        if is_permanent(error):
            return ConfigError(f"Kafka at {self} refused to {action}: {reason}", advice=self.grant(error))
        if error.code() in _REFUSED:
            return ConfigError(f"Kafka at {self} refused to {action}: {reason}", advice=_REFUSED[error.code()])
        advice = _ADVICE.get(error.code(), "") or advice or self.check_brokers
        kind = SinkUnavailable if self.error is SinkError and error.code() in _UNAVAILABLE else self.error
        return kind(f"Kafka at {self} could not {action}: {reason}", advice=advice)

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self.translate(action, error.args[0]) from None
        except TimeoutError:
            raise self.translate(action, KafkaError(KafkaError._TIMED_OUT)) from None

    @property
    def check_brokers(self) -> str:
        return (
            f"Check that the cluster is up, and that {self.address} and the security settings in {self.key} are right."
        )

    @property
    def address(self) -> str:
        return "source.brokers" if self.key == "source.kafka" else "the address"  # a sink's may be the source's

    def grant(self, error: KafkaError) -> str:
        """What ends a permanent error."""
        match error.code():
            case KafkaError._SSL | KafkaError._TRANSPORT:
                return (
                    f"Check security.protocol and the ssl.* settings in {self.key}: ssl.ca.location must hold the CA "
                    "that signed the brokers' certificates."
                )
            case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                operations = [f"--operation {right}" for right in self.rights]
                topics = [f"--topic {name}" for name in self.topics or ["TOPIC"]]
                return f"Grant the user access to the topics: {_ACLS} {' '.join([*operations, *topics])}"
            case KafkaError.GROUP_AUTHORIZATION_FAILED:
                return f"Grant the user access to the consumer group: {_ACLS} --operation Read --group {self.group}"
            case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                return (
                    f"Grant the user access to the transactional ids: {_ACLS} --operation Write --operation Describe "
                    f"--resource-pattern-type prefixed --transactional-id {self.transactional_ids}"
                )
            case KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                return f"Grant the user access to the cluster: {_ACLS} --operation IdempotentWrite --cluster"
            case _:
                return f"Check security.protocol and the sasl.* settings in {self.key}: mechanism, user and password."


def is_permanent(error: KafkaError) -> bool:
    """Whether it stays until somebody changes settings or rights. Anything else may pass, and is retried."""
    if error.code() in _TLS_CODES:
        return _TLS_REFUSED.search(error.str()) is not None
    if error.code() == KafkaError._AUTHENTICATION:
        return _SASL_PASSING.search(error.str()) is None
    return error.code() in _PERMANENT


def is_refused(error: KafkaError) -> bool:
    """Whether the broker refuses the request itself: a configuration, a name, a number."""
    return error.code() in _REFUSED


def of_the_group(error: KafkaError | None) -> bool:
    """librdkafka looks for the coordinator of its group even if partitions are only assigned. A user without a right to
    the group gets this error among the records, which come all the same."""
    return error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def words(error: KafkaError) -> str:
    """What it says, without the client's own bookkeeping."""
    return re.sub(r" \(after \d+ms in state \w+.*\)$", "", error.str())


class RecentErrors:
    """What a client's connections report (its ``error_cb``), while that may still be so: an error that has passed is
    not the reason of a later silence."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, KafkaError]] = deque(maxlen=100)

    def append(self, error: KafkaError) -> None:
        self._errors.append((time.monotonic(), error))

    def __iter__(self) -> Iterator[KafkaError]:
        since = time.monotonic() - REPORTED_S
        return (error for reported_at, error in list(self._errors) if reported_at >= since)


def first_permanent(errors: Iterable[KafkaError]) -> KafkaError | None:
    """Of what a client's connections reported (its ``error_cb``). A request over them only says that it timed out,
    after as long as it may take."""
    return next((error for error in list(errors) if is_permanent(error)), None)


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
    producer: client.Producer, errors: Iterable[KafkaError], timeout_s: float, call: Callable[[], Answer]
) -> Answer:
    """The answer of a call that waits for this producer; or, at once, a permanent error of its connections.
    ``errors`` is where its ``error_cb`` puts them."""

    def watch() -> None:
        producer.poll(0)
        if (error := first_permanent(errors)) is not None:
            raise KafkaException(error)

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


def _culprits(config: Mapping[str, str], text: str) -> list[str]:
    named = [name for name in config if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)]
    return named or [name for name, value in config.items() if _complains(name, value, text)]


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


def redact(values: Iterable[str], text: str) -> str:
    """The text without any value that may be a secret, and any word that is part of one."""
    known = sorted((value for value in values if value and value.upper() not in _PUBLIC), key=len, reverse=True)
    for value in known:
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    hide = re.compile(r"[^\s\"'`:,=]{3,}")
    return hide.sub(lambda word: "***" if any(word[0] in value for value in known) else word[0], text)
