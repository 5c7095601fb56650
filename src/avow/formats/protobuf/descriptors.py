"""What a .proto file says, as frozen values: they travel with the settings, and who reads records needs no library.

Owns: the shape of a schema. Must not know: how it is compiled, columns, records. Neighbours: ``compile``, which makes
it of text, ``layout``, which makes columns of it, and ``compatibility``, which compares two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class BadSchema(ValueError):
    """A schema that does not compile, or that no columns can be made of: what is wrong, for a person."""


class Kind(StrEnum):
    """The type of a field, as .proto files name it."""

    DOUBLE = "double"
    FLOAT = "float"
    INT32 = "int32"
    INT64 = "int64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    SINT32 = "sint32"
    SINT64 = "sint64"
    FIXED32 = "fixed32"
    FIXED64 = "fixed64"
    SFIXED32 = "sfixed32"
    SFIXED64 = "sfixed64"
    BOOL = "bool"
    STRING = "string"
    BYTES = "bytes"
    ENUM = "enum"
    MESSAGE = "message"
    GROUP = "group"  # also a message with the feature message_encoding = DELIMITED


class Presence(StrEnum):
    """What it means that a field is not there."""

    IMPLICIT = "implicit"  # it has its type's default
    EXPLICIT = "explicit"  # it is not set
    REQUIRED = "required"  # the message is not valid


@dataclass(frozen=True, slots=True)
class Field:
    number: int
    name: str
    kind: Kind
    type_name: str = ""  # of an enum, a message or a group: its full name
    is_repeated: bool = False  # a map, too: of its entries
    presence: Presence = Presence.IMPLICIT
    oneof: str = ""  # the one that it shares with other fields
    default: object = None  # declared; of an enum the name of its value
    precision: int = 0  # of a confluent.type.Decimal, where the schema says it
    scale: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    fields: tuple[Field, ...]
    is_map_entry: bool = False


@dataclass(frozen=True, slots=True)
class Enum:
    name: str
    values: Mapping[int, str]  # of two names for a number the one declared first; the default is the first of all


@dataclass(frozen=True, slots=True)
class Schema:
    """A .proto file with all that it imports. Names are full ones: ``shop.Payment``."""

    messages: Mapping[str, Message]
    enums: Mapping[str, Enum]
    # Where the messages stand in the file itself: (1, 0) is the first message inside its second one. Entries of maps
    # are not counted: the .proto text has no message there.
    places: Mapping[tuple[int, ...], str]
