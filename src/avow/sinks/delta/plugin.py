"""Delta Lake as a plugin: what it asks of its surroundings, and the way to its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from avow.settings import PipelineConfig
from avow.sinks.delta.config import DeltaConfig
from avow.sinks.lake.plugin import LakePlugin

if TYPE_CHECKING:
    from avow.sinks.lake.table import LakeTable


class DeltaPlugin(LakePlugin):
    kind = "delta"
    title = "Delta Lake"
    Config = DeltaConfig
    assumes = (
        "The store keeps what it has acknowledged, and puts a file under a new name only if there is none (a local "
        "file system does, and S3 with conditional puts).",
        "Nobody restores the table to an older version or removes its transactions; both are looked for at the start.",
    )
    witness = "avow.prove.witnesses.lakes:DeltaWitness"

    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        from avow.sinks.delta.table import open_tables

        return open_tables(pipeline)


DELTA = DeltaPlugin()
