"""One broker that checks who may do what: its own listener is the administrator's, another one is SASL_SSL, with SCRAM
and a certificate of a CA of its own.

Where the question is which rights a client needs, the shared cluster cannot answer it: it permits everything.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from avow.errors import SourceError
from avow.kafka import metadata
from avow.local.broker import Broker, kafka_uuid
from avow.local.cluster import PortPicker

USER, PASSWORD = "pipe", "not-a-secret-here"
MECHANISM = "SCRAM-SHA-512"


class Authority:
    """A certificate authority, made on the spot."""

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def server_pem(self) -> bytes:
        """Key and certificate of a server at 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = self._signed(name, key, address).public_bytes(Encoding.PEM)
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate + self.pem

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(extension, critical=True)
            .sign(self._key, hashes.SHA256())
        )


class Authorizing(Broker):
    """A single node. Its own listener permits everything; the guarded one, what was granted to the user."""

    def __init__(self, folder: Path) -> None:
        ports = PortPicker()
        super().__init__(1, folder, ports.free(), {1: ports.free()})
        self.guarded = ports.free()
        self.ca_file = folder / "ca.pem"
        self._keystore = folder / "broker.pem"

    def prepare(self) -> None:
        super().prepare()
        authority = Authority("tests")
        self.ca_file.write_bytes(authority.pem)
        self._keystore.write_bytes(authority.server_pem())

    @property
    def bootstrap(self) -> str:
        """For the user."""
        return f"127.0.0.1:{self.guarded}"

    def settings(self) -> dict[str, object]:
        known = super().settings()
        return known | {
            "listeners": f"{known['listeners']},GUARDED://{self.bootstrap}",
            "advertised.listeners": f"{known['advertised.listeners']},GUARDED://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GUARDED:SASL_SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self._keystore,
            "sasl.enabled.mechanisms": MECHANISM,
            f"listener.name.guarded.{MECHANISM.lower()}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.num.partitions": 1,
        }

    def login(self, password: str = PASSWORD) -> dict[str, str]:
        """The settings of the one user."""
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(self.ca_file),
            "sasl.mechanism": MECHANISM,
            "sasl.username": USER,
            "sasl.password": password,
        }

    def add_user(self) -> None:
        client = metadata.admin(self.address)
        credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(USER, credentials, PASSWORD.encode())
        for done in client.alter_user_scram_credentials([wanted]).values():
            done.result(30)

    def allow(
        self,
        kind: ResourceType,
        name: str,
        *operations: AclOperation,
        pattern: ResourcePatternType = ResourcePatternType.LITERAL,
    ) -> None:
        """The user may do this from now on."""
        bindings = [
            AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, AclPermissionType.ALLOW)
            for operation in operations
        ]
        client = metadata.admin(self.address)  # not let go of before the answers are there
        for done in client.create_acls(bindings).values():
            done.result(30)


@contextmanager
def authorizing(folder: Path) -> Iterator[Authorizing]:
    """The broker, up until the end of the block."""
    broker = Authorizing(folder)
    broker.prepare()
    broker.format(kafka_uuid())
    broker.start()
    try:
        client = metadata.admin(broker.address)
        deadline = time.monotonic() + 60
        while True:
            broker.check_running()
            try:
                metadata.view(client, timeout_s=1)
                break
            except SourceError:
                if time.monotonic() > deadline:
                    raise
        broker.add_user()
        yield broker
    finally:
        broker.stop()
