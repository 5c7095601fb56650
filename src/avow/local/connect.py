"""A Kafka Connect worker with Debezium's connector for PostgreSQL, and Apicurio's converter into Avro: a real source of
change events, by pid.

It keeps its connectors and their positions in topics of the cluster, so a worker that was killed goes on where it was,
under the name that it has. Loopback only; one worker to a group.

Owns: the worker's settings, its REST interface, and what every connector here needs. Must not know: pipelines. It is
started on its own, and is no part of ``Cluster``; the database that it reads is ``Postgres`` with ``logical``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from zipfile import ZipFile

from avow.errors import LocalError
from avow.local import jars, java
from avow.local.broker import LOG4J
from avow.local.part import ClusterPart
from avow.local.postgres import Postgres
from avow.local.registry import API
from avow.retry import poll_until

READY_TIMEOUT_S = 90
REQUEST_TIMEOUT_S = 10
AVRO_CONVERTER = "io.apicurio.registry.utils.converter.AvroConverter"

# The worker is on this machine, whatever proxy the environment names for others.
_open = build_opener(ProxyHandler({})).open


class Connect(ClusterPart):
    """``bootstrap``: the cluster that it writes to. ``group``: its name there, and the prefix of its topics."""

    def __init__(self, folder: Path, port: int, bootstrap: str, group: str = "connect") -> None:
        super().__init__("connect", folder, port)
        self._bootstrap = bootstrap
        self._group = group
        self._config = folder / "worker.properties"
        self._log4j = folder / "log4j2.properties"
        self._plugins = folder / "plugins"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def command(self) -> list[str | Path]:
        # As for a broker: a small heap, and quick to start.
        jvm = ["-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dlog4j2.configurationFile={self._log4j}"]
        classpath = ":".join(map(str, jars.classpath("connect")))
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        return [java.find().path, *jvm, "-cp", classpath, main, self._config]

    def prepare(self) -> None:
        """Write the settings, and fetch what it needs (50 MB) if it is not there."""
        self._plugins.mkdir(parents=True, exist_ok=True)
        self._prepare_converter()
        self._log4j.write_text(LOG4J)
        self._config.write_text("".join(f"{key}={value}\n" for key, value in self.settings().items()))

    def _prepare_converter(self) -> None:
        """A folder of its jars, as Connect wants plugins, with the list of its classes that its authors left out."""
        folder = self._plugins / "converter"
        folder.mkdir(exist_ok=True)
        for jar in jars.unpacked("converter").glob("*.jar"):
            (folder / jar.name).unlink(missing_ok=True)
            (folder / jar.name).symlink_to(jar)
        with ZipFile(folder / "services.jar", "w") as services:
            services.writestr("META-INF/services/org.apache.kafka.connect.storage.Converter", AVRO_CONVERTER)

    def settings(self) -> dict[str, object]:
        converter = "org.apache.kafka.connect.json.JsonConverter"
        topics = {f"{name}.storage.topic": f"{self._group}-{name}" for name in ("config", "offset", "status")}
        one = {f"{name}.storage.partitions": 1 for name in ("offset", "status")}
        # As many copies as the brokers make of any topic.
        copies = {f"{name}.storage.replication.factor": -1 for name in ("config", "offset", "status")}
        return {
            "bootstrap.servers": self._bootstrap,
            "group.id": self._group,
            "listeners": self.url,
            "plugin.path": f"{jars.unpacked('debezium')},{self._plugins}",
            "plugin.discovery": "service_load",  # without a look into every class
            "key.converter": converter,
            "value.converter": converter,
            "offset.flush.interval.ms": 1000,
            # A worker that was killed is forgotten as soon as brokers allow it, and its tasks go to the next at once.
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1000,
            "scheduled.rebalance.max.delay.ms": 0,
            **topics,
            **one,
            **copies,
        }

    def await_ready(self) -> None:
        """Until it has read its topics and takes connectors."""

        def ready() -> bool:
            self.check_running()
            try:
                self._ask("/connectors")
            except OSError:
                return False
            return True

        if not poll_until(ready, READY_TIMEOUT_S):
            raise LocalError(f"connect is not ready after {READY_TIMEOUT_S} s", advice=f"See its log: {self.log}")

    def put(self, name: str, config: dict[str, str]) -> None:
        """Create a connector, or change its configuration."""

        def put() -> bool:
            try:
                self._ask(f"/connectors/{name}/config", config)
            except HTTPError as error:
                if error.code == 409:  # it is being rebalanced
                    return False
                said = error.read().decode(errors="replace")[:500]
                raise LocalError(f"connector {name} is refused: {said}", advice=f"See the log: {self.log}") from error
            return True

        if not poll_until(put, READY_TIMEOUT_S):
            raise LocalError(f"connect takes no connector after {READY_TIMEOUT_S} s", advice=f"See the log: {self.log}")

    def await_running(self, name: str) -> None:
        """Until the connector's tasks run."""

        def running() -> bool:
            self.check_running()
            try:
                tasks = self._ask(f"/connectors/{name}/status")["tasks"]
            except OSError:
                return False
            for task in tasks:
                if task["state"] == "FAILED":
                    raise LocalError(f"connector {name} failed: {task.get('trace', '').splitlines()[:3]}")
            return bool(tasks) and all(task["state"] == "RUNNING" for task in tasks)

        if not poll_until(running, READY_TIMEOUT_S):
            raise LocalError(f"{name} does not run after {READY_TIMEOUT_S} s", advice=f"See the log: {self.log}")

    def _ask(self, path: str, content: dict[str, str] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}{path}", data, headers, method="PUT" if data else "GET")
        with _open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)


def postgres_connector(source: Postgres, prefix: str, tables: str) -> dict[str, str]:
    """A connector's configuration. ``tables`` is what ``table.include.list`` takes; ``prefix`` begins the names of its
    topics, and is that of the slot and the publication."""
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": "127.0.0.1",
        "database.port": str(source.port),
        "database.user": "postgres",
        "database.password": "not asked for",
        "database.dbname": "postgres",
        "plugin.name": "pgoutput",
        "topic.prefix": prefix,
        "slot.name": prefix,
        "publication.name": prefix,
        "publication.autocreate.mode": "filtered",
        "table.include.list": tables,
    }


def avro_converters(registry: str) -> dict[str, str]:
    """What a connector's configuration needs for keys and values in Avro, behind ids as Confluent's API has them.
    ``registry``: the URL that clients take."""
    settings = {
        "": AVRO_CONVERTER,
        ".apicurio.registry.url": f"{registry.removesuffix(API)}/apis/registry/v2",
        ".apicurio.registry.auto-register": "true",
        ".apicurio.registry.headers.enabled": "false",
        ".apicurio.registry.as-confluent": "true",  # four bytes of an id, not eight
        ".apicurio.registry.use-id": "contentId",  # which is what the other API answers for
    }
    return {f"{part}.converter{name}": value for part in ("key", "value") for name, value in settings.items()}
