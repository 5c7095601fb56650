"""Keys and values as Connect's JsonConverter writes them: with their schema, ``{"schema": ..., "payload": ...}``, or
without. Which of them a record is, it says itself: a change event has other fields.

The converter writes the schema first, and the same bytes for every record of a table, 3 kB or more: a schema that was
seen is not read again.

Owns: JSON. Must not know: what is in a payload. Its neighbours are ``connect``, whose contract it keeps, and
``avow.formats.json``, which has the strict parser.
"""

from __future__ import annotations

from collections.abc import Mapping

from avow.formats.base import DecodeError, Reason
from avow.formats.debezium.connect import ConnectType, Message, Reader
from avow.formats.json.document import Json, Number, describe, parse, parse_any
from avow.formats.json.values import ReadRules, base64_decode, reader
from avow.formats.text import text_of
from avow.schema import Decimal, Scalar

_SCHEMA, _PAYLOAD = b'{"schema":', b',"payload":'
_WRAPPER = {"schema", "payload"}
_SCHEMAS_MAX = 64  # at once: a topic has few, of keys and of values
_DEPTH_MAX = 64
_DIGITS_MAX = 30  # of an integer; the largest of Connect has 19


class JsonPayload:
    """See ``connect.Payload``. ``refuse_nul``: the sink cannot hold NUL in text."""

    def __init__(self, *, refuse_nul: bool) -> None:
        self._rules = ReadRules(refuse_nul=refuse_nul, ignore_unknown=False)
        self._recent: list[tuple[bytes, ConnectType]] = []  # by the bytes before the payload

    def read(self, data: bytes) -> Message:
        if (split := self.split(data)) is not None and split[0] is not None:
            try:
                return Message(split[0], _object(parse_any(text_of(split[1]))))
            except DecodeError as error:
                raise error.inside("payload") from None
        document = parse(data)
        if document.keys() != _WRAPPER:
            return Message(None, document)
        return Message(_schema(document["schema"]), _object(document["payload"]))

    def split(self, data: bytes) -> tuple[ConnectType | None, bytes] | None:
        """The schema and the payload's bytes of a record as the converter writes it. Without a schema these are all of
        it. None: it may still be JSON."""
        if not data.startswith(_SCHEMA):
            return None, data
        if not data.endswith(b"}"):
            return None
        for head, schema in self._recent:
            if data.startswith(head):
                payload = data[len(head) : -1]
                return (schema, payload) if payload.startswith(b"{") else None
        return self.split(data) if self._learn(data) else None

    def _learn(self, data: bytes) -> bool:
        """Know the schema before the payload, from now on, by its bytes. False: there is none."""
        end = data.find(_PAYLOAD)
        if end < 0:
            return False
        try:
            schema = _schema(parse_any(text_of(data[len(_SCHEMA) : end])))
        except DecodeError:
            return False
        if schema is None:
            return False
        self._recent.insert(0, (data[: end + len(_PAYLOAD)], schema))
        del self._recent[_SCHEMAS_MAX:]
        return True

    def plain(self, type: Scalar | Decimal) -> Reader:
        return reader(type, self._rules)

    def integer(self, value: Json) -> int:
        if not isinstance(value, Number) or not value.removeprefix(b"-").isdigit():
            raise DecodeError(Reason.WRONG_TYPE, f"expected a whole number, found {describe(value)}")
        if len(value) > _DIGITS_MAX:
            raise DecodeError(Reason.OUT_OF_RANGE, f"{describe(value)} is too large")
        return int(value)

    def text(self, value: Json) -> str:
        if not isinstance(value, str):
            raise DecodeError(Reason.WRONG_TYPE, f"expected a string, found {describe(value)}")
        return value

    def data(self, value: Json) -> bytes:
        text = self.text(value)
        if not text.isascii() or (data := base64_decode(text)) is None:
            raise DecodeError(Reason.BAD_TEXT, f"expected a base64 string, found {describe(value)}")
        return data

    def members(self, value: Json) -> Mapping[str, Json]:
        return _object(value)

    def elements(self, value: Json) -> list[Json]:
        if not isinstance(value, list):
            raise DecodeError(Reason.WRONG_TYPE, f"expected an array, found {describe(value)}")
        return value

    def is_number(self, value: Json) -> bool:
        return isinstance(value, Number)

    def is_text(self, value: Json) -> bool:
        return isinstance(value, str)

    def is_object(self, value: Json) -> bool:
        return isinstance(value, dict)

    def describe(self, value: Json) -> str:
        return describe(value)


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise DecodeError(Reason.NOT_OBJECT, f"expected a JSON object, found {describe(value)}")
    return value


def _schema(described: Json, depth: int = 0) -> ConnectType | None:
    return None if described is None else _type(described, depth)


def _type(described: Json, depth: int) -> ConnectType:
    if depth > _DEPTH_MAX:
        raise DecodeError(Reason.TOO_DEEP, f"types nested more than {_DEPTH_MAX} deep", "schema")
    match described:
        case {"type": str(type), **rest}:
            pass
        case _:
            raise DecodeError(
                Reason.WRONG_TYPE, f"expected a type of Kafka Connect, found {describe(described)}", "schema"
            )
    name, parameters, fields = rest.get("name"), rest.get("parameters"), rest.get("fields")
    items = rest.get("values" if type == "map" else "items")
    return ConnectType(
        type,
        name if isinstance(name, str) else "",
        {key: text for key, text in parameters.items() if isinstance(text, str)}
        if isinstance(parameters, dict)
        else {},
        dict(_field(inner, depth) for inner in fields) if isinstance(fields, list) else {},
        _schema(items, depth + 1),
    )


def _field(described: Json, depth: int) -> tuple[str, ConnectType]:
    match described:
        case {"field": str(name)}:
            return name, _type(described, depth + 1)
    raise DecodeError(Reason.WRONG_TYPE, f"expected a field of Kafka Connect, found {describe(described)}", "schema")
