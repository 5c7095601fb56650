"""A small TCP proxy that can cut, delay, hold back one direction, or lose an answer; and counts what it did.

It stands on a loopback port in front of one server. The faults command it, and its counts are their proof that they
really happened. Owns: bytes between two sockets. Must not know: Kafka, PostgreSQL or any fault; requests and answers
are matched as bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from avow.prove.server import LoopbackServer

CHUNK_BYTES = 64 * 1024

PeerFilter = Callable[[int], bool]  # by the port a client connects from


class Direction(StrEnum):
    UP = "up"  # client to server: requests
    DOWN = "down"  # server to client: answers


@dataclass(slots=True)
class ProxyCounts:
    """What the proxy has done since it started."""

    connections: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    cut: int = 0  # connections ended by us
    refused: int = 0  # new connections rejected
    held_bytes: int = 0  # that had to wait for the heal
    delayed: int = 0  # chunks that waited for the declared delay
    lost_replies: int = 0  # answers that the server gave and the client never got


@dataclass(slots=True)
class LostReply:
    """Drop the response to ``request``, on a connection that has sent ``after`` since its last such request."""

    request: bytes
    after: bytes
    answer: bytes  # what the server must have said, for the reply to count as lost
    times: int


@dataclass(slots=True, eq=False)
class _Connection:
    peer: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    tail: bytes = b""  # the end of what was sent: a request may come in two chunks
    after_seen: bool = False
    losing: LostReply | None = None

    def close(self) -> None:
        for writer in self.writers:
            with suppress(OSError, RuntimeError):
                writer.transport.abort()


class Proxy(LoopbackServer):
    """Listens on ``port`` and forwards everything to ``target``, until a fault is set. Both are loopback ports."""

    def __init__(self, port: int, target: int) -> None:
        super().__init__(port)
        self._target = target
        self._counts = ProxyCounts()
        self._connections: set[_Connection] = set()
        self._cut: list[PeerFilter] = []
        self._delay_s = 0.0
        self._lost: LostReply | None = None
        self._flowing = {way: asyncio.Event() for way in Direction}
        for flowing in self._flowing.values():
            flowing.set()

    @property
    def counts(self) -> ProxyCounts:
        return replace(self._counts)

    def cut(self, only: PeerFilter | None = None) -> None:
        """End connections and let no new ones in; ``only`` those of some clients."""
        self._run(self._cut_off(only or (lambda _port: True)))

    def delay(self, seconds: float) -> None:
        """Every chunk waits so long, in both directions."""
        self._delay_s = seconds

    def hold(self, *ways: Direction) -> None:
        """Nothing passes that way until the heal: as when packets vanish and TCP goes on trying."""
        self._run(self._stop_flow(ways))

    def lose_replies(self, lost: LostReply) -> None:
        self._lost = lost

    def heal(self) -> None:
        """Back to passing everything on. A connection whose answer is still to be lost ends: nobody should wait there
        for ever."""
        self._delay_s, self._lost = 0.0, None
        self._cut.clear()
        self._run(self._restore())

    # In the loop's own thread.

    async def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        await super()._end()

    async def _cut_off(self, peers: PeerFilter) -> None:
        self._cut.append(peers)
        for connection in list(self._connections):
            if peers(connection.peer):
                self._counts.cut += 1
                connection.close()

    async def _restore(self) -> None:
        for connection in list(self._connections):
            if connection.losing is not None:
                connection.close()
        for flowing in self._flowing.values():
            flowing.set()

    async def _stop_flow(self, ways: tuple[Direction, ...]) -> None:
        for way in ways:
            self._flowing[way].clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = int(writer.get_extra_info("peername")[1])
        connection = _Connection(peer, [writer])
        if any(peers(peer) for peers in self._cut):
            self._counts.refused += 1
            connection.close()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down: the client must see that, and not wait
            connection.close()
            return
        connection.writers.append(server_writer)
        self._connections.add(connection)
        self._counts.connections += 1
        pumps = [
            asyncio.create_task(self._pump(connection, Direction.UP, reader, server_writer)),
            asyncio.create_task(self._pump(connection, Direction.DOWN, server_reader, writer)),
        ]
        try:
            # One side's end is the connection's end: neither of our protocols goes on with half of it.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._connections.discard(connection)
            connection.close()

    async def _pump(
        self, connection: _Connection, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self._delay_s:
                    self._counts.delayed += 1
                    await asyncio.sleep(self._delay_s)
                if not self._flowing[way].is_set():
                    self._counts.held_bytes += len(data)
                    await self._flowing[way].wait()
                if way is Direction.UP:
                    self._watch(connection, data)
                    self._counts.up_bytes += len(data)
                elif connection.losing is not None:
                    if connection.losing.answer in data:
                        self._counts.lost_replies += 1
                        return
                    continue
                else:
                    self._counts.down_bytes += len(data)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    def _watch(self, connection: _Connection, data: bytes) -> None:
        """Whether this chunk holds the request whose answer is to be lost."""
        lost = self._lost
        if lost is None:
            connection.tail = b""
            return
        sent = connection.tail + data
        connection.after_seen |= lost.after in sent
        if lost.request in sent:
            if connection.after_seen and lost.times > 0:
                lost.times -= 1
                connection.losing = lost
            connection.after_seen, sent = False, b""
        connection.tail = sent[-max(len(lost.request), len(lost.after)) :]
