"""The sections of the pipeline file as frozen pydantic models, and the checks that span them.

``[decode]`` and ``[sink]`` are read by the classes that the plugins of the format and of the sink bring, subclasses of
``FormatConfig`` and ``SinkConfig``.

Owns: the keys, their types and defaults. Must not know: TOML, files, any format or sink by name, what a sink offers.
Its neighbours are ``values`` (the rules of one value), ``read`` (which fills the tree from a file) and ``plugins``.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from avow import plugins
from avow import schema as ddl
from avow.guarantee import Guarantee
from avow.settings import values
from avow.settings.values import Problem, Refused, Start, raise_if_any, refuse


class Section(BaseModel):
    """One table of the file. Shows a value that came from the environment as the file wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    def shown(self, name: str) -> Any:
        """A field's value as it may be printed: a value from the environment as ``${env:NAME}``."""
        return self._written.get(name, getattr(self, name))

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        section = handler(data)
        if isinstance(data, dict):
            for name, field in cls.model_fields.items():
                value = data.get(field.alias or name)
                # A secret is never shown, not even as written: half of it may stand in the file.
                if values.from_env(value) and not isinstance(getattr(section, name), SecretStr):
                    section._written[name] = values.as_written(value)
        return section

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._written.get(name or "", value)

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        return {name: self._written.get(name, value) for name, value in dumped.items()}


# A dict and not a mappingproxy, typed read-only: the tree must survive pickling to Spark's executors.
ClientSettings = Mapping[str, SecretStr]


def unwrap_secrets(settings: Mapping[str, SecretStr]) -> dict[str, str]:
    """Client settings as the client needs them. Their values must not be printed."""
    return {name: value.get_secret_value() for name, value in settings.items()}


TopicName = Annotated[
    str, values.matching("[a-zA-Z0-9._-]{1,249}", "is not a topic name", "1 to 249 letters, digits, . _ and -")
]


PipelineName = Annotated[
    str, values.matching("[A-Za-z0-9._-]{1,200}", "is not a pipeline name", "1 to 200 letters, digits, . _ and -")
]
FunctionName = Annotated[
    str, values.matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", "is not a function's name", '"module:function"')
]


class Source(Section):
    """[source]: what is read, and from where."""

    brokers: Annotated[str, AfterValidator(values.brokers)] = Field(
        description="host:port, several separated by commas"
    )
    topics: tuple[TopicName, ...] = Field((), description="a list of topic names")
    topics_pattern: Annotated[str, AfterValidator(values.topics_pattern)] | None = Field(
        None, description="a regular expression"
    )
    start: Annotated[Start, BeforeValidator(values.start)] = Field("earliest", description=values.START_ALLOWED)
    on_data_loss: Literal["stop", "skip"] = Field("stop", description='"stop" or "skip"')
    kafka: Annotated[ClientSettings, BeforeValidator(values.kafka_settings)] = Field(
        {}, description="a table of Kafka client settings"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        allowed = "either topics, a list of names, or topics_pattern, a regular expression"
        if self.topics and self.topics_pattern is not None:
            refuse("is set together with topics", allowed, "topics_pattern")
        if not self.topics and self.topics_pattern is None:
            refuse("names no topic", allowed, "topics")
        for topic, times in Counter(self.topics).items():
            if times > 1:
                refuse(f"{topic!r} is listed {times} times", "each topic once", "topics")
        if isinstance(self.start, Mapping) and self.topics:
            for topic in self.start:
                if topic not in self.topics:
                    refuse("is not among source.topics", "offsets of the topics that are read", "start", topic)
        return self


class FormatConfig(Section):
    """[decode], as far as every format has it. A plugin's own is a subclass with its ``format`` and its other keys."""

    # The decoder refuses a record in which a column of sink.key is null; else these must be declared not null.
    refuses_null_keys: ClassVar[bool] = False
    # Under upsert records with a value can delete, too, and not only null values.
    deletes_by_value: ClassVar[bool] = False
    # What a null value does where the file does not say it; None: what the sink assumes.
    default_tombstones: ClassVar[Literal["dead-letter", "skip", "keep"] | None] = None

    format: str = Field(description="the name of a format")
    tombstones: Literal["dead-letter", "skip", "keep"] = Field(
        "dead-letter", description='"dead-letter", "skip" or "keep"'
    )

    @property
    @abstractmethod
    def columns(self) -> ddl.Schema:
        """The payload's columns."""

    def for_source(self, source: Source) -> Self:  # noqa: ARG002
        """The same with the columns of now, where they come from outside the file: a schema registry may have them, by
        topic. Asked when a pipeline is loaded, and after a decoder has raised ``ColumnsChanged``."""
        return self

    @property
    def columns_from(self) -> str:
        """Where the columns come from, if not from the pipeline's file: a version of a subject, for a run's log."""
        return ""

    @property
    def is_resolved(self) -> bool:
        """Whether the columns are known. Else ``for_source`` finds them."""
        return True

    @property
    def keeps_unknown_fields(self) -> bool:
        """Whether rows have the column ``_rest``, as JSON text, for fields that are not among the columns."""
        return False

    @property
    def skips_records(self) -> bool:
        """Whether records with a value can be left out, by declaration."""
        return False

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:  # noqa: ARG002
        """What is wrong with this format in this pipeline, where that needs more than its own section."""
        return iter(())

    @model_validator(mode="after")
    def _check_tombstones(self) -> Self:
        self.check_columns()
        return self

    def check_columns(self) -> None:
        """Raise ``Refused`` for keys that the columns contradict. Asked again when columns are known later."""
        if self.tombstones == "keep" and any(field.required for field in self.columns):
            refuse(
                "a null value becomes a row of nulls, but decode.schema declares a column as not null",
                '"dead-letter" or "skip", or a schema in which every column is nullable',
                "tombstones",
            )


class DeclaredColumns(FormatConfig):
    """[decode] of a format whose columns the file declares."""

    declared: Annotated[ddl.Schema, PlainValidator(values.schema), PlainSerializer(str)] = Field(
        alias="schema", description=values.SCHEMA_ALLOWED
    )

    @property
    def columns(self) -> ddl.Schema:
        return self.declared


class Transform(Section):
    """[transform]: optional and narrow; every row keeps the identity of its record."""

    sql: Annotated[str, Field(pattern=r"\S")] | None = Field(None, description='"SELECT ... FROM records"')
    python: FunctionName | None = Field(None, description='"module:function"')

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.sql is None) == (self.python is None):
            refuse("sql and python are both set" if self.sql else "is empty", "either sql or python")
        return self


Mode = Literal["append", "dedupe", "upsert"]


class Lineage(NamedTuple):
    """The names of the columns that say which record a row comes from, and when that record was produced."""

    topic: str
    partition: str
    offset: str
    timestamp: str


class SinkConfig(Section):
    """[sink], as far as every kind has it. A plugin's own is a subclass with its ``kind`` and its other keys."""

    # What the sink's own names can be. A kind that cuts names says where; one that reserves some, which.
    name_bytes_max: ClassVar[int | None] = None
    reserved_columns: ClassVar[frozenset[str]] = frozenset()
    columns_max: ClassVar[int | None] = None

    # What is assumed of a pipeline that does not say it.
    default_interval: ClassVar[timedelta] = timedelta(0)  # of batches on the consumer engine
    default_tombstones: ClassVar[Literal["dead-letter", "skip", "keep"]] = "dead-letter"

    # Rows bring the record's key, headers and value (behind a transform: whether it was null) in columns of their own.
    carries_record: ClassVar[bool] = False

    kind: str = Field(description="the name of a sink")
    mode: Mode = Field("append", description='"append", "dedupe" or "upsert"')
    key: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="a list of columns")
    lineage_prefix: str = Field("_kafka_", description="text before topic, partition, offset and timestamp")

    @property
    def target(self) -> str:
        """Where rows go, as it is shown to people: "table payments". A sink with more to say overrides it."""
        return self.kind

    @property
    def by_topic(self) -> bool:
        """Whether each topic has a table of its own, made from its name."""
        return False

    def for_topic(self, topic: str) -> Self:
        """The sink of one topic, where each has a table of its own. Raises ``Refused`` where its name cannot be one."""
        raise NotImplementedError

    def with_timeout(self, seconds: float) -> Self:  # noqa: ARG002
        """The same sink with a bound on connecting and on each query, for a web page. Not every sink has one."""
        return self

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:  # noqa: ARG002
        """What is wrong with this sink in this pipeline, where that needs more than its own section."""
        return iter(())

    @property
    def lineage(self) -> Lineage:
        return Lineage(*(f"{self.lineage_prefix}{part}" for part in Lineage._fields))

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.mode == "append" and self.key:
            refuse("is set, but append has no key", 'mode = "dedupe" or "upsert" with a key, or no key', "key")
        if self.mode != "append" and not self.key:
            refuse(f"is missing: {self.mode} needs one", 'the columns that identify a row: key = ["id"]', "key")
        if len(set(self.key)) < len(self.key):
            refuse("names a column twice", "each column once", "key")
        for number, name in enumerate(self.key):
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "names that the sink can store", "key", number)
        for name in self.lineage:
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "a short prefix of printable characters", "lineage_prefix")
        return self

    @classmethod
    def name_problem(cls, name: str) -> str:
        """Why the sink cannot take this name, or nothing. Quotes and keywords are fine: names are quoted."""
        if values.has_control(name):
            return "contains a control character"
        size = len(name.encode())
        if cls.name_bytes_max is not None and size > cls.name_bytes_max:
            return f"is {size} bytes long and would be truncated at {cls.name_bytes_max}"
        return ""


TOPIC = "{topic}"  # in a table's name


class TableSinkConfig(SinkConfig):
    """[sink] of a kind whose rows go into a table: one for all topics or, with ``{topic}`` in its name, one each."""

    table_key: ClassVar[str]  # the key that names it

    on_topic_failure: Literal["stop-topic", "stop-all"] = Field("stop-topic", description='"stop-topic" or "stop-all"')

    @property
    def by_topic(self) -> bool:
        return TOPIC in str(getattr(self, self.table_key))

    def for_topic(self, topic: str) -> Self:
        name = topic_in_name(topic)
        own = self.model_copy(update={self.table_key: self._table_of(name)})
        if self.table_key in self._written:
            own._written = {**self._written, self.table_key: str(self._written[self.table_key]).replace(TOPIC, name)}
        own.check_table()
        return own

    @abstractmethod
    def _table_of(self, name: str) -> Any:
        """The value of ``table_key`` with this name for ``{topic}``."""

    @abstractmethod
    def check_table(self) -> None:
        """Refuse a table that the sink cannot have."""

    @property
    def places(self) -> frozenset[str]:
        """What the table takes up, with what is beside it: two topics that share one of these cannot both be there.
        Without case: not every store and catalog tells names apart by it."""
        return frozenset({str(getattr(self, self.table_key)).casefold()})

    @model_validator(mode="after")
    def _check_table_key(self) -> Self:
        for found in re.findall(r"\{\w*\}", str(getattr(self, self.table_key))):
            if found != TOPIC:
                refuse(f"{found} is not known", f"{TOPIC}, the name of the record's topic", self.table_key)
        if not self.by_topic and "on_topic_failure" in self.model_fields_set:
            allowed = f"only with a table for each topic: {TOPIC} in sink.{self.table_key}"
            refuse("is set, but all topics go into one table", allowed, "on_topic_failure")
        self.check_table()
        return self


def topic_in_name(topic: str) -> str:
    """A topic's name as a part of a table's name, where dots would separate and dashes must be quoted."""
    return re.sub("[.-]", "_", topic)


def shared_places(sinks: Mapping[str, SinkConfig]) -> dict[str, str]:
    """Of the sinks of topics: topics whose table is another topic's too -> that one, the first if there are several."""
    owners: dict[str, list[str]] = {}
    for topic, sink in sinks.items():
        for place in sink.places if isinstance(sink, TableSinkConfig) else ():
            owners.setdefault(place, []).append(topic)
    shared = [topics for topics in owners.values() if len(topics) > 1]
    return {topic: next(other for other in topics if other != topic) for topics in shared for topic in reversed(topics)}


class InPluginSection(ValueError):
    """What pydantic found wrong in a section that a plugin's class reads, and the class that has its keys."""

    def __init__(self, config: type[Section], error: ValidationError) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


def _plugin_section(section: str, key: str, registry: Mapping[str, Any], base: type[Section]) -> PlainValidator:
    """Reads a section by the plugin that its ``key`` names. Of an unknown one the other keys cannot be judged."""

    def read(value: Any, info: ValidationInfo) -> Section:
        section = read_alone(value)
        source, sink = info.data.get("source"), info.data.get("sink")
        # Without a source or a sink, which are then refused, nothing is asked about them. Where each topic has a table
        # of its own, each has columns of its own: they are asked for when it is read.
        if not isinstance(section, FormatConfig) or source is None or sink is None or sink.by_topic:
            return section
        return section.for_source(source)

    def read_alone(value: Any) -> Section:
        if isinstance(value, base):
            return value
        if not isinstance(value, dict):
            refuse("should be a table", f"a table [{section}]")
        name = value.get(key)
        if not isinstance(name, str) or name not in registry:
            wrong = f"{name!r} is not known{values.did_you_mean(name, registry)}" if key in value else "is missing"
            refuse(wrong, f"known {key}s: {', '.join(registry)}", key)
        config: type[Section] = registry[name].Config
        try:
            return config.model_validate(value)
        except ValidationError as error:
            raise InPluginSection(config, error) from None

    return PlainValidator(read)


_DECODE = _plugin_section("decode", "format", plugins.FORMATS, FormatConfig)
_SINK = _plugin_section("sink", "kind", plugins.SINKS, SinkConfig)


class DeadLetters(Section):
    """[dead_letters]: records the sink cannot take."""

    max_share: StrictFloat = Field(0.01, ge=0, le=1, description="a share from 0 to 1")


class BatchSettings(Section):
    """[batch]: how much is read at a time."""

    interval: Annotated[timedelta | None, BeforeValidator(values.duration)] = Field(
        None, description='a duration such as "500ms", "1s" or "2m"'
    )
    max_records: StrictInt = Field(500_000, ge=1, le=100_000_000, description="a number from 1 to 100,000,000")


REST_COLUMN = "_rest"  # takes the fields that are no columns, where the format keeps them


class PipelineConfig(Section):
    """The whole file."""

    name: PipelineName = Field(description="1 to 200 letters, digits, . _ and -")
    guarantee: Guarantee = Field(description=", ".join(f'"{word}"' for word in Guarantee))
    engine: Literal["spark", "consumer"] = Field("spark", description='"spark" or "consumer"')
    native: bool = Field(True, description="true or false")
    source: Source = Field(description="a table [source]")
    sink: SerializeAsAny[Annotated[SinkConfig, _SINK]] = Field(description="a table [sink]")
    decode: SerializeAsAny[Annotated[FormatConfig, _DECODE]] = Field(description="a table [decode]")  # asks the sink
    transform: Transform | None = Field(None, description="a table [transform]")
    dead_letters: DeadLetters = Field(DeadLetters(), description="a table [dead_letters]")
    batch: BatchSettings = Field(BatchSettings(), description="a table [batch]")
    spark: Annotated[ClientSettings, BeforeValidator(values.spark_settings)] = Field(
        {}, description="a table of spark.* settings"
    )

    _secrets_in_file: tuple[str, ...] = PrivateAttr(())
    _topic: str | None = PrivateAttr(None)

    @property
    def secrets_in_file(self) -> tuple[str, ...]:
        """The keys whose secret stands in the file itself and not in the environment."""
        return self._secrets_in_file

    @property
    def topic(self) -> str | None:
        """Whose part of a pipeline with a table for each topic this is; None: it is a whole pipeline."""
        return self._topic

    def for_topic(self, topic: str) -> Self:
        """The part of a pipeline with a table for each topic that is about this one: it reads that topic alone. Raises
        ``Refused`` if there can be no such table. Of a format whose columns come from outside the file it has none yet
        (``FormatConfig.for_source``)."""
        source = self.source.model_copy(update={"topics": (topic,), "topics_pattern": None})
        source._written = {name: text for name, text in source._written.items() if not name.startswith("topics")}
        part = self.model_copy(update={"source": source, "sink": self.sink.for_topic(topic)})
        part._topic = topic
        return part

    def on_engine(self, engine: str) -> Self:
        """The same pipeline on another engine. Raises ``Refused`` if that engine cannot run it."""
        changed = self.model_copy(update={"engine": engine})
        raise_if_any([*_combination_problems(changed)])
        return changed

    def with_decode(self, decode: FormatConfig) -> Self:
        """The same pipeline with other columns. Raises ``Refused`` if they do not fit the rest of it."""
        changed = self.model_copy(update={"decode": decode})
        raise_if_any([*_column_problems(changed), *_key_problems(changed), *_combination_problems(changed)])
        return changed

    @property
    def by_sql(self) -> bool:
        """Whether records go through a SQL query."""
        return self.transform is not None and self.transform.sql is not None

    @property
    def interval(self) -> timedelta:
        """The least time from the start of one batch to the next. Undeclared, the consumer engine takes records as they
        come, unless a batch is expensive for the sink."""
        if self.batch.interval is not None:
            return self.batch.interval
        return self.sink.default_interval if self.engine == "consumer" else timedelta(seconds=1)

    @property
    def tombstones(self) -> Literal["delete", "dead-letter", "skip", "keep"]:
        """What a null value does: it deletes under upsert, and otherwise what is declared, or the format's default, or
        the sink's."""
        if self.sink.mode == "upsert":
            return "delete"
        declared = "tombstones" in self.decode.model_fields_set
        return self.decode.tombstones if declared else self.decode.default_tombstones or self.sink.default_tombstones

    @property
    def carried(self) -> dict[str, str]:
        """What of a record travels beside its row, because the sink wants it -> the column that holds it."""
        if not self.sink.carries_record:
            return {}
        # Behind a transform the value is made anew; all that is left of the old one is whether there was one.
        parts = ("key", "headers", "value" if self.transform is None else "tombstone")
        return {part: f"{self.sink.lineage_prefix}{part}" for part in parts}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """What needs more than one section."""
        raise_if_any(
            [*_column_problems(self), *_key_problems(self), *_combination_problems(self), *_topic_problems(self)]
        )
        return self


def _column_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    sink, at = pipeline.sink, ("decode", "schema")
    reserved = {name.lower() for name in (*sink.lineage, *pipeline.carried.values(), REST_COLUMN)}
    cut: Counter[bytes] = Counter(f.name.encode()[: sink.name_bytes_max] for f in pipeline.decode.columns)
    for number, field in enumerate(pipeline.decode.columns, start=1):
        column = f"column {number}, {field.name!r},"
        if field.name.lower() in reserved:
            yield Problem(
                at, f"{column} has the name of a column that avow adds", "another name, or another sink.lineage_prefix"
            )
        if pipeline.transform is not None:
            continue  # the transform decides the sink's columns
        if field.name.lower() in sink.reserved_columns:
            yield Problem(
                at, f"{column} has a name that the sink reserves", "another name, or a transform that renames it"
            )
        if wrong := sink.name_problem(field.name):
            if cut[field.name.encode()[: sink.name_bytes_max]] > 1:
                wrong += ", and then equals another column's name"
            yield Problem(at, f"{column} {wrong}", "a shorter name, or a transform that renames it")
    if sink.columns_max is not None and len(pipeline.decode.columns) + len(reserved) > sink.columns_max:
        yield Problem(
            at, "has too many columns", f"at most {sink.columns_max - len(reserved)} beside those that avow adds"
        )


def _key_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if pipeline.transform is not None:
        return  # the transform decides the sink's columns
    if not pipeline.decode.is_resolved:
        return  # asked again when they are known (``with_decode``)
    columns = {field.name: field for field in pipeline.decode.columns}
    for number, name in enumerate(pipeline.sink.key):
        if name in pipeline.sink.lineage:
            continue
        at = ("sink", "key", number)
        if name not in columns:
            yield Problem(
                at, f"{name!r} is not a column", "columns of decode.schema, in the same case, or lineage columns"
            )
        elif not (columns[name].required or pipeline.decode.refuses_null_keys):
            yield Problem(at, f"{name!r} is nullable", "columns that decode.schema declares as not null")


def _topic_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    """Topics that are listed, and cannot have a table each. Of those of a pattern nothing is known yet."""
    if not pipeline.sink.by_topic:
        return
    topics, tables = pipeline.source.topics, {}
    for number, topic in enumerate(topics):
        try:
            tables[topic] = pipeline.sink.for_topic(topic)
        except Refused as error:
            for problem in error.problems:
                yield Problem(
                    ("source", "topics", number), f"{topic!r} cannot have a table: {problem.wrong}", problem.allowed
                )
    for topic, other in sorted(shared_places(tables).items()):
        yield Problem(
            ("source", "topics", topics.index(topic)),
            f"{topic!r}: its {tables[topic].target} would be that of {other!r} too",
            "topics whose names differ by more than case, . - _ or, in a lake, a final _dead_letters; or two pipelines",
        )


def _combination_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if pipeline.sink.mode == "upsert" and "tombstones" in pipeline.decode.model_fields_set:
        yield Problem(
            ("decode", "tombstones"),
            "cannot be set with upsert, where a null value deletes the row",
            "upsert without tombstones",
        )
    yield from pipeline.decode.problems(pipeline)
    yield from pipeline.sink.problems(pipeline)
    if pipeline.by_sql and not pipeline.decode.is_resolved:
        yield Problem(
            ("transform", "sql"),
            "is one query over all topics, and each topic has columns of its own in the schema registry",
            "transform.python, a declared schema, or a pipeline for each topic",
        )
    if pipeline.engine == "consumer" and pipeline.by_sql:
        yield Problem(
            ("engine",), "the consumer engine cannot run transform.sql", 'transform.python, or engine = "spark"'
        )
