"""Sinks: where a pipeline's rows, dead letters and positions go. Each kind is a package with everything of its own.

``SINKS`` has them by ``sink.kind``; the functions below open a part of a pipeline's own. A plugin's modules are
imported when it is opened, so that a command waits for no client that it does not use.

Owns: the way to a plugin. Must not know: any one of them. Neighbours: ``base`` (the contract) and ``avow.plugins``
(which finds them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from avow import extras, plugins
from avow.settings import PipelineConfig
from avow.sinks.base import DeadLetterReader, DriverSink, Offer, RedriveSink, SinkPlugin, StagingSink, TaskSink

__all__ = [
    "SINKS",
    "Offer",
    "SinkPlugin",
    "audit_reader",
    "dead_letters",
    "driver_sink",
    "plugin_of",
    "redriving",
    "task_sink",
]

if TYPE_CHECKING:
    from avow.sinks.auditing import AuditReader

SINKS: Mapping[str, SinkPlugin] = plugins.SINKS


def plugin_of(pipeline: PipelineConfig) -> SinkPlugin:
    return SINKS[pipeline.sink.kind]


def driver_sink(pipeline: PipelineConfig) -> DriverSink:
    """The pipeline's sink, for the driver of a run."""
    with extras.named():
        return plugin_of(pipeline).open_driver(pipeline)


def task_sink(pipeline: PipelineConfig, run: int, context: object) -> TaskSink | StagingSink:
    """The pipeline's sink, for one task of a run. ``context``: the driver's ``task_context``."""
    with extras.named():
        return plugin_of(pipeline).open_task(pipeline, run, context)


def redriving(pipeline: PipelineConfig) -> RedriveSink:
    """The pipeline's sink, for a redrive."""
    with extras.named():
        return plugin_of(pipeline).open_redrive(pipeline)


def dead_letters(pipeline: PipelineConfig) -> DeadLetterReader:
    """The pipeline's dead letters, to be read."""
    with extras.named():
        return plugin_of(pipeline).open_dead_letters(pipeline)


def audit_reader(pipeline: PipelineConfig, snapshot: str | None = None) -> AuditReader:
    """The pipeline's sink now, or at a moment that another reader's ``snapshot`` names."""
    with extras.named():
        return plugin_of(pipeline).open_reader(pipeline, snapshot)
