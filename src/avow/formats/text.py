"""Text in records, whatever their format: UTF-8, strictly, and without NUL where the sink cannot hold it.

Owns: these two checks. Must not know: formats.
"""

from __future__ import annotations

from avow.formats.base import DecodeError, Reason, shown


def text_of(value: bytes) -> str:
    """UTF-8, strictly."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise DecodeError(Reason.NOT_UTF8, f"byte 0x{value[at]:02x} at {at:,} is not UTF-8") from None


def refuse_nul(text: str) -> None:
    if "\0" in text:
        raise DecodeError(Reason.NUL, f"NUL (U+0000) in {shown(text)}: the sink cannot store it")


def refuse_nul_within(value: object) -> None:
    """The same for every text in a value, names included. Without recursion: it may be a thousand deep."""
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, str):
            refuse_nul(inner)
        elif isinstance(inner, dict):
            todo += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list | tuple):
            todo += inner
