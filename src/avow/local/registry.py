"""A schema registry: Apicurio Registry, on a loopback port, with Confluent's API at ``/apis/ccompat/v7``.

Its schemas are in an H2 database in the part's folder, so they outlive ``down`` and a kill.

Owns: its settings, when it is ready, and the compatibility level that it begins with. Must not know: what is
registered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from avow.errors import LocalError
from avow.local import jars, java
from avow.local.part import ClusterPart
from avow.retry import poll_until

READY_TIMEOUT_S = 90
API = "/apis/ccompat/v7"
# Apicurio's own is none. This is what Confluent's registry begins with: readers of a new schema can read older records.
COMPATIBILITY = "BACKWARD"

# The registry is on this machine, whatever proxy the environment names for others.
_open = build_opener(ProxyHandler({})).open


def program() -> Path:
    """The jar to run, fetched (109 MB) and unpacked if it is not there."""
    return jars.unpacked("registry") / f"apicurio-registry-app-{jars.REGISTRY_VERSION}-runner.jar"


class Registry(ClusterPart):
    def __init__(self, folder: Path, port: int) -> None:
        super().__init__("registry", folder, port)
        self._configured = folder / "configured"

    @property
    def url(self) -> str:
        """What clients take as the registry's URL."""
        return f"http://{self.address}{API}"

    def command(self) -> list[str | Path]:
        # As for a broker: a small heap, and quick to start. It has pools for three databases, of which it uses one.
        jvm = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        pools = [f"apicurio.datasource.{pool}jdbc" for pool in ("", "blue.", "green.")]
        settings: dict[str, object] = {
            "java.io.tmpdir": self.folder / "tmp",
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": self.port,
            "quarkus.http.access-log.enabled": "false",
            "quarkus.log.console.format": "%d{yyyy-MM-dd HH:mm:ss,SSS} %p %m (%c{1})%n",
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
            # Without a delay: H2 has commits on disk half a second later otherwise, and a kill takes them.
            "apicurio.datasource.url": f"jdbc:h2:file:{self.folder / 'data'};WRITE_DELAY=0",
            "apicurio.ccompat.max-subjects": 100_000,  # 1,000, and a list of them would end there without a word
            "apicurio.import.work-dir": self.folder / "tmp",
            **{f"{pool}.{size}-size": 1 for pool in pools for size in ("initial", "min")},
        }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        return [java.find().path, *jvm, *options, "-jar", program()]

    def prepare(self) -> None:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)

    def version(self) -> str | None:
        """What the registry says, or None if it does not answer: this is also its health check."""
        try:
            return str(self._ask("/apis/registry/v3/system/info")["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def await_ready(self) -> None:
        """Until it answers. A new one gets its compatibility level; a level that somebody sets later stays."""

        def ready() -> bool:
            self.check_running()
            return self.version() is not None

        if not poll_until(ready, READY_TIMEOUT_S):
            raise LocalError(f"registry is not ready after {READY_TIMEOUT_S} s", advice=f"See its log: {self.log}")
        if not self._configured.exists():
            try:
                self._ask(f"{API}/config", {"compatibility": COMPATIBILITY})
            except (OSError, ValueError) as error:
                raise LocalError(
                    f"the registry's compatibility level cannot be set: {error}", advice=f"See its log: {self.log}"
                ) from error
            self._configured.touch()

    def _ask(self, path: str, content: dict[str, str] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://{self.address}{path}", data, headers, method="PUT" if data else "GET")
        with _open(request, timeout=2 if data is None else 10) as answer:
            return json.load(answer)
