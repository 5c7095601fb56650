"""What the dashboard holds while it runs: the cluster it looks at, clients for it, pipelines, jobs, evidence.

Owns: these, and that clients are shared without being used by two threads at once. Must not know: any page.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from avow.dashboard.evidence import Evidence
from avow.dashboard.guard import Rules
from avow.dashboard.jobs import Jobs
from avow.dashboard.watch import Watch
from avow.errors import ConfigError, SourceError
from avow.kafka.brokers import Brokers
from avow.kafka.browse import Browser
from avow.kafka.log import Log
from avow.settings import Source

TIMEOUT_S = 4.0  # of a question to Kafka
PAGE = 2.5  # a page may take so many times as long; then it says so
IDLE_MAX = 4


class Closing(Protocol):
    def close(self) -> None: ...


Client = TypeVar("Client", bound=Closing)
Answer = TypeVar("Answer")


class Pool(Generic[Client]):
    """Clients that are kept for the next who needs one. What failed is closed: it may be stuck."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._idle: list[Client] = []
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[Client]:
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self._make()
        try:
            yield client
        except BaseException:
            client.close()
            raise
        with self._lock:
            if keep := len(self._idle) < IDLE_MAX:
                self._idle.append(client)
        if not keep:
            client.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


class House:
    """One dashboard."""

    def __init__(
        self,
        rules: Rules,
        source: Source | None,  # the cluster; None: none is known
        watch: Watch,
        jobs: Jobs,
        evidence: Sequence[Path] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.timeout_s = timeout_s
        self.rules, self.watch, self.jobs = rules, watch, jobs
        self.evidence = Evidence(evidence)
        self.closing = threading.Event()  # whoever follows something ends
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
                "no Kafka cluster is known",
                advice="Start the dashboard with --brokers host:port or a pipeline file, or `avow up` for a local one.",
            )
        return self._source

    def log(self) -> AbstractContextManager[Log]:
        """For questions about the cluster."""
        return self._logs.taken()

    def browser(self) -> AbstractContextManager[Browser]:
        """For looking through records."""
        return self._browsers.taken()

    def told(self, ask: Callable[[Brokers], Answer]) -> Answer | None:
        """What brokers say of themselves, if they do: a page is of use without it."""
        with suppress(SourceError), self._brokers.taken() as brokers:
            return ask(brokers)
        return None

    def close(self) -> None:
        self.watch.close()
        self.jobs.close()
        self._logs.close()
        self._browsers.close()
        self._brokers.close()
