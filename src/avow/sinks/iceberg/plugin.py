"""Iceberg as a plugin: what it asks of its surroundings, and the way to its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from avow.settings import PipelineConfig
from avow.sinks.iceberg.config import IcebergConfig
from avow.sinks.lake.plugin import LakePlugin

if TYPE_CHECKING:
    from avow.sinks.lake.table import LakeTable


class IcebergPlugin(LakePlugin):
    kind = "iceberg"
    title = "Iceberg"
    Config = IcebergConfig
    assumes = (
        "The catalog keeps acknowledged commits, and compares the table's current snapshot before each commit.",
        "The table's avow.* properties are not removed and the table is not rolled back; a start checks both.",
    )
    oracle = "avow.prove.oracles.lakes:IcebergOracle"

    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        from avow.sinks.iceberg.table import open_tables

        return open_tables(pipeline)


ICEBERG = IcebergPlugin()
