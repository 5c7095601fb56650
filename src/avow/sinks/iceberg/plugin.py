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
        "The catalog keeps what it has acknowledged, and compares the table's newest snapshot before it commits.",
        "Nobody removes the table's avow.* properties or rolls the table back; both are looked for at the start.",
    )
    witness = "avow.prove.witnesses.lakes:IcebergWitness"

    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        from avow.sinks.iceberg.table import open_tables

        return open_tables(pipeline)


ICEBERG = IcebergPlugin()
