"""Avro as a plugin: the keys of ``[decode]``, what it promises, and the way to its decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from avow import schema as ddl
from avow.formats.avro.resolution import NoColumn, column_of, columns_of
from avow.formats.avro.schema import Record, Type, parse
from avow.formats.base import Decoder, Encode, FormatPlugin, Samples, Shown
from avow.formats.registry.config import Compiled, RegistryConfig, Text
from avow.settings import PipelineConfig

if TYPE_CHECKING:
    from avow.formats.registry.decoder import MakeReader, SchemaReader


_KEPT = 512  # schemas of a process that people look at


@dataclass(frozen=True)
class AvroSchema:
    """A reader's schema. It is parsed where it is used: its text is what travels."""

    text: str
    references: tuple[str, ...]
    columns: ddl.Schema

    @cached_property
    def type(self) -> Type:
        return parse(self.text, self.references)


class AvroConfig(RegistryConfig):
    """[decode] with format = "avro"."""

    language: ClassVar[str] = "AVRO"

    format: Literal["avro"] = Field(description='"avro"')

    def compile(self, text: Text, *, key: bool = False) -> Compiled:
        references = tuple(text.references.values())
        type = parse(text.text, references)
        if key and not isinstance(type, Record):
            assert self.key is not None
            column, nullable = column_of(type)
            if nullable:
                raise NoColumn("a key that may be null names no row")
            return AvroSchema(text.text, references, ddl.Schema((ddl.Field(self.key.column, column, required=True),)))
        return AvroSchema(text.text, references, columns_of(type))

    @property
    def avro_type(self) -> Record:
        """The reader's schema."""
        assert isinstance(self.reader, AvroSchema)
        assert isinstance(self.reader.type, Record)
        return self.reader.type


class AvroFormat(FormatPlugin):
    format = "avro"
    Config = AvroConfig
    schema_kind = "AVRO"

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        from avow.formats.registry.decoder import RegistryDecoder

        decode = pipeline.decode
        assert isinstance(decode, AvroConfig)
        key = _maker(decode.key_reader, refuse_nul=refuse_nul) if decode.key_reader else None
        return RegistryDecoder(pipeline, _maker(decode.reader, refuse_nul=refuse_nul), key, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        decode = pipeline.decode
        assert isinstance(decode, AvroConfig)
        written = "the schema whose id stands before it" if decode.framed else "the reader's own schema"
        return (
            f"Read each value as Avro, written by {written}, into {len(decode.columns)} column(s).",
            decode.explain_reader(),
        )

    def show(self, schema: Text, value: bytes, at: int) -> Shown:
        from avow.formats.avro.show import show

        type = _parsed(schema.text, tuple(schema.references.values()))
        return Shown(getattr(type, "fullname", ""), show(type, value, at))

    def encoder(self, schema: Text, message: str | None = None) -> Encode:
        from avow.formats.avro.encode import encode

        if message is not None:
            raise ValueError("an Avro schema is one type: --message is for formats whose schemas have several")
        return partial(encode, _parsed(schema.text, tuple(schema.references.values())))

    def samples(self) -> Samples:
        from avow.formats.avro.samples import SAMPLES

        return SAMPLES

    def sample_value(self, pipeline: PipelineConfig, number: int, key: int) -> bytes:
        from avow.formats.avro.samples import sample_value

        return sample_value(pipeline, number, key)

    def sample_key_columns(self, pipeline: PipelineConfig) -> frozenset[str]:
        from avow.formats.avro.samples import key_columns

        return key_columns(pipeline)


@lru_cache(_KEPT)
def _parsed(text: str, references: tuple[str, ...]) -> Type:
    return parse(text, references)


def _maker(reader: Compiled, *, refuse_nul: bool) -> MakeReader:
    from avow import native
    from avow.formats.avro.readers import schema_reader

    assert isinstance(reader, AvroSchema)
    by_column = native.library() is not None

    def make(writer: Text | None) -> SchemaReader:
        written = (writer.text, tuple(writer.references.values())) if writer else (reader.text, reader.references)
        return schema_reader(reader, *written, refuse_nul=refuse_nul, by_column=by_column)

    return make


AVRO = AvroFormat()
