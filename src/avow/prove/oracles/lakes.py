"""Lakes: a Delta table, read by deltalake, and an Iceberg table, read by pyiceberg; each in a folder of the pipeline's.

Progress is read several times a second: from Delta through an open handle, from Iceberg out of its newest metadata
file, which is JSON.
"""

from __future__ import annotations

import json
import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from sqlalchemy.exc import SQLAlchemyError

from avow.errors import LocalError
from avow.prove.oracles.base import TableOracle

DEAD_LETTERS = "_dead_letters"
T = TypeVar("T")


class LakeOracle(TableOracle):
    cells_max = 8  # every batch leaves a version and files, and each judge opens them all

    _known: tuple[int, dict[int, int]] = (0, {})  # the newest run and the positions, as last seen
    _claiming = 0  # the run
    _opened = (0, 0)  # the newest run, and what was claimed when it was first seen

    @property
    def files(self) -> Path:
        return self.folder / "lake"

    @abstractmethod
    def _read_ledger(self) -> tuple[int, dict[int, int]] | None:
        """The ledger: the newest run, and the positions by partition. None while there is no table."""

    def _ledger(self) -> tuple[int, dict[int, int]]:
        """A table that cannot be read at this moment has not gone back."""
        self._known = self._read_ledger() or self._known
        return self._known

    def positions(self) -> dict[int, int]:
        return self._ledger()[1]

    def claiming_run(self) -> int:
        """A run is in the ledger before it claims; what is claimed after that is its own, for the driver alone can."""
        run, positions = self._ledger()
        claimed = sum(positions.values())
        if run != self._opened[0]:
            self._opened = (run, claimed)
        elif claimed > self._opened[1]:
            self._claiming = run
        return self._claiming

    @abstractmethod
    def _columns(self, suffix: str, columns: Sequence[str]) -> pa.Table | None:
        """Of the table with this suffix; None if there is none."""

    def read(self, columns: Sequence[str], suffix: str = "") -> list[tuple[Any, ...]]:
        try:
            table = self._columns(suffix, columns)
        except (DeltaError, SQLAlchemyError, pa.ArrowException) as error:
            raise LocalError(f"table {self.table}{suffix} cannot be read back: {error}") from error
        return [] if table is None else list(zip(*(table[name].to_pylist() for name in columns), strict=True))

    def dead_letters(self) -> list[tuple[int, int]]:
        return [(row[0], row[1]) for row in self.read(["partition", "offset"], DEAD_LETTERS)]


class DeltaOracle(LakeOracle):
    _handle: DeltaTable | None = None

    def sink_config(self) -> dict[str, Any]:
        return {"path": self._path(), "options": {}}

    def _path(self, suffix: str = "") -> str:
        return f"{self.files / self.table}{suffix}"

    def _try_read(self, question: Callable[[DeltaTable], T]) -> T | None:
        """Of the newest version; None while there is no table, or none that can be read."""
        with self._lock:
            try:
                if self._handle is None:
                    self._handle = DeltaTable(self._path())
                else:
                    self._handle.update_incremental()
                return question(self._handle)
            except (DeltaError, OSError):
                self._handle = None
                return None

    def count(self) -> int | None:
        files = self._try_read(lambda table: pa.table(table.get_add_actions(flatten=True)))
        return None if files is None else pc.sum(files["num_records"]).as_py() or 0

    def _read_ledger(self) -> tuple[int, dict[int, int]] | None:
        """The ledger is in transactions of the table, one of them for each partition's position."""
        ledger = f"avow/{self.pipeline}"

        def read(table: DeltaTable) -> tuple[int, dict[int, int]]:
            positions: dict[int, int] = {}
            while (position := table.transaction_version(f"{ledger}/{self.pipeline}/{len(positions)}")) is not None:
                positions[len(positions)] = position
            return table.transaction_version(ledger) or 0, positions

        return self._try_read(read)

    def _columns(self, suffix: str, columns: Sequence[str]) -> pa.Table | None:
        try:
            return DeltaTable(self._path(suffix)).to_pyarrow_table(columns=list(columns))
        except TableNotFoundError:
            return None


class IcebergOracle(LakeOracle):
    def sink_config(self) -> dict[str, Any]:
        return {"table": f"lake.{self.table}", "catalog": {"warehouse": str(self.files)}}

    @property
    def _catalog(self) -> Path:
        return self.files / "catalog.db"

    def _metadata(self) -> dict[str, Any]:
        """The newest; empty while there is no table."""
        query = "SELECT metadata_location FROM iceberg_tables WHERE table_namespace = 'lake' AND table_name = ?"
        try:
            with closing(sqlite3.connect(f"file:{self._catalog}?mode=ro", uri=True)) as catalog:
                row = catalog.execute(query, [self.table]).fetchone()
            return json.loads(Path(row[0].removeprefix("file://")).read_text()) if row else {}
        except (sqlite3.Error, OSError):
            return {}

    def count(self) -> int | None:
        metadata = self._metadata()
        for snapshot in metadata.get("snapshots", ()):
            if snapshot["snapshot-id"] == metadata["current-snapshot-id"]:
                return int(snapshot["summary"]["total-records"])
        return 0 if metadata else None

    def _read_ledger(self) -> tuple[int, dict[int, int]] | None:
        """The ledger is a property of the table, as JSON."""
        stored = self._metadata().get("properties", {}).get(f"avow.{self.pipeline}")
        if stored is None:
            return None
        ledger = json.loads(json.loads(stored)["book"])
        return ledger["run"], {partition: position for _, partition, _, _, position, *_ in ledger["held"]}

    def _columns(self, suffix: str, columns: Sequence[str]) -> pa.Table | None:
        if not self._catalog.exists():
            return None
        location = {"uri": f"sqlite:///{self._catalog}", "warehouse": f"file://{self.files}"}
        with closing(SqlCatalog("default", **location, init_catalog_tables="false")) as catalog:
            try:
                table = catalog.load_table(f"lake.{self.table}{suffix}")
            except NoSuchTableError:
                return None
            return table.scan(selected_fields=tuple(columns)).to_arrow()
