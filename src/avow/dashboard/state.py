"""What all requests share: the Kafka cluster, pooled clients for it, watched pipelines, jobs and evidence.

Owns: these, and that no client is used by two threads at once. Must not know: any page.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from queue import Empty, Full, LifoQueue
from typing import Generic, Protocol, TypeVar

from avow.dashboard.evidence import Evidence
from avow.dashboard.guard import AccessRules
from avow.dashboard.jobs import Jobs
from avow.dashboard.schemas import Schemas
from avow.dashboard.watch import Watch
from avow.errors import ConfigError, SourceError
from avow.kafka.brokers import Brokers
from avow.kafka.browse import Browser
from avow.kafka.log import Log
from avow.schema_registry import RegistrySettings
from avow.settings import Source

TIMEOUT_S = 4.0  # of a request to Kafka
PAGE_TIMEOUTS = 2.5  # a page may take this many times as long, then the answer is 504
IDLE_MAX = 4


class Closeable(Protocol):
    def close(self) -> None: ...


Client = TypeVar("Client", bound=Closeable)
Answer = TypeVar("Answer")


class Pool(Generic[Client]):
    """Idle clients for reuse. One that raised is closed: it may be stuck."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._idle: LifoQueue[Client] = LifoQueue(IDLE_MAX)

    @contextmanager
    def borrow(self) -> Iterator[Client]:
        client = self._take() or self._make()
        try:
            yield client
        except BaseException:
            client.close()
            raise
        try:
            self._idle.put_nowait(client)
        except Full:
            client.close()

    def _take(self) -> Client | None:
        with suppress(Empty):
            return self._idle.get_nowait()
        return None

    def close(self) -> None:
        while client := self._take():
            client.close()


class AppState:
    """The state of one running dashboard."""

    def __init__(
        self,
        rules: AccessRules,
        source: Source | None,  # the cluster; None: none is known
        watch: Watch,
        jobs: Jobs,
        evidence: Sequence[Path] = (),
        timeout_s: float = TIMEOUT_S,
        registry: RegistrySettings | None = None,  # of topics that no pipeline with a registry of its own reads
    ) -> None:
        self.timeout_s = timeout_s
        self.rules, self.watch, self.jobs = rules, watch, jobs
        self.evidence = Evidence(evidence)
        self.schemas = Schemas(registry, watch, timeout_s)
        self.closing = threading.Event()  # set at shutdown: event streams end
        self._source = source
        self._logs = Pool(lambda: Log(self.source, "avow", timeout_s=timeout_s))
        self._browsers = Pool(lambda: Browser(self.source, timeout_s=timeout_s))
        self._brokers = Pool(lambda: Brokers(self.source, timeout_s=timeout_s / 2))

    @property
    def has_source(self) -> bool:
        return self._source is not None

    @property
    def source(self) -> Source:
        if self._source is None:
            raise ConfigError(
                "no Kafka cluster is configured",
                advice="Start the dashboard with --brokers host:port or a pipeline file, or start a local cluster "
                "with `avow up`.",
            )
        return self._source

    def log(self) -> AbstractContextManager[Log]:
        """For metadata of the cluster."""
        return self._logs.borrow()

    def browser(self) -> AbstractContextManager[Browser]:
        """For reading records."""
        return self._browsers.borrow()

    def ask_brokers(self, ask: Callable[[Brokers], Answer]) -> Answer | None:
        """A request to the brokers themselves; None if it fails: pages are shown without these values."""
        with suppress(SourceError), self._brokers.borrow() as brokers:
            return ask(brokers)
        return None

    def close(self) -> None:
        self.watch.close()
        self.jobs.close()
        self._logs.close()
        self._browsers.close()
        self._brokers.close()
