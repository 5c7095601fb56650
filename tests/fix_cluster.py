"""The real local cluster as fixtures: one per test session, topics and tables per test."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka.cimpl import NewTopic

from avow.kafka import metadata
from avow.kafka.committed import committed, reader
from avow.local.cluster import Cluster


def pytest_configure() -> None:
    # A polite kill of the test run must still run the fixtures' ends, which stop the cluster.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def positions_of(cluster: Cluster, group: str) -> dict[int, int]:
    """What a group has committed, by partition. It is of one topic."""
    with closing(reader({"bootstrap.servers": cluster.bootstrap}, group)) as one:
        return {at.partition: at.offset for at in committed(one, 30)}


# Takes the cluster down when the other end of its standard input is closed, whatever ended the tests, be it kill -9.
GUARD = """
import shutil, sys
from pathlib import Path
from avow.local.cluster import Cluster
sys.stdin.read()
cluster = Cluster(Path(sys.argv[1]))
if cluster.exists:
    cluster.down()
shutil.rmtree(sys.argv[1])
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three brokers and PostgreSQL in a temporary folder, all up. A test that hurts a part mends it."""
    folder = tempfile.mkdtemp(prefix="avow-test-")
    command = [sys.executable, "-c", GUARD, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        cluster = Cluster(Path(folder))
        cluster.up()
        yield cluster
    assert guard.returncode == 0


@pytest.fixture
def healthy(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, for tests that hurt it: whatever they did, it is whole again afterwards."""
    yield cluster
    for part in cluster.parts():
        part.resume()
    cluster.up()


@pytest.fixture
def make_topic(cluster: Cluster) -> Callable[..., str]:
    """Makes a topic under a name of its own."""

    def make(partitions: int = 1, **config: str) -> str:
        name = f"t-{uuid4().hex[:12]}"
        client = metadata.admin(cluster.bootstrap)
        topic = NewTopic(name, partitions, config={k.replace("_", "."): v for k, v in config.items()})
        client.create_topics([topic], operation_timeout=30)[name].result()
        return name

    return make


@pytest.fixture
def database(cluster: Cluster) -> Iterator[psycopg.Connection]:
    """A fresh connection to PostgreSQL, committing each statement."""
    assert cluster.postgres_url
    with psycopg.connect(cluster.postgres_url, autocommit=True) as connection:
        yield connection
