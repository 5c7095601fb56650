"""What a table format must do for the lake sinks: one table, read and committed on one handle.

``load`` takes the newest version; everything after it, the book and every commit, is of that version until the next
``load`` or a commit of our own. A commit on a version that is no longer the newest is refused with ``Conflict``.

Owns: the shape. Must not know: any one format, the ledger's rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from avow.kafka.log import TopicPartition
from avow.sinks.lake.book import Book
from avow.sinks.lake.files import DataFile, Place


class Conflict(Exception):
    """Somebody else has committed since the handle was loaded. Nothing of ours was."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table's columns: ours, with required ones not nullable, and how its files are put."""

    schema: pa.Schema
    partition: pa.Field | None = None
    by_day_of: str | None = None  # the timestamp whose day ``partition`` is
    required: frozenset[str] = frozenset()  # parts of nested columns that are never null: column.part.part


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows of one partition by their offsets: from one on, up to one, or exactly these, or of one redrive."""

    where: TopicPartition
    columns: tuple[str, str, str]  # topic, partition, offset
    start: int | None = None
    until: int | None = None
    offsets: tuple[int, ...] | None = None
    redrive: int | None = None


def expression(chosen: Chosen) -> pc.Expression:
    """The same, for Arrow."""
    topic, partition, offset = map(pc.field, chosen.columns)
    found = (topic == chosen.where.topic) & (partition == chosen.where.partition)
    if chosen.start is not None:
        found &= offset >= chosen.start
    if chosen.until is not None:
        found &= offset < chosen.until
    if chosen.offsets is not None:
        found &= offset.isin(list(chosen.offsets))
    if chosen.redrive is not None:
        found &= pc.field("redrive") == chosen.redrive
    return found


def predicate(chosen: Chosen) -> str:
    """The same, for Delta and Iceberg, which spell it alike."""
    topic, partition, offset = map(quoted, chosen.columns)
    found = [f"{topic} = '{chosen.where.topic}'", f"{partition} = {chosen.where.partition}"]  # no topic has a quote
    if chosen.start is not None:
        found.append(f"{offset} >= {chosen.start}")
    if chosen.until is not None:
        found.append(f"{offset} < {chosen.until}")
    if chosen.offsets is not None:
        found.append(f"{offset} IN ({', '.join(map(str, chosen.offsets))})")
    if chosen.redrive is not None:
        found.append(f"redrive = {chosen.redrive}")
    return " AND ".join(found)


def among(column: str, values: pa.ChunkedArray) -> pc.Expression | None:
    """Rows with one of these values, for Arrow. None for floats: it compares their bits there, and 0.0 is not -0.0."""
    return None if pa.types.is_floating(values.type) else pc.field(column).isin(values)


def same_keys(found: pa.Table, wanted: pa.Table, key: Sequence[str]) -> pa.Table:
    """The keys that are in both."""
    if not found.num_rows:
        return found
    return comparable(found, key).join(comparable(wanted, key), list(key), join_type="inner")


def comparable(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The keys alone, as SQL compares them: 0.0 is -0.0, and NaN is NaN. Arrow joins and groups by their bits."""
    keys = rows.select(list(key))
    for number, one in enumerate(keys.schema):
        if pa.types.is_floating(one.type):
            values = pc.add(keys[one.name], pa.scalar(0.0, one.type))
            keys = keys.set_column(number, one, pc.if_else(pc.is_nan(values), pa.scalar(math.nan, one.type), values))
    return keys


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class LakeTable(Protocol):
    @property
    def shown(self) -> str:
        """Its name, for people."""

    @property
    def data(self) -> Place:
        """Where its files go."""

    @property
    def partition_in_files(self) -> bool:
        """Whether the column by which files are put is in the files as well."""

    @property
    def loaded(self) -> bool:
        """Whether a version is at hand."""

    @property
    def version(self) -> int | str:
        """Of what is loaded."""

    def load(self, pinned: str | None = None) -> bool:
        """Take the newest version, or one that was pinned. False if there is no table."""

    def pinned(self) -> str:
        """What is loaded, for another process to load: it needs the files of rows and no others that upkeep removes."""

    def book(self) -> Book:
        """The ledger of our pipeline, in the version that is loaded."""

    def create(self, shape: Shape) -> bool:
        """Make it, and load it. False if somebody else was quicker."""

    def schema(self) -> pa.Schema:
        """Its columns in the types that Arrow has for them."""

    def storable(self, type_: pa.DataType) -> pa.DataType:
        """The type in which it keeps values of a type: the same, or one that holds all of them."""

    def file_schema(self, wanted: pa.Schema) -> pa.Schema:
        """Our columns as the files need them."""

    def refusals(self, shape: Shape, mode: str) -> list[str]:
        """What there is about it that would break the promise."""

    def basis(self) -> object:
        """All that ``refusals`` and ``schema`` rest on: where it is the same, so are they."""

    def rolled_back(self) -> str:
        """How the table went back behind our last commit; nothing if it did not."""

    def past_is_known(self) -> bool:
        """Whether ``rolled_back`` can tell: every version since our last commit can still be looked at."""

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns, all nullable, and load."""

    def commit(self, book: Book, files: Sequence[DataFile], name: str) -> None:
        """Files and ledger in one act, under a name by which ``landed`` finds it."""

    def merge(self, rows: pa.Table, key: Sequence[str], lineage: Sequence[str], book: Book, name: str) -> None:
        """Bring rows in by key, one per key, and the ledger with them: a later record of the same partition replaces or
        deletes, an unknown key is added."""

    def remove(self, chosen: Chosen, book: Book, name: str) -> None:
        """Take rows out, and the ledger with them."""

    def mark(self, chosen: Chosen, redrive: int | None, book: Book, name: str) -> None:
        """Note on rows which redrive has taken them up, or that none has, and the ledger with them."""

    def landed(self, name: str) -> bool:
        """After ``load``: whether the commit of this name, the last that was tried, is in the table."""

    def keys(self, key: Sequence[str], wanted: pa.Table) -> pa.Table:
        """Which of the wanted keys are in the table."""

    def rows(self, columns: Sequence[str] | None = None, chosen: Chosen | None = None) -> pa.Table:
        """Its rows, all of them or chosen ones."""

    def batches(self, columns: Sequence[str], chosen: Chosen | None = None) -> Iterator[pa.RecordBatch]:
        """The same, as they come."""

    def spans(self, column: str) -> Sequence[tuple[int, int]]:
        """Least and greatest value of a column of whole numbers, file by file."""

    def file_count(self) -> int:
        """How many data files it has."""

    def compact(self, pipeline: str, target: int) -> None:
        """Merge files that are smaller than half of ``target`` bytes, in one commit or several."""

    def referenced(self) -> set[str]:
        """The names of all files that any version which readers may still open refers to."""
