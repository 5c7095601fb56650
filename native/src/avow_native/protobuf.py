"""``protobuf.c`` for Python: messages of Protocol Buffers into a record batch.

What a message must look like is said in ``protobuf.c``. A record that it cannot vouch for is named, not refused.

Owns: describing a message to C. Must not know: avow, .proto files. Its neighbour is ``columns``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from avow_native.columns import NUMBER, POINTER, READ_ARGUMENTS, Column, Columns, can_hold

__all__ = ["OPS", "Column", "Field", "ProtobufReader"]

_VARINTS = ("bool", "int32", "int64", "uint32", "uint64", "sint32", "sint64")
_FIXED = ("fixed32", "fixed64", "sfixed32", "sfixed64", "float", "double")
_LONG = ("string", "bytes", "enum", "message", "wrapped", "timestamp", "duration", "empty", "date", "decimal", "doubt")
# In the order of protobuf.c. ``doubt``: what is only read one by one.
OPS = {name: number for number, name in enumerate((*_VARINTS, *_FIXED, *_LONG))}
_MANY = {"one": 0, "list": 1, "map": 2}
_NULL, _DEFAULT, _DOUBT = 0, 1, 2
_REFUSE_NUL, _IGNORE_UNKNOWN = 1, 2


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message, or the message itself."""

    op: str
    number: int = 0
    many: str = "one"  # "one", "list" or "map": its parts are then key and value, or the message's own fields
    default: bytes | None = None  # where it is absent, as its value stands in a message; None: null
    required: bool = False  # a record without it is doubtful
    oneof: int = 0  # not 0: excludes those of its message that have the same
    parts: tuple[Field, ...] = ()  # of a message; of a map key and value; the field 1 of what is wrapped
    names: Mapping[int, str] = field(default_factory=dict)  # of an enum


class _Node(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("many", ctypes.c_int32),
        ("absent", ctypes.c_int32),
        ("oneof", ctypes.c_int32),
        ("first_part", ctypes.c_int32),
        ("part_count", ctypes.c_int32),
        ("name_count", ctypes.c_int32),
        ("initial", ctypes.c_char_p),
        ("initial_length", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("name_ends", ctypes.c_void_p),
        ("names", ctypes.c_char_p),
    )


class ProtobufReader:
    """Reads messages of one type into columns. It keeps nothing from one call to the next.

    ``columns`` and the parts of ``message`` are the same fields in the same order.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        columns: Sequence[Column],
        message: Field,
        *,
        refuse_nul: bool,
        ignore_unknown: bool,
    ) -> None:
        self._columns = Columns(columns)
        self._kept: list[object] = []  # what the nodes point to
        nodes = self._nodes(message)
        self._node_array = (_Node * len(nodes))(*nodes)
        self._rules = (_REFUSE_NUL if refuse_nul else 0) | (_IGNORE_UNKNOWN if ignore_unknown else 0)
        self._read = library.avow_protobuf_read
        self._read.restype = ctypes.c_int64
        layout: list[Any] = [POINTER, NUMBER, POINTER, NUMBER, ctypes.c_int32, NUMBER, ctypes.c_char_p, NUMBER]
        self._read.argtypes = [*layout, *READ_ARGUMENTS]

    @staticmethod
    def can_read(columns: Sequence[Column]) -> bool:
        """Whether all their types are known to the library."""
        return can_hold(columns)

    def read(
        self, values: pa.BinaryArray, *, skip: int = 0, prefix: bytes = b""
    ) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the records that are beyond doubt, in order, and the indices of the others. No value is null.

        ``skip``: bytes before each record; then comes ``prefix``, without which it is doubtful.
        """
        fields, nodes = self._columns.fields, self._node_array
        before = (fields, len(fields), nodes, len(nodes), self._rules, skip, prefix, len(prefix))
        return self._columns.read(values, partial(self._read, *before))

    def _nodes(self, message: Field) -> list[_Node]:
        """All fields, the parts of each side by side."""
        nodes: list[_Node] = []
        todo: list[Field] = [message]
        next_part = 1
        while len(nodes) < len(todo):
            one = todo[len(nodes)]
            # A map is a node with two parts; so its value's own parts are the value's.
            todo += one.parts
            nodes.append(self._node(one, next_part))
            next_part += len(one.parts)
        return nodes

    def _node(self, one: Field, first_part: int) -> _Node:
        absent = _DOUBT if one.required else _NULL if one.default is None else _DEFAULT
        initial = one.default or b""
        numbers = sorted(one.names)
        encoded = [one.names[number].encode() for number in numbers]
        names = b"".join(encoded)
        ends = (ctypes.c_int32 * len(numbers))(*_ends(encoded))
        number_array = (ctypes.c_int32 * len(numbers))(*numbers)
        self._kept += [ends, number_array, initial, names]
        return _Node(
            OPS[one.op],
            one.number,
            _MANY[one.many],
            absent,
            one.oneof,
            first_part,
            len(one.parts),
            len(numbers),
            initial,
            len(initial),
            ctypes.addressof(number_array),
            ctypes.addressof(ends),
            names,
        )


def _ends(texts: Sequence[bytes]) -> Iterator[int]:
    end = 0
    for text in texts:
        end += len(text)
        yield end
