"""The inner loops of avow in C: one shared library for ctypes, which needs no Python ABI and runs without the GIL.

    library = avow_native.load()          # None where it was not built for these sources; status() says why
    avow_native.status()                  # where it is, which compiler made it, or why there is none

Nothing is compiled here: a wheel has the library inside, and ``python -m avow_native.build`` makes it in a checkout.
Each part is a C file and a thin module of the same name that describes its functions to ctypes.

Owns: finding and checking the library. Must not know: avow, and what the parts do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Status", "load", "status"]


@dataclass(frozen=True, slots=True)
class Status:
    """The library that ``load`` gives, or why it gives none."""

    path: Path | None = None
    compiler: str | None = None
    why_not: str | None = None


def load() -> ctypes.CDLL | None:
    """The library, once for each process, if there is one that these very sources made."""
    return _found()[0]


def status() -> Status:
    return _found()[1]


@cache
def _found() -> tuple[ctypes.CDLL | None, Status]:
    from avow_native import build  # here, so that ``python -m avow_native.build`` does not find itself imported

    why_not = "the library is not built: run python -m avow_native.build"
    for path in build.libraries():
        try:
            library = ctypes.CDLL(str(path))
            made_from = _text(library, "avow_native_sources")
        except (OSError, AttributeError) as error:
            why_not = f"{path} cannot be loaded: {error}"
            continue
        if made_from != build.sources_hash():
            why_not = f"{path} was made from other sources: run python -m avow_native.build"
            continue
        return library, Status(path=path, compiler=_text(library, "avow_native_compiler"))
    return None, Status(why_not=why_not)


def _text(library: ctypes.CDLL, name: str) -> str:
    function = library[name]
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()
