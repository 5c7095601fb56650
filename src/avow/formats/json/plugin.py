"""JSON as a plugin: the keys of ``[decode]``, what it promises, and the way to its decoder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from avow.formats.base import Decoder, FormatPlugin, Samples
from avow.schema import Scalar
from avow.settings import REST_COLUMN, DeclaredColumns, PipelineConfig

_UNKNOWN_FIELDS = {
    "reject": "A JSON field that is not declared makes the record a dead letter.",
    "ignore": "A JSON field that is not declared is dropped.",
    "keep": f"A JSON field that is not declared is stored in the column {REST_COLUMN}.",
}


class JsonConfig(DeclaredColumns):
    """[decode] with format = "json"."""

    format: Literal["json"] = Field(description='"json"')
    unknown_fields: Literal["reject", "ignore", "keep"] = Field("reject", description='"reject", "ignore" or "keep"')

    @property
    def keeps_unknown_fields(self) -> bool:
        return self.unknown_fields == "keep"


class JsonFormat(FormatPlugin):
    format = "json"
    Config = JsonConfig

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.json.decoder import JsonDecoder

        return JsonDecoder(pipeline, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        decode = pipeline.decode
        assert isinstance(decode, JsonConfig)
        does = f"Read each value as JSON into the {len(decode.columns)} declared column(s)."
        return does, _UNKNOWN_FIELDS[decode.unknown_fields]

    def samples(self) -> Samples:
        from avow.formats.json.samples import SAMPLES

        return SAMPLES

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:
        from avow.formats.json.samples import sample_value

        return sample_value(pipeline, number, key)

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:
        return frozenset(field.name for field in pipeline.decode.columns if field.type in (Scalar.LONG, Scalar.STRING))


JSON = JsonFormat()
