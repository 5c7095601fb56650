"""Formatting of values for people: numbers, times, untrusted bytes; and the template environment.

Data from records, topics and errors is untrusted: Jinja escapes it for HTML, and ``visible`` first turns control codes,
direction marks and the like into visible escapes.

Owns: these formats. Must not know: what is formatted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
SHORT_CHARS = 240
LONG_BYTES = 128 * 1024  # of a value that is shown whole
HEX_BYTES = 4 * 1024
HEADERS_MAX = 500  # that are shown of a record
DEEP = 32  # what is nested deeper is indented no further: the page would grow with the square of the value

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


Row = TypeVar("Row")


def copy_fields(kind: type[Row], source: object, **values: Any) -> Row:
    """A dataclass of ``kind`` with the fields of ``source`` that have the same names, and these ``values``."""
    names = [field_.name for field_ in fields(kind) if field_.name not in values]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **values)


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """The schema whose id stands before a value."""

    id: int
    type: str  # the name of the value's type; empty: it has none, or it is not known
    subjects: tuple[str, ...]  # "NAME version N"; empty: not asked for, or not known
    problem: str  # why the value is not decoded; empty: it is


@dataclass(frozen=True, slots=True)
class FormattedValue:
    """Untrusted bytes, as far as they are displayed."""

    size: int
    kind: str  # json, text or binary; of a decoded value its format
    text: str  # visible characters only; binary ones as replacement signs; JSON laid out over several lines
    raw: str  # JSON as it stands in the record; empty for others, whose text is that already
    hex: str
    hex_bytes: int  # how many of the first are in it
    cut: bool  # there is more than this text
    schema: ValueSchema | None = None  # its text is the decoded value, if there is no problem


def visible(text: str, keep: str = "") -> str:
    """Control codes and direction marks are shown, not obeyed. ``keep``: those that may stay."""
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_value(value: bytes | None, *, whole: bool = False, size: int | None = None) -> FormattedValue | None:
    """For a table (a short line), or on a page of its own (``whole``: JSON is laid out and raw, and there is hex).
    ``size``: that of the whole, where ``value`` is only its beginning."""
    if value is None:
        return None
    head = value[: LONG_BYTES if whole else SHORT_CHARS * 4]
    size = len(value) if size is None else size
    cut = len(head) < size
    kind, text = _read(head, cut=cut)
    if not whole:
        text = visible(text)
        short = text[:SHORT_CHARS]
        return FormattedValue(size, kind, short, "", "", 0, cut or len(short) < len(text))
    raw = visible(text, keep="\n\t")
    laid_out = visible(indented_json(text), keep="\n") if kind == "json" else ""
    first = value[:HEX_BYTES]
    return FormattedValue(size, kind, laid_out or raw, raw if laid_out else "", hex_lines(first), len(first), cut)


def format_decoded(value: bytes, kind: str, document: str, schema: ValueSchema, *, whole: bool) -> FormattedValue:
    """A value whose bytes were read: ``document``, in JSON."""
    if not whole:
        text = visible(document[: SHORT_CHARS + 1])
        return FormattedValue(
            len(value), kind, text[:SHORT_CHARS], "", "", 0, cut=len(document) > SHORT_CHARS, schema=schema
        )
    head, first = document[:LONG_BYTES], value[:HEX_BYTES]
    cut = len(head) < len(document)
    text = visible(head if cut else indented_json(head), keep="\n")
    return FormattedValue(len(value), kind, text, "", hex_lines(first), len(first), cut, schema)


def format_record(
    key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]], full_bytes: int | None = None
) -> dict[str, Any]:
    """The bytes of a record that has a page of its own. ``full_bytes``: the size of a value that was stored in part."""
    return {
        "key": format_value(key, whole=True),
        "value": format_value(value, whole=True, size=full_bytes),
        "headers": format_headers(headers),
        "more_headers": max(0, len(headers) - HEADERS_MAX),
    }


def format_headers(headers: Sequence[tuple[str, bytes | None]]) -> tuple[tuple[str, FormattedValue | None], ...]:
    """Each whole, as long as all of them are not too much for a page."""
    formatted, left = [], LONG_BYTES
    for name, value in headers[:HEADERS_MAX]:
        left -= len(name) + len(value or b"")
        formatted.append((visible(name[:SHORT_CHARS]), format_value(value, whole=left >= 0)))
    return tuple(formatted)


def indented_json(text: str) -> str:
    """JSON over several lines, every token as it is: no number is rounded, no key that is there twice is dropped."""
    parts: list[str] = []
    depth = 0
    before = ""
    for token in TOKEN.findall(text):
        opened, closes = before in ("{", "["), token in ("}", "]")
        depth -= closes
        if before == "," or opened != closes:
            parts.append("\n" + "  " * min(depth, DEEP))
        elif before == ":":
            parts.append(" ")
        parts.append(token)
        depth += token in ("{", "[")
        before = token
    return "".join(parts)


def _read(head: bytes, *, cut: bool) -> tuple[str, str]:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if not (cut and error.start > len(head) - 4):  # else the cut is in a character
            return "binary", head.decode(errors="replace")
        text = head[: error.start].decode()
    if text.lstrip()[:1] in ("{", "[") and not cut:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "text", text
        return "json", text
    return "text", text


def hex_lines(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        line = data[start : start + 16]
        plain = "".join(chr(c) if 32 <= c < 127 else "." for c in line)
        lines.append(f"{start:06x}  {line.hex(' '):<47}  {plain}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 10 else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def ago(at: float | None) -> str:
    """A moment, in seconds since 1970, as people say it."""
    if at is None:
        return "never"
    seconds = time.time() - at
    return "just now" if seconds < 1.5 else f"{duration(seconds)} ago"


def moment(at: float | None) -> str:
    if at is None:
        return "–"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) + "Z"
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f} s"


def moment_ms(at: int | None) -> str:
    """A record's timestamp, which may be anything."""
    if at is None or at == -1:
        return "no timestamp"
    return f"{moment(at / 1000)[:-1]}.{at % 1000:03d}Z"


def url(*parts: object, **query: object) -> str:
    """A path of quoted parts. What is None is left out of the query."""
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    # Not by ==: 0 is a partition, and an offset.
    parameters = {
        name: value for name, value in query.items() if value is not None and value is not False and value != ""
    }
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _visible_text(value: Any) -> Any:
    """Whatever a template shows, be it the name of a group or of a client. What is HTML already was made of such."""
    return visible(value, keep="\n\t") if type(value) is str and not value.isprintable() else value


def environment() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        number=number, size=size, duration=duration, ago=ago, moment=moment, moment_ms=moment_ms, visible=visible
    )
    templates.globals["url"] = url
    return templates
