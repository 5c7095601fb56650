"""A small connection pooler in front of PostgreSQL, as PgBouncer in transaction mode.

A client keeps its connection to the pooler; a server connection is its own for one transaction, and then serves the
next client, with whatever was left on it. It speaks as much of the protocol as that takes: where messages begin, and
when the server is ready for a new transaction. No passwords, no TLS, no cancelling.

Owns: that. Must not know: SQL, pipelines, faults.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from dataclasses import dataclass

from avow.prove.server import LoopbackServer

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
PROTOCOL = 196608


@dataclass(slots=True)
class _Server:
    """A connection to PostgreSQL, and the server's start-up messages on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    greeting: bytes = b""


class _Client:
    """The state of a client's requests."""

    def __init__(self) -> None:
        self.server: _Server | None = None  # while a transaction is open, or an answer due
        self._due = 0  # answers that end with "ready for query"
        self._simple = False

    def sent(self, kind: bytes) -> None:
        if kind in b"QPB":
            self._simple = kind == b"Q"
        if kind in b"QS" or (kind in b"cf" and self._simple):
            self._due += 1

    def answered(self, kind: bytes, body: bytes) -> bool:
        """Whether the server connection is free for others."""
        if kind == b"G":  # it waits for data, and passes over a Sync that came before them
            self._due = 0
        if kind == b"Z":
            self._due -= 1
        return kind == b"Z" and self._due <= 0 and body == b"I"


class Pooler(LoopbackServer):
    """Listens on ``port`` and shares ``size`` connections to the server on ``target``. Both are loopback ports."""

    def __init__(self, port: int, target: int, size: int = 1) -> None:
        super().__init__(port)
        self._target = target
        self.clients = self.servers = self.transactions = 0  # so far
        self._idle: asyncio.Queue[_Server | None] = asyncio.LifoQueue()
        for _ in range(size):
            self._idle.put_nowait(None)  # room for one

    async def _end(self) -> None:
        await super()._end()
        while not self._idle.empty():
            if (server := self._idle.get_nowait()) is not None:
                server.writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client()
        answers: asyncio.Task[None] | None = None
        try:
            with suppress(OSError, EOFError):
                hello = await self._hello(reader, writer)
                if hello is None:
                    return
                self.clients += 1
                server = await self._taken(hello)
                writer.write(server.greeting)
                self._idle.put_nowait(server)
                while True:
                    kind, message = await _message(reader)
                    if kind == b"X":
                        return
                    if client.server is None:
                        client.server = await self._taken(hello)
                        answers = asyncio.create_task(self._answer(client, client.server, writer))
                    client.sent(kind)
                    client.server.writer.write(message)
                    await client.server.writer.drain()
        finally:
            if answers is not None:
                answers.cancel()
            if client.server is not None:  # gone in mid-transaction: that ends with its connection
                client.server.writer.close()
                self._idle.put_nowait(None)
            writer.close()

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """The start-up message for a server connection of this client. None: it wants none."""
        while True:
            size, code = struct.unpack("!II", await reader.readexactly(8))
            body = await reader.readexactly(size - 8)
            if code in (SSL_REQUEST, GSS_REQUEST):
                writer.write(b"N")
                continue
            if code != PROTOCOL:
                return None
            fields = body.split(b"\0")
            parameters = dict(zip(fields[::2], fields[1::2], strict=False))
            # What else a client declares is its own: it does not come to a connection that others get.
            startup = b"".join(
                b"%s\0%s\0" % (name, parameters[name]) for name in (b"user", b"database") if name in parameters
            )
            return struct.pack("!II", len(startup) + 9, PROTOCOL) + startup + b"\0"

    async def _taken(self, hello: bytes) -> _Server:
        server = await self._idle.get()
        if server is not None and not server.reader.at_eof():
            return server
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
            server = _Server(reader, writer)
            writer.write(hello)
            kind = b""
            while kind != b"Z":
                kind, message = await _message(reader)
                server.greeting += message
        except BaseException:
            self._idle.put_nowait(None)
            raise
        self.servers += 1
        return server

    async def _answer(self, client: _Client, server: _Server, writer: asyncio.StreamWriter) -> None:
        """Until the transaction has ended. If the server ends instead, so does the client's connection."""
        try:
            while True:
                kind, message = await _message(server.reader)
                free = client.answered(kind, message[5:])
                if free:
                    self.transactions += 1
                    client.server = None
                    self._idle.put_nowait(server)
                writer.write(message)
                if free:
                    return
                await writer.drain()
        except (OSError, EOFError):
            writer.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The next message: its kind, and all of it."""
    head = await reader.readexactly(5)
    (size,) = struct.unpack("!I", head[1:])
    return head[:1], head + await reader.readexactly(size - 4)
