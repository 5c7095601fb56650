"""Keeping a lake in order: files that no commit took in, and small files made into larger ones.

A file is an orphan if it is one of this pipeline's, no version that can still be read refers to it, and a newer run has
begun since: the run that wrote it is fenced, so no commit can ever take it in. Files of the newest run may be those of
a batch in progress and are left alone, and so is everything that somebody else wrote.

Owns: which files go. Must not know: any format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from avow.sinks.lake.files import Place, run_of
from avow.sinks.lake.table import Conflict, LakeTable

COMPACTIONS_MAX = 10  # attempts, while a run commits in between


@dataclass(frozen=True, slots=True)
class Orphan:
    place: Place
    path: str
    size: int
    run: int

    def remove(self) -> None:
        self.place.filesystem.delete_file(self.path)


def orphans(tables: tuple[LakeTable, LakeTable], pipeline: str) -> Iterator[Orphan]:
    """Files of fenced runs that belong to nothing."""
    loaded = [table for table in tables if table.load()]
    newest = max((table.book().run for table in loaded), default=0)
    for table in loaded:
        # Listed before the table is looked at again: what is committed in between is then referred to.
        found = list(table.data.listed())
        table.load()
        known = table.referenced()
        for info in found:
            run = run_of(info.base_name, pipeline)
            if run is not None and run < newest and info.base_name not in known:
                yield Orphan(table.data, info.path, info.size, run)


@dataclass(frozen=True, slots=True)
class Compacted:
    files_before: int
    files_after: int


def compact(table: LakeTable, pipeline: str, target: int) -> Compacted:
    """Merge small files. A run that goes on meanwhile is never in the way, and neither is this in its."""
    for attempt in range(COMPACTIONS_MAX):
        table.load()
        before = table.file_count()
        try:
            table.compact(pipeline, target)
        except Conflict:
            if attempt == COMPACTIONS_MAX - 1:
                raise
            continue
        break
    table.load()
    return Compacted(before, table.file_count())
