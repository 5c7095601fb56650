"""Whether a topic is compacted: then a row without a record proves nothing.

Owns: that question. Must not know: the sink. Its neighbour is ``avow.kafka.admin``.
"""

from __future__ import annotations

from collections.abc import Iterable

from avow.errors import SourceError
from avow.kafka.admin import Admin, several
from avow.kafka.connect import Connection
from avow.settings import Source


def compacted(source: Source, topics: Iterable[str]) -> frozenset[str]:
    """Of these topics, those that are compacted."""
    wanted = set(topics)
    with Admin(Connection.of(source)) as admin:
        configs = admin.topic_configs(wanted)
    if hidden := sorted(wanted - configs.keys()):
        raise SourceError(
            f"not authorized to describe the configuration of topic {several(hidden)}, which says whether it is "
            "compacted",
            advice="Grant the pipeline's Kafka user DescribeConfigs on its topics.",
        )
    return frozenset(topic for topic, config in configs.items() if "compact" in str(config["cleanup.policy"].value))
