"""The pipeline file as one frozen, typed tree, checked before any I/O.

Theory of operation
-------------------
``load`` reads the file in four steps: TOML, ``${env:NAME}`` filled in, the tree, and checks that need more
than one section. Every step collects its problems; they are raised together as one ``ConfigError`` with a
line each: file, line, key, what is wrong, what is allowed.

Secrets. A value that came from the environment, the sink's URL, and every client setting never appear in a
``repr``, a dump or an error. Three rules keep that true: such values are ``SecretStr``, or are remembered as
written (``${env:NAME}``) by their ``Section``; a ``Problem`` quotes the value at its own key and no other;
and a quote of a value from the environment is dropped when the problem is reported.

Owns: the keys, their types and their checks. Must not know: Kafka, Spark, any format or sink by name, or what a sink
offers. Its neighbours are ``schema`` (``decode.schema``), ``plugins`` (which finds the classes that read ``[decode]``
and ``[sink]``) and ``plan`` (which adds the sinks' offers).
"""

from avow.settings.read import cluster, declared, from_options, load, refused
from avow.settings.tree import (
    REST_COLUMN,
    TOPIC,
    BatchSettings,
    ClientSettings,
    DeadLetters,
    DeclaredColumns,
    FormatConfig,
    Lineage,
    Mode,
    PipelineConfig,
    Section,
    SinkConfig,
    Source,
    TableSinkConfig,
    TopicName,
    Transform,
    shared_places,
    unwrap_secrets,
)
from avow.settings.values import Offsets, Problem, Start

__all__ = [
    "REST_COLUMN",
    "TOPIC",
    "BatchSettings",
    "ClientSettings",
    "DeadLetters",
    "DeclaredColumns",
    "FormatConfig",
    "Lineage",
    "Mode",
    "Offsets",
    "PipelineConfig",
    "Problem",
    "Section",
    "SinkConfig",
    "Source",
    "Start",
    "TableSinkConfig",
    "TopicName",
    "Transform",
    "cluster",
    "declared",
    "from_options",
    "load",
    "refused",
    "shared_places",
    "unwrap_secrets",
]
