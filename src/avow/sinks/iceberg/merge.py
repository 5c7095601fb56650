"""Changes by key against the rows of one file: which rows they replace, and what the file's successor holds.

Owns: the comparison, in Arrow. Must not know: files, commits, Iceberg. Its neighbour is ``table``, which reads and
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from avow.settings import Lineage
from avow.sinks.lake.table import numbered_keys
from avow.sinks.lake.task import DELETED, columns_of

_ROW, _CHANGE = "__avow_row", "__avow_change"


@dataclass(frozen=True, slots=True)
class KeyMatches:
    """Row by row and change by change, by number: those that have a key in common."""

    known: pa.ChunkedArray  # changes whose key is there, replaced or not
    rows: pa.ChunkedArray  # rows that are replaced or deleted ...
    changes: pa.ChunkedArray  # ... and by which change each


def match_keys(existing: pa.Table, changes: pa.Table, key: Sequence[str], lineage: Lineage) -> KeyMatches:
    """A later record of the same partition replaces or deletes, and so does any of another one."""
    pairs = numbered_keys(existing, key, _ROW).join(numbered_keys(changes, key, _CHANGE), list(key), join_type="inner")
    topic, partition, offset, _ = lineage
    old = existing.select([topic, partition, offset]).take(pairs[_ROW])
    new = changes.select([topic, partition, offset]).take(pairs[_CHANGE])
    elsewhere = pc.or_(pc.not_equal(old[topic], new[topic]), pc.not_equal(old[partition], new[partition]))
    due = pairs.filter(pc.or_(elsewhere, pc.less(old[offset], new[offset])))
    return KeyMatches(pairs[_CHANGE], due[_ROW], due[_CHANGE])


def successor(existing: pa.Table, changes: pa.Table, matches: KeyMatches) -> pa.Table:
    """The rows as they are afterwards. Columns that the changes do not have stay as they were."""
    gone = pc.is_in(pa.array(range(existing.num_rows), pa.int64()), value_set=matches.rows)
    applied = changes.take(matches.changes)
    stays = pc.invert(applied[DELETED])
    replaced = existing.take(matches.rows.filter(stays))
    applied = applied.filter(stays)
    for number, field in enumerate(existing.schema):
        if field.name in applied.schema.names:
            replaced = replaced.set_column(number, field, applied[field.name].cast(field.type))
    return pa.concat_tables([existing.filter(pc.invert(gone)), replaced])


def fresh(changes: pa.Table, known: Sequence[pa.ChunkedArray], schema: pa.Schema) -> pa.Table:
    """New rows: changes that bring a value for a key that no file has."""
    numbers = pa.array(range(changes.num_rows), pa.int64())
    seen = pa.chunked_array([chunk for field in known for chunk in field.chunks], pa.int64())
    new = changes.filter(pc.and_not(pc.invert(pc.is_in(numbers, value_set=seen)), changes[DELETED]))
    return pa.Table.from_arrays(columns_of(schema, new), schema=schema)
