"""Commits that do not slow down with the number of snapshots a table has.

A snapshot never changes, and a table gets one or two with every batch. pyiceberg deep-copies all of them a dozen times
in a transaction, and its SQL catalog reads and copies the whole list again at every commit. Here a transaction works
on the newest snapshot alone, and our own SQL catalog parses no metadata file that it wrote itself. Other catalogs are
pyiceberg's own: a REST catalog does this work on its server.

Owns: these subclasses, which change nothing for other users of pyiceberg in the process. Must not know: the ledger,
files of rows.
"""

from __future__ import annotations

from typing import Any

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.table import CommitTableResponse, StagedTable, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AddSnapshotUpdate, SetPropertiesUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Identifier
from sqlalchemy.exc import DBAPIError

from avow.retry import random_pauses, retry

_NEED_NO_HISTORY = (AddSnapshotUpdate, SetPropertiesUpdate, SetSnapshotRefUpdate)


def without_history(metadata: TableMetadata) -> TableMetadata:
    """With its newest snapshot alone."""
    newest = metadata.current_snapshot()
    return metadata.model_copy(update={"snapshots": [newest] if newest else [], "snapshot_log": []})


class CachedTransaction(Transaction):
    """pyiceberg's own applies all updates anew, and copies the result, each time its metadata is read."""

    _cache: tuple[object, object, TableMetadata] | None = None  # the base, the updates, and what came of them

    @property
    def table_metadata(self) -> TableMetadata:
        cache = self._cache
        if cache is None or cache[0] is not self._table.metadata or cache[1] is not self._updates:
            cache = self._cache = (self._table.metadata, self._updates, super().table_metadata)
        return cache[2]


class CachingSqlCatalog(SqlCatalog):
    """Keeps the metadata of its last commit to each table. Both overrides of private methods only save time: where a
    version of pyiceberg calls them no more, its own way is taken."""

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._committed: dict[Identifier, CommitTableResponse] = {}

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        response = super().commit_table(table, requirements, updates)
        self._committed[table.name()] = response
        return response

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        identifier = (*Catalog.identifier_to_tuple(orm_table.table_namespace), orm_table.table_name)
        ours = self._committed.get(identifier)
        if ours is None or ours.metadata_location != orm_table.metadata_location:
            return super()._convert_orm_to_iceberg(orm_table)
        io = self._load_file_io(ours.metadata.properties, ours.metadata_location)
        return Table(identifier, ours.metadata, ours.metadata_location, io, self)

    def _update_and_stage_table(
        self, current_table: Table | None, table_identifier: Any, requirements: Any, updates: Any
    ) -> StagedTable:
        if current_table is None or not all(isinstance(update, _NEED_NO_HISTORY) for update in updates):
            return super()._update_and_stage_table(current_table, table_identifier, requirements, updates)
        whole, base = current_table.metadata, without_history(current_table.metadata)
        short = Table(table_identifier, base, current_table.metadata_location, current_table.io, self)
        outputs = super()._update_and_stage_table(short, table_identifier, requirements, updates)
        added = outputs.metadata.snapshots[len(base.snapshots) :]
        outputs.metadata = outputs.metadata.model_copy(
            update={
                "snapshots": [*whole.snapshots, *added],
                "snapshot_log": [*whole.snapshot_log, *outputs.metadata.snapshot_log],
            }
        )
        return outputs


def open_catalog(settings: dict[str, str]) -> Catalog:
    """A new SQL catalog's tables are created by who opens it first. Two who do so at once both find none, and the
    second one's CREATE TABLE fails: it tries again, and finds them."""
    return retry(lambda: _open_catalog(settings), DBAPIError, random_pauses(0.1, 0.5, attempts=4))


def _open_catalog(settings: dict[str, str]) -> Catalog:
    catalog = load_catalog(settings.get("name", "default"), **settings)
    if type(catalog) is SqlCatalog:
        catalog.close()
        return CachingSqlCatalog(catalog.name, **catalog.properties)
    return catalog
