"""A table's metadata without its past: what pyiceberg does with every snapshot at every commit, done once for each.

A snapshot never changes, and a table gets one or two with every batch. Left to itself the library copies all of them a
dozen times in a commit, reads the whole list back and writes each anew, so that a thousand of them take seconds.

Owns: these short cuts, which hold for the whole process. Must not know: the ledger, files of rows.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from pyiceberg.io import InputFile, OutputFile
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata, TableMetadataV1, TableMetadataV2, TableMetadataV3
from pyiceberg.table.snapshots import Snapshot


def without_past(metadata: TableMetadata) -> dict[str, Any]:
    """What is to be replaced in it, so that it has its newest snapshot alone."""
    newest = metadata.current_snapshot()
    return {"snapshots": [newest] if newest else [], "snapshot_log": []}


class Changes(Transaction):
    """pyiceberg's own copies all metadata each time that it is asked for it, a dozen times in a commit. It is the same
    until there is another update."""

    _seen: tuple[object, object, TableMetadata] | None = None  # for which metadata and updates, and what came of them

    @property
    def table_metadata(self) -> TableMetadata:
        seen = self._seen
        if seen is None or seen[0] is not self._table.metadata or seen[1] is not self._updates:
            seen = self._seen = (self._table.metadata, self._updates, super().table_metadata)
        return seen[2]


# A catalog copies the metadata, deeply, at every commit.


def _copied(metadata: TableMetadata, _memo: Any = None) -> TableMetadata:
    parts = {name: copy(part) for name, part in vars(metadata).items() if isinstance(part, list | dict)}
    return metadata.model_copy(update=parts)


for _kind in (TableMetadataV1, TableMetadataV2, TableMetadataV3):
    _kind.__deepcopy__ = _copied  # type: ignore[assignment, method-assign]


# It reads it before each commit. A metadata file never changes, and one that we wrote need not be read: of each table
# the newest is kept, by its folder.
_written: dict[str, tuple[str, TableMetadata]] = {}
_read = FromInputFile.table_metadata


def remember(table: Table) -> None:
    """After a commit: the metadata that it made."""
    _written[_folder(table.metadata_location)] = (table.metadata_location, table.metadata)


def _remembered(file: InputFile, *more: Any) -> TableMetadata:
    location, metadata = _written.get(_folder(file.location), ("", None))
    return metadata if metadata is not None and location == file.location else _read(file, *more)


def _folder(location: str) -> str:
    return location.rpartition("/")[0]


FromInputFile.table_metadata = staticmethod(_remembered)  # type: ignore[assignment, method-assign]


# It writes it at each commit. A snapshot that was written has the same text again: those of each table are kept, by its
# folder, with the very snapshot that they are of.
NONE = '"snapshots":[]'
_texts: dict[str, dict[int, tuple[Snapshot, str]]] = {}
_write = ToOutputFile.table_metadata


class _Told:
    """Metadata, as far as it is asked for when it is written."""

    def __init__(self, metadata: TableMetadata, folder: str) -> None:
        self._metadata, self._folder = metadata, folder

    def model_dump_json(self, *, exclude_none: bool) -> str:
        known = _texts.get(self._folder, {})
        texts = _texts[self._folder] = {}
        for one in self._metadata.snapshots:
            seen, text = known.get(one.snapshot_id, (None, ""))
            text = text if seen is one else one.model_dump_json(exclude_none=exclude_none)
            texts[one.snapshot_id] = (one, text)
        rest = self._metadata.model_copy(update={"snapshots": []}).model_dump_json(exclude_none=exclude_none)
        # A quote inside of a text has a backslash before it, so this stands there once; unless the library spells it
        # otherwise one day, and then all of it is written as the library does.
        if rest.count(NONE) != 1:
            return self._metadata.model_dump_json(exclude_none=exclude_none)
        return rest.replace(NONE, f'"snapshots":[{",".join(text for _, text in texts.values())}]')


def _briefly(metadata: TableMetadata, file: OutputFile, *more: Any, **named: Any) -> None:
    _write(_Told(metadata, _folder(file.location)), file, *more, **named)  # type: ignore[arg-type]


ToOutputFile.table_metadata = staticmethod(_briefly)  # type: ignore[assignment, method-assign]
