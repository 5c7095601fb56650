"""``[sink]`` with ``kind = "kafka"``, and the topics that a pipeline into Kafka writes to.

Owns: its keys and the rules of their values. Must not know: how records are sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator

from avow.settings import ClientSettings, PipelineConfig, Problem, SinkConfig, TopicName
from avow.settings.values import brokers as broker_list
from avow.settings.values import client_settings, not_owned, refuse

# Settings of the producers that are avow's own, each with the reason.
_OWNED_PRODUCER = {
    "bootstrap.servers": "set sink.brokers instead",
    "metadata.broker.list": "set sink.brokers instead",
    "group.id": "the pipeline's name is the group id",
    "message.max.bytes": "the output topics' max.message.bytes sets it",
    "delivery.report.only.error": "avow needs every delivery report",
    "partitioner": "avow partitions keys as the Java producer does",
    "max.in.flight": "the order of records depends on it",
    "max.in.flight.requests.per.connection": "the order of records depends on it",
    "isolation.level": "only committed records are read",
    "interceptor.classes": "an interceptor could change or drop records unnoticed",
    "transactional.id": "avow sets it for each partition",
    "enable.idempotence": "the guarantee sets it",
    "acks": "the guarantee sets it",
    "request.required.acks": "the guarantee sets it",
}


def producer_settings(value: Any) -> dict[str, str]:
    return not_owned(client_settings(value), _OWNED_PRODUCER)


def topic_template(value: str) -> str:
    """A topic's name, with columns in braces where it depends on the record."""
    try:
        parts = list(Formatter().parse(value))
    except ValueError:
        refuse("has an unbalanced brace", "a topic name, or a template such as orders-{region}")
    for text, name, spec, conversion in parts:
        if name is not None and (not name or spec or conversion or re.search(r"[.\[\]]", name)):
            refuse(f"{{{name}}} is not a column name", "a column name in braces")
        if re.search(r"[^a-zA-Z0-9._-]", text):
            refuse("is not a topic name", "1 to 249 letters, digits, . _ and -, and columns in braces")
    if not 1 <= len(value) <= 249 or value in (".", ".."):
        refuse("is not a topic name", "1 to 249 letters, digits, . _ and -")
    return value


class KafkaConfig(SinkConfig):
    default_tombstones: ClassVar[Literal["dead-letter", "skip", "keep"]] = "keep"
    carries_record: ClassVar[bool] = True

    kind: Literal["kafka"] = Field(description='"kafka"')
    topic: Annotated[str, AfterValidator(topic_template)] = Field(
        description="a topic name, or a template with columns such as orders-{region}"
    )
    routes: tuple[TopicName, ...] = Field((), description="the topics that a template may produce")
    brokers: Annotated[str, AfterValidator(broker_list)] | None = Field(
        None, description="host:port of another cluster; without it, the source's"
    )
    key_column: str | None = Field(None, description="a column of text or bytes")
    value_column: str | None = Field(None, description="a column of text or bytes")
    headers: Literal["keep", "drop"] = Field("keep", description='"keep" or "drop"')
    timestamps: Literal["keep", "now"] = Field("keep", description='"keep" or "now"')
    origin: StrictBool = Field(True, description="true or false")
    dead_letter_topic: TopicName | None = Field(None, description="a topic name")
    kafka: Annotated[ClientSettings, BeforeValidator(producer_settings)] = Field(
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
        columns = [name for name in self.routed_by if name != self.lineage.topic]
        if columns and not self.routes:
            refuse(
                f"is missing: the topic depends on {', '.join(columns)}",
                "a list of every topic that records may go to; any other makes its record a dead letter",
                "routes",
            )
        if self.routes and not columns:
            refuse("is set, but sink.topic is not a template", "routes only with a template in sink.topic", "routes")
        return self

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:
        """Columns that are not there, and an output that would be read again."""
        columns = {field.name for field in pipeline.decode.columns} | {*self.lineage}
        for key, name in (("key_column", self.key_column), ("value_column", self.value_column)):
            if pipeline.transform is None and name is not None and name not in columns:
                yield Problem(("sink", key), f"{name!r} is not a column", "a column of decode.schema, in the same case")
        for name in self.routed_by:
            if pipeline.transform is None and name not in columns:
                yield Problem(("sink", "topic"), f"{name!r} is not a column", "columns of decode.schema or of lineage")
        if on_other_cluster(pipeline):
            return
        pattern = pipeline.source.topics_pattern
        for topic in sorted({*declared_outputs(pipeline), dead_letter_topic(pipeline)}):
            if topic in pipeline.source.topics or (pattern is not None and re.fullmatch(pattern, topic)):
                yield Problem(
                    ("sink", "topic"), f"{topic!r} is also read by this pipeline", "another topic than the source's"
                )


def config_of(pipeline: PipelineConfig) -> KafkaConfig:
    assert isinstance(pipeline.sink, KafkaConfig)
    return pipeline.sink


def on_other_cluster(pipeline: PipelineConfig) -> bool:
    """Whether the output topics are on another cluster than the source's."""
    return config_of(pipeline).brokers not in (None, pipeline.source.brokers)


def dead_letter_topic(pipeline: PipelineConfig) -> str:
    return config_of(pipeline).dead_letter_topic or f"{pipeline.name}.dead-letters"


def declared_outputs(pipeline: PipelineConfig) -> frozenset[str]:
    """The output topics, as far as the file alone names them."""
    sink = config_of(pipeline)
    if sink.routes:
        return frozenset(sink.routes)
    if not sink.routed_by:
        return frozenset({sink.topic})
    return frozenset(sink.topic.format_map({sink.lineage.topic: topic}) for topic in pipeline.source.topics)
