"""Which of Kafka's errors stay, so that trying again is for nothing, and what ends them."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from avow.errors import ConfigError, SourceError
from avow.kafka import connect
from avow.kafka.connect import Connection, RecentErrors, first_permanent, is_permanent
from avow.kafka.log import Log
from avow.settings import Source

# Signed by nobody that anyone knows, valid for a hundred years.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg9LK8L4ZMt82VcNuO
40KyYt+rswn4MBleiN8GGDUBw0WhRANCAARFRuFkOSbrPIMaVu4VvOLIhRNWofnR
hsuG8Lfas9HyBSE1k05AU53v+cwgZ3we0D8TPC3/JqG6U54W0P/p1reL
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUCk+C7GzLaLKBswNO4hYtXQFPZY8wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTExODAzMzg0NFoYDzIxMjYxMDI1
MDMzODQ0WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARFRuFkOSbrPIMaVu4VvOLIhRNWofnRhsuG8Lfas9HyBSE1k05AU53v
+cwgZ3we0D8TPC3/JqG6U54W0P/p1reLo1MwUTAdBgNVHQ4EFgQUqvZm4dnmZv7f
2W//3rt4uowIENEwHwYDVR0jBBgwFoAUqvZm4dnmZv7f2W//3rt4uowIENEwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEAzR1SPLw20xlHf2JvSoUL
bgFJvoJQBwRrfXwFCG+gDXICIQCDz8yJgVmpts5NxxIJ/5zcubTewjZZ/8PuMqyi
RKQmbg==
-----END CERTIFICATE-----
"""


@pytest.fixture
def unknown_ca(tmp_path: Path) -> Iterator[str]:
    """The address of a server with that certificate."""
    (tmp_path / "pem").write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    one, _ = server.accept()
                    with one, suppress(OSError):
                        context.wrap_socket(one, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_unknown_ca_is_told_at_once(unknown_ca: str) -> None:
    source = Source.model_validate({"brokers": unknown_ca, "topics": ["t"], "kafka": {"security.protocol": "ssl"}})
    started = time.monotonic()
    with (
        Log(source, "g", timeout_s=60) as log,
        pytest.raises(ConfigError, match="certificate verify failed") as refused,
    ):
        log.partitions()
    assert time.monotonic() - started < 20, "not after the time-out"
    assert "ssl.ca.location" in refused.value.advice


def test_a_broker_that_is_away_may_come_back() -> None:
    source = Source.model_validate({"brokers": "127.0.0.1:1", "topics": ["t"]})
    with Log(source, "g", timeout_s=1) as log, pytest.raises(SourceError):
        log.partitions()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KafkaError._AUTHENTICATION, "SASL authentication error: Authentication failed: Invalid username or password"),
        (KafkaError._AUTHENTICATION, "Unsupported SASL mechanism: broker's supported mechanisms: PLAIN"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "Broker: Group authorization failed"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "Broker: Transactional Id authorization failed"),
        (KafkaError._SSL, "SSL handshake failed: broker certificate could not be verified"),
        (KafkaError._TRANSPORT, "error:0A00010B:SSL routines::wrong version number"),
    ],
)
def test_what_stays(code: int, words: str) -> None:
    error = KafkaError(code, words)
    assert is_permanent(error)
    passing = KafkaError(KafkaError._ALL_BROKERS_DOWN)
    assert first_permanent([passing, error]) is error
    assert Connection("").grant(error)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KafkaError._TRANSPORT, "Connect to ipv4#127.0.0.1:1 failed: Connection refused"),
        (KafkaError._SSL, "SSL handshake failed: Disconnected"),
        (KafkaError._AUTHENTICATION, "SaslHandshake request failed: Local: Broker transport failure"),
        (KafkaError._AUTHENTICATION, "Failed to acquire SASL OAUTHBEARER token: timed out"),
        (KafkaError.NOT_COORDINATOR, "Broker: Not coordinator"),
    ],
)
def test_what_passes(code: int, words: str) -> None:
    assert not is_permanent(KafkaError(code, words))


def test_an_error_that_has_passed_ends_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are kept from task to task: a login that failed once would end a run hours later."""
    reported = RecentErrors()
    reported.append(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED))
    assert first_permanent(reported) is not None
    monkeypatch.setattr(connect, "REPORTED_S", -1.0)
    assert first_permanent(reported) is None
