"""The row of a change: the table's columns, and those of the envelope (``names``).

Owns: which column comes from where. Must not know: encodings, records. Its neighbours are ``values``, which reads a
value, and ``decoder``.
"""

from __future__ import annotations

from collections.abc import Mapping

from avow.formats.base import DecodeError, Reason
from avow.formats.debezium.change import Change
from avow.formats.debezium.connect import ConnectType, Reader, Value
from avow.formats.debezium.names import envelope_path, instant_unit, is_envelope
from avow.formats.debezium.values import Encoding, ReadFields, fields_reader, instant, reader
from avow.schema import Field, Scalar

_TYPES_MAX = 256


class RowReader:
    """Makes rows of changes."""

    def __init__(self, fields: tuple[Field, ...], how: Encoding) -> None:
        self._table = tuple(field for field in fields if not is_envelope(field.name))
        self._envelope = [_EnvelopeColumn(field, how) for field in fields if is_envelope(field.name)]
        self._how = how
        self._readers: dict[ConnectType | None, ReadFields] = {}

    def read(self, change: Change) -> dict[str, object]:
        row = {} if change.op == "t" else self._reader(change.row_type)(change.row)
        for column in self._envelope:
            row[column.name] = column.read(change.envelope)
        return row

    def _reader(self, type: ConnectType | None) -> ReadFields:
        if type not in self._readers:
            if len(self._readers) >= _TYPES_MAX:
                self._readers.clear()
            self._readers[type] = fields_reader(self._table, type, self._how)
        return self._readers[type]


class _EnvelopeColumn:
    def __init__(self, field: Field, how: Encoding) -> None:
        self.name = field.name
        self._path = envelope_path(field.name)
        self._required = field.required
        self._payload = how.payload
        unit = instant_unit(field.name) if field.type is Scalar.TIMESTAMP else None
        self._read: Reader = instant(unit, how) if unit else reader(field.type, None, how)

    def read(self, envelope: Mapping[str, Value]) -> object:
        try:
            value: Value = envelope.get(self._path[0])
            for name in self._path[1:]:
                value = None if value is None else self._payload.members(value).get(name)
            if value is not None:
                return self._read(value)
            if self._required:
                raise DecodeError(Reason.MISSING_FIELD, "absent or null, but declared not null")
        except DecodeError as error:
            raise error.inside(self.name) from None
        return None
