"""One message as a document for people, by Google's mapping to JSON (ProtoJSON): what ``encode`` takes back.

The message is the one that the frame names, whichever of its schema's it is. Where columns can be made of it, the
strict reader reads it first: Google's library passes over what has the wrong type.

Owns: that. Must not know: registries. Neighbours: ``encode``, ``frame`` and ``reader``.
"""

from __future__ import annotations

from functools import lru_cache

from avow import extras
from avow.formats.base import DecodeError, Shown
from avow.formats.protobuf.compile import Imports, compile_text
from avow.formats.protobuf.descriptors import BadSchema, Schema
from avow.formats.protobuf.encode import message_class
from avow.formats.protobuf.frame import read_place
from avow.formats.protobuf.layout import layout
from avow.formats.protobuf.reader import Rules, StrictReader
from avow.formats.protobuf.wire import NOT_PROTOBUF
from avow.formats.registry.frame import BAD_FRAME

_KEPT = 64
_RULES = Rules(refuse_nul=False, refuse_unknown_fields=False, keep_unknown_enums=True)


def show(text: str, imports: Imports, value: bytes, at: int) -> Shown:
    """The message behind the schema's id, which ends ``at``."""
    with extras.named():
        from google.protobuf import json_format, message
    place, at = read_place(value, at)
    name = _compiled(text, imports).places.get(place)
    if name is None:
        raise DecodeError(BAD_FRAME, f"its schema has no message at the place {list(place)}")
    if (strict := _strict(text, imports, name)) is not None:
        strict.row(value[at:])
    try:
        read = message_class(text, imports, name).FromString(value[at:])
        options = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
        return Shown(name, json_format.MessageToDict(read, **options))
    except (message.DecodeError, json_format.SerializeToJsonError, ValueError, TypeError) as error:
        raise DecodeError(NOT_PROTOBUF, str(error)) from None


@lru_cache(_KEPT)
def _compiled(text: str, imports: Imports) -> Schema:
    return compile_text(text, imports)


@lru_cache(_KEPT)
def _strict(text: str, imports: Imports, name: str) -> StrictReader | None:
    try:
        return StrictReader(layout(_compiled(text, imports), name), _RULES)
    except BadSchema:  # no columns, such as those of a message inside itself
        return None
