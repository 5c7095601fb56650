"""The key of a change's record: which row it is about.

A record's key has the columns of the table's primary key. Under upsert they must be those of ``sink.key``, no less, or
a delete could not say which row, and no more, or several rows of the table would be one.

Owns: reading a key. Must not know: values. Its neighbours are ``decoder`` and ``avow.formats.tombstones``.
"""

from __future__ import annotations

from avow.formats.base import DecodeError, Reason
from avow.formats.debezium.connect import Message
from avow.formats.debezium.values import Encoding, fields_reader
from avow.schema import Field

KEY_COLUMNS = "key-columns"  # the record's key has other columns than sink.key


class KeyReader:
    """``fields``: the columns of sink.key that a record's key must have."""

    def __init__(self, fields: tuple[Field, ...], how: Encoding) -> None:
        self._fields = fields
        self._names = frozenset(field.name for field in fields)
        self._how = how

    def read(self, key: bytes) -> dict[str, object]:
        message = self._checked(key)
        return fields_reader(self._fields, message.schema, self._how)(message.fields)

    def check(self, key: bytes | None) -> None:
        """Of a record that has a value."""
        if key is None:
            raise DecodeError(Reason.NULL_KEY, "no key: upsert needs a table with a primary key")
        try:
            self._checked(key)
        except DecodeError as error:
            raise DecodeError(KEY_COLUMNS, f"the record's key: {error.detail}", error.path) from None

    def _checked(self, key: bytes) -> Message:
        message = self._how.payload.read(key)
        if message.fields.keys() != self._names:
            has, due = (", ".join(sorted(names)) or "none" for names in (message.fields, self._names))
            raise DecodeError(KEY_COLUMNS, f"it has the columns {has}, and sink.key {due}")
        return message
