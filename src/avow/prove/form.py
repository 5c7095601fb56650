"""What a cell's pipeline and records look like: the harness's own, or those of a user's file.

The user's file keeps its schema, transform, sink and mode; names, addresses and table become the cell's. Its records
are made from its schema, and since they carry no number of ours, its rows are known by the place of their records in
the log. Owns: both forms. Must not know: faults, processes.
"""

from __future__ import annotations

import base64
import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from avow import sinks
from avow.errors import ConfigError
from avow.prove import check
from avow.prove.cells import ENGINES, Cell
from avow.prove.check import Row, Sent, checksum
from avow.prove.witnesses.base import Witness
from avow.schema import Array, Decimal, Field, Map, Scalar, Struct, Type
from avow.settings import PipelineConfig


class Form(ABC):
    """``left_to_audit``: why the independent check cannot tell lost and duplicated records; empty if it can."""

    left_to_audit: str = ""

    @abstractmethod
    def document(self, cell: Cell) -> dict[str, Any]:
        """The pipeline file as a document, but for names, addresses and the size of a batch."""

    @abstractmethod
    def value(self, number: int, key: int) -> bytes: ...

    @abstractmethod
    def rows(self, witness: Witness, sent: Iterable[Sent], log: Mapping[tuple[int, int], int]) -> list[Row]:
        """What is in the sink. ``log`` says which number is at which place."""

    def text(
        self,
        cell: Cell,
        name: str,
        witness: Witness,
        brokers: str,
        batch: int,
        spark: Mapping[str, str] | None = None,
        master: Mapping[str, str] | None = None,
        declares: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """The pipeline file of one cell. ``spark``: settings that the file itself may replace. ``master``: those that
        it may not, beside the engine's own. ``declares``: settings of the cell's fault, by section."""
        document = self.document(cell)
        engine = ENGINES[cell.engine]
        document |= {"name": name, "guarantee": str(cell.guarantee), "engine": engine.name}
        document["source"] = {"brokers": brokers, "topics": [name], "kafka": engine.source}
        document["sink"] = {**document["sink"], **witness.section()}
        document["batch"] = {"interval": "500ms", "max_records": batch}
        document["spark"] = {**(spark or {}), **document.get("spark", {}), **engine.spark, **(master or {})}
        for section, settings in (declares or {}).items():
            document[section] = {**document.get(section, {}), **settings}
        return "".join(f"{json.dumps(key)} = {toml(found)}\n" for key, found in document.items())


class Numbered(Form):
    """Records that carry their number and a checksum."""

    def document(self, cell: Cell) -> dict[str, Any]:
        key = {} if cell.mode == "append" else {"key": ["k"]}
        return {
            "decode": {"format": "json", "schema": check.SCHEMA},
            "sink": {"kind": cell.sink, "mode": cell.mode, **key},
        }

    def value(self, number: int, key: int) -> bytes:
        return check.value(number, key)

    def rows(self, witness: Witness, sent: Iterable[Sent], log: Mapping[tuple[int, int], int]) -> list[Row]:  # noqa: ARG002
        return witness.numbered()


class Own(Form):
    """A user's pipeline."""

    def __init__(self, file: Path, pipeline: PipelineConfig) -> None:
        self._document = tomllib.loads(file.read_text(encoding="utf-8"))
        self._pipeline = pipeline
        if pipeline.transform is not None:
            self.left_to_audit = (
                "the transform decides how many rows a record gives; lost and duplicated are the audit's"
            )
        self._refuse_keys()
        sinks.plugin_of(pipeline).check_provable(pipeline)

    def _refuse_keys(self) -> None:
        """A key must be one that records can be given on purpose."""
        made = {field.name for field in self._pipeline.decode.columns if field.type in (Scalar.LONG, Scalar.STRING)}
        made |= {"key"} if self._pipeline.decode.format != "json" else set()
        for name in self._pipeline.sink.key:
            if name not in made:
                raise ConfigError(
                    f"sink.key: no records can be made for the key {name!r}",
                    advice="Proofs make keys of columns that decode.schema declares as long or string.",
                )

    def document(self, cell: Cell) -> dict[str, Any]:  # noqa: ARG002
        return {name: found for name, found in self._document.items() if name != "batch"}

    def value(self, number: int, key: int) -> bytes:
        if self._pipeline.decode.format != "json":
            return f"record {number}".encode()
        keys = self._pipeline.sink.key
        fields = self._pipeline.decode.columns
        # A key is never null: such a record is dead, whatever is done to the pipeline.
        made = {f.name: _made(f.type, key) if f.name in keys else sample(f, number) for f in fields}
        return json.dumps(made, ensure_ascii=False).encode()

    def rows(self, witness: Witness, sent: Iterable[Sent], log: Mapping[tuple[int, int], int]) -> list[Row]:
        known = {one.number: one for one in sent}
        by_place = {(one.partition, one.offset): one.number for one in known.values()} | dict(log)
        places = witness.places(self._pipeline.sink.lineage)
        rows = []
        for place in places:
            number = by_place.get(place, -1)
            key = known[number].key if number in known else -1
            # The content is the audit's to compare: here it is taken as whole.
            rows.append(Row(number, key, checksum(number, key, ""), "", *place))
        return rows


def sample(field: Field, number: int) -> Any:
    """A value for a column. Where it may be null, it sometimes is."""
    return None if not field.required and number % 5 == 4 else _made(field.type, number)


def _made(kind: Type, number: int) -> Any:
    day, second = number % 28 + 1, number % 60
    match kind:
        case Scalar.BOOLEAN:
            return number % 2 == 0
        case Scalar.BYTE:
            return number % 100
        case Scalar.SHORT:
            return number % 30_000
        case Scalar.INT | Scalar.LONG:
            return number
        case Scalar.FLOAT | Scalar.DOUBLE:
            return number % 4_096 / 4
        case Scalar.STRING:
            return f"text {number}"
        case Scalar.BINARY:
            return base64.b64encode(b"bytes %d" % number).decode()
        case Scalar.DATE:
            return f"2026-01-{day:02d}"
        case Scalar.TIMESTAMP:
            return f"2026-01-{day:02d}T12:00:{second:02d}Z"
        case Scalar.TIMESTAMP_NTZ:
            return f"2026-01-{day:02d}T12:00:{second:02d}"
        case Decimal(precision, scale):
            return number % 10 ** min(precision - scale, 9)
        case Array(element):
            return [_made(element, number)]
        case Map(value):
            return {"a": _made(value, number)}
        case Struct(fields):
            return {field.name: sample(field, number) for field in fields}


def toml(value: Any) -> str:
    """A value of a pipeline file, on one line."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(found)}" for key, found in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case bool() | str():
            return json.dumps(value)
        case _:
            return str(value)
