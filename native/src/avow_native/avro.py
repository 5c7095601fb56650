"""``avro.c`` for Python: Avro records into a record batch of declared columns, by steps.

A record that it cannot vouch for is named, not refused.

Owns: describing steps to C. Must not know: avow, and what Avro's rules are. Its neighbour is ``columns``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from avow_native.columns import NUMBER, POINTER, READ_ARGUMENTS, Column, Columns, can_hold

__all__ = ["AvroReader", "Column", "Node"]

_REFUSE_NUL = 1
SKIPPED = -1
_OPS = (  # in the order of avro.c
    *("null", "boolean", "int", "long", "float", "double", "bytes", "fixed", "decimal-bytes", "decimal-fixed", "date"),
    *("time", "millis", "micros", "nanos", "uuid-text", "uuid-fixed", "enum", "symbol", "array", "map", "record"),
    *("union", "member", "default", "doubt"),
)


@dataclass(eq=False, slots=True)
class Node:
    """A step. ``parts`` may be filled later, and name the node itself."""

    op: str  # one of those above
    is_int: bool = False
    column: int = SKIPPED
    size: int = 0
    data: bytes = b""
    parts: list[Node] = field(default_factory=list)


class _Node(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_int32),
        ("is_int", ctypes.c_int32),
        ("column", ctypes.c_int32),
        ("first_part", ctypes.c_int32),
        ("part_count", ctypes.c_int32),
        ("size", ctypes.c_int64),
        ("bytes", ctypes.c_char_p),
        ("bytes_length", ctypes.c_int64),
    )


class AvroReader:
    """Reads records into columns. It keeps nothing from one call to the next."""

    def __init__(self, library: ctypes.CDLL, columns: Sequence[Column], record: Node, *, refuse_nul: bool) -> None:
        self._columns = Columns(columns)
        self._rules = _REFUSE_NUL if refuse_nul else 0
        nodes = _all(record)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        parts: list[int] = []
        flat = []
        for node in nodes:
            flat.append(
                _Node(
                    _OPS.index(node.op),
                    node.is_int,
                    node.column,
                    len(parts),
                    len(node.parts),
                    node.size,
                    node.data,
                    len(node.data),
                )
            )
            parts += [numbers[id(part)] for part in node.parts]
        self._nodes = (_Node * len(flat))(*flat)
        self._parts = (ctypes.c_int32 * len(parts))(*parts)
        self._read = library.avow_avro_read
        self._read.restype = ctypes.c_int64
        arrays: list[Any] = [POINTER, NUMBER] * 3
        self._read.argtypes = [*arrays, ctypes.c_int32, NUMBER, *READ_ARGUMENTS]

    @staticmethod
    def can_read(columns: Sequence[Column]) -> bool:
        """Whether all their types are known to the library."""
        return can_hold(columns)

    def read(self, values: pa.BinaryArray, skip: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """The rows of the records that are beyond doubt, in order, and the indices of the others. No value is null.

        ``skip``: how many bytes stand before each record.
        """
        fields, nodes, parts = self._columns.fields, self._nodes, self._parts
        steps = (fields, len(fields), nodes, len(nodes), parts, len(parts), self._rules, skip)
        return self._columns.read(values, partial(self._read, *steps))


def _all(record: Node) -> list[Node]:
    """Every node once, the record's first."""
    nodes = {id(record): record}
    todo = [record]
    while todo:
        for part in todo.pop().parts:
            if id(part) not in nodes:
                nodes[id(part)] = part
                todo.append(part)
    return list(nodes.values())
