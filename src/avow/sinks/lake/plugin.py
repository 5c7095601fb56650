"""What the plugins of Delta Lake and Iceberg have in common: all but the table format itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from avow import sinks
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetterReader, DriverSink, RedriveSink, SinkPlugin, StagingSink
from avow.sinks.offers import TABLE_OFFERS

if TYPE_CHECKING:
    from avow.sinks.auditing import AuditReader
    from avow.sinks.lake.table import LakeTable


class LakePlugin(SinkPlugin):
    offers = TABLE_OFFERS
    commits_per_batch = True
    ledger_by_topic = True
    dead_letter_promise = (
        "Dead letters are committed before the rows of their batch, each once by positions of their own; the next run "
        "resolves a crash in between."
    )
    faults = frozenset({"batch-commit", "lake-files"})

    @abstractmethod
    def open_tables(self, pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
        """The table of rows, and that of dead letters."""

    def open_driver(self, pipeline: PipelineConfig) -> DriverSink:
        from avow.sinks.lake.driver import LakeDriver
        from avow.sinks.topics import TopicsDriver

        if pipeline.sink.by_topic:
            return TopicsDriver(pipeline, self.open_driver)
        return LakeDriver(pipeline, *self.open_tables(pipeline))

    def open_task(self, pipeline: PipelineConfig, run: int, context: object) -> StagingSink:
        from avow.sinks.lake.task import LakeTask, LakeTaskContext

        assert isinstance(context, LakeTaskContext)
        return LakeTask(pipeline, run, context)

    def open_redrive(self, pipeline: PipelineConfig) -> RedriveSink:
        from avow.sinks.lake.redrive import LakeRedrive

        return LakeRedrive(pipeline, *self.open_tables(pipeline))

    def open_dead_letters(self, pipeline: PipelineConfig) -> DeadLetterReader:
        from avow.sinks.lake.redrive import LakeDeadLetters
        from avow.sinks.topics import TopicsDeadLetters

        if pipeline.sink.by_topic:
            return TopicsDeadLetters(pipeline, self.open_dead_letters)
        return LakeDeadLetters(*self.open_tables(pipeline))

    def open_reader(self, pipeline: PipelineConfig, snapshot: str | None) -> AuditReader:
        from avow.sinks.lake.audit import LakeAuditReader

        return LakeAuditReader(pipeline, snapshot)

    def dead_letter_place(self, pipeline: PipelineConfig) -> str:  # noqa: ARG002
        return "a table beside it, ..._dead_letters"


def lake_tables(pipeline: PipelineConfig) -> tuple[LakeTable, LakeTable]:
    """A lake's table of rows, and that of its dead letters."""
    plugin = sinks.plugin_of(pipeline)
    assert isinstance(plugin, LakePlugin)
    return plugin.open_tables(pipeline)
