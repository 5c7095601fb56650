"""A broker with SASL_SSL and ACLs, for both engines and the audit: what never heals stops at once, by name, with what
grants it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from deltalake import DeltaTable
from tests.authorizer import Authority, Authorizing, authorizing
from tests.fix_pipeline import session_spark

from avow import Consumer as AvowConsumer
from avow import Producer as AvowProducer
from avow.audit.auditor import audit
from avow.audit.judge import Verdict
from avow.engines import consumer, spark
from avow.errors import ConfigError
from avow.kafka import metadata
from avow.kafka.reader import Reader
from avow.ledger import OffsetRange
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.sinks.kafka.config import dead_letter_topic

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("secured")]


@dataclass
class Site:
    """The broker, and pipelines that read from it."""

    broker: Authorizing
    folder: Path

    @property
    def address(self) -> str:
        return self.broker.bootstrap

    def topic(self) -> str:
        name = f"t-{uuid4().hex[:10]}"
        admin = metadata.admin(self.broker.address)
        admin.create_topics([NewTopic(name, 1)], operation_timeout=30)[name].result(30)
        return name

    def produce(self, topic: str, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.broker.address}, logger=metadata.QUIET)
        for number in range(count):
            producer.produce(topic, json.dumps({"id": number}).encode())
        assert producer.flush(30) == 0

    def pipeline(self, topic: str, sink: str = "", *, engine: str = "consumer", **settings: str) -> PipelineConfig:
        """Into a Delta table, unless the sink is another."""
        name = f"p-{uuid4().hex[:8]}"
        given = "".join(f'kafka."{key}" = "{value}"\n' for key, value in (self.broker.login() | settings).items())
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'name = "{name}"\nguarantee = "exactly-once"\n'
            f'[source]\nbrokers = "{self.address}"\ntopics = ["{topic}"]\n{given}'
            '[decode]\nformat = "json"\nschema = "id long"\n'
            + (sink or f'[sink]\nkind = "delta"\npath = "{self.folder / name}"\n')
        )
        return load_checked(path, {}, engine=engine)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("secured")
    with authorizing(folder / "broker-1") as broker:
        yield Site(broker, folder)


def refused(act: Callable[[], object]) -> ConfigError:
    """The error of an act that is refused."""
    with pytest.raises(ConfigError) as raised:
        act()
    return raised.value


R, D, W = AclOperation.READ, AclOperation.DESCRIBE, AclOperation.WRITE


def test_a_wrong_password_stops_every_client_at_once(site: Site) -> None:
    wrong = {"sasl.password": "guessed"}
    source = site.pipeline("t", **wrong)
    output = '[sink]\nkind = "kafka"\ntopic = "o"\n'
    for pipeline in (source, site.pipeline("t", output, **wrong)):
        error = refused(consumer.ConsumerRun(pipeline, once=True).execute)
        assert "Authentication failed" in str(error)
        assert "sasl." in error.advice
        assert "guessed" not in f"{error}{error.advice}"
    error = refused(lambda: Reader(source.source, "g").read(OffsetRange("t", 0, 0, 1)).__next__())
    assert "Authentication failed" in str(error)
    kafka = site.broker.login("guessed")
    error = refused(lambda: AvowProducer(site.address, guarantee="exactly-once", transactional_id="n", config=kafka))
    assert "Authentication failed" in str(error)
    error = refused(lambda: AvowConsumer(["t"], bootstrap_servers=site.address, group_id="g", config=kafka).run(print))
    assert "Authentication failed" in str(error)


def test_a_certificate_of_an_unknown_ca_stops_every_client_at_once(site: Site) -> None:
    other = site.folder / "other-ca.pem"
    other.write_bytes(Authority("somebody else").pem)
    pipeline = site.pipeline("t", **{"ssl.ca.location": str(other)})
    error = refused(consumer.ConsumerRun(pipeline, once=True).execute)
    assert "certificate" in str(error)
    assert "ssl.ca.location" in error.advice
    kafka = site.broker.login() | {"ssl.ca.location": str(other)}
    error = refused(lambda: AvowProducer(site.address, guarantee="exactly-once", transactional_id="n", config=kafka))
    assert "certificate" in str(error)


def test_rights_that_are_missing_are_named_with_what_grants_them(site: Site) -> None:
    topic = site.topic()
    site.produce(topic, 3)
    pipeline = site.pipeline(topic)
    group = f"{pipeline.name}.members"

    def run() -> None:
        consumer.ConsumerRun(pipeline, once=True).execute()

    error = refused(run)
    assert topic in str(error)
    assert f"--operation Describe --topic {topic}" in error.advice
    site.broker.allow(ResourceType.TOPIC, topic, D)
    error = refused(run)
    assert f"--group {group}" in error.advice
    site.broker.allow(ResourceType.GROUP, group, R)
    error = refused(run)
    assert f"--operation Read --operation Describe --topic {topic}" in error.advice
    site.broker.allow(ResourceType.TOPIC, topic, R)
    run()  # the group that is only told the positions is a courtesy: without a right to it, the run goes on
    assert DeltaTable(f"{site.folder / pipeline.name}").to_pyarrow_table().num_rows == 3


def test_rights_of_a_kafka_sink(site: Site) -> None:
    topic, output = site.topic(), site.topic()
    site.produce(topic, 3)
    pipeline = site.pipeline(topic, f'[sink]\nkind = "kafka"\ntopic = "{output}"\n')
    site.broker.allow(ResourceType.TOPIC, topic, R, D)
    site.broker.allow(ResourceType.GROUP, f"{pipeline.name}.members", R)

    def run() -> None:
        consumer.ConsumerRun(pipeline, once=True).execute()

    error = refused(run)
    assert f"--group {pipeline.name}" in error.advice, "its ledger"
    site.broker.allow(ResourceType.GROUP, pipeline.name, R, D)
    error = refused(run)
    assert "--operation Create --operation Write" in error.advice
    for name in (output, dead_letter_topic(pipeline)):
        site.broker.allow(ResourceType.TOPIC, name, AclOperation.CREATE, W, R, D, AclOperation.DESCRIBE_CONFIGS)
    error = refused(run)
    ids = f"{pipeline.name}/"
    assert error.advice.endswith(f"--resource-pattern-type prefixed --transactional-id {ids}")
    site.broker.allow(ResourceType.TRANSACTIONAL_ID, ids, W, D, pattern=ResourcePatternType.PREFIXED)
    run()
    error = refused(
        lambda: AvowProducer(
            site.address, guarantee="exactly-once", durability="transactional", config=site.broker.login()
        )
    )
    assert "--transactional-id" in error.advice


def test_one_set_of_client_settings_serves_spark_and_the_audit(site: Site) -> None:
    """User and password as librdkafka takes them: no part of avow reads Kafka with another client."""
    topic = site.topic()
    site.produce(topic, 3)
    site.broker.allow(ResourceType.TOPIC, topic, R, D, AclOperation.DESCRIBE_CONFIGS)
    pipeline = site.pipeline(topic, engine="spark")
    spark.SparkRun(pipeline, lambda _: session_spark(pipeline), once=True).execute()
    report = audit(pipeline, lambda: session_spark(pipeline))
    assert report.verdict is Verdict.HELD, "without a right to the group, to which nothing is committed"
