"""Changes by key against the rows of one file: which rows they replace, and what the file's successor holds.

Owns: the comparison, in Arrow. Must not know: files, commits, Iceberg. Its neighbour is ``table``, which reads and
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from avow.sinks.lake.staging import DELETED
from avow.sinks.lake.table import comparable

_ROW, _CHANGE = "__avow_row", "__avow_change"


@dataclass(frozen=True, slots=True)
class Met:
    """Row by row and change by change, by number: those that have a key in common."""

    known: pa.ChunkedArray  # changes whose key is there, replaced or not
    rows: pa.ChunkedArray  # rows that are replaced or deleted ...
    changes: pa.ChunkedArray  # ... and by which change each


def meet(there: pa.Table, changes: pa.Table, key: Sequence[str], lineage: Sequence[str]) -> Met:
    """A later record of the same partition replaces or deletes, and so does any of another one."""
    left, right = (_numbered(comparable(table, key), name) for table, name in ((there, _ROW), (changes, _CHANGE)))
    pairs = left.join(right, list(key), join_type="inner")
    topic, partition, offset, _ = lineage
    old = there.select([topic, partition, offset]).take(pairs[_ROW])
    new = changes.select([topic, partition, offset]).take(pairs[_CHANGE])
    elsewhere = pc.or_(pc.not_equal(old[topic], new[topic]), pc.not_equal(old[partition], new[partition]))
    due = pairs.filter(pc.or_(elsewhere, pc.less(old[offset], new[offset])))
    return Met(pairs[_CHANGE], due[_ROW], due[_CHANGE])


def successor(there: pa.Table, changes: pa.Table, met: Met) -> pa.Table:
    """The rows as they are afterwards. Columns that the changes do not have stay as they were."""
    gone = pc.is_in(pa.array(range(there.num_rows), pa.int64()), value_set=met.rows)
    applied = changes.take(met.changes)
    stays = pc.invert(applied[DELETED])
    replaced = there.take(met.rows.filter(stays))
    applied = applied.filter(stays)
    for number, one in enumerate(there.schema):
        if one.name in applied.schema.names:
            replaced = replaced.set_column(number, one, applied[one.name].cast(one.type))
    return pa.concat_tables([there.filter(pc.invert(gone)), replaced])


def fresh(changes: pa.Table, known: Sequence[pa.ChunkedArray], schema: pa.Schema) -> pa.Table:
    """New rows: changes that bring a value for a key that no file has."""
    numbers = pa.array(range(changes.num_rows), pa.int64())
    seen = pa.chunked_array([chunk for one in known for chunk in one.chunks], pa.int64())
    new = changes.filter(pc.and_not(pc.invert(pc.is_in(numbers, value_set=seen)), changes[DELETED]))
    columns = [
        new[one.name].cast(one.type) if one.name in new.schema.names else pa.nulls(new.num_rows, one.type)
        for one in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _numbered(rows: pa.Table, name: str) -> pa.Table:
    return rows.append_column(name, pa.array(range(rows.num_rows), pa.int64()))
