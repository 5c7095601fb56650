"""The dashboard for a Kafka user who may describe and read one topic and nothing else, on a broker that checks it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic
from tests.authorizer import Authorizing, authorizing

from avow.dashboard import messages
from avow.dashboard.guard import AccessRules
from avow.dashboard.jobs import Jobs
from avow.dashboard.state import AppState
from avow.dashboard.watch import Watch, _processes
from avow.kafka import metadata
from avow.settings import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dashboard_rights")]

TOPIC, CLOSED = "readable", "described"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authorizing]:
    with authorizing(tmp_path_factory.mktemp("authorizing")) as one:
        client = metadata.admin(one.address)
        topics = [NewTopic(TOPIC, 1, 1), NewTopic(CLOSED, 1, 1)]
        for made in client.create_topics(topics, operation_timeout=30).values():
            made.result(30)
        one.allow(ResourceType.TOPIC, TOPIC, AclOperation.DESCRIBE, AclOperation.READ)
        one.allow(ResourceType.TOPIC, CLOSED, AclOperation.DESCRIBE)
        producer = Producer({"bootstrap.servers": one.address}, logger=metadata.QUIET)
        for number in range(3):
            producer.produce(TOPIC, b"value %d" % number)
            producer.produce(CLOSED, b"not for everybody")
        assert producer.flush(30) == 0
        yield one


@pytest.fixture
def state(broker: Authorizing, tmp_path: Path) -> Iterator[AppState]:
    source = cluster(broker.bootstrap, broker.login())
    one = AppState(AccessRules(), source, Watch(timeout_s=30), Jobs(dict(os.environ)), [tmp_path], 30)
    yield one
    one.close()


def test_records_are_browsed_without_a_right_to_any_group(state: AppState) -> None:
    """librdkafka asks for the coordinator of its group all the time; whoever may not is told so among the records."""
    until = time.monotonic() + 2  # the refusal comes when the first records have been read already
    while time.monotonic() < until:
        found = messages.messages(state, messages.MessagesParams(topic=TOPIC))
        assert [one.offset for one in found.messages] == [2, 1, 0]
        assert messages.message(state, messages.MessageParams(topic=TOPIC, partition=0, offset=1)).offset == 1
    rows = messages.tail(state, messages.TailParams(topic=TOPIC, onwards="0:0"), lambda: False)
    seen = [row.offset for some, _ in islice(rows, 6) for row in some]
    assert seen == [0, 1, 2]


def test_pages_say_what_is_not_permitted(state: AppState) -> None:
    from tests.visitor import Visitor

    visitor = Visitor(state)
    for path in (f"/topics/{TOPIC}", f"/topics/{TOPIC}/groups", "/topics", "/groups", "/transactions", "/cluster"):
        answer = visitor.get(path)
        assert answer.status_code == 200, (path, answer.text)
    refused = visitor.get(f"/topics/{CLOSED}/messages")
    assert (refused.status_code, f"Read on topic {CLOSED}" in refused.text) == (502, True), refused.text
    (one,) = visitor.get("/api/cluster").json()["brokers"]
    assert (one["disk_bytes"], one["free_bytes"], one["total_bytes"]) == (None, None, None)
    assert one["no_disk"] == "not permitted"
    assert "not permitted" in visitor.get("/cluster").text
    assert [one["disk_bytes"] for one in visitor.get("/api/topics").json()["topics"]] == [None, None]
    topic = visitor.get(f"/api/topics/{TOPIC}").json()
    assert (topic["disk_bytes"], topic["config"]) == (None, None)
    assert "Not authorized to read the configuration" in visitor.get(f"/topics/{TOPIC}").text
    with state.log() as log:
        assert _processes(log, "p") is None, "not known, which is not none"
