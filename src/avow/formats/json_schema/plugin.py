"""JSON with a JSON Schema as a plugin: the keys of ``[decode]``, what it promises, and the way to its decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from avow import extras
from avow import schema as ddl
from avow.formats.base import Decoder, Encode, FormatPlugin, Samples, Shown
from avow.formats.registry.config import Compiled, RegistryConfig, Text
from avow.settings import REST_COLUMN, PipelineConfig

if TYPE_CHECKING:
    from avow.formats.registry.decoder import MakeReader, SchemaReader

UnknownFields = Literal["ignore", "reject", "keep"]

_UNKNOWN_FIELDS = {
    "ignore": "A field that the schema allows and that has no column is dropped.",
    "reject": "A field that has no column makes the record a dead letter.",
    "keep": f"A field that the schema allows and that has no column is stored in the column {REST_COLUMN}.",
}


@dataclass(frozen=True)
class JsonSchema:
    """A reader's schema. It is parsed where it is used: its text is what travels."""

    text: str
    references: tuple[tuple[str, str], ...]
    columns: ddl.Schema
    is_object: bool  # else it is the schema of a key that is a single value


class JsonSchemaConfig(RegistryConfig):
    """[decode] with format = "json-schema"."""

    language: ClassVar[str] = "JSON"

    format: Literal["json-schema"] = Field(description='"json-schema"')
    unknown_fields: UnknownFields = Field("ignore", description='"ignore", "reject" or "keep"')

    @property
    def keeps_unknown_fields(self) -> bool:
        return self.unknown_fields == "keep"

    def compile(self, text: Text, *, key: bool = False) -> Compiled:
        with extras.named():
            from avow.formats.json_schema.columns import NoColumn, column_of, columns_of
            from avow.formats.json_schema.document import Document

        references = tuple(sorted(text.references.items()))
        document = Document(text.text, references)
        if not key:
            return JsonSchema(text.text, references, columns_of(document), is_object=True)
        assert self.key is not None
        column, nullable = column_of(document)
        if nullable:
            raise NoColumn("a key that may be null names no row")
        if isinstance(column, ddl.Struct):
            return JsonSchema(text.text, references, ddl.Schema(column.fields), is_object=True)
        fields = (ddl.Field(self.key.column, column, required=True),)
        return JsonSchema(text.text, references, ddl.Schema(fields), is_object=False)


class JsonSchemaFormat(FormatPlugin):
    format = "json-schema"
    Config = JsonSchemaConfig
    schema_kind = "JSON"

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.registry.decoder import RegistryDecoder

        decode = pipeline.decode
        assert isinstance(decode, JsonSchemaConfig)
        # What else a key has is nobody's column.
        key = _maker(decode.key_reader, "ignore", refuse_nul=refuse_nul) if decode.key_reader else None
        make = _maker(decode.reader, decode.unknown_fields, refuse_nul=refuse_nul)
        return RegistryDecoder(pipeline, make, key, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        decode = pipeline.decode
        assert isinstance(decode, JsonSchemaConfig)
        written = "the schema whose id stands before it" if decode.framed else "the reader's own schema"
        return (
            f"Read each value as JSON into {len(decode.columns)} column(s), and refuse what {written} does not allow.",
            decode.explain_reader(),
            _UNKNOWN_FIELDS[decode.unknown_fields],
        )

    def show(self, schema: Text, value: bytes, at: int) -> Shown:
        with extras.named():
            from avow.formats.json_schema.show import show

        return show(schema.text, tuple(sorted(schema.references.items())), value[at:])

    def encoder(self, schema: Text, message: str | None = None) -> Encode:
        with extras.named():
            from avow.formats.json_schema.show import check, encode

        if message is not None:
            raise ValueError("a JSON Schema is one type: --message is for formats whose schemas have several")
        references = tuple(sorted(schema.references.items()))
        check(schema.text, references)
        return partial(encode, schema.text, references)

    def samples(self) -> Samples:
        from avow.formats.json_schema.samples import SAMPLES

        return SAMPLES

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:
        from avow.formats.json_schema.samples import sample_value

        return sample_value(pipeline, number, key)

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:
        from avow.formats.json_schema.samples import key_columns

        return key_columns(pipeline)


def _maker(reader: Compiled, unknown_fields: UnknownFields, *, refuse_nul: bool) -> MakeReader:
    from avow import native
    from avow.formats.json_schema.readers import schema_reader

    assert isinstance(reader, JsonSchema)

    def make(writer: Text | None) -> SchemaReader:
        text = writer.text if writer else reader.text
        references = tuple(sorted(writer.references.items())) if writer else reader.references
        return schema_reader(
            reader, text, references, unknown_fields, refuse_nul=refuse_nul, native=native.library() is not None
        )

    return make


JSON_SCHEMA = JsonSchemaFormat()
