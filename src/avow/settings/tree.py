"""The sections of the pipeline file as frozen pydantic models, and the checks that span them.

A new kind of sink is one subclass of ``Sink`` and a member of ``AnySink``; what it offers is registered in
``avow.sinks``.

Owns: the keys, their types and defaults. Must not know: TOML, files, what a sink offers. Its neighbours are
``values`` (the rules of one value) and ``read`` (which fills the tree from a file).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from string import Formatter
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
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_serializer,
    model_validator,
)

from avow import schema as ddl
from avow.guarantee import Guarantee
from avow.settings import values
from avow.settings.values import FromEnv, PartitionBy, Problem, Start, Table, raise_if_any, refuse


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


class Sink(Section):
    """[sink], as far as every kind has it."""

    # What the sink's own names can be. A kind that cuts names says where; one that reserves some, which.
    name_bytes_max: ClassVar[int | None] = None
    reserved_columns: ClassVar[frozenset[str]] = frozenset()
    columns_max: ClassVar[int | None] = None

    mode: Mode = Field("append", description='"append", "dedupe" or "upsert"')
    key: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="a list of columns")
    lineage_prefix: str = Field("_kafka_", description="text before topic, partition, offset and timestamp")

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


def _or_none(value: object) -> str | None:
    return None if value is None else str(value)


class Postgres(Sink):
    """[sink] with kind = "postgres"."""

    name_bytes_max: ClassVar[int | None] = 63
    reserved_columns: ClassVar[frozenset[str]] = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
    columns_max: ClassVar[int | None] = 1_600

    kind: Literal["postgres"] = Field(description='"postgres"')
    url: Annotated[SecretStr, AfterValidator(values.postgres_url)] = Field(
        description="postgresql://user@host:port/database"
    )
    table: Annotated[Table, PlainValidator(values.table), PlainSerializer(str)] = Field(
        description='"table", "schema.table" or ["schema", "table"]'
    )

    @property
    def target(self) -> str:
        """Where rows go, as it is shown to people."""
        return f"table {self.shown('table')}"

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        for name in filter(None, (self.table.schema, self.table.name)):
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "names of at most 63 bytes, without control characters", "table")
        if self.table.schema in ("avow", "information_schema") or (self.table.schema or "").startswith("pg_"):
            refuse(f"the schema {self.table.schema!r} is not yours to use", "any other schema", "table")
        return self


class Lake(Sink):
    """[sink], as far as Delta Lake and Iceberg have it in common."""

    reserved_columns: ClassVar[frozenset[str]] = frozenset({"__avow_deleted"})

    partition_by: Annotated[PartitionBy | None, PlainValidator(values.partition_by), PlainSerializer(_or_none)] = Field(
        None, description='"column" or "day(column)"'
    )
    file_mb: StrictInt = Field(128, ge=1, le=4_096, description="a number from 1 to 4,096")
    evolve: Literal["refuse", "add"] = Field("refuse", description='"refuse" or "add"')

    def partition_problem(self, fields: Iterable[ddl.Field]) -> tuple[str, str] | None:
        """What keeps rows of these fields and the lineage from being put so, and what is allowed; None if nothing."""
        by, times = self.partition_by, (ddl.Scalar.TIMESTAMP, ddl.Scalar.TIMESTAMP_NTZ)
        if by is None:
            return None
        lineage = (ddl.Scalar.STRING, ddl.Scalar.INT, ddl.Scalar.LONG, ddl.Scalar.TIMESTAMP)
        types = {field.name: field.type for field in fields} | dict(zip(self.lineage, lineage, strict=True))
        type_ = types.get(by.column)
        if type_ is None:
            return f"{by.column!r} is not a column", "a column of the rows, in the same case"
        if by.day and type_ not in times:
            return f"{by.column!r} is no timestamp", "day() of a timestamp, or a column as it is"
        if by.day and f"{by.column}_day".lower() in {name.lower() for name in types}:
            return f"{by.column}_day is the name of the day, and there is a column of that name", "another name for it"
        if not by.day and type_ in (*times, ddl.Scalar.FLOAT, ddl.Scalar.DOUBLE, ddl.Scalar.BINARY):
            return f"{by.column!r} has too many values", "a column of few values, or day() of a timestamp"
        if not isinstance(type_, ddl.Scalar | ddl.Decimal):
            return f"{by.column!r} is nested", "a plain column"
        return None

    @classmethod
    def name_problem(cls, name: str) -> str:
        # Readers that know a column by its name in the files cannot take these.
        found = sorted(set(name) & set(" ,;{}()=."))
        return super().name_problem(name) or (f"holds {found[0]!r}, which a lake's files cannot" if found else "")


class Delta(Lake):
    """[sink] with kind = "delta"."""

    kind: Literal["delta"] = Field(description='"delta"')
    path: Annotated[str, AfterValidator(values.lake_path)] = Field(description="a folder, or s3://bucket/folder")
    options: Annotated[ClientSettings, BeforeValidator(values.store_settings)] = Field(
        {}, description="a table of the store's settings"
    )

    @property
    def target(self) -> str:
        return f"table {self.shown('path')}"


class Iceberg(Lake):
    """[sink] with kind = "iceberg"."""

    reserved_columns: ClassVar[frozenset[str]] = frozenset(
        {"__avow_deleted", "_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id"}
    )

    kind: Literal["iceberg"] = Field(description='"iceberg"')
    table: Annotated[
        str, values.matching(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+", "is not a table's name", '"namespace.table"')
    ] = Field(description='"namespace.table"')
    catalog: Annotated[ClientSettings, BeforeValidator(values.catalog_settings)] = Field(
        description='a table of pyiceberg\'s catalog settings; { warehouse = "folder" } is a local one'
    )

    @property
    def target(self) -> str:
        return f"table {self.shown('table')}"


class Kafka(Sink):
    """[sink] with kind = "kafka"."""

    kind: Literal["kafka"] = Field(description='"kafka"')
    topic: Annotated[str, AfterValidator(values.topic_template)] = Field(
        description="a topic's name, or a template of columns such as orders-{region}"
    )
    routes: tuple[TopicName, ...] = Field((), description="the topics that a template may name")
    brokers: Annotated[str, AfterValidator(values.brokers)] | None = Field(
        None, description="host:port of another cluster; without it, the source's"
    )
    key_column: str | None = Field(None, description="a column of text or bytes")
    value_column: str | None = Field(None, description="a column of text or bytes")
    headers: Literal["keep", "drop"] = Field("keep", description='"keep" or "drop"')
    timestamps: Literal["keep", "now"] = Field("keep", description='"keep" or "now"')
    origin: StrictBool = Field(True, description="true or false")
    dead_letter_topic: TopicName | None = Field(None, description="a topic's name")
    kafka: Annotated[ClientSettings, BeforeValidator(values.producer_settings)] = Field(
        {}, description="a table of Kafka producer settings"
    )

    @property
    def target(self) -> str:
        return f"topic {self.shown('topic')}"

    @property
    def routed_by(self) -> tuple[str, ...]:
        """The columns that name the output topic."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.topic) if name is not None)

    @model_validator(mode="after")
    def _check_route(self) -> Self:
        columns = [name for name in self.routed_by if name != self.lineage[0]]
        if columns and not self.routes:
            refuse(
                f"is missing: the topic depends on {', '.join(columns)}",
                "every topic that records may go to; what names another is a dead letter",
                "routes",
            )
        if self.routes and not columns:
            refuse("is for a topic that depends on columns", "routes only with a template in sink.topic", "routes")
        return self


# Pydantic puts the kind into the place of an error; ``read`` takes it out again.
AnySink = Annotated[Postgres | Delta | Iceberg | Kafka, Field(discriminator="kind")]
SINK_KINDS: Mapping[str, type[Sink]] = {"postgres": Postgres, "delta": Delta, "iceberg": Iceberg, "kafka": Kafka}


def _known_kind(value: Any) -> Any:
    """Judge the kind first: the keys of an unknown kind cannot be judged at all."""
    if not isinstance(value, dict):
        refuse("should be a table", "a table [sink]")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in SINK_KINDS:
        wrong = f"{kind!r} is not known" if "kind" in value else "is missing"
        refuse(wrong, f"known kinds: {', '.join(SINK_KINDS)}", "kind")
    return value


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
    sink: Annotated[AnySink, BeforeValidator(_known_kind)] = Field(description="a table [sink]")
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

    @property
    def by_sql(self) -> bool:
        """Whether records go through a SQL query."""
        return self.transform is not None and self.transform.sql is not None

    @property
    def interval(self) -> timedelta:
        """The least time from the start of one batch to the next. Undeclared, the consumer engine takes records as they
        come, but for a lake, where every batch makes files and a commit."""
        if self.batch.interval is not None:
            return self.batch.interval
        at_once = self.engine == "consumer" and not isinstance(self.sink, Lake)
        return timedelta(0) if at_once else timedelta(seconds=1)

    @property
    def tombstones(self) -> Literal["delete", "dead-letter", "skip", "keep"]:
        """What a null value does: it deletes under upsert, and is treated as declared otherwise. A topic keeps it."""
        if self.sink.mode == "upsert":
            return "delete"
        if self.sink.kind == "kafka" and "tombstones" not in self.decode.model_fields_set:
            return "keep"
        return self.decode.tombstones

    @property
    def carried(self) -> dict[str, str]:
        """What of a record travels beside its row, because the sink wants it -> the column that holds it."""
        if self.sink.kind != "kafka":
            return {}
        # Behind a transform the value is made anew; all that is left of the old one is whether there was one.
        parts = ("key", "headers", "value" if self.transform is None else "tombstone")
        return {part: f"{self.sink.lineage_prefix}{part}" for part in parts}

    @property
    def elsewhere(self) -> bool:
        """Whether the output topics are on another cluster than the source's."""
        return isinstance(self.sink, Kafka) and self.sink.brokers not in (None, self.source.brokers)

    @property
    def dead_letter_topic(self) -> str:
        """Where the Kafka sink keeps dead letters."""
        assert isinstance(self.sink, Kafka)
        return self.sink.dead_letter_topic or f"{self.name}.dead-letters"

    @property
    def declared_outputs(self) -> frozenset[str]:
        """The output topics of the Kafka sink, as far as the file alone says them."""
        assert isinstance(self.sink, Kafka)
        if self.sink.routes:
            return frozenset(self.sink.routes)
        if not self.sink.routed_by:
            return frozenset({self.sink.topic})
        return frozenset(self.sink.topic.format_map({self.sink.lineage[0]: topic}) for topic in self.source.topics)

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
                *_partition_problems(self),
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


def _partition_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if not isinstance(pipeline.sink, Lake) or pipeline.transform is not None:
        return  # the transform decides the sink's columns, and the sink asks when they are known
    if found := pipeline.sink.partition_problem(pipeline.decode.columns.fields):
        yield Problem(("sink", "partition_by"), *found)


def _combination_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    if pipeline.sink.mode == "upsert" and "tombstones" in pipeline.decode.model_fields_set:
        yield Problem(
            ("decode", "tombstones"),
            "upsert has its own: a null value deletes the row",
            "no tombstones with upsert",
        )
    if isinstance(pipeline.sink, Kafka):
        yield from _topic_problems(pipeline, pipeline.sink)
    if pipeline.engine == "consumer" and pipeline.by_sql:
        yield Problem(("engine",), "the consumer has no SQL", 'transform.python, or engine = "spark"')


def _topic_problems(pipeline: PipelineConfig, sink: Kafka) -> Iterator[Problem]:
    """Columns that are not there, and an output that would be read again."""
    columns = {field.name for field in pipeline.decode.columns} | {*sink.lineage}
    for key, name in (("key_column", sink.key_column), ("value_column", sink.value_column)):
        if pipeline.transform is None and name is not None and name not in columns:
            yield Problem(("sink", key), f"{name!r} is not a column", "a column of decode.schema, in the same case")
    for name in sink.routed_by:
        if pipeline.transform is None and name not in columns:
            yield Problem(("sink", "topic"), f"{name!r} is not a column", "columns of decode.schema or of lineage")
    if pipeline.elsewhere:
        return
    pattern = pipeline.source.topics_pattern
    for topic in sorted({*pipeline.declared_outputs, pipeline.dead_letter_topic}):
        if topic in pipeline.source.topics or (pattern is not None and re.fullmatch(pattern, topic)):
            yield Problem(
                ("sink", "topic"), f"{topic!r} is read by this pipeline too", "another topic than the source's"
            )


_SECRET_NAME = re.compile(
    r"(password|passphrase|secret|token|key|jaas\.config|credentials?|\.pem|bearer\.config)$", re.I
)


_PASSWORD_IN_URL = re.compile(r"^\w+://[^/?#@:]*:[^/?#]+@|[?&]password=[^&#]")


def _literal_secrets(document: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a valid document whose secret is written in the file itself."""
    written = values.as_written(document["sink"].get("url", ""))
    if _PASSWORD_IN_URL.search(values.ENV.sub("", written)):
        yield "sink.url"
    kafka, spark, sink = document["source"].get("kafka", {}), document.get("spark", {}), document["sink"]
    own = {name: sink[name] for name in ("options", "catalog", "kafka") if name in sink}
    for key, value in values.flat({"source": {"kafka": kafka}, "spark": spark, "sink": own}):
        name = ".".join(key)
        if _SECRET_NAME.search(name) and not isinstance(value, FromEnv):
            yield name
