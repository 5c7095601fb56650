"""The proxy over real sockets on loopback: what it does to bytes, and that it counts it."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from avow.local.cluster import PortPicker
from avow.prove.proxy import Direction, LostReply, Proxy


class Echo(socketserver.BaseRequestHandler):
    """Answers every message with itself, after ``ok ``."""

    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(b"ok " + data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Proxy(PortPicker().free(), server.server_address[1]).start()
        yield made
        made.stop()
        server.shutdown()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def ask(client: socket.socket, message: bytes) -> bytes:
    client.sendall(message)
    return client.recv(4096)


def ended(client: socket.socket) -> bool:
    """Whether the other side has closed, or broken off."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def unanswered(client: socket.socket, message: bytes) -> bool:
    try:
        client.sendall(message)
    except ConnectionError:
        return True
    return ended(client)


def test_everything_passes(proxy: Proxy) -> None:
    with closing(connect(proxy)) as client:
        assert ask(client, b"hello") == b"ok hello"
    counts = proxy.counts
    assert (counts.connections, counts.up_bytes, counts.down_bytes) == (1, 5, 8)


def test_a_stop_with_connections_open_is_silent(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    with closing(connect(proxy)) as client:
        ask(client, b"x")
        proxy.stop()
        assert ended(client)
    assert not caplog.records


def test_a_cut_ends_connections_and_lets_none_in_until_the_heal(proxy: Proxy) -> None:
    with closing(connect(proxy)) as client:
        ask(client, b"x")
        proxy.cut()
        assert ended(client)
    with closing(connect(proxy)) as client:
        assert unanswered(client, b"x")
    assert (proxy.counts.cut, proxy.counts.refused) == (1, 1)
    proxy.heal()
    with closing(connect(proxy)) as client:
        assert ask(client, b"back") == b"ok back"


def test_a_cut_of_some_leaves_the_others(proxy: Proxy) -> None:
    with closing(connect(proxy)) as one, closing(connect(proxy)) as other:
        ask(one, b"1")
        ask(other, b"2")
        port = one.getsockname()[1]
        proxy.cut(only=lambda peer: peer == port)
        assert ended(one)
        assert ask(other, b"still") == b"ok still"
    assert proxy.counts.cut == 1


def test_a_delay_is_a_delay(proxy: Proxy) -> None:
    with closing(connect(proxy)) as client:
        proxy.delay(0.15)
        started = time.monotonic()
        assert ask(client, b"slow") == b"ok slow"
        assert time.monotonic() - started >= 0.3
    assert proxy.counts.delayed == 2


def test_one_way_the_request_arrives_and_the_answer_waits_for_the_heal(proxy: Proxy) -> None:
    with closing(connect(proxy)) as client:
        proxy.hold(Direction.DOWN)
        client.sendall(b"late")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert proxy.counts.held_bytes == 7
        assert proxy.counts.up_bytes == 4
        proxy.heal()
        client.settimeout(5)
        assert client.recv(4096) == b"ok late"


def test_a_lost_reply_was_given_and_never_arrives(proxy: Proxy) -> None:
    proxy.lose_replies(LostReply(b"COMMIT", b"COPY", b"ok COMMIT", times=1))
    with closing(connect(proxy)) as client:
        assert ask(client, b"COMMIT") == b"ok COMMIT", "nothing was copied before it"
        assert ask(client, b"COPY rows") == b"ok COPY rows"
        assert unanswered(client, b"COMMIT")
    assert proxy.counts.lost_replies == 1
    with closing(connect(proxy)) as client:
        ask(client, b"COPY rows")
        assert ask(client, b"COMMIT") == b"ok COMMIT", "only once"


def test_nobody_waits_after_the_heal_for_an_answer_that_was_not_the_one_to_lose(proxy: Proxy) -> None:
    proxy.lose_replies(LostReply(b"COMMIT", b"COPY", b"something else", times=1))
    with closing(connect(proxy)) as client:
        ask(client, b"COPY rows")
        client.sendall(b"COMMIT")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.heal()
        client.settimeout(5)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert proxy.counts.lost_replies == 0


def test_a_request_in_two_pieces_is_found(proxy: Proxy) -> None:
    proxy.lose_replies(LostReply(b"COMMIT", b"COPY", b"MIT", times=1))
    with closing(connect(proxy)) as client:
        ask(client, b"COPY COM")
        assert unanswered(client, b"MIT")
    assert proxy.counts.lost_replies == 1


def test_a_server_that_is_down_is_seen_as_down() -> None:
    pick = PortPicker()
    proxy = Proxy(pick.free(), pick.free()).start()
    try:
        with closing(connect(proxy)) as client:
            assert unanswered(client, b"x")
    finally:
        proxy.stop()
