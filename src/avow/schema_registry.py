"""A client of schema registries: the REST API (v1) of Confluent's registry, and of Apicurio at ``/apis/ccompat/v7``.

Three kinds of failure are kept apart. No usable answer may pass: engines try again, and no record is to blame
(``RegistryUnavailable``). An id that the registry does not know is the fault of the record that names it
(``UnknownSchema``). A subject that is not there, and whatever the registry refuses, is for a person to put right: a run
stops by name (``UnknownSubject``, ``RegistryRefused``).

Only an answer in the registry's own form says that something is unknown. A 404 of anybody else (a wrong path, a proxy)
means a wrong ``url``: else every record would become a dead letter for it.

Each request is a connection of its own, so an object may be used by any thread, after a fork, and pickled. What an id
means never changes, so it is asked for once in a process.

Owns: ``[decode.registry]``, requests and answers, what is kept of them. Must not know: Kafka, and what a schema means.
Its neighbours are the formats.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from http.client import HTTPException, HTTPMessage
from ipaddress import ip_address
from typing import IO, Annotated, Any, Literal, NoReturn, Self, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from avow.errors import (
    LINE_MAX,
    AvowError,
    ConfigError,
    RegistryRefused,
    RegistryUnavailable,
    UnknownSchema,
    UnknownSubject,
)
from avow.settings import Section, values
from avow.settings.values import refuse

ANSWER_BYTES_MAX = 16 * 1024 * 1024
SCHEMAS_KEPT = 10_000  # in a process, by id; far more than topics have
UNKNOWN_KEPT_S = 2.0  # an id that is unknown now may be registered in a moment
REFERENCES_MAX = 1_000  # of one schema, with theirs
ID_MAX = 2**31 - 1

_MEDIA = "application/vnd.schemaregistry.v1+json"
# In the answers of a registry: what it does not know. Any other 404 is somebody else's.
_UNKNOWN = range(40401, 40500)  # subject, version, schema, and the same deleted
_NO_VERSION = 40402
_AT_ONCE = 8  # requests about many subjects
_MAY_PASS = (408, 425, 429)  # and 5xx
_TLS_REFUSED = re.compile(
    r"certificate|unknown.ca|wrong.version|unsupported.protocol|no.shared.cipher|handshake.failure", re.I
)

Key = TypeVar("Key")
Value = TypeVar("Value")


def _urls(value: str) -> str:
    """Does not quote an entry: people paste user:password@host here."""
    allowed = '"https://registry:8081", several separated by commas; Apicurio: "http://host:8080/apis/ccompat/v7"'
    urls = [url.strip().rstrip("/") for url in value.split(",")]
    for number, url in enumerate(urls, start=1):
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").encode("idna"), parts.port
        except (ValueError, UnicodeError):
            parts, host = urlsplit(""), b""
        if (
            parts.scheme not in ("http", "https")
            or not host
            or not url.isascii()
            or values.has_control(url)
            or " " in url
        ):
            refuse(f"entry {number} is not an http or https URL", allowed)
        if "@" in parts.netloc:
            refuse(f"entry {number} contains a user", 'a URL without one: set user and password = "${env:NAME}"')
        if parts.query or parts.fragment:
            refuse(f"entry {number} contains ? or #", allowed)
    return ",".join(urls)


def _timeout(value: Any) -> timedelta:
    timeout = values.duration(value)
    if not timeout:
        refuse("is zero", 'a duration such as "5s"')
    return timeout


def _path(value: str) -> str:
    if not value or values.climbs(value):
        refuse("contains .." if value else "is empty", "the path of a PEM file, without ..")
    return value


_Path = Annotated[str, AfterValidator(_path)]


class RegistrySettings(Section):
    """[decode.registry]: which schema registry, and who we are there."""

    url: Annotated[str, AfterValidator(_urls)] = Field(
        description="http://host:port or https://host:port, several separated by commas"
    )
    user: SecretStr | None = Field(None, description="the user's name, for basic authentication")
    password: SecretStr | None = Field(None, description='the user\'s password, best as "${env:NAME}"')
    token: SecretStr | None = Field(None, description='a bearer token, best as "${env:NAME}"')
    ca_file: _Path | None = Field(None, description="a PEM file with the CA that signed the registry's certificate")
    certificate_file: _Path | None = Field(None, description="a PEM file with our certificate")
    key_file: _Path | None = Field(None, description="a PEM file with our private key")
    key_password: SecretStr | None = Field(None, description='the key\'s password, best as "${env:NAME}"')
    timeout: Annotated[timedelta, BeforeValidator(_timeout)] = Field(
        timedelta(seconds=5), description='of a request, a duration such as "5s"'
    )
    subject_strategy: Literal["topic", "record", "topic-record"] = Field(
        "topic", description='"topic", "record" or "topic-record"'
    )
    subject: Annotated[str, Field(min_length=1)] | None = Field(None, description="the subject of the values' schema")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.user is None) != (self.password is None):
            given, other = ("user", "password") if self.user is not None else ("password", "user")
            refuse(f"is set without {other}", "user and password, or neither", given)
        if self.token is not None and self.user is not None:
            refuse("is set together with user and password", "either token, or user and password", "token")
        if self.user is not None and ":" in self.user.get_secret_value():
            refuse("contains a colon", "a name without one: basic authentication ends the name there", "user")
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token.get_secret_value()):
            refuse("is not a bearer token", "printable ASCII without spaces", "token")
        for name in ("key_file", "key_password"):
            if getattr(self, name) is not None and self.certificate_file is None:
                refuse("is set without certificate_file", "certificate_file too, or neither", name)
        for name in ("ca_file", "certificate_file"):
            if getattr(self, name) is not None and not any(url.startswith("https:") for url in self.urls):
                refuse("is set, but no url begins with https", "https://host:port, or no certificates", name)
        if self.subject is not None and "subject_strategy" in self.model_fields_set:
            refuse("is set together with subject", "either subject or subject_strategy", "subject_strategy")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self.url.split(","))

    def subject_of(self, topic: str, record: str = "", *, key: bool = False) -> str:
        """The subject with the schema of a topic's values, or keys. ``record``: the full name of the record or message
        type, which the strategies with ``record`` want."""
        if self.subject is not None and not key:
            return self.subject
        match self.subject_strategy:
            case "topic":
                return f"{topic}-{'key' if key else 'value'}"
            case "record":
                return record
            case "topic-record":
                return f"{topic}-{record}"

    @property
    def needs_record_name(self) -> bool:
        """Whether ``subject_of`` wants a record's name: the subject then follows from a schema, not from the topic."""
        return self.subject is None and self.subject_strategy != "topic"


@dataclass(frozen=True, slots=True)
class Reference:
    """What a schema imports, by the name it uses, and where that is registered."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A schema as a registry has it. Asked for by id, it comes without subject and version: it may be in several."""

    id: int
    subject: str | None
    version: int | None
    kind: str  # "AVRO", "PROTOBUF" or "JSON"; a registry may have others
    text: str
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicSchemas:
    """The newest schemas of a topic's values and keys."""

    value: Registered | None
    key: Registered | None


# Of this process, by URL and id. Without a lock, which a fork could copy while it is held: each access is one operation
# of a dict, and two threads that ask for the same id both get the same answer.
_known: dict[tuple[str, int], Registered] = {}
_known_references: dict[tuple[str, int], dict[str, str]] = {}
_unknown: dict[tuple[str, int], float] = {}  # until when it is not asked for again


def _keep(kept: dict[Key, Value], key: Key, value: Value) -> None:
    while len(kept) >= SCHEMAS_KEPT:
        with suppress(KeyError, StopIteration, RuntimeError):  # another thread did the same
            del kept[next(iter(kept))]
    kept[key] = value


class SchemaRegistry:
    """One registry, at one or more URLs. ``key``: where the user writes its settings, for messages."""

    def __init__(self, settings: RegistrySettings, *, key: str = "decode.registry") -> None:
        self._settings = settings
        self._key = key
        self._timeout_s = settings.timeout.total_seconds()
        self._urls = settings.urls  # the one that answered last comes first

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opener"}

    def __str__(self) -> str:
        return f"the schema registry at {self._settings.shown('url')}"

    # Reading.

    def latest(self, subject: str) -> Registered:
        """The newest version of a subject. Never from memory."""
        return self._version(subject, "latest")

    def version(self, subject: str, number: int) -> Registered:
        return self._version(subject, str(number))

    def by_id(self, schema_id: int) -> Registered:
        """The schema that a record's frame names, or ``UnknownSchema``."""
        at = (self._settings.url, schema_id)
        if (known := _known.get(at)) is not None:
            return known
        if not 0 <= schema_id <= ID_MAX or _unknown.get(at, 0.0) > time.monotonic():
            raise self._unknown_schema(schema_id)
        try:
            answer = self._ask("GET", f"/schemas/ids/{schema_id}")
        except _Missing:
            _keep(_unknown, at, time.monotonic() + UNKNOWN_KEPT_S)
            raise self._unknown_schema(schema_id) from None
        found = self._registered({**_table(answer), "id": schema_id, "subject": None, "version": None})
        _keep(_known, at, found)
        return found

    def knows(self, schema_id: int) -> bool:
        """Whether ``by_id`` would answer without asking."""
        at = (self._settings.url, schema_id)
        return at in _known or _unknown.get(at, 0.0) > time.monotonic()

    def subjects_of(self, schema_id: int) -> list[tuple[str, int]]:
        """The subjects, and the version in each, that are this schema."""
        try:
            answer = self._ask("GET", f"/schemas/ids/{schema_id}/versions")
        except _Missing:
            return []
        listed = self._list(answer, dict)
        if not all(isinstance(one.get("subject"), str) for one in listed):
            self._senseless()
        return [(one["subject"], self._int(one.get("version"))) for one in listed]

    def references(self, schema: Registered) -> Mapping[str, str]:
        """The texts of all that a schema imports, and of what these import, by the names they are imported by."""
        at = (self._settings.url, schema.id)
        if (known := _known_references.get(at)) is not None:
            return known
        texts: dict[str, str] = {}
        seen: dict[str, Reference] = {}
        left = list(schema.references)
        while left:
            reference = left.pop()
            if (before := seen.setdefault(reference.name, reference)) is not reference:
                if before != reference:
                    raise RegistryRefused(
                        f"schema {schema.id} in {self} imports {reference.name} as version {before.version} of "
                        f"{before.subject} and as version {reference.version} of {reference.subject}",
                        advice="Register it again, with references that agree.",
                    )
                continue
            if len(seen) > REFERENCES_MAX:
                raise RegistryRefused(f"schema {schema.id} in {self} has more than {REFERENCES_MAX} references")
            found = self.version(reference.subject, reference.version)
            texts[reference.name] = found.text
            left += found.references
        _keep(_known_references, at, texts)
        return texts

    def subjects(self) -> list[str]:
        return self._list(self._ask("GET", "/subjects"), str)

    def versions(self, subject: str) -> list[int]:
        try:
            return self._list(self._ask("GET", f"/subjects/{_quoted(subject)}/versions"), int)
        except _Missing:
            raise self._unknown_subject(subject) from None

    def newest_of(self, topics: Iterable[str]) -> dict[str, TopicSchemas]:
        """What the subjects of topics' values and keys have, where there are such subjects. Many are asked at once."""
        if self._settings.needs_record_name:
            raise ConfigError(
                f"no topic says its subjects under {self._key}.subject_strategy = {self._settings.subject_strategy}",
                advice="Leave out subject_strategy, for subjects named TOPIC-value and TOPIC-key.",
            )
        there = set(self.subjects())
        wanted = {(t, key): f"{t}-{'key' if key else 'value'}" for t in topics for key in (False, True)}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = {at: pool.submit(self._newest, name) for at, name in wanted.items() if name in there}
        found = {at: future.result() for at, future in asked.items()}
        return {t: TopicSchemas(found.get((t, False)), found.get((t, True))) for t, _ in wanted}

    def _newest(self, subject: str) -> Registered | None:
        try:
            return self.latest(subject)
        except UnknownSubject:  # deleted in between
            return None

    # Writing, and asking about a schema that one has.

    def register(self, subject: str, kind: str, text: str, references: Iterable[Reference] = ()) -> int:
        """The id of the schema under this subject, registered if it is not yet. ``RegistryRefused`` if it is not
        compatible or not valid."""
        answer = self._ask("POST", f"/subjects/{_quoted(subject)}/versions", _as_body(kind, text, references))
        return self._int(_table(answer).get("id"))

    def find(self, subject: str, kind: str, text: str, references: Iterable[Reference] = ()) -> Registered | None:
        """This very schema as the subject has it, or None."""
        try:
            answer = self._ask("POST", f"/subjects/{_quoted(subject)}", _as_body(kind, text, references))
        except _Missing:
            return None
        return self._registered({"schemaType": kind, **_table(answer)})

    def compatible(self, subject: str, text: str, kind: str, references: Iterable[Reference] = ()) -> bool:
        """Whether the schema could be registered here, by the subject's own rule. A new subject takes any."""
        try:
            body = _as_body(kind, text, references)
            answer = self._ask("POST", f"/compatibility/subjects/{_quoted(subject)}/versions", body)
        except _Missing:
            return True
        compatible = _table(answer).get("is_compatible")
        if not isinstance(compatible, bool):
            self._senseless()
        return compatible

    # How an answer is read.

    def _version(self, subject: str, version: str) -> Registered:
        try:
            return self._registered(_table(self._ask("GET", f"/subjects/{_quoted(subject)}/versions/{version}")))
        except _Missing as missing:
            raise self._unknown_subject(subject, version if missing.code == _NO_VERSION else "") from None

    def _registered(self, answer: Mapping[str, Any]) -> Registered:
        try:
            references = tuple(
                Reference(str(one["name"]), str(one["subject"]), self._int(one["version"]))
                for one in answer.get("references") or ()
            )
        except (KeyError, TypeError):
            self._senseless()
        subject, version, text = answer.get("subject"), answer.get("version"), answer.get("schema")
        if not isinstance(text, str) or not isinstance(subject, str | None):
            self._senseless()
        return Registered(
            self._int(answer.get("id")),
            subject,
            None if version is None else self._int(version),
            str(answer.get("schemaType") or "AVRO").upper(),  # Confluent's does not name its first kind
            text,
            references,
        )

    def _int(self, value: Any) -> int:
        if type(value) is not int:
            self._senseless()
        return value

    def _list(self, answer: Any, kind: type[Value]) -> list[Value]:
        if not isinstance(answer, list) or not all(type(item) is kind for item in answer):
            self._senseless()
        return answer

    def _senseless(self) -> NoReturn:
        raise RegistryUnavailable(f"{self} answered with something else than a registry does", advice=self._check)

    def _unknown_schema(self, schema_id: int) -> UnknownSchema:
        return UnknownSchema(f"{self} has no schema with id {schema_id}")

    def _unknown_subject(self, subject: str, version: str = "") -> UnknownSubject:
        what = f"no version {version} of subject {subject}" if version else f"no subject {subject}"
        return UnknownSubject(
            f"{self} has {what}",
            advice=f"Check {self._key}.subject_strategy and {self._key}.subject, or register the schema.",
        )

    # How it is asked.

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer, of the first URL that gives one."""
        unavailable: list[RegistryUnavailable] = []
        for url in self._urls:
            try:
                answer = self._ask_at(url, method, path, body)
            except RegistryUnavailable as error:
                unavailable.append(error)
                continue
            except (AvowError, _Missing):
                self._first(url)
                raise
            self._first(url)
            return answer
        if len(unavailable) == 1:
            raise unavailable[0]
        raise RegistryUnavailable("; ".join(map(str, unavailable)), advice=self._check)

    def _first(self, url: str) -> None:
        if self._urls[0] != url:
            self._urls = (url, *(other for other in self._settings.urls if other != url))

    def _ask_at(self, url: str, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{url}{path}", data, self._headers, method=method)
        opener = self._opener
        try:
            status, content = _within(self._timeout_s, lambda: _exchange(opener, request, self._timeout_s))
        except RegistryRefused as error:  # a redirect
            raise RegistryRefused(f"{self._at(url)} {error}", advice=error.advice) from None
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer(url, error) from None
        try:
            answer = json.loads(content) if content else None
        except (ValueError, RecursionError):
            answer = None if status >= 400 else _NOT_JSON
        if status == 200 and answer is not _NOT_JSON:
            return answer
        raise self._refusal(url, status, answer)

    def _no_answer(self, url: str, error: Exception) -> AvowError:
        reason = error.reason if isinstance(error, URLError) else error
        text = self._redacted(str(reason)) or type(reason).__name__
        if isinstance(reason, ssl.SSLError) and _TLS_REFUSED.search(f"{reason.reason} {reason}"):
            return RegistryRefused(
                f"the TLS handshake with {self._at(url)} failed: {text}",
                advice=f"Check {self._key}.url and .ca_file (the CA that signed the registry's certificate), and "
                "certificate_file and key_file if the registry asks for ours.",
            )
        if isinstance(reason, TimeoutError):
            text = f"no answer within {self._timeout_s:g} s"
        advice = self._check
        if isinstance(reason, ssl.SSLEOFError | ConnectionError) and url.startswith("https:"):
            # A server that misses our certificate says so after its side of the handshake, and its word may be lost.
            advice += f" If it asks for our certificate, check {self._key}.certificate_file."
        return RegistryUnavailable(f"{self._at(url)} cannot be asked: {text}", advice=advice)

    def _refusal(self, url: str, status: int, answer: Any) -> Exception:
        """What an answer that is none means."""
        given = answer if isinstance(answer, dict) else {}
        code, said = given.get("error_code"), self._redacted(str(given.get("message") or ""))
        saying = f": {said}" if said else ""
        if status == 404 and isinstance(code, int) and code in _UNKNOWN:
            return _Missing(code)
        if status >= 500 or status in _MAY_PASS or status == 200:
            text = f"answered {status}{saying}" if status != 200 else "answered with something else than JSON"
            return RegistryUnavailable(f"{self._at(url)} {text}", advice=self._check)
        refused = f"{self._at(url)} refused the request ({status}){saying}"
        match status:
            case 401:
                advice = f"Check {self._key}: user and password, or token, or certificate_file."
            case 403:
                advice = f"Grant this user of the registry the right, or set another one in {self._key}."
            case 407:
                advice = "Check the user and the password of the proxy in the environment."
            case 404 | 405:
                refused = f"there is no schema registry at {self._named(url)} (its answer: {status}{saying})"
                advice = f"Check the path in {self._key}.url; Apicurio's API is at /apis/ccompat/v7."
            case 409:
                advice = "The subject's compatibility level does not allow this change of the schema."
            case _:
                advice = ""
        return RegistryRefused(refused, advice=advice)

    @property
    def _check(self) -> str:
        return f"Check that the registry is up, and that {self._key}.url is right."

    def _at(self, url: str) -> str:
        return f"the schema registry at {self._named(url)}"

    def _named(self, url: str) -> str:
        """A URL as it may be shown: one that came from the environment as the file has it."""
        shown = str(self._settings.shown("url"))
        return url if shown == self._settings.url else shown

    def _redacted(self, text: str) -> str:
        """In one line that is not too long, without any secret, and without hosts that the file does not show."""
        one = self._settings
        hidden = [
            secret.get_secret_value() for secret in (one.password, one.token, one.key_password, one.user) if secret
        ]
        if one.shown("url") != one.url:
            hidden += [part for url in one.urls for part in (url, urlsplit(url).netloc, urlsplit(url).hostname or "")]
        for word in sorted(filter(None, hidden), key=len, reverse=True):
            text = text.replace(word, "***")
        return "".join(c if c.isprintable() else " " for c in text).strip()[:LINE_MAX]

    @cached_property
    def _headers(self) -> dict[str, str]:
        headers = {"Accept": f"{_MEDIA}, application/json", "Content-Type": _MEDIA, "User-Agent": "avow"}
        settings = self._settings
        if settings.token is not None:
            headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
        elif settings.user is not None and settings.password is not None:
            login = f"{settings.user.get_secret_value()}:{settings.password.get_secret_value()}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return headers

    @cached_property
    def _opener(self) -> OpenerDirector:
        return build_opener(_Proxies(), _WithinOrigin(), HTTPSHandler(context=self._tls()))

    def _tls(self) -> ssl.SSLContext:
        settings = self._settings
        at = "ca_file"
        try:
            context = ssl.create_default_context(cafile=settings.ca_file)
            if settings.certificate_file is not None:
                at = "key_file" if settings.key_file else "certificate_file"
                password = settings.key_password.get_secret_value() if settings.key_password else ""
                # By a function: without a password, OpenSSL would ask for it on the terminal.
                context.load_cert_chain(settings.certificate_file, settings.key_file, lambda: password)
        except FileNotFoundError:
            raise ConfigError(f"{self._key}: there is no such file", advice=self._check_files) from None
        except (OSError, ValueError) as error:
            why = self._redacted(str(error))
            raise ConfigError(f"{self._key}.{at} cannot be used: {why}", advice=self._check_files) from None
        return context

    @property
    def _check_files(self) -> str:
        names = [name for name in ("ca_file", "certificate_file", "key_file") if getattr(self._settings, name)]
        shown = ", ".join(f"{name} = {self._settings.shown(name)}" for name in names)
        return f"Check the PEM files ({shown}), and key_password if the key has one."


class _Missing(Exception):
    """The registry says that it has no such thing."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


_NOT_JSON = object()


def _table(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}


def _quoted(subject: str) -> str:
    return quote(subject, safe="")


def _as_body(kind: str, text: str, references: Iterable[Reference]) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": text}
    if kind != "AVRO":  # old registries do not know this key
        body["schemaType"] = kind
    if listed := [{"name": one.name, "subject": one.subject, "version": one.version} for one in references]:
        body["references"] = listed
    return body


def _within(timeout_s: float, call: Callable[[], Value]) -> Value:
    """The call's result, or a TimeoutError. A socket's time-out bounds one wait for bytes, neither all of them together
    nor the look-up of a host's name; so the call has a thread of its own, left to itself when the time is over."""
    ended: Future[Value] = Future()

    def attempt() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            ended.set_exception(error)

    threading.Thread(target=attempt, name="avow-schema-registry", daemon=True).start()
    return ended.result(timeout_s)


def _exchange(opener: OpenerDirector, request: Request, timeout_s: float) -> tuple[int, bytes]:
    """The status and the content of an answer."""
    give_up_at = time.monotonic() + timeout_s
    try:
        response = opener.open(request, timeout=timeout_s)
    except HTTPError as error:
        response = error
    with response:
        content = bytearray()
        while piece := response.read1(65536):
            content += piece
            if len(content) > ANSWER_BYTES_MAX:
                raise ValueError(f"the answer is longer than {ANSWER_BYTES_MAX // 2**20} MiB")
            if time.monotonic() > give_up_at:
                raise TimeoutError
        return int(response.status), bytes(content)


class _WithinOrigin(HTTPRedirectHandler):
    """Follows a redirect within the same server. Elsewhere our credentials would be somebody else's."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if req.get_method() != "GET" or urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            host = urlsplit(newurl).hostname
            raise RegistryRefused(
                f"redirects to {host}" if req.get_method() == "GET" else "redirects what is sent to it",
                advice="Set the url of the registry itself.",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Proxies(ProxyHandler):
    """The proxies that the environment names, but not for this machine: a local registry is behind no proxy."""

    def proxy_open(self, req: Request, proxy: str, type: str) -> Any:
        if _is_loopback(urlsplit(f"//{req.host}").hostname or ""):
            return None
        return super().proxy_open(req, proxy, type)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
