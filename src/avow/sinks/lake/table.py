"""What a table format must do for the lake sinks: one table, read and committed on one handle.

``load`` takes the newest version; everything after it, the ledger and every commit, is of that version until the next
``load`` or a commit of our own. A commit on a version that is no longer the newest is refused with ``CommitConflict``.

Owns: the shape. Must not know: any one format, the ledger's rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_, eq, ge, lt
from types import MappingProxyType
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from avow.errors import AvowError, SinkError
from avow.kafka.log import TopicPartition
from avow.settings import Lineage
from avow.sinks.lake.files import DataFile, Location
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot

EVERY_OFFSET = (0, 2**63 - 1)  # the span of a file that does not say


class CommitConflict(Exception):
    """Another writer has committed since the handle was loaded. Nothing of ours was committed."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table's columns: ours, with required ones not nullable, and how its files are put."""

    schema: pa.Schema
    partition: pa.Field | None = None
    by_day_of: str | None = None  # the timestamp whose day ``partition`` is
    required: frozenset[str] = frozenset()  # parts of nested columns that are never null: column.part.part


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Rows of one partition by their offsets: from one on, up to one, or exactly these, or of one redrive."""

    tp: TopicPartition
    columns: tuple[str, str, str] = ("topic", "partition", "offset")  # as the table of dead letters has them
    start: int | None = None
    until: int | None = None
    offsets: tuple[int, ...] | None = None
    redrive: int | None = None

    def _conditions(self) -> list[tuple[str, str, Any]]:
        topic, partition, offset = self.columns
        every = (
            (topic, "=", self.tp.topic),
            (partition, "=", self.tp.partition),
            (offset, ">=", self.start),
            (offset, "<", self.until),
            (offset, "IN", self.offsets),
            ("redrive", "=", self.redrive),
        )
        return [condition for condition in every if condition[2] is not None]

    def expression(self) -> pc.Expression:
        """For Arrow."""
        return reduce(and_, (_COMPARE[op](pc.field(column), value) for column, op, value in self._conditions()))

    def predicate(self) -> str:
        """For Delta and Iceberg, which spell it alike."""
        return " AND ".join(f"{quoted(column)} {op} {_literal(value)}" for column, op, value in self._conditions())


_COMPARE: Mapping[str, Callable[[pc.Expression, Any], pc.Expression]] = MappingProxyType(
    {"=": eq, ">=": ge, "<": lt, "IN": lambda column, values: column.isin(list(values))}
)


def _literal(value: str | int | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return f"'{value}'" if isinstance(value, str) else str(value)  # no topic has a quote


def numbered_keys(rows: pa.Table, key: Sequence[str], number: str) -> pa.Table:
    """The keys, each beside the number of its row: to be joined or grouped, which keeps no order."""
    return _comparable(rows, key).append_column(number, pa.array(range(rows.num_rows), pa.int64()))


def _comparable(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The keys alone, as SQL compares them: 0.0 is -0.0, and NaN is NaN. Arrow joins and groups by their bits."""
    keys = rows.select(list(key))
    for number, field in enumerate(keys.schema):
        if pa.types.is_floating(field.type):
            values = pc.add(keys[field.name], pa.scalar(0.0, field.type))
            keys = keys.set_column(
                number, field, pc.if_else(pc.is_nan(values), pa.scalar(math.nan, field.type), values)
            )
    return keys


def partition_problems(partitioned_by: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """What keeps files from being put as declared."""
    if list(partitioned_by) == list(wanted):
        return []
    existing, declared = (", ".join(names) or "nothing" for names in (partitioned_by, wanted))
    return [f"it is partitioned by {existing}, but sink.partition_by is {declared}"]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class LakeTable(ABC):
    """One table of a format. ``shown`` is its name, for people; ``partition_in_files``: whether the files have the
    column by which they are partitioned."""

    shown: str
    partition_in_files: ClassVar[bool]
    never_widens: ClassVar[str] = ""  # why no column can have a wider type, if none can
    _table: object | None = None  # the library's handle on the version that is loaded
    _library_errors: ClassVar[tuple[type[Exception], ...]]  # what the format's library raises
    _advice: ClassVar[str]  # what to check when it does

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The library's errors as ours."""
        try:
            yield
        except (AvowError, CommitConflict):
            raise
        except self._library_errors as error:
            raise SinkError(f"table {self.shown} {what}: {self._error_text(error)}", advice=self._advice) from error

    @staticmethod
    @abstractmethod
    def _error_text(error: Exception) -> str:
        """What the library said, in one line."""

    @abstractmethod
    def _dataset(self, row_filter: RowFilter | None) -> Any:
        """The files in which such rows may be, as an Arrow dataset or something with its ``scanner``."""

    def _dataset_with(self, column: str, values: pa.ChunkedArray) -> Any:  # noqa: ARG002
        """The files in which one of these values may be."""
        return self._dataset(None)

    def _scanner(self, columns: Sequence[str] | None, row_filter: RowFilter | None) -> ds.Scanner:
        return self._dataset(row_filter).scanner(
            columns=None if columns is None else list(columns),
            filter=None if row_filter is None else row_filter.expression(),
        )

    def rows(self, columns: Sequence[str] | None = None, row_filter: RowFilter | None = None) -> pa.Table:
        """Its rows, all of them or filtered ones."""
        with self._errors("cannot be read"):
            return self._scanner(columns, row_filter).to_table()

    def batches(self, columns: Sequence[str], row_filter: RowFilter | None = None) -> Iterator[pa.RecordBatch]:
        """The same, as they come."""
        with self._errors("cannot be read"):
            yield from self._scanner(columns, row_filter).to_batches()

    def keys(self, key: Sequence[str], wanted: pa.Table) -> pa.Table:
        """Which of the wanted keys are in the table."""
        first = wanted[key[0]].unique()
        # Not floats: Arrow compares their bits there, and 0.0 is not -0.0.
        among = None if pa.types.is_floating(first.type) else pc.field(key[0]).isin(first)
        with self._errors("cannot be read"):
            rows = self._dataset_with(key[0], first).scanner(columns=list(key), filter=among).to_table()
        if not rows.num_rows:
            return rows
        return _comparable(rows, key).join(_comparable(wanted, key), list(key), join_type="inner")

    @property
    @abstractmethod
    def data(self) -> Location:
        """Where its files go."""

    @property
    def loaded(self) -> bool:
        """Whether a version is at hand."""
        return self._table is not None

    @property
    @abstractmethod
    def version(self) -> int | str:
        """Of what is loaded."""

    @abstractmethod
    def load(self, pinned: str | None = None) -> bool:
        """Take the newest version, or one that was pinned. False if there is no table."""

    @abstractmethod
    def pinned(self) -> str:
        """What is loaded, for another process to load: it needs the files of rows and no others that upkeep removes."""

    @abstractmethod
    def ledger(self) -> LedgerSnapshot:
        """The ledger of our pipeline, in the version that is loaded."""

    @abstractmethod
    def create(self, layout: TableLayout) -> bool:
        """Create the table, and load it. False if another process created it first."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Its columns in the types that Arrow has for them."""

    def storable(self, type_: pa.DataType) -> pa.DataType:
        """The type in which it keeps values of a type: the same, or one that holds all of them."""
        return type_

    def file_schema(self, wanted: pa.Schema) -> pa.Schema:
        """Our columns as the files need them."""
        return wanted

    @abstractmethod
    def incompatibilities(self, layout: TableLayout, mode: str) -> list[str]:
        """Properties of the table that would break the guarantee."""

    @abstractmethod
    def compatibility_key(self) -> object:
        """All that ``incompatibilities`` and ``schema`` rest on: where it is the same, so are they."""

    @abstractmethod
    def rolled_back(self) -> str:
        """How the table went back behind our last commit; nothing if it did not."""

    @abstractmethod
    def has_full_history(self) -> bool:
        """Whether ``rolled_back`` is certain: every version since our last commit can still be read."""

    def can_widen(self, column: str) -> bool:  # noqa: ARG002
        """Whether a column's type can be made a wider one, by which the files that are there are read, too."""
        return not self.never_widens

    @abstractmethod
    def alter(self, fields: Sequence[pa.Field], alterations: str) -> None:
        """Add columns, all nullable, and give those that are there a wider type; with a text that ``alterations`` then
        gives, in the same commit or before; and load."""

    @abstractmethod
    def alterations(self) -> str:
        """The text that our pipeline's last ``alter`` has left; empty before the first."""

    @abstractmethod
    def commit(self, snapshot: LedgerSnapshot, files: Sequence[DataFile], name: str) -> None:
        """Files and ledger in one act, under a name by which ``has_commit`` finds it."""

    @abstractmethod
    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Lineage, snapshot: LedgerSnapshot, name: str) -> None:
        """Bring rows in by key, one per key, and the ledger with them: a later record of the same partition replaces or
        deletes, an unknown key is added."""

    @abstractmethod
    def remove(self, row_filter: RowFilter, snapshot: LedgerSnapshot, name: str) -> None:
        """Take rows out, and the ledger with them."""

    @abstractmethod
    def mark(self, row_filter: RowFilter, redrive: int | None, snapshot: LedgerSnapshot, name: str) -> None:
        """Note on rows which redrive has taken them up, or that none has, and the ledger with them."""

    @abstractmethod
    def has_commit(self, name: str) -> bool:
        """After ``load``: whether the commit of this name, the last that was tried, is in the table."""

    @abstractmethod
    def spans(self, column: str) -> Sequence[tuple[int, int]]:
        """Least and greatest value of a column of whole numbers, file by file."""

    @abstractmethod
    def file_count(self) -> int:
        """How many data files it has."""

    @abstractmethod
    def compact(self, pipeline: str, target: int) -> None:
        """Merge files that are smaller than half of ``target`` bytes, in one commit or several."""

    @abstractmethod
    def referenced(self) -> set[str]:
        """The names of all files that any version which readers may still open refers to."""
