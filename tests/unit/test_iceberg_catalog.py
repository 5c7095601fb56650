"""The SQL catalog that saves work at each commit: what it writes is what pyiceberg's own would have written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog, SqlCatalogBaseTable
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataV1, TableMetadataV2
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from avow.sinks.iceberg.catalog import CachedTransaction, CachingSqlCatalog, open_catalog, without_history

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}


def append(table: Table, name: str) -> None:
    """As the sink does it."""
    table.metadata = without_history(table.metadata)
    with CachedTransaction(table) as transaction:
        transaction.set_properties({"ledger": name})
        transaction.append(ROWS, {"avow.commit": name})


def test_nothing_of_pyiceberg_is_patched() -> None:
    for function in (FromInputFile.table_metadata, ToOutputFile.table_metadata):
        assert function.__module__ == "pyiceberg.serializers"
    for kind in (TableMetadataV1, TableMetadataV2):
        assert kind.__deepcopy__.__module__ == "pydantic.main"


def test_another_reader_finds_every_snapshot(settings: dict[str, str]) -> None:
    catalog, plain = open_catalog(settings), load_catalog("default", **settings)
    assert (type(catalog), type(plain)) == (CachingSqlCatalog, SqlCatalog)
    catalog.create_namespace("a")
    table = catalog.create_table("a.t", ROWS.schema)
    for number in range(3):
        append(table, f"ours-{number}")
    other = plain.load_table("a.t")
    assert other.metadata == table.metadata == catalog.load_table("a.t").metadata
    other.append(ROWS, {"avow.commit": "of another"})  # what is cached is old now
    table = catalog.load_table("a.t")
    append(table, "ours-3")
    table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()  # with its history
    found = plain.load_table("a.t")
    assert found.metadata == table.metadata == catalog.load_table("a.t").metadata
    names = [snapshot.summary["avow.commit"] for snapshot in found.metadata.snapshots if snapshot.summary]
    assert names == ["ours-1", "ours-2", "of another", "ours-3"]
    assert len(found.metadata.snapshot_log) == 4
    assert found.properties["ledger"] == "ours-3"
    assert found.scan().to_arrow().num_rows == 5 * ROWS.num_rows
    catalog.close()
    plain.close()


def test_two_open_a_new_catalog_at_once(settings: dict[str, str]) -> None:
    others = []

    def before_create(*_: object, **__: object) -> None:  # pyiceberg has looked, and found no tables
        others.append(load_catalog("default", **settings))

    event.listen(SqlCatalogBaseTable.metadata, "before_create", before_create, once=True)
    catalog = open_catalog(settings)
    catalog.create_namespace("a")
    assert [other.list_namespaces() for other in others] == [[("a",)]]
    for opened in (catalog, *others):
        opened.close()


def test_a_database_that_does_not_open_is_an_error(settings: dict[str, str]) -> None:
    with pytest.raises(OperationalError, match="unable to open database file"):
        open_catalog(settings | {"uri": "sqlite:////no/such/folder/catalog.db"})
