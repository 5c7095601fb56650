"""What is in the topic, and what the table is like that it goes into: the same for every contender.

Records are those of ``bench.decode``; larger with a longer note, wider with more columns.

Owns: values, their schema in avow's and PostgreSQL's words. Must not know: who reads them.
"""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass

from bench.decode import SCHEMA, record

PARTITIONS = 4
LINEAGE = (
    "_kafka_topic text NOT NULL, _kafka_partition integer NOT NULL, _kafka_offset bigint NOT NULL,"
    " _kafka_timestamp timestamp with time zone"
)
COLUMNS = len(SCHEMA.split(","))
COLUMN_TYPES = {
    "long": "bigint",
    "string": "text",
    "double": "double precision",
    "timestamp": "timestamp with time zone",
}
FURTHER = ("long", "string", "double")  # types of further columns, in turns
NOISE = base64.b64encode(random.Random(1).randbytes(3_000_000))  # text that neither Kafka nor PostgreSQL makes small


@dataclass(frozen=True, slots=True)
class Shape:
    partitions: int = PARTITIONS
    value_bytes: int = 0  # at least, by a longer note
    columns: int = COLUMNS  # at least those of bench.decode

    @property
    def is_usual(self) -> bool:
        return self.value_bytes == 0 and self.columns <= COLUMNS

    @property
    def schema(self) -> str:
        return ", ".join([SCHEMA, *(f"{name} {kind}" for name, kind in self._further())])

    @property
    def payload(self) -> str:
        """The columns that avow makes of the schema. Made beforehand for every contender, so that all fill the same."""
        columns = (column.split(maxsplit=2) for column in self.schema.split(","))
        return ", ".join(" ".join([name, COLUMN_TYPES[kind], *null]) for name, kind, *null in columns)

    def fields(self) -> list[tuple[str, str]]:
        """Names and avow's types."""
        return [(name, kind) for name, kind, *_ in (column.split() for column in self.schema.split(","))]

    def value(self, number: int) -> bytes:
        value = record(number)
        if self.columns > COLUMNS:
            further = ",".join(f'"{name}":{_json(kind, number)}' for name, kind in self._further())
            value = value[:-1] + f",{further}}}".encode()
        if (missing := self.value_bytes - len(value)) > 0:
            begin = number * 97 % max(1, len(NOISE) - missing)
            value = value.replace(b'"note":"', b'"note":"' + NOISE[begin : begin + missing], 1)
        return value

    def _further(self) -> list[tuple[str, str]]:
        return [(f"c{number}", FURTHER[number % len(FURTHER)]) for number in range(COLUMNS + 1, self.columns + 1)]


def _json(kind: str, number: int) -> str:
    return {"long": f"{number}", "string": f'"text {number % 1000}"', "double": f"{number % 999}.25"}[kind]
