"""JSON into messages, by Google's library and its own mapping (ProtoJSON): int64 as a number or a string, bytes as
base64, enums by name, Timestamp as RFC 3339, Duration as "1.5s", wrappers as their value.

Owns: that. Must not know: records. Neighbour: ``compile``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from avow import extras
from avow.formats.protobuf.compile import Imports, descriptor_set
from avow.formats.protobuf.frame import place_bytes
from avow.formats.protobuf.plugin import ProtobufSchema

_KEPT = 64


class DoesNotFit(ValueError):
    """A JSON value that is no such message."""


def encode(schema: ProtobufSchema, value: object) -> bytes:
    """The message that a JSON object spells, or ``DoesNotFit``."""
    with extras.named():
        from google.protobuf import json_format
    if not isinstance(value, dict):
        raise DoesNotFit(f"expected an object with the fields of {schema.message}")
    message = _class(schema.text, schema.imports, schema.message)()
    try:
        json_format.ParseDict(value, message)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise DoesNotFit(str(error)) from None
    if missing := message.FindInitializationErrors():
        raise DoesNotFit(f"required, and not there: {', '.join(missing)}")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def place_of(schema: ProtobufSchema) -> bytes:
    """What stands between a schema's id and the message."""
    return place_bytes(next(place for place, name in schema.schema.places.items() if name == schema.message))


@lru_cache(_KEPT)
def _class(text: str, imports: Imports, message: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set(text, imports)).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message))
