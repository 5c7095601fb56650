"""Connections and Kafka clients that are kept from one task to the next: opening one costs more than a small batch.

Each belongs to one thread of one process. A thread, because two pipelines can run in one process and no connection is
for two of them; a process, because Spark's Python workers are forked and a client does not survive that.

Owns: whose a client is, and that it is closed with its owner. Must not know: what kind of client it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Client = TypeVar("Client")

_caches: list[ClientCache] = []  # type: ignore[type-arg]


class ClientCache(Generic[Client]):
    """``close`` ends a client; ``keep``: of how many keys a thread keeps one, the newest."""

    def __init__(self, close: Callable[[Client], None], *, keep: int) -> None:
        self._close = close
        self._keep = keep
        # By thread; keys are compared, not hashed: some hold a mapping.
        self._clients: dict[tuple[int, int], list[tuple[object, Client]]] = {}
        _caches.append(self)

    def get(self, key: object, make: Callable[[], Client]) -> Client:
        """This thread's client for the key, made if there is none."""
        mine = self._clients.setdefault(_owner(), [])
        for known, client in mine:
            if known == key:
                return client
        while len(mine) >= self._keep:
            self._close(mine.pop(0)[1])
        mine.append((key, make()))
        return mine[-1][1]

    def drop(self, key: object) -> None:
        """Drop the client, for example because it failed: the next ``get`` creates a new one."""
        mine = self._clients.get(_owner(), [])
        for found in [one for one in mine if one[0] == key]:
            mine.remove(found)
            self._close(found[1])

    def close_mine(self) -> None:
        for _, client in self._clients.pop(_owner(), []):
            self._close(client)


def _owner() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def close_clients() -> None:
    """Close all that this thread has: its run has ended."""
    for cache in _caches:
        cache.close_mine()
