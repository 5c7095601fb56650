"""Debezium as a plugin: the keys of ``[decode]``, what it promises, and the way to its decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from avow.formats.base import Decoder, FormatPlugin, Samples
from avow.formats.debezium.names import OP, instant_unit, is_envelope
from avow.schema import Scalar
from avow.schema_registry import RegistrySettings
from avow.settings import DeclaredColumns, PipelineConfig, Problem
from avow.settings.values import refuse

_UNKNOWN_FIELDS = {
    "reject": "A column of the table that is not declared makes the record a dead letter.",
    "ignore": "A column of the table that is not declared is dropped.",
}
_TRUNCATE = {
    "refuse": "A truncation of the source's table stops the run.",
    "ignore": "A truncation of the source's table is counted as skipped: the rows stay.",
    "keep": 'A truncation of the source\'s table becomes a row of nulls with the op "t".',
}


class DebeziumConfig(DeclaredColumns):
    """[decode] with format = "debezium"."""

    deletes_by_value: ClassVar[bool] = True
    default_tombstones: ClassVar[Literal["skip"]] = "skip"

    format: Literal["debezium"] = Field(description='"debezium"')
    payload: Literal["json", "avro"] = Field("json", description='"json" or "avro"')
    registry: RegistrySettings | None = Field(None, description="a table [decode.registry]")
    unknown_fields: Literal["reject", "ignore"] = Field("reject", description='"reject" or "ignore"')
    truncate: Literal["refuse", "ignore", "keep"] = Field("refuse", description='"refuse", "ignore" or "keep"')
    ignore: tuple[Literal["heartbeat", "transaction", "schema-change", "message"], ...] = Field(
        (), description='a list of "heartbeat", "transaction", "schema-change" and "message"'
    )
    decimal_handling_mode: Literal["precise", "double", "string"] | None = Field(
        None, description='"precise", "double" or "string"'
    )
    time_precision_mode: (
        Literal["adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"] | None
    ) = Field(
        None,
        description='"adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds" or "nanoseconds"',
    )
    binary_handling_mode: Literal["bytes", "base64", "base64-url-safe", "hex"] | None = Field(
        None, description='"bytes", "base64", "base64-url-safe" or "hex"'
    )
    millisecond_columns: tuple[str, ...] = Field((), description="a list of columns declared as timestamp_ntz")
    unavailable_value: str = Field("__debezium_unavailable_value", min_length=1, description="a text")

    @property
    def skips_records(self) -> bool:
        return bool(self.ignore) or self.truncate == "ignore"

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:
        if pipeline.sink.mode == "upsert":
            for number, name in enumerate(pipeline.sink.key):
                if is_envelope(name):
                    yield Problem(
                        ("sink", "key", number),
                        f"{name!r} is not a column of the table, and upsert deletes by the record's key",
                        "the columns of the table's primary key",
                    )
            if self.truncate == "keep":
                yield Problem(("decode", "truncate"), "'keep' is for the log of changes", '"refuse" or "ignore"')
        elif self.is_resolved and OP not in (field.name for field in self.columns):
            yield Problem(
                ("decode", "schema"),
                f"{pipeline.sink.mode} keeps every change as a row, and no column says which are deletes",
                f'the column "{OP} string not null", or mode = "upsert"',
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.payload == "avro" and self.registry is None:
            refuse(
                "'avro' needs a registry, which has the schemas of the records",
                "a table [decode.registry] with its url",
                "payload",
            )
        if self.payload == "json" and self.registry is not None:
            refuse(
                'is not used: with payload = "json" each record brings its own schema, or none',
                'payload = "avro", or no table [decode.registry]',
                "registry",
            )
        ntz = {field.name for field in self.columns if field.type is Scalar.TIMESTAMP_NTZ}
        for number, name in enumerate(self.millisecond_columns):
            if name not in ntz:
                refuse(
                    f"{name!r} is not a column declared as timestamp_ntz",
                    "such columns",
                    "millisecond_columns",
                    number,
                )
        for field in self.columns:
            allowed = {Scalar.STRING} if field.name == OP else {Scalar.LONG, Scalar.INT, Scalar.STRING, Scalar.BOOLEAN}
            if instant_unit(field.name):
                allowed = {Scalar.LONG, Scalar.TIMESTAMP}
            if is_envelope(field.name) and field.type not in allowed:
                words = " or ".join(sorted(allowed))
                refuse(f"{field.name} is of the envelope and cannot be {field.type}", words, "schema")
        if self.truncate == "keep" and any(f.required for f in self.columns if not is_envelope(f.name)):
            refuse(
                "a truncation becomes a row of nulls, but decode.schema declares a column as not null",
                '"refuse" or "ignore", or a schema in which every column of the table is nullable',
                "truncate",
            )
        return self


class DebeziumFormat(FormatPlugin):
    format = "debezium"
    Config = DebeziumConfig

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.debezium.decoder import DebeziumDecoder

        return DebeziumDecoder(pipeline, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        decode = pipeline.decode
        assert isinstance(decode, DebeziumConfig)
        count = f"{len(decode.columns)} declared columns"
        others = [f"A {other} record is counted as skipped." for other in decode.ignore]
        if pipeline.sink.mode == "upsert":
            does = (
                f"Read each value as a change event of Debezium: a row of the {count}, or a delete by the record's key."
            )
        else:
            does = f"Read each value as a change event of Debezium: a row of the {count} for each change."
        if decode.payload == "avro":
            does += " Keys and values are Avro, written by the schemas whose ids stand before them."
        return does, _UNKNOWN_FIELDS[decode.unknown_fields], _TRUNCATE[decode.truncate], *others

    def samples(self) -> Samples:
        from avow.formats.debezium.samples import SAMPLES

        return SAMPLES


DEBEZIUM = DebeziumFormat()
