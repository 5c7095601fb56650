"""Single values of the pipeline file: each function takes what TOML gave and returns it typed, or refuses it.

Owns: the rules of one value, and the marks of values from the environment. Must not know: which section a
value stands in. Its neighbour is ``tree``, which puts these together.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from string import Formatter
from typing import Any, Literal, NoReturn, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, SecretStr

from avow import schema as ddl
from avow.errors import ConfigError

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a pipeline file."""

    key: Key  # relative to the section that found it
    wrong: str  # may quote the value at this key, and no other value
    allowed: str  # quotes no value


class Refused(ValueError):
    """What the checks below raise: pydantic collects ValueErrors and adds where they happened."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("refused")
        self.problems = problems


def refuse(wrong: str, allowed: str, *key: str | int) -> NoReturn:
    raise Refused(Problem(key, wrong, allowed))


def raise_if_any(problems: list[Problem]) -> None:
    if problems:
        raise Refused(*problems)


ENV = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


class FromEnv(str):
    """A string that holds values from the environment, and remembers how the file wrote it."""

    written: str

    def __new__(cls, value: str, written: str) -> Self:
        self = super().__new__(cls, value)
        self.written = written
        return self

    def __repr__(self) -> str:
        return repr(self.written)


def from_env(value: Any) -> bool:
    """Whether a string, or one in a list, came from the environment. Tables answer for themselves."""
    return isinstance(value, FromEnv) or (isinstance(value, list) and any(isinstance(v, FromEnv) for v in value))


def as_written(value: Any) -> Any:
    if isinstance(value, list):
        return [as_written(item) for item in value]
    return value.written if isinstance(value, FromEnv) else value


@dataclass(frozen=True, slots=True)
class Table:
    """A table's name in its parts; the sink quotes each of them."""

    name: str
    schema: str | None = None  # None: the first schema of the connection's search path

    def __str__(self) -> str:
        parts = (self.name,) if self.schema is None else (self.schema, self.name)
        return ".".join(p if re.fullmatch(r"\w+", p) else '"' + p.replace('"', '""') + '"' for p in parts)


def matching(pattern: str, wrong: str, allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII) or value in (".", ".."):
            refuse(f"{value!r} {wrong}", allowed)
        return value

    return AfterValidator(check)


def has_control(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)


def climbs(path: str) -> bool:
    """Whether a path, or a list of paths, leaves a folder by ``..``."""
    return ".." in re.split(r"[/\\,:;]", path)


_DURATION_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


def duration(value: Any) -> timedelta:
    allowed = 'a number and ms, s, m or h, from "0s" to "1h", for example "500ms"'
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h)", value) if isinstance(value, str) else None
    if match is None:
        refuse(f"{value!r} is not a duration", allowed)
    duration = timedelta(milliseconds=int(match[1]) * _DURATION_UNITS_MS[match[2]])
    if duration > timedelta(hours=1):
        refuse(f"{value!r} is too long", allowed)
    return duration


def brokers(value: str) -> str:
    for number, broker in enumerate(value.split(","), start=1):
        match = re.fullmatch(r"\s*(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})\s*", broker)
        if match is None or not 1 <= int(match[1]) <= 65_535:
            # The entry is not quoted: people paste user:password@host here.
            refuse(
                f"entry {number} is not host:port",
                'host:port, several with commas: "kafka-1:9092,kafka-2:9092"',
            )
    return ",".join(broker.strip() for broker in value.split(","))


# What Python's and Java's regular expressions read alike. A topic name holds no other characters.
_PLAIN_REGEX = re.compile(
    r"(?:[A-Za-z0-9_.^$|*+?-]|\\[.dw-]|\[(?![^]]*--)\^?(?:[A-Za-z0-9_.-]|\\[.dw-])+\]|\((?:\?[:=!])?|\)|\{[0-9]+(?:,[0-9]*)?\})+"
)


def topics_pattern(value: str) -> str:
    if not _PLAIN_REGEX.fullmatch(value):
        refuse(
            f"{value!r} is not a plain regular expression",
            r"letters, digits, . _ - [classes] (groups) (?:..) (?=..) (?!..) | * + ? {n,m} ^ $ \. \- \d \w",
        )
    try:
        re.compile(value)
    except re.error as error:
        refuse(
            f"{value!r} does not compile: {error.msg}",
            "a regular expression that a topic's whole name matches",
        )
    return value


_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
START_ALLOWED = (
    '"earliest", "latest", a time with its zone ("2026-01-31T12:00:00Z"), '
    'or offsets: { topic = { "0" = 17 } }, a topic with dots in quotes'
)

Offsets = Mapping[str, Mapping[int, int]]  # topic, partition, offset
Start = Literal["earliest", "latest"] | datetime | Offsets


def start(value: Any) -> Start:
    match value:
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
        case dict():
            return _offsets(value)
        case str() if _RFC3339.fullmatch(value):
            try:
                time = datetime.fromisoformat(value.upper())
            except ValueError:
                refuse(f"{value!r} is no time of any calendar", START_ALLOWED)
        case datetime():
            time = value
        case _:
            refuse(f"{value!r} is not a start", START_ALLOWED)
    if time.tzinfo is None:
        refuse(f"{value!s} has no zone", START_ALLOWED)
    if time < datetime(1970, 1, 1, tzinfo=UTC):
        refuse(f"{value!s} is before 1970, where Kafka's clock begins", START_ALLOWED)
    return time


def _offsets(table: dict[str, Any]) -> Offsets:
    offsets: dict[str, dict[int, int]] = {}
    for topic, partitions in table.items():
        if not isinstance(partitions, dict) or not partitions:
            refuse("is not a table of partition = offset", START_ALLOWED, topic)
        for partition, offset in partitions.items():
            if not re.fullmatch("[0-9]{1,9}", partition):
                refuse("is not a partition's number", START_ALLOWED, topic, partition)
            if type(offset) is not int or not 0 <= offset < 2**63:
                refuse("is not an offset", START_ALLOWED, topic, partition)
        offsets[topic] = {int(partition): offset for partition, offset in partitions.items()}
        if len(offsets[topic]) < len(partitions):
            refuse("names a partition twice", START_ALLOWED, topic)
    return offsets


def schema(value: Any) -> ddl.Schema:
    if not isinstance(value, str):
        refuse("should be a string", 'columns in Spark\'s spelling: "id long not null, note string"')
    try:
        return ddl.parse(value)
    except ConfigError as error:
        refuse(str(error), error.advice.rstrip("."))


def table(value: Any) -> Table:
    allowed = '"table" or "schema.table"; a name that itself holds a dot: ["schema", "we.ird"] or ["we.ird"]'
    parts = value.split(".") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) not in (1, 2) or not all(isinstance(p, str) and p for p in parts):
        refuse("is not a table's name", allowed)
    return Table(*reversed(parts))


@dataclass(frozen=True, slots=True)
class PartitionBy:
    """How a lake's files are put into folders: by a column's values, or by the day of a timestamp."""

    column: str
    day: bool = False

    def __str__(self) -> str:
        return f"day({self.column})" if self.day else self.column


def partition_by(value: Any) -> PartitionBy:
    if not isinstance(value, str) or not value or has_control(value):
        refuse("is not a column", '"column" or "day(column)"')
    found = re.fullmatch(r"day\((.+)\)", value)
    return PartitionBy(found[1], day=True) if found else PartitionBy(value)


SCHEMES = ("file", "s3", "s3a")  # of the places of a lake

# Options of a store: without aws_, as the client of Delta's log spells them -> the same for the client that writes the
# files, if it concerns that one. What is not here would reach one of the two alone.
STORE_OPTIONS = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "token": "session_token",
    "region": "region",
    "default_region": "region",
    "endpoint_url": "endpoint_override",
    "endpoint": "endpoint_override",
    "virtual_hosted_style_request": "force_virtual_addressing",
    "skip_signature": "anonymous",
    "proxy_url": "proxy_options",
    "allow_http": "",
    "connect_timeout": "",
    "timeout": "",
}


def lake_path(value: str) -> str:
    allowed = "a folder, or s3://bucket/folder"
    found = re.match(r"([^/]*):/+", value)
    if not value or has_control(value) or (found and (found[1] not in SCHEMES or found.end() == len(value))):
        refuse("is not a place for a table", allowed)
    if climbs(value) or "%" in value or "\\" in value:
        refuse("holds .., % or a backslash", allowed)
    return value.rstrip("/") or "/"


def store_settings(value: Any) -> dict[str, str]:
    settings = client_settings(value)
    unknown = [name for name in settings if name.lower().removeprefix("aws_") not in STORE_OPTIONS]
    allowed = f"{', '.join(STORE_OPTIONS)}, with or without aws_ before it"
    raise_if_any([Problem((name,), "is not an option that avow hands on", allowed) for name in unknown])
    return settings


def catalog_settings(value: Any) -> dict[str, str]:
    settings = client_settings(value)
    if not {"uri", "warehouse", "type"} & settings.keys():
        refuse("names neither a warehouse nor a uri", '{ warehouse = "folder" }, or the settings of your catalog')
    found = re.match(r"([^/]*):/", settings.get("warehouse", ""))
    if found and found[1] not in SCHEMES:
        known = f"a folder, {' or '.join(f'{scheme}://' for scheme in SCHEMES)}"
        raise_if_any([Problem(("warehouse",), f"{found[1]} is not a store that avow knows", known)])
    return settings


def postgres_url(value: SecretStr) -> SecretStr:
    """Never quotes the URL, nor what urllib says of it."""
    allowed = 'postgresql://user@host:port/database, best as "${env:DATABASE_URL}"'
    url = value.get_secret_value()
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("postgresql", "postgres") or not url.startswith(f"{parts.scheme}://"):
        refuse("is not a PostgreSQL URL", allowed)
    if has_control(url) or " " in url:
        refuse("holds a space or a control character", f"{allowed}; other characters as %XX")
    _check_as_libpq_reads_it(url.partition("://")[2])
    if any(climbs(path) for _, path in parse_qsl(parts.query)):
        refuse("holds a path with ..", "paths without ..")
    return value


def _check_as_libpq_reads_it(rest: str) -> None:
    """A password with a character that ends it is read as a host or a port, and libpq's message then shows it."""
    escaped = "in a password: @ as %40, / as %2F, : as %3A, ? as %3F, # as %23, % as %25"
    base, _, _ = rest.partition("?")
    authority, _, path = base.partition("/")
    who, at, hosts = authority.rpartition("@")
    if "@" in who or "@" in path:
        refuse("has more than one @, or one behind a /: the password is not escaped", escaped)
    if re.search("%(?![0-9A-Fa-f]{2})", rest):
        refuse("has a % without two hexadecimal digits: the password is not escaped", escaped)
    for host in (hosts if at else authority).split(","):
        port = re.sub(r"^\[[^]]*\]", "", host).partition(":")[2]
        if port and not (port.isascii() and port.isdigit()):
            refuse("has a port that is not a number, or a password that is not escaped", escaped)


_PATH_NAME = re.compile("(location|dir|directory|path|file|jar|archive)s?$", re.I)


def client_settings(value: Any) -> dict[str, str]:
    """A table of client settings, flat: ``a.b = 1`` and ``"a.b" = 1`` mean the same."""
    if not isinstance(value, dict):
        refuse("should be a table", "name = value, where a value is a string, a number or a boolean")
    settings: dict[str, str] = {}
    problems: list[Problem] = []
    for key, item in flat(value):
        name = ".".join(key)
        if name in settings:
            problems.append(Problem((name,), "is there twice", "once, in either spelling"))
        if not isinstance(item, str | int | float):
            problems.append(Problem((name,), "is no string, number or boolean", "one of these"))
            continue
        settings[name] = str(item).lower() if isinstance(item, bool) else str(item)
        if _PATH_NAME.search(name) and climbs(settings[name]):
            problems.append(Problem((name,), "holds a path with ..", "paths without .."))
    raise_if_any(problems)
    return settings


def flat(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, (*above, name))
        else:
            yield (*above, name), value


# Settings of the Kafka clients that are avow's own, each with the reason.
_READS_FROM_LEDGER = "a run always starts from the ledger's position"
_OWNED_KAFKA = {
    "bootstrap.servers": "it is source.brokers",
    "metadata.broker.list": "it is source.brokers",
    "group.id": "it is the pipeline's name",
    "group.instance.id": "avow decides who is a member of the group",
    "partition.assignment.strategy": "the consumer engine moves partitions one by one",
    "enable.auto.commit": "positions are told to the group after their claim, never before",
    "auto.commit.interval.ms": "positions are told to the group after their claim, never before",
    "enable.auto.offset.store": "positions are told to the group after their claim, never before",
    "auto.offset.reset": _READS_FROM_LEDGER,
    "isolation.level": "only committed records are read",
    "enable.partition.eof": "the engine decides where a partition ends",
    "key.deserializer": "keys are read as bytes",
    "value.deserializer": "values are read as bytes, decode.format says what they mean",
    "interceptor.classes": "an interceptor could change or drop records unseen",
    "transactional.id": "avow names its own transactions",
    "enable.idempotence": "the guarantee decides it",
    "acks": "the guarantee decides it",
}


# And of the producers that the Kafka sink has.
_OWNED_PRODUCER = {
    "bootstrap.servers": "it is sink.brokers",
    "metadata.broker.list": "it is sink.brokers",
    "group.id": "it is the pipeline's name",
    "message.max.bytes": "what the output topics take decides it",
    "delivery.report.only.error": "avow counts what was not delivered",
    "partitioner": "keys go where a Java producer would put them",
    "max.in.flight": "the order of records rests on it",
    "max.in.flight.requests.per.connection": "the order of records rests on it",
    "isolation.level": "only committed records are read",
    "interceptor.classes": "an interceptor could change or drop records unseen",
    "transactional.id": "avow names its own transactions",
    "enable.idempotence": "the guarantee decides it",
    "acks": "the guarantee decides it",
    "request.required.acks": "the guarantee decides it",
}


def kafka_settings(value: Any) -> dict[str, str]:
    return _not_owned(client_settings(value), _OWNED_KAFKA)


def producer_settings(value: Any) -> dict[str, str]:
    return _not_owned(client_settings(value), _OWNED_PRODUCER)


def _not_owned(settings: dict[str, str], owned: Mapping[str, str]) -> dict[str, str]:
    allowed = "any other client setting"
    problems = [Problem((name,), f"is avow's own: {owned[name]}", allowed) for name in settings if name in owned]
    problems += [
        Problem((name,), "begins with kafka.", f"client settings without it: {name.removeprefix('kafka.')}")
        for name in settings
        if name.startswith("kafka.")
    ]
    raise_if_any(problems)
    return settings


def spark_settings(value: Any) -> dict[str, str]:
    problems = []
    settings = client_settings(value)
    for name, setting in settings.items():
        if name.startswith("spark."):
            problems.append(Problem((name,), "begins with spark.", f"in this table without it: {name[6:]}"))
        if name == "speculation" and setting.lower() != "false":
            problems.append(Problem((name,), "would run two attempts of a task at once", "false, which is the default"))
    raise_if_any(problems)
    return {f"spark.{name}": setting for name, setting in settings.items()}


def topic_template(value: str) -> str:
    """A topic's name, with columns in braces where it depends on the record."""
    try:
        parts = list(Formatter().parse(value))
    except ValueError:
        refuse("has a brace without its partner", "a topic's name, or a template such as orders-{region}")
    for text, name, spec, conversion in parts:
        if name is not None and (not name or spec or conversion or re.search(r"[.\[\]]", name)):
            refuse(f"{{{name}}} names no column", "braces around a column's name and nothing else")
        if re.search(r"[^a-zA-Z0-9._-]", text):
            refuse("is not a topic's name", "1 to 249 letters, digits, . _ and -, and columns in braces")
    if not 1 <= len(value) <= 249 or value in (".", ".."):
        refuse("is not a topic's name", "1 to 249 letters, digits, . _ and -")
    return value
