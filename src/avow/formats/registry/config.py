"""``[decode]`` of a format whose columns come from a schema in a language of its own: Avro, Protobuf, JSON Schema.

The *reader's* schema says which columns there are. It is declared (``schema``, ``schema_file``), or is a version of a
subject in a schema registry, fetched once when the pipeline is loaded: tasks never ask for it, and all have the same.
The *writer's* schema says what the bytes of one record are. Its id stands before them.

Owns: these keys, and fetching the reader's schema. Must not know: any language. Its neighbour is ``schema_registry``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Field, PrivateAttr, StrictInt, model_validator

from avow import schema as ddl
from avow.errors import ConfigError
from avow.schema_registry import Registered, RegistrySettings, SchemaRegistry
from avow.settings import FormatConfig, Section, Source
from avow.settings.values import refuse

FROM_REGISTRY = "registry"
_FILE_BYTES_MAX = 16 << 20


class Compiled(Protocol):
    """A schema that was read and checked. It can be pickled."""

    @property
    def columns(self) -> ddl.Schema: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A schema as it is written. ``references``: what it imports, by the names it uses."""

    text: str
    origin: str  # where it is from, for messages
    references: Mapping[str, str] = field(default_factory=dict)
    schema_id: int | None = None


def _path(value: str) -> str:
    if not value:
        refuse("is empty", "the path of a file")
    return value


class SchemaSource(Section):
    """Where a schema is from: the keys that [decode] and [decode.key] share."""

    text: Annotated[str, Field(min_length=1)] | None = Field(
        None, alias="schema", description=f'"{FROM_REGISTRY}", or the schema itself'
    )
    schema_file: Annotated[str, AfterValidator(_path)] | None = Field(None, description="the path of a file")
    version: StrictInt | None = Field(None, ge=1, description="a version of the subject in the registry")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        from_registry = self.text == FROM_REGISTRY
        if (self.text is None) == (self.schema_file is None):
            wrong = "is missing" if self.text is None else "is set together with schema_file"
            refuse(wrong, f'"{FROM_REGISTRY}", the schema itself, or schema_file', "schema")
        if self.version is not None and not from_registry:
            refuse("is set, but the schema is declared here", f'schema = "{FROM_REGISTRY}", or no version', "version")
        return self

    @property
    def from_registry(self) -> bool:
        return self.text == FROM_REGISTRY

    def declared_text(self) -> Text:
        """The schema that stands here or in the file. Raises ``Refused``."""
        if self.schema_file is None:
            return Text(self.text or "", "decode.schema")
        try:
            data = Path(self.schema_file).read_bytes()[: _FILE_BYTES_MAX + 1]
            if len(data) > _FILE_BYTES_MAX:
                refuse(f"is larger than {_FILE_BYTES_MAX >> 20} MiB", "the path of a schema file", "schema_file")
            return Text(data.decode("utf-8-sig"), self.shown("schema_file"))
        except UnicodeDecodeError:
            refuse("is not UTF-8", "the path of a schema file", "schema_file")
        except OSError as error:
            refuse(f"cannot be read: {error.strerror}", "the path of a readable file", "schema_file")


class KeySchema(SchemaSource):
    """[decode.key]: the schema of records' keys, in the language of the values."""

    subject: Annotated[str, Field(min_length=1)] | None = Field(None, description="the subject of the keys' schema")
    column: Annotated[str, Field(min_length=1)] = Field(
        "key", description="the column of a key that is a single value and no record"
    )


class RegistryConfig(FormatConfig, SchemaSource):
    """[decode] of a format with schemas. A plugin's own is a subclass with its ``format`` and its language."""

    language: ClassVar[str]  # as registries call it: AVRO, PROTOBUF, JSON
    takes_empty: ClassVar[bool] = False  # a value of zero bytes can be a good one

    registry: RegistrySettings | None = Field(None, description="a table [decode.registry]")
    frame: Literal["confluent", "none"] | None = Field(None, description='"confluent" or "none"')
    incompatible: Literal["stop", "dead-letter"] = Field("stop", description='"stop" or "dead-letter"')
    key: KeySchema | None = Field(None, description="a table [decode.key]")

    # As they were when the pipeline was loaded.
    _reader: Compiled | None = PrivateAttr(None)
    _reader_text: Text | None = PrivateAttr(None)
    _key_reader: Compiled | None = PrivateAttr(None)

    @abstractmethod
    def compile(self, text: Text, *, key: bool = False) -> Compiled:
        """A schema of this language, or ``ValueError`` with what is wrong with it."""

    @model_validator(mode="after")
    def _check_registry(self) -> Self:
        if self.registry is None:
            for name, wants in (("schema", self.from_registry), ("frame", self.frame == "confluent")):
                if wants:
                    refuse("needs a registry", "a table [decode.registry] with its url", name)
            if self.key is not None and self.key.from_registry:
                refuse("needs a registry", "a table [decode.registry] with its url", "key", "schema")
        elif self.from_registry and self.registry.needs_record_name:
            refuse("is missing: no topic says it under this strategy", "the subject's name", "registry", "subject")
        if not self.from_registry:
            assert self.reader is not None  # read now, so that what is wrong with it is said of its key
        if self.key is not None and not self.key.from_registry:
            self._key_reader = self._compiled(self.key.declared_text(), "key", key=True)
        return self

    @property
    def framed(self) -> bool:
        """Whether each value begins with the id of its writer's schema."""
        return self.registry is not None if self.frame is None else self.frame == "confluent"

    @property
    def follows(self) -> bool:
        """Whether the reader's schema is the subject's newest, whatever that is."""
        return self.from_registry and self.version is None

    @property
    def is_resolved(self) -> bool:
        return not self.from_registry or self._reader is not None

    @property
    def reader(self) -> Compiled:
        """The reader's schema."""
        if self._reader is None:
            assert not self.from_registry, "asked before for_source"
            text = self.declared_text()
            self._reader = self._compiled(text)
            self._reader_text = text
        return self._reader

    @property
    def reader_text(self) -> Text:
        assert self.reader is not None
        assert self._reader_text is not None
        return self._reader_text

    @property
    def writer_id(self) -> int:
        """The id under which the reader's schema is registered, for records that are written by it."""
        if self.reader_text.schema_id is None:
            raise ConfigError(
                f"decode.frame: {self.reader_text.origin} has no id: it was not fetched from the registry",
                advice=f'Set schema = "{FROM_REGISTRY}".',
            )
        return self.reader_text.schema_id

    @property
    def key_reader(self) -> Compiled | None:
        return self._key_reader

    @property
    def columns(self) -> ddl.Schema:
        if not self.is_resolved:
            return ddl.Schema(())
        own = self.reader.columns
        if self._key_reader is None:
            return own
        names = {column.name.lower() for column in own}
        return ddl.Schema((*(c for c in self._key_reader.columns if c.name.lower() not in names), *own.fields))

    def for_source(self, source: Source) -> Self:
        """With the reader's schema from the registry, where it is declared to come from there."""
        if not self.from_registry and not (self.key is not None and self.key.from_registry):
            return self
        assert self.registry is not None
        registry = SchemaRegistry(self.registry)
        resolved = self.model_copy()
        if self.from_registry:
            text = _same(self._texts(registry, source, self, key=False), "decode.schema")
            resolved._reader, resolved._reader_text = self._fetched(text, key=False), text
        if self.key is not None and self.key.from_registry:
            text = _same(self._texts(registry, source, self.key, key=True), "decode.key.schema")
            resolved._key_reader = self._fetched(text, key=True)
        resolved.check_columns()
        return resolved

    def _texts(
        self, registry: SchemaRegistry, source: Source, wanted: SchemaSource, *, key: bool
    ) -> list[tuple[str, Text]]:
        """What the registry has for each topic."""
        assert self.registry is not None
        explicit = self.key.subject if key and self.key is not None else self.registry.subject
        subjects = [explicit] if explicit else [self.registry.subject_of(topic, key=key) for topic in source.topics]
        if not subjects:
            name = "decode.key.subject" if key else "decode.registry.subject"
            raise ConfigError(
                "source.topics_pattern says no topic whose subject has the reader's schema",
                advice=f"Set {name}, name the topics, or declare the schema.",
            )
        texts = []
        for subject in subjects:
            found = registry.latest(subject) if wanted.version is None else registry.version(subject, wanted.version)
            texts.append((subject, self.text_of(found, registry)))
        return texts

    def text_of(self, registered: Registered, registry: SchemaRegistry) -> Text:
        """A schema of the registry's, with what it imports. One in another language is refused."""
        where = (
            f"subject {registered.subject}, version {registered.version} (id {registered.id})"
            if registered.subject
            else f"schema {registered.id}"
        )
        if registered.kind != self.language:
            raise ConfigError(
                f"{where} of {registry} is {registered.kind}, and decode.format is {self.format}",
                advice="Set decode.format to the language of the topic's schemas, or another subject.",
            )
        return Text(registered.text, where, registry.references(registered), registered.id)

    def _fetched(self, text: Text, *, key: bool) -> Compiled:
        try:
            return self.compile(text, key=key)
        except ValueError as error:
            raise ConfigError(f"{text.origin}: {error}", advice="Declare a reader's schema without it.") from None

    def _compiled(self, text: Text, *at: str, key: bool = False) -> Compiled:
        try:
            return self.compile(text, key=key)
        except ValueError as error:
            refuse(str(error), f"a schema of {self.format}", *at, "schema_file" if self.schema_file else "schema")

    @property
    def columns_from(self) -> str:
        return self.reader_text.origin if self.from_registry else ""

    def explain_reader(self) -> str:
        """For ``avow plan``: which columns there are, and whose they are."""
        origin = self.reader_text.origin
        return f"The columns are those of {origin}: {self.columns}."


def _same(texts: Sequence[tuple[str, Text]], key: str) -> Text:
    """The one schema of all topics."""
    (first, text), *others = texts
    for subject, other in others:
        if (other.text, other.references) != (text.text, text.references):
            raise ConfigError(
                f"the subjects {first} and {subject} have different schemas, and the pipeline has one set of columns",
                advice=f"Declare {key}, set decode.registry.subject, or read each topic into a table of its own.",
            )
    return text
