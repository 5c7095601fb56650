"""Types as Kafka Connect describes them, and what a payload must give: the schema of a record, and its values.

Debezium's encodings are said in Connect's terms, whatever the converter: a type (``int64``), and what it stands for, by
name (``io.debezium.time.MicroTimestamp``). JSON has both beside the payload or not at all; Avro and Protobuf have them
in their own schemas.

Owns: these terms, and the contract of a payload. Must not know: any one payload, Debezium's envelope. Its neighbours
are ``values``, which reads by them, and ``json_payload`` and ``avro_payload``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from avow.schema import Decimal, Scalar

Value = Any  # as the payload has it; None is null
Reader = Callable[[Value], object]  # never called with null; DecodeError for what it cannot read


@dataclass(frozen=True, slots=True, eq=False)
class ConnectType:
    """A type, compared by identity: each schema is built once, and what is made of it is kept beside it."""

    type: str  # int8 to int64, float, double, boolean, string, bytes, array, map, struct
    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, ConnectType] = field(default_factory=dict)  # of a struct
    items: ConnectType | None = None  # the elements of an array, the values of a map

    def __str__(self) -> str:
        return f"{self.name} ({self.type})" if self.name else self.type


@dataclass(frozen=True, slots=True)
class Message:
    """A record's key or value."""

    schema: ConnectType | None  # None: the record brings none
    fields: Mapping[str, Value]


class Payload(Protocol):
    """How keys and values are written: what is JSON, Avro or Protobuf of a record, and nothing else."""

    def read(self, data: bytes) -> Message:
        """A key or a value, or DecodeError."""

    def plain(self, type: Scalar | Decimal) -> Reader:
        """Reads what stands there for itself, strictly: of a decimal, a number or text that spells one."""

    def integer(self, value: Value) -> int: ...
    def text(self, value: Value) -> str: ...
    def data(self, value: Value) -> bytes:
        """What Connect calls bytes."""

    def members(self, value: Value) -> Mapping[str, Value]: ...
    def elements(self, value: Value) -> Sequence[Value]: ...
    def is_number(self, value: Value) -> bool: ...
    def is_text(self, value: Value) -> bool: ...
    def is_object(self, value: Value) -> bool: ...
    def describe(self, value: Value) -> str:
        """What it is, short, for a person."""
