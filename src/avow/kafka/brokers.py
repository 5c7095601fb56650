"""Broker queries that librdkafka does not have: disk use, and the producers of open transactions.

It is asked through kafka-python's admin client, each broker by itself, so that one that is away takes only its own part
of the answer with it. That client's settings have other names than librdkafka's; where the user's have no counterpart
there (Kerberos, OAuth, a key given as text), a ``SourceError`` says which. These answers are for people to look at:
nothing that is promised depends on them.

Owns: these answers, and that client. Must not know: pipelines, sinks. Its neighbour is ``topics``.
"""

from __future__ import annotations

import logging
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from kafka import KafkaAdminClient
from kafka import TopicPartition as Partition
from kafka.admin import TransactionState
from kafka.errors import KafkaError

from avow.errors import SourceError
from avow.kafka.connect import redact
from avow.kafka.log import TopicPartition
from avow.settings import Source, unwrap_secrets

logging.getLogger("kafka").addHandler(logging.NullHandler())
logging.getLogger("kafka").propagate = False

Answer = TypeVar("Answer")

AT_ONCE = 8  # brokers that are asked side by side

_SASL = {
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_TLS = {
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "enable.ssl.certificate.verification",
}


@dataclass(frozen=True, slots=True)
class Disk:
    """One broker's log folders."""

    broker: int
    version: str  # of Kafka, derived from its API versions: 4.3
    used_bytes: int | None  # by replicas; None, as the next two: the user may not describe the cluster
    total_bytes: int | None  # of the file systems; None also: a broker before Kafka 3.3
    usable_bytes: int | None
    offline: tuple[str, ...]  # folders that failed
    sizes: dict[TopicPartition, int]  # of its replicas


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a transaction open in a partition."""

    producer_id: int
    first_offset: int
    last_ms: int  # of its last record there
    transactional_id: str  # empty: no coordinator has it, so nothing will end it
    state: str  # as its coordinator has it; empty with the id
    timeout_ms: int | None

    def describe(self) -> str:
        """As a phrase for a sentence."""
        if not self.transactional_id:
            return (
                f"by producer {self.producer_id}, unknown to every transaction coordinator: kafka-transactions.sh "
                "can abort it"
            )
        ends = "" if self.timeout_ms is None else f"; Kafka aborts it after {self.timeout_ms / 1000:g} s"
        return f"by transactional.id {self.transactional_id} (producer {self.producer_id}), {self.state}{ends}"


class Brokers:
    """A cluster's brokers. Several threads may ask. Close it, or use it as a context manager."""

    def __init__(self, source: Source, *, timeout_s: float = 10) -> None:
        self._brokers = source.shown("brokers")
        options = unwrap_secrets(source.kafka)
        self._secrets = [source.brokers, *options.values()]
        try:
            self._admin: Any = KafkaAdminClient(  # type: ignore[no-untyped-call]
                bootstrap_servers=source.brokers.split(","),
                client_id=options.get("client.id", "avow"),
                request_timeout_ms=int(timeout_s * 1000),
                bootstrap_timeout_ms=int(timeout_s * 1000),
                reconnect_backoff_max_ms=250,
                **client_settings(options),
            )
        except (KafkaError, OSError, ValueError) as error:
            raise self._error("describe the log folders", error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._admin.close()

    def disks(self, topics: Iterable[str] | None = None) -> dict[int, Disk]:
        """Of every broker that answers: by its number. With ``topics``, the sizes of these alone."""
        wanted = None if topics is None else list(topics)
        return self._each("describe the log folders", lambda broker: self._disk(broker, wanted))

    def _disk(self, broker: int, topics: list[str] | None) -> Disk:
        (response,) = self._admin.describe_log_dirs(topics, brokers=[broker])
        folders = response["log_dirs"]
        version = self._admin.get_broker_version_data(broker).broker_version_str
        if not folders:  # every broker has one; kafka-python drops the error with the reason
            return Disk(broker, version, None, None, None, (), {})
        sizes: dict[TopicPartition, int] = defaultdict(int)
        for folder in folders:
            for topic in folder["topics"]:
                for part in topic["partitions"]:
                    # A replica that is being moved is in two folders.
                    sizes[TopicPartition(topic["name"], part["partition_index"])] += part["partition_size"]
        return Disk(
            broker=broker,
            version=version,
            used_bytes=sum(sizes.values()),
            total_bytes=_whole([folder.get("total_bytes") for folder in folders]),
            usable_bytes=_whole([folder.get("usable_bytes") for folder in folders]),
            offline=tuple(folder["log_dir"] for folder in folders if folder["error_code"]),
            sizes=dict(sizes),
        )

    def holders(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, list[Holder]]:
        """Who has transactions open in these partitions, the oldest first. Partitions without any are left out."""
        partitions_ = [Partition(tp.topic, tp.partition) for tp in partitions]
        action = "describe open transactions"
        states = self._request(action, lambda: self._admin.describe_producers(partitions_))
        opened = {
            TopicPartition(tp.topic, tp.partition): [
                producer for producer in state.active_producers if producer.current_transaction_start_offset >= 0
            ]
            for tp, state in states.items()
        }
        ids = list({producer.producer_id for producers in opened.values() for producer in producers})
        if not ids:
            return {}
        listed = self._each(
            action, lambda broker: self._admin.list_transactions([broker], producer_id_filters=ids)[broker]
        )
        named = {
            producer.producer_id: producer.transactional_id for producers in listed.values() for producer in producers
        }
        described = self._request(action, lambda: self._admin.describe_transactions(named.values()))

        def holder(tp: TopicPartition, producer: Any) -> Holder:
            known = described.get(named.get(producer.producer_id, ""))
            begun = producer.producer_id, producer.current_transaction_start_offset, producer.last_timestamp
            if known is None or Partition(tp.topic, tp.partition) not in known.topic_partitions:
                return Holder(*begun, transactional_id="", state="", timeout_ms=None)
            state = _STATES.get(known.state, known.state.value)
            return Holder(*begun, named[producer.producer_id], state, known.transaction_timeout_ms)

        return {
            tp: sorted((holder(tp, producer) for producer in producers), key=lambda producer: producer.first_offset)
            for tp, producers in opened.items()
            if producers
        }

    def _each(self, action: str, ask: Callable[[int], Answer]) -> dict[int, Answer]:
        """Every live broker's answer. One that gives none is left out; if none does, it is an error."""
        numbers = [broker["broker_id"] for broker in self._request(action, self._admin.describe_cluster)["brokers"]]
        answers: dict[int, Answer] = {}
        errors: list[Exception] = []

        def answer(broker: int) -> None:
            try:
                answers[broker] = ask(broker)
            except (KafkaError, OSError) as error:
                errors.append(error)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(answer, numbers))
        if errors and not answers:
            raise self._error(action, errors[0])
        return dict(sorted(answers.items()))

    def _request(self, action: str, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except (KafkaError, OSError) as error:
            raise self._error(action, error) from None

    def _error(self, action: str, error: Exception) -> SourceError:
        text = redact(self._secrets, str(error) or type(error).__name__)
        return SourceError(
            f"Kafka at {self._brokers} could not {action}: {text}",
            advice="Check that the cluster is up, and that the user may describe the cluster and its topics.",
        )


_STATES = {
    TransactionState.ONGOING: "open",
    TransactionState.PREPARE_COMMIT: "being committed",
    TransactionState.PREPARE_ABORT: "being aborted",
    TransactionState.PREPARE_EPOCH_FENCE: "being fenced",
}


def _whole(parts: list[int | None]) -> int | None:
    """The sum, if every folder's is known: brokers before 3.3 say nothing, or -1."""
    known = [size for size in parts if size is not None and size >= 0]
    return sum(known) if len(known) == len(parts) else None


def client_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """The user's settings of librdkafka, those that decide who may connect, as kafka-python spells them."""
    protocol = options.get("security.protocol", "plaintext").upper()
    settings: dict[str, Any] = {"security_protocol": protocol}
    if "SASL" in protocol:
        settings |= {_SASL[name]: value for name, value in options.items() if name in _SASL}
        mechanism = settings.get("sasl_mechanism", "GSSAPI")  # librdkafka's default
        strange = [name for name in options if name.startswith("sasl.") and name not in _SASL]
        if mechanism not in _MECHANISMS or strange:
            raise _untranslated(strange or [f"sasl.mechanism {mechanism}"])
    if "SSL" in protocol:
        settings["ssl_context"] = _tls(options)
    return settings


def _tls(options: Mapping[str, str]) -> ssl.SSLContext:
    strange = [name for name in options if name.startswith(("ssl.", "enable.ssl.")) and name not in _TLS]
    if strange:
        raise _untranslated(strange)
    trusted = options.get("ssl.ca.location", "")
    context = ssl.create_default_context(
        cafile=trusted if trusted and Path(trusted).is_file() else None,
        capath=trusted if trusted and Path(trusted).is_dir() else None,
        cadata=options.get("ssl.ca.pem"),
    )
    verified = options.get("enable.ssl.certificate.verification", "true") == "true"
    if not verified or options.get("ssl.endpoint.identification.algorithm", "https") == "none":
        context.check_hostname = False
    if not verified:
        context.verify_mode = ssl.CERT_NONE
    if certificate := options.get("ssl.certificate.location"):
        context.load_cert_chain(certificate, options.get("ssl.key.location"), options.get("ssl.key.password"))
    return context


def _untranslated(names: list[str]) -> SourceError:
    return SourceError(
        f"kafka-python, the client for these requests, does not support {', '.join(names)} of source.kafka",
        advice="Use Kafka's own tools: kafka-log-dirs.sh, kafka-transactions.sh.",
    )


def try_query(source: Source, ask: Callable[[Brokers], Answer], *, timeout_s: float = 10) -> Answer | None:
    """An optional answer: None if the cluster does not give it."""
    with suppress(SourceError), Brokers(source, timeout_s=timeout_s) as brokers:
        return ask(brokers)
    return None
