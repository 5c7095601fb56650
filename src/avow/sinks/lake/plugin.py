"""What the plugins of Delta Lake and Iceberg have in common: all but the table format itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from avow import sinks
from avow.settings import PipelineConfig
from avow.sinks.base import DriverSink, Letters, Redriving, SinkPlugin, StagingSink
from avow.sinks.offers import TABLE_OFFERS

if TYPE_CHECKING:
    from avow.sinks.lake.table import LakeTable
    from avow.sinks.reading import Reading


class LakePlugin(SinkPlugin):
    offers = TABLE_OFFERS
    commits_per_batch = True
    dead_letter_promise = (
        "They are written before the rows of their batch, each once by positions of their own; a crash in between is "
        "settled by the next run."
    )
    faults = frozenset({"batch-commit", "lake-files"})

    @abstractmethod
    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        """The table of rows, and that of dead letters."""

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.lake.driver import LakeDriver

        return LakeDriver(pipeline, *self.open_tables(pipeline))

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> StagingSink:
        from avow.sinks.lake.staging import Brief, LakeStaging

        assert isinstance(context, Brief)
        return LakeStaging(pipeline, run, context)

    def open_redrive(self, pipeline: PipelineConfig) -> Redriving:
        from avow.sinks.lake.redrive import LakeRedriving

        return LakeRedriving(pipeline, *self.open_tables(pipeline))

    def open_dead_letters(self, pipeline: PipelineConfig) -> Letters:
        from avow.sinks.lake.redrive import LakeLetters

        return LakeLetters(*self.open_tables(pipeline))

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> Reading:
        from avow.sinks.lake.audit import LakeReading

        return LakeReading(pipeline, snapshot)

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:  # noqa: ARG002
        return "a table beside it, ..._dead_letters"


def lake_tables(pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
    """A lake's table of rows, and that of its dead letters."""
    plugin = sinks.plugin_of(pipeline)
    assert isinstance(plugin, LakePlugin)
    return plugin.open_tables(pipeline)
