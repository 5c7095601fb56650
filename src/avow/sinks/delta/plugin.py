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
        "The store keeps acknowledged writes, and supports put-if-absent (a local file system does, and S3 with "
        "conditional puts).",
        "The table is not restored to an older version and its transactions are not removed; a start checks both.",
    )
    oracle = "avow.prove.oracles.lakes:DeltaOracle"

    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        from avow.sinks.delta.table import open_tables

        return open_tables(pipeline)


DELTA = DeltaPlugin()
