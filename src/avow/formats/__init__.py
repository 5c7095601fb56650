"""Formats: what the bytes of a record mean. Each is a package with everything of its own.

``FORMATS`` has them by ``decode.format``; ``decoder`` opens a pipeline's own, behind the checks that every record
passes first. Nothing is ever coerced: a record either fits the columns exactly, or it is a dead letter with a reason.

Owns: the way to a plugin. Must not know: any one of them, sinks, Spark. Neighbours: ``base`` (the contract),
``avow.plugins`` (which finds them) and the engines' task, which calls ``decode`` once for each batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from avow import extras, plugins
from avow.formats.base import Decoder, FormatPlugin
from avow.settings import PipelineConfig, refused
from avow.settings.values import Refused

__all__ = ["FORMATS", "decoder", "plugin_of", "renewed"]

FORMATS: Mapping[str, FormatPlugin] = plugins.FORMATS


def plugin_of(pipeline: PipelineConfig) -> FormatPlugin:
    return FORMATS[pipeline.decode.format]


def renewed(pipeline: PipelineConfig) -> PipelineConfig:
    """The pipeline with the columns of now, where its format takes them from outside the file."""
    decode = pipeline.decode.for_source(pipeline.source)
    if decode == pipeline.decode:
        return pipeline
    try:
        return pipeline.with_decode(decode)
    except Refused as error:
        problems = error.problems
    raise refused(problems)


def decoder(pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
    """The decoder of a pipeline. ``refuse_nul``: the sink cannot hold NUL in text."""
    from avow.formats.checksum import CheckedDecoder

    with extras.named():
        return CheckedDecoder(plugin_of(pipeline).decoder(pipeline, refuse_nul=refuse_nul))
