"""raw and string as plugins: the columns key and value, as they are in the record."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from avow import schema
from avow.formats.base import Decoder, FormatPlugin, Reason, Samples
from avow.settings import FormatConfig, PipelineConfig
from avow.settings.values import refuse

_BYTES = schema.parse("key binary, value binary")
_TEXT = schema.parse("key string, value string")


class RawConfig(FormatConfig):
    """[decode] with format = "raw" or "string"."""

    refuses_null_keys: ClassVar[bool] = True

    format: Literal["raw", "string"] = Field(description='"raw" or "string"')

    @property
    def is_text(self) -> bool:
        return self.format == "string"

    @property
    def columns(self) -> schema.Schema:
        return _TEXT if self.is_text else _BYTES

    @model_validator(mode="before")
    @classmethod
    def _refuse_columns(cls, data: Any) -> Any:
        for key in ("schema", "unknown_fields"):
            if isinstance(data, dict) and key in data:
                refuse(
                    "is for formats whose columns are declared", "raw and string have the columns key and value", key
                )
        return data


class RawFormat(FormatPlugin):
    format = "raw"
    Config = RawConfig

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.raw.decoder import RawDecoder

        return RawDecoder(pipeline, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        return (f"Store each record unchanged in the columns key and value ({pipeline.decode.columns}).",)

    def samples(self) -> Samples:
        values = (b"v", b"\0", b"\xff\xfe", b"a value\n")
        return Samples(
            decode={"format": "raw"},
            good=tuple((value, {"key": None, "value": value}) for value in values),
            bad=((b"", Reason.EMPTY),),
        )

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:  # noqa: ARG002
        return f"record {number}".encode()

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:  # noqa: ARG002
        return frozenset({"key"})


class StringFormat(RawFormat):
    format = "string"

    def samples(self) -> Samples:
        values = ("v", "\ufeffé\n", "\u2028 \x1b")
        return Samples(
            decode={"format": "string"},
            good=tuple((value.encode(), {"key": None, "value": value}) for value in values),
            bad=(
                (b"", Reason.EMPTY),
                (b"a\0", Reason.NUL),
                (b"\xff", Reason.NOT_UTF8),
                (b"\xed\xa0\x80", Reason.NOT_UTF8),
            ),
        )


RAW, STRING = RawFormat(), StringFormat()
