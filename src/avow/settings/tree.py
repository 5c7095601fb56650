"""The sections of the pipeline file as frozen pydantic models, and the checks that span them.

``[sink]`` is read by the class that the sink's plugin brings, a subclass of ``SinkConfig``.

Owns: the keys, their types and defaults. Must not know: TOML, files, any sink by name, what a sink offers. Its
neighbours are ``values`` (the rules of one value), ``read`` (which fills the tree from a file) and ``plugins``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, Self

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
    model_serializer,
    model_validator,
)

from avow import plugins
from avow import schema as ddl
from avow.guarantee import Guarantee
from avow.settings import values
from avow.settings.values import FromEnv, Problem, Start, raise_if_any, refuse


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


def revealed(settings: Mapping[str, SecretStr]) -> dict[str, str]:
    """Client settings as the client needs them. Their values must not be printed."""
    return {name: value.get_secret_value() for name, value in settings.items()}


TopicName = Annotated[
    str,
    values.matching("[a-zA-Z0-9._-]{1,249}", "is not a topic's name", "1 to 249 letters, digits, . _ and -"),
]


PipelineName = Annotated[
    str,
    values.matching("[A-Za-z0-9._-]{1,200}", "is not a pipeline's name", "1 to 200 letters, digits, . _ and -"),
]
FunctionName = Annotated[
    str,
    values.matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", "names no function", '"module:function"'),
]


class Source(Section):
    """[source]: what is read, and from where."""

    brokers: Annotated[str, AfterValidator(values.brokers)] = Field(description="host:port, several with commas")
    topics: tuple[TopicName, ...] = Field((), description="a list of topic names")
    topics_pattern: Annotated[str, AfterValidator(values.topics_pattern)] | None = Field(
        None, description="a plain regular expression"
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
            refuse("stands beside topics", allowed, "topics_pattern")
        if not self.topics and self.topics_pattern is None:
            refuse("no topic is named", allowed, "topics")
        for topic, times in Counter(self.topics).items():
            if times > 1:
                refuse(f"{topic!r} is there {times} times", "each topic once", "topics")
        if isinstance(self.start, Mapping) and self.topics:
            for topic in self.start:
                if topic not in self.topics:
                    refuse("is not among source.topics", "offsets of the topics that are read", "start", topic)
        return self


_RAW = ddl.parse("key binary, value binary")
_STRING = ddl.parse("key string, value string")


class Decode(Section):
    """[decode]: what a record's bytes mean."""

    format: Literal["json", "raw", "string"] = Field(description='"json", "raw" or "string"')
    declared: Annotated[ddl.Schema | None, PlainValidator(values.schema), PlainSerializer(lambda v: v and str(v))] = (
        Field(None, alias="schema", description="columns in Spark's spelling")
    )
    unknown_fields: Literal["reject", "ignore", "keep"] = Field("reject", description='"reject", "ignore" or "keep"')
    tombstones: Literal["dead-letter", "skip", "keep"] = Field(
        "dead-letter", description='"dead-letter", "skip" or "keep"'
    )

    @property
    def columns(self) -> ddl.Schema:
        """The payload's columns: declared for json, the record's own key and value otherwise."""
        return self.declared or (_RAW if self.format == "raw" else _STRING)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.format == "json":
            if self.declared is None:
                refuse("is missing", 'json needs the columns: schema = "id long not null, note string"', "schema")
            if self.tombstones == "keep" and any(field.required for field in self.declared):
                refuse(
                    "a null value has no columns, and decode.schema declares one as not null",
                    '"dead-letter" or "skip", or a schema in which every column may be null',
                    "tombstones",
                )
            return self
        only = "raw and string have the columns key and value"
        if self.declared is not None:
            refuse("is for json only", only, "schema")
        if "unknown_fields" in self.model_fields_set:
            refuse("is for json only", only, "unknown_fields")
        return self


class Transform(Section):
    """[transform]: optional and narrow; every row keeps the identity of its record."""

    sql: Annotated[str, Field(pattern=r"\S")] | None = Field(None, description='"SELECT ... FROM records"')
    python: FunctionName | None = Field(None, description='"module:function"')

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.sql is None) == (self.python is None):
            refuse("sql and python are both there" if self.sql else "is empty", "either sql or python")
        return self


Mode = Literal["append", "dedupe", "upsert"]


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

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:  # noqa: ARG002
        """What is wrong with this sink in this pipeline, where that needs more than its own section."""
        return iter(())

    @property
    def lineage(self) -> tuple[str, str, str, str]:
        """The columns that carry a row's identity: topic, partition, offset, and the record's timestamp."""
        prefix = self.lineage_prefix
        return (f"{prefix}topic", f"{prefix}partition", f"{prefix}offset", f"{prefix}timestamp")

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.mode == "append" and self.key:
            refuse("append takes no key", 'mode = "dedupe" or "upsert" with a key, or no key', "key")
        if self.mode != "append" and not self.key:
            refuse(f"is missing: {self.mode} needs one", 'the columns that name a row: key = ["id"]', "key")
        if len(set(self.key)) < len(self.key):
            refuse("names a column twice", "each column once", "key")
        for number, name in enumerate(self.key):
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "names that the sink can take", "key", number)
        for name in self.lineage:
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "a short prefix of printable characters", "lineage_prefix")
        return self

    @classmethod
    def name_problem(cls, name: str) -> str:
        """Why the sink cannot take this name, or nothing. Quotes and keywords are fine: names are quoted."""
        if values.has_control(name):
            return "holds a control character"
        size = len(name.encode())
        if cls.name_bytes_max is not None and size > cls.name_bytes_max:
            return f"is {size} bytes long and would be cut at {cls.name_bytes_max}"
        return ""


class InSinkSection(ValueError):
    """What pydantic found wrong in a sink's own section, and the class that has its keys."""

    def __init__(self, config: type[SinkConfig], error: ValidationError) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


def _sink(value: Any) -> SinkConfig:
    """The sink's section, read by the plugin that its kind names: the keys of an unknown kind cannot be judged."""
    if isinstance(value, SinkConfig):
        return value
    if not isinstance(value, dict):
        refuse("should be a table", "a table [sink]")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in plugins.SINKS:
        wrong = f"{kind!r} is not known" if "kind" in value else "is missing"
        refuse(wrong, f"known kinds: {', '.join(plugins.SINKS)}", "kind")
    config: type[SinkConfig] = plugins.SINKS[kind].Config
    try:
        return config.model_validate(value)
    except ValidationError as error:
        raise InSinkSection(config, error) from None


class DeadLetters(Section):
    """[dead_letters]: records the sink cannot take."""

    max_share: StrictFloat = Field(0.01, ge=0, le=1, description="a share from 0 to 1")


class Batch(Section):
    """[batch]: how much is read at a time."""

    interval: Annotated[timedelta | None, BeforeValidator(values.duration)] = Field(
        None, description='a duration such as "500ms", "1s" or "2m"'
    )
    max_records: StrictInt = Field(500_000, ge=1, le=100_000_000, description="a number from 1 to 100,000,000")


REST_COLUMN = "_rest"  # takes the unknown fields under unknown_fields = "keep"


class PipelineConfig(Section):
    """The whole file."""

    name: PipelineName = Field(description="1 to 200 letters, digits, . _ and -")
    guarantee: Guarantee = Field(description=", ".join(f'"{word}"' for word in Guarantee))
    engine: Literal["spark", "consumer"] = Field("spark", description='"spark" or "consumer"')
    source: Source = Field(description="a table [source]")
    decode: Decode = Field(description="a table [decode]")
    transform: Transform | None = Field(None, description="a table [transform]")
    sink: SerializeAsAny[Annotated[SinkConfig, PlainValidator(_sink)]] = Field(description="a table [sink]")
    dead_letters: DeadLetters = Field(DeadLetters(), description="a table [dead_letters]")
    batch: Batch = Field(Batch(), description="a table [batch]")
    spark: Annotated[ClientSettings, BeforeValidator(values.spark_settings)] = Field(
        {}, description="a table of spark.* settings"
    )

    _secrets_in_file: tuple[str, ...] = PrivateAttr(())

    @property
    def secrets_in_file(self) -> tuple[str, ...]:
        """The keys whose secret stands in the file itself and not in the environment."""
        return self._secrets_in_file

    def on_engine(self, engine: str) -> Self:
        """The same pipeline on another engine. Raises ``Refused`` if that engine cannot run it."""
        changed = self.model_copy(update={"engine": engine})
        raise_if_any([*_combination_problems(changed)])
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
        """What a null value does: it deletes under upsert, and otherwise what is declared, or the sink's default."""
        if self.sink.mode == "upsert":
            return "delete"
        declared = "tombstones" in self.decode.model_fields_set
        return self.decode.tombstones if declared else self.sink.default_tombstones

    @property
    def carried(self) -> dict[str, str]:
        """What of a record travels beside its row, because the sink wants it -> the column that holds it."""
        if not self.sink.carries_record:
            return {}
        # Behind a transform the value is made anew; all that is left of the old one is whether there was one.
        parts = ("key", "headers", "value" if self.transform is None else "tombstone")
        return {part: f"{self.sink.lineage_prefix}{part}" for part in parts}

    @model_validator(mode="wrap")
    @classmethod
    def _remember_secrets(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        pipeline = handler(data)
        if isinstance(data, dict) and isinstance(data["sink"], dict) and isinstance(data["source"], dict):
            pipeline._secrets_in_file = tuple(_literal_secrets(data))
        return pipeline

    @model_validator(mode="after")
    def _check(self) -> Self:
        """What needs more than one section."""
        raise_if_any(
            [
                *_column_problems(self),
                *_key_problems(self),
                *_combination_problems(self),
            ]
        )
        return self


def _column_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    sink, at = pipeline.sink, ("decode", "schema")
    ours = {name.lower() for name in (*sink.lineage, *pipeline.carried.values(), REST_COLUMN)}
    cut: Counter[bytes] = Counter(f.name.encode()[: sink.name_bytes_max] for f in pipeline.decode.columns)
    for number, field in enumerate(pipeline.decode.columns, start=1):
        column = f"column {number}, {field.name!r},"
        if field.name.lower() in ours:
            yield Problem(
                at,
                f"{column} has the name of one of avow's own",
                "another name, or another sink.lineage_prefix",
            )
        if pipeline.transform is not None:
            continue  # the transform decides the sink's columns
        if field.name.lower() in sink.reserved_columns:
            yield Problem(at, f"{column} has a name that the sink keeps for itself", "another name, or a transform")
        if wrong := sink.name_problem(field.name):
            if cut[field.name.encode()[: sink.name_bytes_max]] > 1:
                wrong += ", where it equals another column's"
            yield Problem(at, f"{column} {wrong}", "a shorter name, or a transform that renames it")
    if sink.columns_max is not None and len(pipeline.decode.columns) + len(ours) > sink.columns_max:
        yield Problem(at, "has too many columns", f"at most {sink.columns_max - len(ours)} beside avow's own")


def _key_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if pipeline.transform is not None:
        return  # the transform decides the sink's columns
    columns = {field.name: field for field in pipeline.decode.columns}
    for number, name in enumerate(pipeline.sink.key):
        if name in pipeline.sink.lineage:
            continue
        at = ("sink", "key", number)
        if name not in columns:
            yield Problem(
                at,
                f"{name!r} is not a column",
                "columns of decode.schema, in the same case, or lineage columns",
            )
        elif pipeline.decode.format == "json" and not columns[name].required:
            yield Problem(at, f"{name!r} may be null", "columns that decode.schema declares as not null")


def _combination_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if pipeline.sink.mode == "upsert" and "tombstones" in pipeline.decode.model_fields_set:
        yield Problem(
            ("decode", "tombstones"),
            "upsert has its own: a null value deletes the row",
            "no tombstones with upsert",
        )
    yield from pipeline.sink.problems(pipeline)
    if pipeline.engine == "consumer" and pipeline.by_sql:
        yield Problem(("engine",), "the consumer has no SQL", 'transform.python, or engine = "spark"')


_SECRET_NAME = re.compile(
    r"(password|passphrase|secret|token|key|jaas\.config|credentials?|\.pem|bearer\.config)$", re.I
)


_PASSWORD_IN_URL = re.compile(r"^\w+://[^/?#@:]*:[^/?#]+@|[?&]password=[^&#]")


def _literal_secrets(document: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a valid document whose secret is written in the file itself."""
    kafka, spark, sink = document["source"].get("kafka", {}), document.get("spark", {}), document["sink"]
    for name, value in sink.items():
        if isinstance(value, str) and _PASSWORD_IN_URL.search(values.ENV.sub("", values.as_written(value))):
            yield f"sink.{name}"
    own = {name: value for name, value in sink.items() if isinstance(value, dict)}
    for key, value in values.flat({"source": {"kafka": kafka}, "spark": spark, "sink": own}):
        name = ".".join(key)
        if _SECRET_NAME.search(name) and not isinstance(value, FromEnv):
            yield name
