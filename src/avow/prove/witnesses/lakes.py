"""Lakes: a Delta table, read by deltalake, and an Iceberg table, read by pyiceberg; each in a folder of the pipeline's.

How far they are is asked several times a second: of Delta by a handle that is kept, of Iceberg by its newest metadata
file, which is JSON.
"""

from __future__ import annotations

import json
import sqlite3
import threading
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
from avow.prove.witnesses.base import Around, TableWitness

DEAD_LETTERS = "_dead_letters"
T = TypeVar("T")


class LakeWitness(TableWitness):
    """``place`` is the folder that holds its tables, and nothing else."""

    cells_max = 8  # every batch leaves a version and files, and each judge opens them all

    def __init__(self, site: Around, folder: Path, pipeline: str, table: str) -> None:
        super().__init__(site, folder, pipeline, table)
        self.place = self.folder / "lake"
        self._asking = threading.Lock()
        self._known: tuple[int, dict[int, int]] = (0, {})  # the newest run and the positions, as last seen
        self._claiming = 0  # the run
        self._opened = (0, 0)  # the newest run, and what was claimed when it was first seen

    @abstractmethod
    def _told(self) -> tuple[int, dict[int, int]] | None:
        """What the ledger says: the newest run, and the positions by partition. None while there is no table."""

    def _ledger(self) -> tuple[int, dict[int, int]]:
        """A table that cannot be read at this moment has not gone back."""
        self._known = self._told() or self._known
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
            found = self._columns(suffix, columns)
        except (DeltaError, SQLAlchemyError, pa.ArrowException) as error:
            raise LocalError(f"table {self.table}{suffix} cannot be read back: {error}") from error
        return [] if found is None else list(zip(*(found[name].to_pylist() for name in columns), strict=True))

    def dead(self) -> list[tuple[int, int]]:
        return [(row[0], row[1]) for row in self.read(["partition", "offset"], DEAD_LETTERS)]


class DeltaWitness(LakeWitness):
    _handle: DeltaTable | None = None

    def section(self) -> dict[str, Any]:
        return {"path": self._path(), "options": {}}

    def _path(self, suffix: str = "") -> str:
        return f"{self.place / self.table}{suffix}"

    def _asked(self, question: Callable[[DeltaTable], T]) -> T | None:
        """Of the newest version; None while there is no table, or none that can be read."""
        with self._asking:
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
        files = self._asked(lambda table: pa.table(table.get_add_actions(flatten=True)))
        return None if files is None else pc.sum(files["num_records"]).as_py() or 0

    def _told(self) -> tuple[int, dict[int, int]] | None:
        """The ledger is in transactions of the table, one of them for each partition's position."""
        ledger = f"avow/{self.pipeline}"

        def told(table: DeltaTable) -> tuple[int, dict[int, int]]:
            positions: dict[int, int] = {}
            while (found := table.transaction_version(f"{ledger}/{self.pipeline}/{len(positions)}")) is not None:
                positions[len(positions)] = found
            return table.transaction_version(ledger) or 0, positions

        return self._asked(told)

    def _columns(self, suffix: str, columns: Sequence[str]) -> pa.Table | None:
        try:
            return DeltaTable(self._path(suffix)).to_pyarrow_table(columns=list(columns))
        except TableNotFoundError:
            return None


class IcebergWitness(LakeWitness):
    def section(self) -> dict[str, Any]:
        return {"table": f"lake.{self.table}", "catalog": {"warehouse": str(self.place)}}

    @property
    def _catalog(self) -> Path:
        return self.place / "catalog.db"

    def _metadata(self) -> dict[str, Any]:
        """The newest; empty while there is no table."""
        query = "SELECT metadata_location FROM iceberg_tables WHERE table_namespace = 'lake' AND table_name = ?"
        try:
            with closing(sqlite3.connect(f"file:{self._catalog}?mode=ro", uri=True)) as catalog:
                found = catalog.execute(query, [self.table]).fetchone()
            return json.loads(Path(found[0].removeprefix("file://")).read_text()) if found else {}
        except (sqlite3.Error, OSError):
            return {}

    def count(self) -> int | None:
        told = self._metadata()
        if not told:
            return None
        newest = (one for one in told.get("snapshots", ()) if one["snapshot-id"] == told["current-snapshot-id"])
        return sum(int(one["summary"]["total-records"]) for one in newest)

    def _told(self) -> tuple[int, dict[int, int]] | None:
        """The ledger is a property of the table, as JSON."""
        said = self._metadata().get("properties", {}).get(f"avow.{self.pipeline}")
        if said is None:
            return None
        book = json.loads(json.loads(said)["book"])
        return book["run"], {partition: position for _, partition, _, _, position, *_ in book["held"]}

    def _columns(self, suffix: str, columns: Sequence[str]) -> pa.Table | None:
        if not self._catalog.exists():
            return None
        place = {"uri": f"sqlite:///{self._catalog}", "warehouse": f"file://{self.place}"}
        with closing(SqlCatalog("default", **place, init_catalog_tables="false")) as catalog:
            try:
                table = catalog.load_table(f"lake.{self.table}{suffix}")
            except NoSuchTableError:
                return None
            return table.scan(selected_fields=tuple(columns)).to_arrow()
