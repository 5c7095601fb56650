"""Connections and Kafka clients that are kept from one task to the next: opening one costs more than a small batch.

Each belongs to one thread of one process. A thread, because two pipelines can run in one process and no connection is
for two of them; a process, because Spark's Python workers are forked and a client does not survive that.

Owns: whose a client is, and that it is closed with its owner. Must not know: what kind of client it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Client = TypeVar("Client")

_caches: list[ClientCache] = []  # type: ignore[type-arg]


class ClientCache(Generic[Client]):
    """``close`` ends a client; ``keep``: of how many keys a thread keeps one, the newest."""

    def __init__(self, close: Callable[[Client], None], *, keep: int) -> None:
        self._close = close
        self._keep = keep
        self._clients: dict[tuple[int, int], dict[Hashable, Client]] = {}
        _caches.append(self)

    def get(self, key: Hashable, make: Callable[[], Client]) -> Client:
        """This thread's client for the key, made if there is none."""
        mine = self._clients.setdefault(_owner(), {})
        if key not in mine:
            for old in list(mine)[: max(0, len(mine) + 1 - self._keep)]:
                self._close(mine.pop(old))
            mine[key] = make()
        return mine[key]

    def drop(self, key: Hashable) -> None:
        """It is of no use any more: the next ``get`` makes a new one."""
        client = self._clients.get(_owner(), {}).pop(key, None)
        if client is not None:
            self._close(client)

    def close_mine(self) -> None:
        for client in self._clients.pop(_owner(), {}).values():
            self._close(client)


def _owner() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def close_clients() -> None:
    """Close all that this thread has: its run has ended."""
    for cache in _caches:
        cache.close_mine()
