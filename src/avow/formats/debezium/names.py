"""The columns that come from a change's envelope, and not from the table, by their names: those that Debezium's own
ExtractNewRecordState gives them.

``__op``, ``__ts_ms``, ``__ts_us``, ``__ts_ns``, ``__source_NAME`` (``__source_lsn``) and ``__transaction_NAME``.

Owns: these names. Must not know: how anything is read. Its neighbours are ``plugin`` and ``columns``.
"""

from __future__ import annotations

import re

OP = "__op"

_ENVELOPE = re.compile("__(op|ts_[mun]s|source_.+|transaction_.+)")
_INSTANT = re.compile("__(?:source_)?ts_([mu])s")  # nanoseconds fit no timestamp exactly
_PER_SECOND = {"m": 1_000, "u": 1_000_000}


def is_envelope(name: str) -> bool:
    return _ENVELOPE.fullmatch(name) is not None


def instant_unit(name: str) -> int | None:
    """How many of its units make a second, if the column holds a moment; it can then be declared as a timestamp."""
    match = _INSTANT.fullmatch(name)
    return _PER_SECOND[match[1]] if match else None


def envelope_path(name: str) -> tuple[str, ...]:
    """Where in the envelope its value is."""
    bare = name.removeprefix("__")
    section, _, inner = bare.partition("_")
    return (section, inner) if section in ("source", "transaction") else (bare,)
