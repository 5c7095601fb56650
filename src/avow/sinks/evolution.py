"""A table that follows the declared columns, as far as every sink with columns has it: ``sink.evolve``.

Owns: what is said of a table that does not fit. Must not know: any sink, or how a table is altered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# What sink.evolve = "add" may do to a column that is there, for messages.
WIDENS = (
    "it widens byte, short, int and long to a longer one, float to double, a decimal to more digits before its point"
)


def missing(name: str, type_: object, existing: Collection[str], *, evolves: bool, required: bool) -> str:
    """Why a column that the table lacks was not added."""
    text = f"column {name!r} ({type_}) is missing"
    twin = next((other for other in existing if other.lower() == name.lower()), None)
    if twin is not None:
        return f"{text}: the table has {twin!r}, which differs only in case"
    if evolves and required:
        return f"{text}, and cannot be added as NOT NULL: the rows that are there would have no value in it"
    return text


def advice(lines: Sequence[str], evolve: str) -> str:
    """What to do about a table that does not fit."""
    if evolve == "add":
        cannot = f' (sink.evolve = "add" adds columns that may be null, and {WIDENS})'
        return f"Alter the table or decode.schema (docs/PIPELINE.md){cannot}, or name a new table."
    could = any("is missing" in line or "has type" in line for line in lines)
    set_ = ', set sink.evolve = "add"' if could else ""
    return f"Alter the table or decode.schema (docs/PIPELINE.md){set_}, or name a new table."
