"""Protocol Buffers as a plugin: the keys of ``[decode]``, what it promises, and the way to its decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from avow import schema as ddl
from avow.formats.base import Decoder, Encode, FormatPlugin, Samples, Shown
from avow.formats.protobuf.compile import Imports, compile_text, imports_of
from avow.formats.protobuf.descriptors import BadSchema, Schema
from avow.formats.protobuf.layout import Record, columns, layout
from avow.formats.registry.config import Compiled, KeySchema, RegistryConfig, Text
from avow.settings import PipelineConfig

if TYPE_CHECKING:
    from avow.formats.protobuf.reader import Rules
    from avow.formats.registry.decoder import MakeReader, SchemaReader

_MessageName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
_MESSAGE = 'the full name of a message, such as "shop.Payment"'
_UNKNOWN_FIELDS = {
    "ignore": "A field that the schema has not is ignored.",
    "reject": "A field that the schema has not makes the record a dead letter.",
}
_UNKNOWN_ENUM = {
    "reject": "A number that an enum has not makes the record a dead letter.",
    "keep": "A number that an enum has not is stored as its digits.",
}


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    """A reader's schema, compiled: who reads records needs no compiler for their own schema."""

    text: str
    imports: Imports
    message: str
    schema: Schema = field(repr=False, compare=False)
    record: Record = field(repr=False, compare=False)

    @property
    def columns(self) -> ddl.Schema:
        return columns(self.record)


class ProtobufKey(KeySchema):
    """[decode.key] with format = "protobuf"."""

    message: _MessageName | None = Field(None, description=_MESSAGE)


class ProtobufConfig(RegistryConfig):
    """[decode] with format = "protobuf"."""

    language: ClassVar[str] = "PROTOBUF"
    takes_empty: ClassVar[bool] = True
    refuses_null_keys: ClassVar[bool] = True  # hardly a field can be declared not null

    format: Literal["protobuf"] = Field(description='"protobuf"')
    message: _MessageName | None = Field(None, description=_MESSAGE)
    unknown_fields: Literal["ignore", "reject"] = Field("ignore", description='"ignore" or "reject"')
    unknown_enum: Literal["reject", "keep"] = Field("reject", description='"reject" or "keep"')
    key: ProtobufKey | None = Field(None, description="a table [decode.key]")

    def compile(self, text: Text, *, key: bool = False) -> Compiled:
        source = self.key if key and self.key is not None else self
        imports = tuple(sorted(text.references.items()))
        if source.schema_file is not None and text.schema_id is None:
            imports = imports_of(text.text, Path(source.schema_file).parent)
        schema = compile_text(text.text, imports)
        message = source.message or _only_message(schema)
        return ProtobufSchema(text.text, imports, message, schema, layout(schema, message))

    @property
    def protobuf_schema(self) -> ProtobufSchema:
        """The reader's schema."""
        assert isinstance(self.reader, ProtobufSchema)
        return self.reader


def _only_message(schema: Schema) -> str:
    """A file mostly has one message, besides those inside it."""
    outer = [name for place, name in schema.places.items() if len(place) == 1]
    if len(outer) != 1:
        raise BadSchema(f"message is not set, and there are {len(outer)}: {', '.join(outer) or 'none'}")
    return outer[0]


class ProtobufFormat(FormatPlugin):
    format = "protobuf"
    Config = ProtobufConfig
    schema_kind = "PROTOBUF"

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.protobuf.reader import Rules
        from avow.formats.registry.decoder import RegistryDecoder

        decode = pipeline.decode
        assert isinstance(decode, ProtobufConfig)
        rules = Rules(
            refuse_nul=refuse_nul,
            refuse_unknown_fields=decode.unknown_fields == "reject",
            keep_unknown_enums=decode.unknown_enum == "keep",
        )
        # The rows of a transform have keys of their own.
        keys = frozenset(pipeline.sink.key) if pipeline.transform is None else frozenset()
        key = _maker(decode.key_reader, rules, keys) if decode.key_reader else None
        return RegistryDecoder(pipeline, _maker(decode.reader, rules, keys), key, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        decode = pipeline.decode
        assert isinstance(decode, ProtobufConfig)
        written = "the schema whose id stands before it" if decode.framed else "the reader's own schema"
        message = f"the Protobuf message {decode.protobuf_schema.message}"
        return (
            f"Read each value as {message}, written by {written}, into {len(decode.columns)} column(s).",
            decode.explain_reader(),
            _UNKNOWN_FIELDS[decode.unknown_fields],
            _UNKNOWN_ENUM[decode.unknown_enum],
        )

    def show(self, schema: Text, value: bytes, at: int) -> Shown:
        from avow.formats.protobuf.show import show

        return show(schema.text, tuple(sorted(schema.references.items())), value, at)

    def encoder(self, schema: Text, message: str | None = None) -> Encode:
        from avow.formats.protobuf.encode import encode, place_of

        imports = tuple(sorted(schema.references.items()))
        compiled = compile_text(schema.text, imports)
        name = message or _only_message(compiled)
        mine = ProtobufSchema(schema.text, imports, name, compiled, layout(compiled, name))
        place = place_of(mine)
        return lambda document: place + encode(mine, document)

    def samples(self) -> Samples:
        from avow.formats.protobuf.samples import SAMPLES

        return SAMPLES

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:
        from avow.formats.protobuf.samples import sample_value

        return sample_value(pipeline, number, key)

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:
        from avow.formats.protobuf.samples import key_columns

        return key_columns(pipeline)


def _maker(reader: Compiled, rules: Rules, keys: frozenset[str]) -> MakeReader:
    from avow import native
    from avow.formats.protobuf.readers import schema_reader

    assert isinstance(reader, ProtobufSchema)
    by_column = native.library() is not None

    def make(writer: Text | None) -> SchemaReader:
        written = (reader.text, reader.imports)
        if writer is not None and writer.text != reader.text:
            written = (writer.text, tuple(sorted(writer.references.items())))
        return schema_reader(reader, *written, rules, keys=keys, by_column=by_column)

    return make


PROTOBUF = ProtobufFormat()
