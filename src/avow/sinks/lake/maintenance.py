"""Keeping a lake in order: files that no commit took in, and small files made into larger ones.

A file is an orphan if it is one of this pipeline's, no version that can still be read refers to it, and newer runs have
taken over every partition of the run that wrote it: that one is fenced, and no commit can ever take the file in. Files
of any other run may be those of a batch in progress, files of the newest those of a redrive or a compaction as well.
They are left alone, and so is everything that somebody else wrote.

Owns: which files go. Must not know: any format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from avow.errors import SinkError
from avow.sinks.lake.files import Location, run_of
from avow.sinks.lake.table import CommitConflict, LakeTable

COMPACTIONS_MAX = 10  # attempts, while the files that are merged are changed by others


@dataclass(frozen=True, slots=True)
class Orphan:
    place: Location
    path: str
    size: int
    run: int

    def remove(self) -> None:
        self.place.filesystem.delete_file(self.path)


def orphans(tables: tuple[LakeTable, LakeTable], pipeline: str) -> Iterator[Orphan]:
    """Files of fenced runs that belong to nothing."""
    listed = [(table, list(table.data.listed())) for table in tables if table.load()]
    # Looked at after the files: what was begun or committed in between is then known of.
    ledger_snapshot = [table.ledger() for table, _ in listed if table.load()]
    newest = max((snapshot.newest for snapshot in ledger_snapshot), default=0)
    at_work = {entry.run for snapshot in ledger_snapshot for entry in snapshot.entries().values()}
    for table, files in listed:
        known = table.referenced()
        for info in files:
            run = run_of(info.base_name, pipeline)
            if run is not None and run < newest and run not in at_work and info.base_name not in known:
                yield Orphan(table.data, info.path, info.size, run)


@dataclass(frozen=True, slots=True)
class Compacted:
    files_before: int
    files_after: int

    def __add__(self, other: Compacted) -> Compacted:
        return Compacted(self.files_before + other.files_before, self.files_after + other.files_after)


def compact(table: LakeTable, pipeline: str, target: int) -> Compacted:
    """Merge small files. A run that goes on meanwhile is never in the way, and neither is this in its."""
    before = table.file_count() if table.load() else 0
    for _ in range(COMPACTIONS_MAX):
        try:
            table.compact(pipeline, target)
        except CommitConflict:
            table.load()
            continue
        table.load()
        return Compacted(before, table.file_count())
    raise SinkError(
        f"compaction gave up: other commits changed the merged files of table {table.shown} {COMPACTIONS_MAX} times",
        advice="Files merged until then stay merged. Compact when the pipeline writes less, or stop it for that time.",
    )
