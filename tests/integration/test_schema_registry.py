"""The client against a real registry, and against real TLS servers that ask who it is; a registry that dies."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from avow import schema_registry as module
from avow.errors import (
    ConfigError,
    RegistryRefused,
    RegistryUnavailable,
    SourceError,
    UnknownSchema,
    UnknownSubject,
)
from avow.local.cluster import PortPicker
from avow.local.part import PartState
from avow.local.registry import Registry
from avow.schema_registry import Reference, RegistrySettings, SchemaRegistry

INT = '{"type":"record","name":"R","fields":[{"name":"a","type":"int"}]}'
LONG = INT.replace('"int"', '"long"')
TEXT = INT.replace('"int"', '"string"')
A_PROTO = 'syntax = "proto3";\npackage a;\nmessage A {\n  int32 x = 1;\n}\n'
B_PROTO = 'syntax = "proto3";\npackage b;\nimport "a.proto";\nmessage B {\n  a.A a = 1;\n}\n'
C_PROTO = 'syntax = "proto3";\npackage c;\nimport "b.proto";\nmessage C {\n  b.B b = 1;\n}\n'


def client(url: str, **settings: Any) -> SchemaRegistry:
    return SchemaRegistry(RegistrySettings.model_validate({"url": url, **settings}))


@pytest.fixture
def registry(schema_registry: str) -> SchemaRegistry:
    return client(schema_registry)


@pytest.fixture
def subject() -> str:
    return f"t/{uuid4().hex[:10]} ü-value"  # whatever is in a name must be quoted


# --- a real registry --------------------------------------------------------------------------------------------------


def test_what_was_registered_is_found_again(registry: SchemaRegistry, subject: str) -> None:
    assert registry.find(subject, "AVRO", INT) is None
    number = registry.register(subject, "AVRO", INT)
    assert registry.register(subject, "AVRO", INT) == number, "the same schema again is the same id"
    newer = registry.register(subject, "AVRO", LONG)
    assert registry.versions(subject) == [1, 2]
    assert subject in registry.subjects()
    first, latest = registry.version(subject, 1), registry.latest(subject)
    assert (first.id, first.subject, first.version, first.kind) == (number, subject, 1, "AVRO")
    assert (latest.id, latest.version, json.loads(latest.text)) == (newer, 2, json.loads(LONG))
    assert registry.find(subject, "AVRO", INT) == first
    assert registry.find(subject, "AVRO", TEXT) is None
    by_id = registry.by_id(number)
    assert (by_id.id, by_id.subject, by_id.version, by_id.kind, by_id.text) == (number, None, None, "AVRO", first.text)


def test_references_are_followed_to_their_ends(registry: SchemaRegistry, subject: str) -> None:
    names = {name: f"{name}-{subject}" for name in ("a.proto", "b.proto")}
    registry.register(names["a.proto"], "PROTOBUF", A_PROTO)
    to_a = [Reference("a.proto", names["a.proto"], 1)]
    registry.register(names["b.proto"], "PROTOBUF", B_PROTO, to_a)
    to_b = [Reference("b.proto", names["b.proto"], 1), *to_a]
    number = registry.register(subject, "PROTOBUF", C_PROTO, to_b)
    found = registry.by_id(number)
    assert found.kind == "PROTOBUF"
    assert set(found.references) == set(to_b)
    assert registry.references(found) == {"a.proto": A_PROTO, "b.proto": B_PROTO}
    assert registry.references(registry.by_id(registry.register(f"i-{subject}", "AVRO", INT))) == {}


def test_json_schema_has_a_kind_of_its_own(registry: SchemaRegistry, subject: str) -> None:
    # Without $schema, Apicurio does not see what it is.
    text = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": subject})
    assert registry.by_id(registry.register(subject, "JSON", text)).kind == "JSON"


def test_what_is_not_there_is_said_to_be_missing(registry: SchemaRegistry, subject: str) -> None:
    with pytest.raises(UnknownSchema, match=r"http://127.0.0.1:\d+/apis/ccompat/v7 has no schema with id 2000000000"):
        registry.by_id(2_000_000_000)
    for ask in (registry.latest, registry.versions, lambda name: registry.version(name, 1)):
        with pytest.raises(UnknownSubject, match=f"has no subject {subject}") as caught:
            ask(subject)
        assert "decode.registry.subject" in caught.value.advice
    registry.register(subject, "AVRO", INT)
    with pytest.raises(UnknownSubject, match=f"no version 7 of subject {subject}"):
        registry.version(subject, 7)


def test_an_incompatible_or_invalid_schema_is_refused_in_the_registrys_words(
    registry: SchemaRegistry, subject: str
) -> None:
    assert registry.compatible(subject, TEXT, "AVRO"), "a new subject takes anything"
    registry.register(subject, "AVRO", INT)
    assert registry.compatible(subject, LONG, "AVRO")
    assert not registry.compatible(subject, TEXT, "AVRO")
    with pytest.raises(RegistryRefused, match="reader type: STRING not compatible with writer type: INT") as caught:
        registry.register(subject, "AVRO", TEXT)
    assert "compatibility level" in caught.value.advice
    assert registry.versions(subject) == [1]
    with pytest.raises(RegistryRefused, match="422"):
        registry.register(subject, "AVRO", '{"type":"rec')


@pytest.mark.parametrize("path", ["", "/apis", "/apis/ccompat/v7/subjects"])
def test_a_wrong_path_is_no_unknown_schema(path: str, schema_registry: str) -> None:
    """Else every record of a topic would become a dead letter for it."""
    wrong = client(schema_registry.removesuffix("/apis/ccompat/v7") + path)
    for ask in (lambda: wrong.by_id(1), wrong.subjects):
        with pytest.raises(RegistryRefused, match="there is no schema registry at") as caught:
            ask()
        assert "/apis/ccompat/v7" in caught.value.advice


def test_nobody_listens() -> None:
    with pytest.raises(RegistryUnavailable, match="Connection refused") as caught:
        client(f"http://127.0.0.1:{PortPicker().free()}").by_id(1)
    assert isinstance(caught.value, SourceError), "engines try again, and blame no record"


def test_the_next_url_is_asked_where_one_is_dead(schema_registry: str, subject: str) -> None:
    dead = f"http://127.0.0.1:{PortPicker().free()}"
    both = client(f"{dead},{schema_registry}")
    both.register(subject, "AVRO", INT)
    assert both.latest(subject).version == 1
    assert both._urls[0] == schema_registry, "who answered last is asked first"
    with pytest.raises(RegistryUnavailable, match=r"127.*; .*127"):
        client(f"{dead},http://127.0.0.1:{PortPicker().free()}").subjects()


def test_it_survives_a_fork_and_many_threads(registry: SchemaRegistry, subject: str) -> None:
    number = registry.register(subject, "AVRO", INT)
    registry.latest(subject)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of a fork beside threads: that is the test
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if registry.latest(subject).id == number and registry.by_id(number).id == number else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(registry.latest(subject).id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [number] * 8


# --- a registry that dies ---------------------------------------------------------------------------------------------


def test_a_registry_killed_paused_and_back_with_all_it_had(tmp_path: Path, subject: str) -> None:
    part = Registry(tmp_path, PortPicker().free())
    part.prepare()
    part.start()
    try:
        part.await_ready()
        asking = client(part.url, timeout="1s")
        number = asking.register(subject, "AVRO", INT)
        part.kill()
        with pytest.raises(RegistryUnavailable, match="Connection refused"):
            asking.latest(subject)
        part.start()
        part.await_ready()
        assert asking.latest(subject).id == number, "what it answered for outlives a kill"
        assert not asking.compatible(subject, TEXT, "AVRO"), "as does the compatibility level"
        assert part.version() == "3.0.9"

        part.pause()
        started = time.monotonic()
        with pytest.raises(RegistryUnavailable, match="no answer within 1 s"):
            asking.latest(subject)
        assert time.monotonic() - started < 5
        with pytest.raises(RegistryUnavailable):
            asking.by_id(number)
        part.resume()
        assert asking.by_id(number).text == INT
        part.pause()
        assert asking.by_id(number).text == INT, "an id is asked for once"
    finally:
        part.resume()
        part.stop()
    assert part.state is PartState.DOWN


def _known(url: str, number: int) -> bool:
    return (url, number) in module._known


# --- who we are, and who it is ----------------------------------------------------------------------------------------


class Authority:
    """A CA, and certificates that it signs."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._basic = x509.BasicConstraints(ca=True, path_length=None)
        self.file = self._write(f"{name}.pem", self._signed(self._name, self._key, self._basic))

    def issue(self, name: str, password: str = "") -> tuple[Path, Path]:
        """The files of a certificate for 127.0.0.1 and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        closed = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, closed)
        return self._write(f"{name}.pem", self._signed(subject, key, address)), self._write(f"{name}.key", pem)

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(days=1),
            not_valid_after=now + datetime.timedelta(days=1),
        )
        signed = builder.add_extension(extension, critical=True).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(content)
        return path


Answering = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answering, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server whose every answer is made by a function. Gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # a handshake that fails, a client that is gone
            pass

        def finish_request(self, request: Any, address: Any) -> None:
            if tls is None:
                return super().finish_request(request, address)
            with tls.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, address)

    with Server(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def say(handler: BaseHTTPRequestHandler, status: int, content: object = None, **headers: str) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def guarded(authorization: str) -> Answering:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        given = handler.headers.get("Authorization")
        if given is None:
            say(handler, 401, {"error_code": 401, "message": "Unauthorized"})
        elif given != authorization:
            say(handler, 403, {"error_code": 40301, "message": f"not you, {given}"})
        else:
            say(handler, 200, ["let in"])

    return answer


def server_tls(authority: Authority, *, ask: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    if ask:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


LOGINS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "basic": (
        f"Basic {base64.b64encode('mé:s:ecret'.encode()).decode()}",
        {"user": "mé", "password": "s:ecret"},
        {"user": "mé", "password": "hunter2"},
    ),
    "bearer": ("Bearer abc.def", {"token": "abc.def"}, {"token": "hunter2"}),
}


@pytest.mark.parametrize("kind", LOGINS)
def test_credentials_are_sent_and_a_wrong_one_is_named_but_not_shown(kind: str, tmp_path: Path) -> None:
    header, right, wrong = LOGINS[kind]
    authority = Authority(tmp_path)
    with server(guarded(header), server_tls(authority)) as url:
        assert client(url, ca_file=str(authority.file), **right).subjects() == ["let in"]
        with pytest.raises(RegistryRefused, match=r"refused the request \(401\): Unauthorized") as caught:
            client(url, ca_file=str(authority.file)).subjects()
        assert "decode.registry: user and password, or token" in caught.value.advice
        with pytest.raises(RegistryRefused, match=r"refused the request \(403\): not you") as caught:
            client(url, ca_file=str(authority.file), **wrong).subjects()
        assert "hunter2" not in str(caught.value) + caught.value.advice
        assert isinstance(caught.value, ConfigError), "a run stops by name"


def test_a_server_that_nobody_vouches_for_is_not_told_who_we_are(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")
    asked: list[BaseHTTPRequestHandler] = []
    with server(asked.append, server_tls(authority)) as url:
        for settings in ({}, {"ca_file": str(other.file)}):
            with pytest.raises(
                RegistryRefused, match=r"TLS handshake .* failed: .*certificate verify failed"
            ) as caught:
                client(url, token="abc", **settings).subjects()
            assert "ca_file" in caught.value.advice
        # Another name than the certificate's: an address that is not in it.
        with pytest.raises(RegistryRefused, match="certificate verify failed"):
            client(url.replace("127.0.0.1", "localhost"), ca_file=str(authority.file)).subjects()
    assert asked == []


def test_our_certificate_is_shown_where_it_is_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("me", password="s3cret")
    ours = {"ca_file": str(authority.file), "certificate_file": str(certificate), "key_file": str(key)}
    with server(lambda handler: say(handler, 200, ["let in"]), server_tls(authority, ask=True)) as url:
        assert client(url, **ours, key_password="s3cret").subjects() == ["let in"]
        # It says "certificate required", or has closed the connection before that was read.
        with pytest.raises((RegistryRefused, RegistryUnavailable)) as refused:
            client(url, ca_file=str(authority.file)).subjects()
        assert "certificate_file" in refused.value.advice
        for password in ({}, {"key_password": "hunter2"}):
            with pytest.raises(ConfigError, match=r"decode.registry.key_file cannot be used") as caught:
                client(url, **ours, **password).subjects()
            assert "hunter2" not in str(caught.value) + caught.value.advice


def test_nobody_else_gets_our_credentials_by_a_redirect() -> None:
    asked: list[str | None] = []

    def listen(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers.get("Authorization"))
        say(handler, 200, ["elsewhere"])

    with server(listen) as elsewhere:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            if handler.path == "/subjects":
                say(handler, 302, Location=f"{elsewhere}/subjects")
            elif handler.path.startswith("/within/"):
                say(handler, 307, Location="/moved")
            else:
                say(handler, 200, [handler.headers.get("Authorization")])

        with server(redirect) as url:
            with pytest.raises(RegistryRefused, match=r"redirects to 127[.]0[.]0[.]1"):
                client(url, token="abc").subjects()
            assert client(f"{url}/within", token="abc").subjects() == ["Bearer abc"]
            with pytest.raises(RegistryRefused, match="redirects what is sent"):
                client(f"{url}/within", token="abc").register("s", "AVRO", INT)
    assert asked == []


# --- answers that are none --------------------------------------------------------------------------------------------


def slow(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b"[")
        handler.wfile.flush()
        time.sleep(0.1)


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**20)


PASSING: dict[str, tuple[Answering, str]] = {
    "overloaded": (lambda h: say(h, 503, {"error_code": 50301, "message": "come\nback"}), "answered 503: come back"),
    "too many": (lambda h: say(h, 429, b""), "answered 429"),
    "leader away": (lambda h: say(h, 500, {"error_code": 50003}), "answered 500"),
    "a page": (lambda h: say(h, 200, b"<html>"), "answered with something else than JSON"),
    "a proxy's page": (lambda h: say(h, 502, b"<html>"), "answered 502"),
    "another answer": (lambda h: say(h, 200, {"a": 1}), "answered with something else than a registry does"),
    "deep": (lambda h: say(h, 200, b"[" * 100_000), "answered with something else than JSON"),
    "nothing": (lambda _: None, "closed connection without response"),
    "drop by drop": (slow, "no answer within 1 s"),
    "without end": (endless, "the answer is longer than 16 MiB"),
}


@pytest.mark.parametrize("case", PASSING)
def test_what_may_pass_is_the_registrys_fault_and_no_records(case: str) -> None:
    answer, expected = PASSING[case]
    with server(answer) as url:
        asking = client(url, timeout="1s")
        started = time.monotonic()
        for ask in (asking.subjects, lambda: asking.by_id(1)):
            with pytest.raises(RegistryUnavailable, match=expected):
                ask()
        assert time.monotonic() - started < 6


def test_an_unknown_id_is_asked_for_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer registers its schema a moment before it sends."""
    monkeypatch.setattr(module, "UNKNOWN_KEPT_S", 0.3)
    asked: list[float] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            say(handler, 404, {"error_code": 40403, "message": "Schema not found"})
        else:
            say(handler, 200, {"schema": '"int"'})

    with server(answer) as url:
        asking = client(url)
        for _ in range(100):
            with pytest.raises(UnknownSchema):
                asking.by_id(5)
        assert len(asked) == 1, "records with the same bad id cost one request"
        time.sleep(0.4)
        assert asking.by_id(5).kind == "AVRO"
        assert client(url).by_id(5) is asking.by_id(5)
    assert len(asked) == 2


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEMAS_KEPT", 20)
    with server(lambda handler: say(handler, 200, {"schema": '"int"'})) as url:
        asking = client(url)
        for number in range(50):
            asking.by_id(number)
    assert len(module._known) <= 20
    assert _known(url, 49)


def test_a_proxy_of_the_environment_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        say(handler, 200, [])

    with server(answer) as url:
        for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", url)
        client("http://registry.invalid:8081").subjects()
        client(url).subjects()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{PortPicker().free()}")
        client(url).subjects()
    assert paths == ["http://registry.invalid:8081/subjects", "/subjects", "/subjects"]
