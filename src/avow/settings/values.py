"""Single values of the pipeline file: each function takes what TOML gave and returns it typed, or refuses it.

Owns: the rules of one value, and the marks of values from the environment. Must not know: which section a
value stands in. Its neighbour is ``tree``, which puts these together.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, Self

from pydantic import AfterValidator

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


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    near = get_close_matches(str(word).lower(), list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


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
    if isinstance(value, timedelta):  # TOML has none: from Python
        value = f"{round(value.total_seconds() * 1000)}ms"
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h)", value) if isinstance(value, str) else None
    if match is None:
        refuse(f"{value!r} is not a duration", allowed)
    duration = timedelta(milliseconds=int(match[1]) * _DURATION_UNITS_MS[match[2]])
    if duration > timedelta(hours=1):
        refuse(f"{value!r} is out of range", allowed)
    return duration


def brokers(value: str) -> str:
    for number, broker in enumerate(value.split(","), start=1):
        match = re.fullmatch(r"\s*(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})\s*", broker)
        if match is None or not 1 <= int(match[1]) <= 65_535:
            # The entry is not quoted: people paste user:password@host here.
            refuse(
                f"entry {number} is not host:port",
                'host:port, several separated by commas: "kafka-1:9092,kafka-2:9092"',
            )
    return ",".join(broker.strip() for broker in value.split(","))


# What Python's and Java's regular expressions read alike. A topic name holds no other characters.
_PLAIN_REGEX = re.compile(
    r"(?:[A-Za-z0-9_.^$|*+?-]|\\[.dw-]|\[(?![^]]*--)\^?(?:[A-Za-z0-9_.-]|\\[.dw-])+\]|\((?:\?[:=!])?|\)|\{[0-9]+(?:,[0-9]*)?\})+"
)


def topics_pattern(value: str) -> str:
    if not _PLAIN_REGEX.fullmatch(value):
        refuse(
            f"{value!r} is not a supported regular expression",
            r"letters, digits, . _ - [classes] (groups) (?:..) (?=..) (?!..) | * + ? {n,m} ^ $ \. \- \d \w",
        )
    try:
        re.compile(value)
    except re.error as error:
        refuse(f"{value!r} does not compile: {error.msg}", "a regular expression that a topic's whole name matches")
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
                refuse(f"{value!r} is not a valid date and time", START_ALLOWED)
        case datetime():
            time = value
        case _:
            refuse(f"{value!r} is not a start", START_ALLOWED)
    if time.tzinfo is None:
        refuse(f"{value!s} has no time zone", START_ALLOWED)
    if time < datetime(1970, 1, 1, tzinfo=UTC):
        refuse(f"{value!s} is before 1970, the earliest Kafka timestamp", START_ALLOWED)
    return time


def _offsets(table: dict[str, Any]) -> Offsets:
    offsets: dict[str, dict[int, int]] = {}
    for topic, partitions in table.items():
        if not isinstance(partitions, dict) or not partitions:
            refuse("is not a table of partition = offset", START_ALLOWED, topic)
        for partition, offset in partitions.items():
            if not re.fullmatch("[0-9]{1,9}", partition):
                refuse("is not a partition number", START_ALLOWED, topic, partition)
            if type(offset) is not int or not 0 <= offset < 2**63:
                refuse("is not an offset", START_ALLOWED, topic, partition)
        offsets[topic] = {int(partition): offset for partition, offset in partitions.items()}
        if len(offsets[topic]) < len(partitions):
            refuse("names a partition twice", START_ALLOWED, topic)
    return offsets


SCHEMA_ALLOWED = 'columns in Spark\'s spelling: "id long not null, note string"'


def schema(value: Any) -> ddl.Schema:
    if not isinstance(value, str):
        refuse("should be a string", SCHEMA_ALLOWED)
    try:
        return ddl.parse(value)
    except ConfigError as error:
        refuse(str(error), error.advice.rstrip("."))


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
            problems.append(Problem((name,), "is set twice", "once, in either spelling"))
        if not isinstance(item, str | int | float):
            problems.append(Problem((name,), "is not a string, number or boolean", "a string, a number or a boolean"))
            continue
        settings[name] = str(item).lower() if isinstance(item, bool) else str(item)
        if _PATH_NAME.search(name) and climbs(settings[name]):
            problems.append(Problem((name,), "contains a path with ..", "paths without .."))
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
    "bootstrap.servers": "set source.brokers instead",
    "metadata.broker.list": "set source.brokers instead",
    "group.id": "the pipeline's name is the group id",
    "group.instance.id": "avow decides who is a member of the group",
    "partition.assignment.strategy": "the consumer engine uses cooperative-sticky",
    "enable.auto.commit": "offsets are committed to the group after their claim, never before",
    "auto.commit.interval.ms": "offsets are committed to the group after their claim, never before",
    "enable.auto.offset.store": "offsets are committed to the group after their claim, never before",
    "auto.offset.reset": _READS_FROM_LEDGER,
    "isolation.level": "only committed records are read",
    "enable.partition.eof": "the engine decides where a partition ends",
    "key.deserializer": "keys are read as bytes",
    "value.deserializer": "values are read as bytes and decoded by decode.format",
    "interceptor.classes": "an interceptor could change or drop records unnoticed",
    "transactional.id": "avow sets it for each partition",
    "enable.idempotence": "the guarantee sets it",
    "acks": "the guarantee sets it",
}


def kafka_settings(value: Any) -> dict[str, str]:
    return not_owned(client_settings(value), _OWNED_KAFKA)


def not_owned(settings: dict[str, str], owned: Mapping[str, str]) -> dict[str, str]:
    allowed = "any other client setting"
    problems = [Problem((name,), f"cannot be set: {owned[name]}", allowed) for name in settings if name in owned]
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
