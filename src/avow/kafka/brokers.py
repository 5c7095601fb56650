"""What brokers know and librdkafka has no request for: how much is on their disks, and who holds a transaction open.

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
from avow.kafka.connect import strike
from avow.kafka.log import TopicPartition
from avow.settings import Source, revealed

logging.getLogger("kafka").addHandler(logging.NullHandler())
logging.getLogger("kafka").propagate = False

Answer = TypeVar("Answer")

AT_ONCE = 8  # brokers that are asked side by side

_SASL = {"sasl.mechanism": "sasl_mechanism", "sasl.mechanisms": "sasl_mechanism"} | {
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
    version: str  # of Kafka, as far as its requests tell: 4.3
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
    transactional_id: str  # empty: no coordinator knows of it, so that nobody is going to end it
    state: str  # as its coordinator has it; empty with the id
    timeout_ms: int | None

    def says(self) -> str:
        """In words."""
        if not self.transactional_id:
            return f"by producer {self.producer_id}, of whom no coordinator knows: kafka-transactions.sh aborts it"
        ends = "" if self.timeout_ms is None else f"; Kafka aborts it after {self.timeout_ms / 1000:g} s"
        return f"by transactional.id {self.transactional_id} (producer {self.producer_id}), {self.state}{ends}"


class Brokers:
    """A cluster's brokers. Several threads may ask. Close it, or use it as a context manager."""

    def __init__(self, source: Source, *, timeout_s: float = 10) -> None:
        self._brokers = source.shown("brokers")
        given = revealed(source.kafka)
        self._secrets = [source.brokers, *given.values()]
        try:
            self._admin: Any = KafkaAdminClient(  # type: ignore[no-untyped-call]
                bootstrap_servers=source.brokers.split(","),
                client_id=given.get("client.id", "avow"),
                request_timeout_ms=int(timeout_s * 1000),
                bootstrap_timeout_ms=int(timeout_s * 1000),
                reconnect_backoff_max_ms=250,
                **client_settings(given),
            )
        except (KafkaError, OSError, ValueError) as error:
            raise self._error("for what is on their disks", error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._admin.close()

    def disks(self, topics: Iterable[str] | None = None) -> dict[int, Disk]:
        """Of every broker that answers: by its number. With ``topics``, the sizes of these alone."""
        wanted = None if topics is None else list(topics)
        return self._each("for what is on their disks", lambda broker: self._disk(broker, wanted))

    def _disk(self, broker: int, topics: list[str] | None) -> Disk:
        (told,) = self._admin.describe_log_dirs(topics, brokers=[broker])
        folders = told["log_dirs"]
        known = self._admin.get_broker_version_data(broker).broker_version_str
        if not folders:  # every broker has one; kafka-python drops the error that says why none is told
            return Disk(broker, known, None, None, None, (), {})
        sizes: dict[TopicPartition, int] = defaultdict(int)
        for folder in folders:
            for topic in folder["topics"]:
                for part in topic["partitions"]:
                    # A replica that is being moved is in two folders.
                    sizes[TopicPartition(topic["name"], part["partition_index"])] += part["partition_size"]
        return Disk(
            broker=broker,
            version=known,
            used_bytes=sum(sizes.values()),
            total_bytes=_whole(folder.get("total_bytes") for folder in folders),
            usable_bytes=_whole(folder.get("usable_bytes") for folder in folders),
            offline=tuple(folder["log_dir"] for folder in folders if folder["error_code"]),
            sizes=dict(sizes),
        )

    def holders(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, list[Holder]]:
        """Who has transactions open in these partitions, the oldest first. Partitions without any are left out."""
        asked = [Partition(where.topic, where.partition) for where in partitions]
        what = "who holds transactions open"
        found = self._asked(what, lambda: self._admin.describe_producers(asked))
        opened = {
            TopicPartition(where.topic, where.partition): [
                one for one in state.active_producers if one.current_transaction_start_offset >= 0
            ]
            for where, state in found.items()
        }
        numbers = {one.producer_id for some in opened.values() for one in some}
        if not numbers:
            return {}
        listed = self._each(
            what, lambda broker: self._admin.list_transactions([broker], producer_id_filters=list(numbers))[broker]
        )
        named = {one.producer_id: one.transactional_id for some in listed.values() for one in some}
        described = self._asked(what, lambda: self._admin.describe_transactions(named.values()))

        def holder(where: TopicPartition, one: Any) -> Holder:
            known = described.get(named.get(one.producer_id, ""))
            ours = known is not None and Partition(where.topic, where.partition) in known.topic_partitions
            return Holder(
                producer_id=one.producer_id,
                first_offset=one.current_transaction_start_offset,
                last_ms=one.last_timestamp,
                transactional_id=named[one.producer_id] if ours else "",
                state=_STATES.get(known.state, known.state.value) if known is not None and ours else "",
                timeout_ms=known.transaction_timeout_ms if known is not None and ours else None,
            )

        return {
            where: sorted((holder(where, one) for one in some), key=lambda one: one.first_offset)
            for where, some in opened.items()
            if some
        }

    def _each(self, what: str, ask: Callable[[int], Answer]) -> dict[int, Answer]:
        """Every live broker's answer. One that gives none is left out; if none does, it is an error."""
        numbers = [one["broker_id"] for one in self._asked(what, self._admin.describe_cluster)["brokers"]]
        found: dict[int, Answer] = {}
        errors: list[Exception] = []

        def one(broker: int) -> None:
            try:
                found[broker] = ask(broker)
            except (KafkaError, OSError) as error:
                errors.append(error)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, numbers))
        if errors and not found:
            raise self._error(what, errors[0])
        return dict(sorted(found.items()))

    def _asked(self, what: str, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except (KafkaError, OSError) as error:
            raise self._error(what, error) from None

    def _error(self, what: str, error: Exception) -> SourceError:
        text = strike(self._secrets, str(error) or type(error).__name__)
        return SourceError(
            f"Kafka at {self._brokers} was asked {what}, and did not say: {text}",
            advice="Check that the cluster is up, and that the user may describe the cluster and its topics.",
        )


_STATES = {
    TransactionState.ONGOING: "open",
    TransactionState.PREPARE_COMMIT: "being committed",
    TransactionState.PREPARE_ABORT: "being aborted",
    TransactionState.PREPARE_EPOCH_FENCE: "being fenced",
}


def _whole(parts: Iterable[int | None]) -> int | None:
    """The sum, if every folder's is known: brokers before 3.3 say nothing, or -1."""
    known = list(parts)
    return sum(one for one in known if one is not None) if all(one is not None and one >= 0 for one in known) else None


def client_settings(given: Mapping[str, str]) -> dict[str, Any]:
    """The user's settings of librdkafka, those that decide who may connect, as kafka-python spells them."""
    protocol = given.get("security.protocol", "plaintext").upper()
    settings: dict[str, Any] = {"security_protocol": protocol}
    if "SASL" in protocol:
        settings |= {_SASL[name]: value for name, value in given.items() if name in _SASL}
        mechanism = settings.get("sasl_mechanism", "GSSAPI")  # librdkafka's default
        strange = [name for name in given if name.startswith("sasl.") and name not in _SASL]
        if mechanism not in _MECHANISMS or strange:
            raise _untranslated(strange or [f"sasl.mechanism {mechanism}"])
    if "SSL" in protocol:
        settings["ssl_context"] = _tls(given)
    return settings


def _tls(given: Mapping[str, str]) -> ssl.SSLContext:
    strange = [name for name in given if name.startswith(("ssl.", "enable.ssl.")) and name not in _TLS]
    if strange:
        raise _untranslated(strange)
    trusted = given.get("ssl.ca.location", "")
    context = ssl.create_default_context(
        cafile=trusted if trusted and Path(trusted).is_file() else None,
        capath=trusted if trusted and Path(trusted).is_dir() else None,
        cadata=given.get("ssl.ca.pem"),
    )
    verified = given.get("enable.ssl.certificate.verification", "true") == "true"
    if not verified or given.get("ssl.endpoint.identification.algorithm", "https") == "none":
        context.check_hostname = False
    if not verified:
        context.verify_mode = ssl.CERT_NONE
    if certificate := given.get("ssl.certificate.location"):
        context.load_cert_chain(certificate, given.get("ssl.key.location"), given.get("ssl.key.password"))
    return context


def _untranslated(names: list[str]) -> SourceError:
    return SourceError(
        f"kafka-python, which is asked for this, has no counterpart of {', '.join(names)} in source.kafka",
        advice="Ask with Kafka's own tools: kafka-log-dirs.sh, kafka-transactions.sh.",
    )


def about(source: Source, ask: Callable[[Brokers], Answer], *, timeout_s: float = 10) -> Answer | None:
    """An answer that is nice to have: None where the cluster does not give it."""
    with suppress(SourceError), Brokers(source, timeout_s=timeout_s) as brokers:
        return ask(brokers)
    return None
