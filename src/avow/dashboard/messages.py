"""The pages about records: browsing, searching and tailing a topic, and one record in full.

A place in a topic is a cursor, written ``0:120,1:88``: partition and offset. Every page has links to the next one in
its direction, so the back button works and a page can be shared by its address.

Owns: these answers. Must not know: how they are shown. Its neighbour is ``avow.kafka.browse``, which reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from avow.dashboard.fields import Offset, OptionalOffset, OptionalPartition, OptionalTime, PartitionNumber, TopicName
from avow.dashboard.formatting import (
    FormattedValue,
    ValueSchema,
    copy_fields,
    format_decoded,
    format_record,
    format_value,
)
from avow.dashboard.requests import NotFound, Params, check_position
from avow.dashboard.schemas import Look as SchemaLook
from avow.dashboard.state import AppState
from avow.errors import ConfigError
from avow.formats.documents import Undecoded, named
from avow.kafka.browse import BrowsedRecord, Browser, Look, Meant

TOGETHER_MAX = 64  # partitions that are looked at side by side
EXPORT_MAX = 5_000  # records
TAIL_BACK = 200  # offsets of a partition, when a tail is resumed


def parse_cursor(text: str) -> dict[int, int]:
    """``0:120,1:88`` as partition -> offset."""
    cursor: dict[int, int] = {}
    for part in filter(None, text.split(",")):
        partition, _, offset = part.partition(":")
        if not (partition.isdecimal() and offset.isdecimal() and len(offset) < 20 and len(partition) < 10):
            raise ValueError("not a cursor: partition:offset, several separated by commas")
        cursor[int(partition)] = int(offset)
    return cursor


def write_cursor(cursor: dict[int, int]) -> str:
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(cursor.items()))


def _checked_cursor(text: str) -> str:
    parse_cursor(text)
    return text


Cursor = Annotated[str, Field(max_length=4_000), AfterValidator(_checked_cursor)]


class MessagesParams(Params):
    topic: TopicName
    partition: Annotated[OptionalPartition, Field(description="one partition; if absent, all of them")] = None
    at: Annotated[Literal["newest", "oldest", "offset", "time"], Field(description="where to start")] = "newest"
    offset: Annotated[OptionalOffset, Field(description="with at=offset: start here")] = None
    time: Annotated[OptionalTime, Field(description="with at=time: start here, UTC unless it has a zone")] = None
    q: Annotated[str, Field(max_length=200, description="text to find in key, value or headers; case-insensitive")] = ""
    onwards: Annotated[Cursor, Field(description="a cursor: records from here on")] = ""
    before: Annotated[Cursor, Field(description="a cursor: records before it")] = ""
    limit: Annotated[int, Field(ge=1, le=500)] = 50

    @model_validator(mode="after")
    def _check_position(self) -> Self:
        if not (self.onwards or self.before):  # a cursor is a place of its own
            check_position("at", self.at, offset=self.offset, time=self.time)
        return self

    @property
    def backwards(self) -> bool:
        return bool(self.before) or (not self.onwards and self.at == "newest")


@dataclass(frozen=True, slots=True)
class MessageRow:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # -1: it has none
    state: str  # committed, aborted or open
    key: FormattedValue | None
    value: FormattedValue | None
    headers: int


@dataclass(frozen=True, slots=True)
class MessagesAnswer:
    topic: str
    partitions: int
    messages: tuple[MessageRow, ...]
    newest_first: bool
    scanned: int
    older: str  # a cursor for ``before``; empty: there is nothing older
    newer: str  # a cursor for ``onwards``
    onwards: str  # the cursor where a look in the same direction goes on; empty: it has seen all
    cut: str  # which bound ended the look early: time or bytes
    choose: bool = False  # too many partitions to look at all of them: one has to be chosen


class TooMany(ConfigError):
    """More partitions than can be looked at side by side."""

    def __init__(self, topic: str, partitions: int) -> None:
        why = f"{topic} has {partitions:,} partitions; at most {TOGETHER_MAX} can be read at once"
        super().__init__(why, advice="Choose a partition.")
        self.partitions = partitions


def messages(state: AppState, params: MessagesParams) -> MessagesAnswer:
    """Records of a topic, some at a time, filtered by ``q`` if given."""
    with state.browser() as browser:
        try:
            firsts, ends = _bounds(browser, params.topic, params.partition)
        except TooMany as many:
            return MessagesAnswer(params.topic, many.partitions, (), True, 0, "", "", "", "", choose=True)
        begin = _begin(browser, params, firsts, ends)
        look = _read_records(browser, params, begin)
    low, high = (look.cursor, begin) if params.backwards else (begin, look.cursor)
    older = write_cursor(low) if any(low[p] > firsts[p] for p in low) else ""
    newer = write_cursor(high) if any(high[p] < ends[p] for p in high) else ""
    return MessagesAnswer(
        topic=params.topic,
        partitions=len(firsts),
        messages=tuple(rows_of(state, params.topic, look.seen)),
        newest_first=params.backwards,
        scanned=look.looked_at,
        older=older,
        newer=newer,
        onwards="" if look.done else write_cursor(look.cursor),
        cut=look.cut,
    )


def _bounds(browser: Browser, topic: str, partition: int | None) -> tuple[dict[int, int], dict[int, int]]:
    firsts, ends = browser.bounds(topic, None if partition is None else [partition])
    if not firsts:
        raise NotFound(f"{topic} has no partition {partition}")
    if len(firsts) > TOGETHER_MAX:
        raise TooMany(topic, len(firsts))
    return firsts, ends


def _begin(browser: Browser, params: MessagesParams, firsts: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
    cursor = parse_cursor(params.before or params.onwards)
    if cursor:
        return {p: min(max(cursor.get(p, ends[p] if params.before else firsts[p]), firsts[p]), ends[p]) for p in firsts}
    match params.at:
        case "newest":
            return ends
        case "offset":
            return {p: min(max(params.offset or 0, firsts[p]), ends[p]) for p in firsts}
        case "time" if params.time is not None:
            return browser.at_time(params.topic, in_utc(params.time), list(firsts))
        case _:
            return firsts


def in_utc(moment: datetime) -> datetime:
    """As a form has it: UTC, unless it has a zone."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read_records(browser: Browser, params: MessagesParams, begin: dict[int, int]) -> Look:
    read = browser.backwards if params.backwards else browser.forwards
    return read(params.topic, begin, params.limit, containing(params.q) if params.q else None)


def containing(text: str) -> Meant:
    """Whether a record has this text in its key, its value, or a header's name or value."""
    wanted = text.lower().encode()

    def matches(record: BrowsedRecord) -> bool:
        parts = [record.key, record.value, *(part for name, value in record.headers for part in (name.encode(), value))]
        return any(part is not None and wanted in part.lower() for part in parts)

    return matches


def rows_of(state: AppState, topic: str, records: Iterable[BrowsedRecord]) -> Iterator[MessageRow]:
    look = state.schemas.look(topic)
    for record in records:
        key, value = _format(look, record.key), _format(look, record.value)
        yield copy_fields(MessageRow, record, key=key, value=value, headers=len(record.headers))


def _format(look: SchemaLook, data: bytes | None, *, whole: bool = False) -> FormattedValue | None:
    """A key or a value: its document, where a registry has its schema."""
    read = look.read(data)
    formatted = format_value(data, whole=whole)
    if read is None or data is None or formatted is None:
        return formatted
    subjects = tuple(look.subjects(read.schema_id)) if whole else ()
    if isinstance(read, Undecoded):
        return replace(formatted, schema=ValueSchema(read.schema_id, "", subjects, str(read)))
    document = json.dumps(read.content, ensure_ascii=False)
    schema = ValueSchema(read.schema_id, read.type_name, subjects, "")
    return format_decoded(data, read.format, document, schema, whole=whole)


class MessageParams(Params):
    topic: TopicName
    partition: PartitionNumber
    offset: Offset


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    state: str
    key: FormattedValue | None
    value: FormattedValue | None
    headers: tuple[tuple[str, FormattedValue | None], ...]
    more_headers: int  # that are not shown


def message(state: AppState, params: MessageParams) -> MessageAnswer:
    """One record as a whole: as text, or JSON laid out and raw, and in hex, with its headers."""
    record = _read_record(state, params)
    look = state.schemas.look(params.topic)
    parts = format_record(None, None, record.headers)
    parts |= {"key": _format(look, record.key, whole=True), "value": _format(look, record.value, whole=True)}
    return copy_fields(MessageAnswer, record, **parts)


def _read_record(state: AppState, params: MessageParams) -> BrowsedRecord:
    with state.browser() as browser:
        firsts, ends = browser.bounds(params.topic, [params.partition])
        inside = params.partition in firsts and firsts[params.partition] <= params.offset < ends[params.partition]
        record = browser.one(params.topic, params.partition, params.offset) if inside else None
    if record is None:
        raise NotFound(
            f"no record is at offset {params.offset} of {params.topic}/{params.partition}",
            advice="The offset may belong to a transaction marker or a compacted record, be deleted by retention, or "
            "not be written yet.",
        )
    return record


def value_bytes(state: AppState, params: MessageParams) -> bytes:
    """A record's value, to be saved as a file."""
    return _read_record(state, params).value or b""


def export(state: AppState, params: MessagesParams) -> Iterator[bytes]:
    """The records of a look as JSON lines. What has a schema is decoded; what is not text is base64, under another
    name."""
    whole = params.model_copy(update={"limit": EXPORT_MAX})
    with state.browser() as browser:
        firsts, ends = _bounds(browser, whole.topic, whole.partition)
        look = _read_records(browser, whole, _begin(browser, whole, firsts, ends))
    schemas = state.schemas.look(whole.topic)
    for record in look.seen:
        line: dict[str, Any] = {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            "state": str(record.state),
            **named("key", record.key, schemas.read(record.key)),
            **named("value", record.value, schemas.read(record.value)),
            "headers": [{"name": name, **named("value", value)} for name, value in record.headers],
        }
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


class TailParams(Params):
    topic: TopicName
    partition: OptionalPartition = None
    q: Annotated[str, Field(max_length=200)] = ""
    onwards: Annotated[Cursor, Field(description="a cursor: start with the records after it")] = ""


def tail_page(_: AppState, params: TailParams) -> TailParams:
    """Where the live part of a topic is: the stream itself is ``/live/topics/TOPIC/tail``."""
    return params


def tail(state: AppState, params: TailParams, stopped: Callable[[], bool]) -> Iterator[tuple[list[MessageRow], str]]:
    """Committed records as they come, from now on or from a cursor, and the cursor behind them; none every so often."""
    matches = containing(params.q) if params.q else None
    cursor = parse_cursor(params.onwards)
    with state.browser() as browser:
        firsts, ends = _bounds(browser, params.topic, params.partition)
        # A browser that was away for long gets the newest only: the page shows the last few anyway.
        position = {p: min(max(cursor.get(p, end), firsts[p], end - TAIL_BACK), end) for p, end in ends.items()}
        for records in browser.follow(params.topic, position, stopped):
            position |= {record.partition: record.offset + 1 for record in records}
            found = [record for record in records if matches is None or matches(record)]
            yield list(rows_of(state, params.topic, found)), write_cursor(position)
