"""What a record's bytes mean: Arrow in, rows and dead letters out.

``decoder(pipeline)`` gives the decoder of the pipeline's format. Nothing is ever coerced: a record either fits the
declared columns exactly, or it is a dead letter with a reason.

Owns: the formats. Must not know: Kafka, Spark, sinks. Its neighbour is the engines' task, which calls ``decode`` once
for each batch and hands the outcome to the sink.
"""

from __future__ import annotations

from avow.arrow import arrow_type
from avow.decode.checksum import Checked
from avow.decode.json import JsonDecoder
from avow.decode.plain import PlainDecoder
from avow.decode.result import REASONS, Dead, Decoded, Decoder, Reason
from avow.settings import PipelineConfig

__all__ = ["REASONS", "Dead", "Decoded", "Decoder", "Reason", "arrow_type", "decoder"]


def decoder(pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
    """The decoder of a pipeline. ``refuse_nul``: the sink cannot hold NUL in text."""
    if pipeline.decode.format == "json":
        return Checked(JsonDecoder(pipeline, refuse_nul=refuse_nul))
    return Checked(PlainDecoder(pipeline, refuse_nul=refuse_nul))
