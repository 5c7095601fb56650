"""One broker that checks who may do what: its own listener is the administrator's, another asks for a password.

Where the question is which rights a client needs, the shared cluster cannot answer it: it permits everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from avow.errors import SourceError
from avow.kafka import metadata
from avow.local.broker import Broker, kafka_uuid
from avow.local.cluster import PortPicker

USER, PASSWORD = "pipe", "not-a-secret-here"


class Authorizing(Broker):
    """A single node. Whoever comes by its own listener may do everything; by the other, what was granted."""

    def __init__(self, folder: Path) -> None:
        ports = PortPicker()
        super().__init__(1, folder, ports.free(), {1: ports.free()})
        self.guarded = ports.free()

    @property
    def bootstrap(self) -> str:
        """For the user."""
        return f"127.0.0.1:{self.guarded}"

    def settings(self) -> dict[str, object]:
        known = super().settings()
        login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        return known | {
            "listeners": f"{known['listeners']},GUARDED://{self.bootstrap}",
            "advertised.listeners": f"{known['advertised.listeners']},GUARDED://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GUARDED:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": login,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.num.partitions": 1,
        }

    def login(self, password: str = PASSWORD) -> dict[str, str]:
        """The settings of the one user."""
        return {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": password,
        }

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
        yield broker
    finally:
        broker.stop()
