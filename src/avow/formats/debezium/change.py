"""A change event, and what else a connector sends: which of them a record is, by its shape.

Owns: Debezium's envelope. Must not know: how it is written, columns, the sink. Its neighbours are ``connect``, which
brings the record's fields, and ``decoder``, which asks what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from avow.formats.base import DecodeError, Reason, shown
from avow.formats.debezium.connect import ConnectType, Message, Payload, Value

NOT_A_CHANGE = "not-a-change"  # no change event of a table

Other = Literal["heartbeat", "transaction", "schema-change", "message"]
_OTHERS: dict[Other, frozenset[str]] = {  # by the fields that each has
    "transaction": frozenset({"status", "id", "event_count"}),
    "schema-change": frozenset({"databaseName", "tableChanges"}),
    "message": frozenset({"op", "message"}),
}
_WITH_AFTER = frozenset("cru")
_KNOWN = frozenset("crudt")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a row, or the truncation of a table."""

    op: str  # c, r, u, d or t
    row: Mapping[str, Value]  # after the change; before it, for a delete; empty for a truncation
    row_type: ConnectType | None
    envelope: Mapping[str, Value]


def change_of(message: Message, payload: Payload) -> Change | Other:
    """What a record is, or DecodeError."""
    fields = message.fields
    op = fields.get("op")
    if not payload.is_text(op) or payload.text(op) not in _KNOWN:
        return _other(fields, op, payload)
    word = payload.text(op)
    if word == "t":
        return Change(word, {}, None, fields)
    side = "after" if word in _WITH_AFTER else "before"
    row = fields.get(side)
    if row is None:
        raise DecodeError(NOT_A_CHANGE, f"op {word} without the row {side} it")
    if not payload.is_object(row):
        raise DecodeError(Reason.WRONG_TYPE, f"expected a row, found {payload.describe(row)}", side)
    return Change(word, payload.members(row), message.schema and message.schema.fields.get(side), fields)


def _other(fields: Mapping[str, Value], op: Value, payload: Payload) -> Other:
    if fields.keys() == {"ts_ms"}:
        return "heartbeat"
    for other, names in _OTHERS.items():
        if names <= fields.keys():
            return other
    if op is not None:
        raise DecodeError(NOT_A_CHANGE, f"expected c, r, u, d or t, found {payload.describe(op)}", "op")
    there = ", ".join(shown(name) for name in list(fields)[:_NAMES_SHOWN]) or "none"
    raise DecodeError(
        NOT_A_CHANGE,
        f"a change event has op, before, after and source; the fields here: {there}. Events that the connector "
        'flattens (ExtractNewRecordState) are read with decode.format = "json"',
    )
