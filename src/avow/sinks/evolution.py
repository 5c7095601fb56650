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


def advice(lines: Sequence[str], evolve: str | None, reason: str = "") -> str:
    """What to do about a table that does not fit. ``evolve``: None where it has no part in it; ``reason``: why the sink
    cannot widen a column, if it cannot."""
    by_type = any("has type" in line for line in lines)
    more = ""
    if evolve == "add":
        why = reason if by_type and reason else WIDENS
        more = f' (sink.evolve = "add" adds columns that may be null; {why})'
    elif evolve is not None and (by_type or any("is missing" in line for line in lines)):
        more = ', set sink.evolve = "add"'
    return f"Alter the table or decode.schema (docs/PIPELINE.md){more}, or name a new table."
