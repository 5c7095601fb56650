"""JSON into messages, by Google's library and its own mapping (ProtoJSON): int64 as a number or a string, bytes as
base64, enums by name, Timestamp as RFC 3339, Duration as "1.5s", wrappers as their value.

Owns: that. Must not know: records. Neighbour: ``compile``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from avow import extras
from avow.formats.protobuf.compile import Imports, descriptor_set
from avow.formats.protobuf.descriptors import Kind
from avow.formats.protobuf.frame import place_bytes
from avow.formats.protobuf.layout import Many, Record, Wrapped
from avow.formats.protobuf.plugin import ProtobufSchema

_KEPT = 64
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{4})*(?:[A-Za-z0-9+/_-]{2}(?:==)?|[A-Za-z0-9+/_-]{3}=?)?")


class DoesNotFit(ValueError):
    """A JSON value that is no such message."""


def encode(schema: ProtobufSchema, value: object) -> bytes:
    """The message that a JSON object spells, or ``DoesNotFit``."""
    with extras.named():
        from google.protobuf import json_format
    if not isinstance(value, dict):
        raise DoesNotFit(f"expected an object with the fields of {schema.message}")
    _refuse_bad_base64(schema.record, value)
    message = message_class(schema.text, schema.imports, schema.message)()
    try:
        json_format.ParseDict(value, message)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise DoesNotFit(str(error)) from None
    if missing := message.FindInitializationErrors():
        raise DoesNotFit(f"required, and not there: {', '.join(missing)}")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _refuse_bad_base64(record: Record, value: dict[str, Any]) -> None:
    """Google's library drops what is no base64."""
    for slot in record.slots:
        found = value.get(slot.name, value.get(_in_camel_case(slot.name)))
        inner = found if isinstance(found, list) else [found]
        if slot.many is Many.MAP and isinstance(found, dict):
            inner = list(found.values())
        for one in inner:
            if slot.value in (Kind.BYTES, Wrapped(Kind.BYTES)):
                if isinstance(one, str) and not _BASE64.fullmatch(one):
                    raise DoesNotFit(f"{slot.name}: expected base64")
            elif isinstance(slot.value, Record) and isinstance(one, dict):
                _refuse_bad_base64(slot.value, one)


def _in_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in others)


def place_of(schema: ProtobufSchema) -> bytes:
    """What stands between a schema's id and the message."""
    return place_bytes(next(place for place, name in schema.schema.places.items() if name == schema.message))


@lru_cache(_KEPT)
def message_class(text: str, imports: Imports, message: str) -> Any:
    """Google's class of a message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set(text, imports)).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message))
