"""How the client that brokers are asked with gets the user's settings, and what is said of who holds a transaction."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from avow.dashboard.cluster import HANGING_S, ORPHAN_S, _hangs
from avow.errors import SourceError
from avow.kafka.brokers import Brokers, Holder, client_settings, try_query
from avow.settings import Source

NOBODYS = Holder(7, 100, 0, "", "", None)
SOMEBODYS = Holder(7, 100, 0, "my-app", "open", 60_000)


def test_settings_that_have_a_counterpart() -> None:
    assert client_settings({"fetch.max.bytes": "1000"}) == {"security_protocol": "PLAINTEXT"}
    given = {"security.protocol": "sasl_plaintext", "sasl.mechanisms": "SCRAM-SHA-256"}
    given |= {"sasl.username": "me", "sasl.password": "hunter2"}
    assert client_settings(given) == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "me",
        "sasl_plain_password": "hunter2",
    }


def test_tls_is_as_strict_as_declared() -> None:
    def context(**given: str) -> ssl.SSLContext:
        found = client_settings({"security.protocol": "SSL"} | {k.replace("_", "."): v for k, v in given.items()})
        assert isinstance(found["ssl_context"], ssl.SSLContext)
        return found["ssl_context"]

    assert (context().check_hostname, context().verify_mode) == (True, ssl.CERT_REQUIRED)
    assert not context(ssl_endpoint_identification_algorithm="none").check_hostname
    assert context(enable_ssl_certificate_verification="false").verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    "given",
    [
        {"security.protocol": "sasl_ssl"},  # Kerberos, unless said otherwise
        {"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER"},
        {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.oauthbearer.config": "hunter2"},
        {"security.protocol": "ssl", "ssl.key.pem": "hunter2"},
    ],
)
def test_settings_without_a_counterpart_are_named_and_not_shown(given: dict[str, str]) -> None:
    with pytest.raises(SourceError, match=r"does not support (sasl|ssl)\.") as caught:
        client_settings(given)
    assert "hunter2" not in str(caught.value)


def test_nobody_there() -> None:
    source = Source(brokers="127.0.0.1:1", topics_pattern=".*")
    with pytest.raises(SourceError, match=r"Kafka at 127\.0\.0\.1:1 could not describe"):
        Brokers(source, timeout_s=0.3)
    assert try_query(source, Brokers.disks, timeout_s=0.3) is None


def test_a_missing_certificate_is_an_answer_too(tmp_path: Path) -> None:
    kafka = {"security.protocol": "ssl", "ssl.certificate.location": str(tmp_path / "none.pem")}
    source = Source.model_validate({"brokers": "127.0.0.1:1", "topics_pattern": ".*", "kafka": kafka})
    assert try_query(source, Brokers.disks, timeout_s=0.3) is None


def test_who_holds_it_in_words() -> None:
    assert SOMEBODYS.describe() == "by transactional.id my-app (producer 7), open; Kafka aborts it after 60 s"
    assert "unknown to every transaction coordinator" in NOBODYS.describe()


@pytest.mark.parametrize(
    ("holder", "age_s", "hangs"),
    [
        (SOMEBODYS, 10 * HANGING_S, False),  # its coordinator ends it
        (NOBODYS, ORPHAN_S / 2, False),  # it may have ended just now
        (NOBODYS, 2 * ORPHAN_S, True),
        (None, HANGING_S / 2, False),
        (None, 2 * HANGING_S, True),
    ],
)
def test_what_hangs(holder: Holder | None, age_s: float, hangs: bool) -> None:
    assert _hangs(1_000_000, holder, 1_000_000 + age_s) is hangs
    assert not _hangs(None, holder, 1_000_000)
