"""The pages about records: looking through a topic, searching it, following it, and one record as a whole.

A place in a topic is a cursor, written ``0:120,1:88``: partition and offset. Every page has links to the next one in
its direction, so the back button works and a look can be sent to somebody.

Owns: these answers. Must not know: how they are shown. Its neighbour is ``avow.kafka.browse``, which reads.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from avow.dashboard.asking import OFFSET_MAX, PARTITION_MAX, Ask, NotThere, one_place
from avow.dashboard.house import House
from avow.dashboard.show import HEADERS_MAX, Shown, shown, shown_headers
from avow.errors import ConfigError
from avow.kafka.browse import Browser, Look, Meant, Seen

TOGETHER_MAX = 64  # partitions that are looked at side by side
EXPORT_MAX = 5_000  # records
TAIL_BACK = 200  # offsets of a partition, for whoever comes back to a tail
TOPIC = r"^[a-zA-Z0-9._-]{1,249}$"


class MessagesAsk(Ask):
    topic: Annotated[str, Field(pattern=TOPIC)]
    partition: Annotated[int | None, Field(ge=0, le=PARTITION_MAX, description="one; none: all of them")] = None
    at: Annotated[Literal["newest", "oldest", "offset", "time"], Field(description="where to begin")] = "newest"
    offset: Annotated[int | None, Field(ge=0, le=OFFSET_MAX, description="with at=offset: begin here")] = None
    time: Annotated[datetime | None, Field(description="with at=time: begin here, UTC unless it has a zone")] = None
    q: Annotated[str, Field(max_length=200, description="text in key, value or headers; case does not matter")] = ""
    onwards: Annotated[str, Field(max_length=4_000, description="a cursor: records from here on")] = ""
    before: Annotated[str, Field(max_length=4_000, description="a cursor: records before it")] = ""
    limit: Annotated[int, Field(ge=1, le=500)] = 50

    @field_validator("partition", "offset", "time", mode="before")
    @classmethod
    def _empty(cls, value: object, _: ValidationInfo) -> object:
        return None if value == "" else value  # as a form sends a field that was left empty

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if not (self.onwards or self.before):  # a cursor is a place of its own
            one_place("at", self.at, offset=self.offset, time=self.time)
        return self

    @field_validator("onwards", "before")
    @classmethod
    def _cursor(cls, value: str) -> str:
        parse_cursor(value)
        return value


def parse_cursor(text: str) -> dict[int, int]:
    """``0:120,1:88`` as partition -> offset."""
    found: dict[int, int] = {}
    for part in filter(None, text.split(",")):
        partition, _, offset = part.partition(":")
        if not (partition.isdecimal() and offset.isdecimal() and len(offset) < 20 and len(partition) < 10):
            raise ValueError("not a cursor: partition:offset, several with commas")
        found[int(partition)] = int(offset)
    return found


def write_cursor(cursor: dict[int, int]) -> str:
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(cursor.items()))


@dataclass(frozen=True, slots=True)
class MessageRow:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    state: str  # committed, aborted or open
    key: Shown | None
    value: Shown | None
    headers: int


@dataclass(frozen=True, slots=True)
class MessagesAnswer:
    topic: str
    partitions: int
    messages: tuple[MessageRow, ...]
    newest_first: bool
    looked_at: int
    older: str  # a cursor for ``before``; empty: there is nothing older
    newer: str  # a cursor for ``onwards``
    onwards: str  # the cursor where a look in the same direction goes on; empty: it has seen all
    cut: str  # which bound ended the look early: time or bytes
    choose: bool = False  # too many partitions to look at all of them: one has to be chosen


class TooMany(ConfigError):
    """More partitions than can be looked at side by side."""

    def __init__(self, topic: str, partitions: int) -> None:
        why = f"{topic} has {partitions:,} partitions, and no more than {TOGETHER_MAX} are looked at side by side"
        super().__init__(why, advice="Choose a partition.")
        self.partitions = partitions


def messages(house: House, ask: MessagesAsk) -> MessagesAnswer:
    """Records of a topic, some at a time, searched if ``q`` is given."""
    with house.browser() as browser:
        try:
            firsts, ends = _bounds(browser, ask)
        except TooMany as many:
            return MessagesAnswer(ask.topic, many.partitions, (), True, 0, "", "", "", "", choose=True)
        backwards = bool(ask.before) or (not ask.onwards and ask.at == "newest")
        begin = _begin(browser, ask, firsts, ends)
        look = _look(browser, ask, begin, backwards=backwards)
    low = look.cursor if backwards else begin
    high = begin if backwards else look.cursor
    older = write_cursor(low) if any(low[p] > firsts[p] for p in low) else ""
    newer = write_cursor(high) if any(high[p] < ends[p] for p in high) else ""
    return MessagesAnswer(
        topic=ask.topic,
        partitions=len(firsts),
        messages=tuple(map(row, look.seen)),
        newest_first=backwards,
        looked_at=look.looked_at,
        older=older,
        newer=newer,
        onwards="" if look.done else write_cursor(look.cursor),
        cut=look.cut,
    )


def _bounds(browser: Browser, ask: MessagesAsk) -> tuple[dict[int, int], dict[int, int]]:
    firsts, ends = browser.bounds(ask.topic, None if ask.partition is None else [ask.partition])
    if not firsts:
        raise NotThere(f"{ask.topic} has no partition {ask.partition}")
    if len(firsts) > TOGETHER_MAX:
        raise TooMany(ask.topic, len(firsts))
    return firsts, ends


def _begin(browser: Browser, ask: MessagesAsk, firsts: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
    given = parse_cursor(ask.before or ask.onwards)
    if given:
        return {p: min(max(given.get(p, ends[p] if ask.before else firsts[p]), firsts[p]), ends[p]) for p in firsts}
    match ask.at:
        case "newest":
            return ends
        case "offset":
            return {p: min(max(ask.offset or 0, firsts[p]), ends[p]) for p in firsts}
        case "time" if ask.time is not None:
            return browser.at_time(ask.topic, in_utc(ask.time), list(firsts))
        case _:
            return firsts


def in_utc(moment: datetime) -> datetime:
    """As a form has it: UTC, unless it has a zone."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _look(browser: Browser, ask: MessagesAsk, begin: dict[int, int], *, backwards: bool) -> Look:
    meant = holds(ask.q) if ask.q else None
    if backwards:
        return browser.backwards(ask.topic, begin, ask.limit, meant)
    return browser.forwards(ask.topic, begin, ask.limit, meant)


def holds(text: str) -> Meant:
    """Whether a record has this text in its key, its value, or a header's name or value."""
    wanted = text.lower().encode()

    def meant(one: Seen) -> bool:
        parts = [one.key, one.value, *(part for name, value in one.headers for part in (name.encode(), value))]
        return any(part is not None and wanted in part.lower() for part in parts)

    return meant


def row(one: Seen) -> MessageRow:
    return MessageRow(
        one.topic,
        one.partition,
        one.offset,
        one.timestamp_ms,
        one.state,
        shown(one.key),
        shown(one.value),
        len(one.headers),
    )


class MessageAsk(Ask):
    topic: Annotated[str, Field(pattern=TOPIC)]
    partition: Annotated[int, Field(ge=0, le=PARTITION_MAX)]
    offset: Annotated[int, Field(ge=0, le=OFFSET_MAX)]


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    state: str
    key: Shown | None
    value: Shown | None
    headers: tuple[tuple[str, Shown | None], ...]
    more_headers: int  # that are not shown


def message(house: House, ask: MessageAsk) -> MessageAnswer:
    """One record as a whole: as text, or JSON laid out and raw, and in hex, with its headers."""
    one = _one(house, ask)
    return MessageAnswer(
        one.topic,
        one.partition,
        one.offset,
        one.timestamp_ms,
        one.state,
        shown(one.key, whole=True),
        shown(one.value, whole=True),
        shown_headers(one.headers),
        max(0, len(one.headers) - HEADERS_MAX),
    )


def _one(house: House, ask: MessageAsk) -> Seen:
    with house.browser() as browser:
        firsts, ends = browser.bounds(ask.topic, [ask.partition])
        inside = ask.partition in firsts and firsts[ask.partition] <= ask.offset < ends[ask.partition]
        found = browser.one(ask.topic, ask.partition, ask.offset) if inside else None
    if found is None:
        raise NotThere(
            f"there is no record at offset {ask.offset} of {ask.topic}/{ask.partition}",
            advice="It may be a transaction's marker, compacted away, deleted by retention, or not written yet.",
        )
    return found


def value_bytes(house: House, ask: MessageAsk) -> bytes:
    """A record's value, to be saved as a file."""
    return _one(house, ask).value or b""


def export(house: House, ask: MessagesAsk) -> Iterator[bytes]:
    """The records of a look as JSON lines. What is not text is base64, under another name."""
    whole = ask.model_copy(update={"limit": EXPORT_MAX})
    with house.browser() as browser:
        firsts, ends = _bounds(browser, whole)
        backwards = bool(whole.before) or (not whole.onwards and whole.at == "newest")
        look = _look(browser, whole, _begin(browser, whole, firsts, ends), backwards=backwards)
    for one in look.seen:
        line: dict[str, Any] = {
            "topic": one.topic,
            "partition": one.partition,
            "offset": one.offset,
            "timestamp_ms": one.timestamp_ms,
            "state": str(one.state),
            **_named("key", one.key),
            **_named("value", one.value),
            "headers": [{"name": name, **_named("value", value)} for name, value in one.headers],
        }
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _named(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


class TailAsk(Ask):
    topic: Annotated[str, Field(pattern=TOPIC)]
    partition: Annotated[int | None, Field(ge=0, le=PARTITION_MAX)] = None
    q: Annotated[str, Field(max_length=200)] = ""
    onwards: Annotated[str, Field(max_length=4_000, description="a cursor: what came since is told first")] = ""

    @field_validator("partition", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("onwards")
    @classmethod
    def _cursor(cls, value: str) -> str:
        parse_cursor(value)
        return value


@dataclass(frozen=True, slots=True)
class TailAnswer:
    topic: str
    partition: int | None
    q: str


def tail_page(_: House, ask: TailAsk) -> TailAnswer:
    """Where the live part of a topic is: the stream itself is ``/live/topics/TOPIC/tail``."""
    return TailAnswer(ask.topic, ask.partition, ask.q)


def tail(house: House, ask: TailAsk, stopped: Callable[[], bool]) -> Iterator[tuple[list[MessageRow], str]]:
    """Committed records as they come, from now on or from a cursor, and the cursor behind them; none every so often."""
    meant = holds(ask.q) if ask.q else None
    given = parse_cursor(ask.onwards)
    with house.browser() as browser:
        firsts, ends = _bounds(browser, MessagesAsk(topic=ask.topic, partition=ask.partition))
        # Whoever comes back after long is not told all of it: a page keeps the last few anyway.
        here = {p: min(max(given.get(p, end), firsts[p], end - TAIL_BACK), end) for p, end in ends.items()}
        for some in browser.follow(ask.topic, here, stopped):
            here |= {one.partition: one.offset + 1 for one in some}
            yield [row(one) for one in some if meant is None or meant(one)], write_cursor(here)
