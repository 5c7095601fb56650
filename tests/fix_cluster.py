"""The real local cluster as fixtures: one for all workers of a test run; a database per worker, topics per test.

Tests that need the cluster for themselves, to hurt it or to count all that is in it, say so by a fixture (``alone``,
``healthy``). The first worker begins with them; meanwhile the others do what needs no cluster, or wait.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest

from avow.kafka.admin import Admin
from avow.kafka.committed import committed, reader
from avow.kafka.connect import Connection
from avow.kafka.metadata import TopicPartition
from avow.local.cluster import Cluster

# Takes the cluster and servers down when the other end of its standard input is closed, whatever ended the tests, be it
# kill -9.
GUARD = """
import shutil, sys
from pathlib import Path
sys.stdin.read()
folder = Path(sys.argv[1])
if (folder / "cluster" / "cluster.json").exists():
    from avow.local.cluster import Cluster
    Cluster(folder / "cluster").down()
for worker in folder.glob("connect-*"):
    from avow.local.connect import Connect
    Connect(worker, 0, "").stop()
for server in folder.glob("server-*"):
    from avow.local.postgres import Postgres
    Postgres(server, 0).stop()
if (folder / "registry").exists():
    from avow.local.registry import Registry
    Registry(folder / "registry", 0).stop()
shutil.rmtree(folder)
"""
GUARDED = pytest.StashKey[subprocess.Popen[bytes]]()
FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    # A polite kill of the test run must still run the fixtures' ends, which stop what they started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.stash[FOLDER] = Path(workerinput["avow_folder"])
        return
    # Not in pytest's own folder: the next pytest that starts on this machine closes that to all other users, and as
    # root PostgreSQL is one of them.
    folder = config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="avow-test-"))
    command: list[str | Path] = [sys.executable, "-c", GUARD, folder]
    config.stash[GUARDED] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the cluster is."""
    node.workerinput["avow_folder"] = str(node.config.stash[FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    if guard := config.stash.get(GUARDED, None):
        assert guard.stdin
        guard.stdin.close()
        assert guard.wait(120) == 0, "the cluster could not be stopped"


def needs(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


def uses_cluster(item: pytest.Item) -> bool:
    into = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return needs(item, "cluster") or (needs(item, "bench") and "kafka" in into)  # a bench asks for it when it is made


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take tests in this order (``--dist loadgroup``). One begins with those that want the cluster for
    themselves and plays them all; the others with those that start a cluster of their own, which take long, and those
    that need none, which are many. So hardly anybody waits for the cluster. Groups begin before single tests: those on
    Spark share one session each, and end last."""
    for item in items:
        if uses_cluster(item):
            item.add_marker("cluster")
            # The contract of a sink, into Kafka: seconds a test, and at-least-once has no act that the others lack.
            if needs(item, "bench") and "at-least-once" in item.callspec.params.values():  # type: ignore[attr-defined]
                item.add_marker("long")
        if needs(item, "alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
    items.sort(
        key=lambda item: (
            not needs(item, "alone"),
            uses_cluster(item),
            item.get_closest_marker("cluster") is None,
            item.get_closest_marker("xdist_group") is None,
        )
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One test that wants the cluster for itself, or any number of others. The wait is not of the test's time."""
    if not uses_cluster(item):
        return (yield)
    folder = item.config.stash[FOLDER]
    handle = os.open(folder, os.O_RDONLY)
    try:
        # One at a time waits: who comes after one that wants the cluster for itself does not overtake it.
        with (folder / "queue").open("w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(handle, fcntl.LOCK_EX if needs(item, "alone") else fcntl.LOCK_SH)
        return (yield)
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # also where a child of the test has the handle
        os.close(handle)


def positions_of(cluster: Cluster, group: str) -> dict[int, int]:
    """What a group has committed, by partition. It is of one topic."""
    with closing(reader(Connection(cluster.bootstrap), group)) as one:
        return {at.partition: at.offset for at in committed(one, 30)}


class WorkersCluster(Cluster):
    """The cluster as one worker has it: with a database of its own, so that all in schema avow is this worker's."""

    def __init__(self, folder: Path, database: str) -> None:
        super().__init__(folder)
        self._database = database

    @property
    def postgres_url(self) -> str | None:
        postgres = self.postgres()
        return f"{postgres.url.removesuffix('/postgres')}/{self._database}" if postgres else None


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config, worker_id: str) -> Cluster:
    """Three brokers and PostgreSQL, all up. The first worker that needs it starts it."""
    folder = pytestconfig.stash[FOLDER]
    cluster = WorkersCluster(folder / "cluster", f"of_{worker_id}")
    with (folder / "starting").open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        cluster.up()
    postgres = cluster.postgres()
    assert postgres
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE of_{worker_id}".encode())
    return cluster


@pytest.fixture
def alone(cluster: Cluster, worker_id: str, request: pytest.FixtureRequest) -> Cluster:
    """The cluster, for tests that speak of all that is in it: no other test uses it meanwhile."""
    # On several workers each of them would restart the cluster, for every test.
    assert worker_id == "master" or request.node.nodeid.endswith("@alone"), "pytest-xdist ignores groups of tests"
    return cluster


@pytest.fixture
def healthy(alone: Cluster) -> Iterator[Cluster]:
    """The cluster, for tests that hurt it: whatever they did, it is whole again afterwards."""
    # Who is killed keeps its pid until its parent has asked for it, and PostgreSQL does not start while the pid of the
    # one before is there: the parent has to be this process.
    children = {child.pid for child in psutil.Process().children()}
    if not children.issuperset(part.pid for part in alone.parts()):  # another worker has started it
        alone.down()
        alone.up()
    yield alone
    for part in alone.parts():
        part.resume()
    alone.up()


@pytest.fixture(scope="session")
def schema_registry(pytestconfig: pytest.Config) -> str:
    """The URL of a real schema registry, one for all workers: tests take subjects of their own. The first that needs it
    starts it."""
    from avow.local.cluster import PortPicker
    from avow.local.registry import Registry

    folder = pytestconfig.stash[FOLDER]
    with (folder / "registry-port").open("a+") as port:
        fcntl.flock(port, fcntl.LOCK_EX)
        port.seek(0)
        chosen = port.read()
        registry = Registry(folder / "registry", int(chosen or PortPicker().free()))
        if not chosen:
            registry.prepare()
            registry.start()
            registry.await_ready()
            port.write(str(registry.port))
    return registry.url


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(Connection(cluster.bootstrap)) as admin:
        yield admin


@pytest.fixture
def make_topic(admin: Admin, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Makes a topic under a name of its own: on one broker, which takes a fifth of the time, or on all three where the
    test has the cluster to itself, to hurt it."""
    default = 3 if needs(request.node, "alone") else 1

    def make(partitions: int = 1, replicas: int = default, **config: str) -> str:
        name = f"t-{uuid4().hex[:12]}"
        admin.create_topic(name, partitions, replicas, {k.replace("_", "."): v for k, v in config.items()})
        # Its leaders answer for it by now: else a producer's first batches are refused, and sent in another order.
        admin.end_offsets(TopicPartition(name, number) for number in range(partitions))
        return name

    return make


@pytest.fixture
def database(cluster: Cluster) -> Iterator[psycopg.Connection]:
    """A fresh connection to PostgreSQL, committing each statement."""
    assert cluster.postgres_url
    with psycopg.connect(cluster.postgres_url, autocommit=True) as connection:
        yield connection
