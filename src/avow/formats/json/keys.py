"""The key of a record whose value would be JSON: which row a null value deletes.

A key is a JSON object that holds the key columns (other fields are ignored), or, where the key is one column,
its plain text: ``17``, ``acc-000017``, ``2026-01-31``. A key that begins with ``{`` is always read as an object.

Owns: reading a key. Must not know: values. Its neighbour is ``avow.formats.tombstones``, which asks it.
"""

from __future__ import annotations

from avow.formats.base import DecodeError, Reason
from avow.formats.json.document import Json, parse, parse_any
from avow.formats.json.values import ReadRules, fields_reader
from avow.formats.text import text_of
from avow.formats.tombstones import ReadKey
from avow.schema import Field, Scalar

# What a JSON string spells stands without quotes in a key; the rest as in JSON.
_TEXTUAL = frozenset({Scalar.STRING, Scalar.BINARY, Scalar.DATE, Scalar.TIMESTAMP, Scalar.TIMESTAMP_NTZ})


def key_reader(fields: tuple[Field, ...], *, refuse_nul: bool) -> ReadKey:
    read = fields_reader(fields, ReadRules(refuse_nul=refuse_nul, ignore_unknown=True))

    def read_key(key: bytes) -> dict[str, object]:
        if key.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return read(parse(key))
        if len(fields) > 1:
            names = ", ".join(field.name for field in fields)
            raise DecodeError(Reason.TOMBSTONE_KEY, f"expected a JSON object with {names}")
        return read({fields[0].name: _plain(key, fields[0])})

    return read_key


def _plain(key: bytes, field: Field) -> Json:
    if field.type in _TEXTUAL:
        return text_of(key)
    return parse_any(text_of(key))
