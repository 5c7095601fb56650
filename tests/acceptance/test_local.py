"""``avow up | down | status`` as a person uses them: the real command, in folders of their own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from confluent_kafka import Producer

from avow.kafka import metadata
from avow.local.cluster import Cluster
from avow.schema_registry import RegistrySettings, SchemaRegistry

pytestmark = pytest.mark.cluster


def avow(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "avow", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **env},
        check=False,
    )


def running(pid: int) -> bool:
    """Not merely a pid that its foster parent has not collected yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def told(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(avow("status", "--json", "--dir", folder).stdout)
    return status


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "with space" / ".avow"
    yield folder
    if Cluster(folder).exists:
        avow("down", "--dir", folder)


def test_a_whole_life(folder: Path) -> None:
    """Up, killed, mended, down, up again with its data, fresh, down with nothing left."""
    up = avow("up", "--brokers", "1", "--dir", folder)
    assert up.returncode == 0, up.stderr
    assert f"avow down --dir {shlex.quote(str(folder))}" in up.stdout
    assert "broker-1    ready at" in up.stderr
    assert "postgres    ready at" in up.stderr
    first = told(folder)
    assert first["all_up"]
    producer = Producer({"bootstrap.servers": first["bootstrap"]}, logger=metadata.QUIET)
    producer.produce("kept", b"x")
    assert producer.flush(30) == 0
    with psycopg.connect(first["postgres_url"]) as connection:
        connection.execute("CREATE TABLE kept (x int)")

    pids = {part["name"]: part["pid"] for part in first["parts"]}
    os.kill(pids["broker-1"], signal.SIGKILL)
    half = avow("status", "--dir", folder)
    assert half.returncode == 1
    assert "down" in half.stdout

    mended = avow("up", "--dir", folder)
    assert mended.returncode == 0, mended.stderr
    second = told(folder)
    assert second["all_up"]
    assert second["bootstrap"] == first["bootstrap"]
    after = {part["name"]: part["pid"] for part in second["parts"]}
    assert after["postgres"] == pids["postgres"], "what was up is left alone"
    assert after["broker-1"] != pids["broker-1"]

    # Down also when some died.
    os.kill(after["broker-1"], signal.SIGKILL)
    down = avow("down", "--dir", folder)
    assert down.returncode == 0, down.stderr
    assert not any(running(pid) for pid in after.values())
    assert avow("status", "--dir", folder).returncode == 1
    for part in second["parts"]:
        host, port = part["address"].split(":")
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((host, int(port)))

    assert avow("up", "--dir", folder).returncode == 0
    third = told(folder)
    assert third["bootstrap"] == first["bootstrap"]
    assert "kept" in {partition["topic"] for partition in third["partitions"]}
    with psycopg.connect(third["postgres_url"]) as connection:
        connection.execute("SELECT x FROM kept")

    fresh = avow("up", "--fresh", "--brokers", "1", "--no-postgres", "--dir", folder)
    assert fresh.returncode == 0, fresh.stderr
    fourth = told(folder)
    assert [part["name"] for part in fourth["parts"]] == ["broker-1"]
    assert "kept" not in {partition["topic"] for partition in fourth["partitions"]}
    assert avow("down", "--dir", folder).returncode == 0


def test_a_cluster_with_a_schema_registry(folder: Path) -> None:
    """It is a part like the others: remembered, found down, started again with its schemas, taken away."""
    up = avow("up", "--brokers", "1", "--no-postgres", "--registry", "--dir", folder)
    assert up.returncode == 0, up.stderr
    assert "registry    ready at http://127.0.0.1:" in up.stderr
    first = told(folder)
    assert first["all_up"]
    assert f"registry    {first['registry_url']}" in up.stdout
    (part,) = (part for part in first["parts"] if part["name"] == "registry")
    assert (part["state"], part["version"]) == ("up", "3.0.9")
    client = SchemaRegistry(RegistrySettings(url=first["registry_url"]))
    client.register("t-value", "AVRO", '"int"')
    assert not client.compatible("t-value", '"string"', "AVRO"), "a new registry asks for compatibility"

    os.kill(part["pid"], signal.SIGKILL)
    assert avow("status", "--dir", folder).returncode == 1
    again = avow("up", "--dir", folder)
    assert again.returncode == 0, again.stderr
    second = told(folder)
    assert second["all_up"]
    assert second["registry_url"] == first["registry_url"]
    assert client.subjects() == ["t-value"]
    pid = next(part["pid"] for part in second["parts"] if part["name"] == "registry")

    without = avow("up", "--no-registry", "--dir", folder)
    assert without.returncode == 0, without.stderr
    assert not running(pid)
    third = told(folder)
    assert third["all_up"]
    assert third["registry_url"] is None
    assert [part["name"] for part in third["parts"]] == ["broker-1"]
    assert avow("down", "--dir", folder).returncode == 0


def test_two_clusters_do_not_disturb_each_other_and_ports_can_be_fixed(cluster: Cluster, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    up = avow("up", "--brokers", "1", "--no-postgres", "--kafka-port", str(port), "--dir", folder)
    assert up.returncode == 0, up.stderr
    mine = told(folder)
    assert mine["bootstrap"] == f"127.0.0.1:{port}"
    other = metadata.view(metadata.admin(cluster.bootstrap))
    assert other.cluster_id != metadata.view(metadata.admin(mine["bootstrap"])).cluster_id
    assert avow("down", "--dir", folder).returncode == 0
    assert cluster.status().all_up


def test_a_taken_port_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = avow("up", "--brokers", "1", "--kafka-port", str(port), "--dir", folder)
    assert up.returncode == 3
    assert f"error: port {port} is in use" in up.stderr
    assert "what to do:" in up.stderr


def test_no_cluster_here(folder: Path) -> None:
    for command in ("status", "down"):
        done = avow(command, "--dir", folder)
        assert done.returncode == 3
        assert "no local cluster in" in done.stderr
        assert "`avow up` starts one" in done.stderr
    assert not folder.exists(), "looking makes nothing"


def test_two_ups_at_once_do_not_fight(folder: Path) -> None:
    command = [sys.executable, "-m", "avow", "up", "--brokers", "1", "--no-postgres", "--dir", str(folder)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        while not (folder / "cluster.json").exists():
            assert first.poll() is None
            time.sleep(0.05)
        second = avow("up", "--dir", folder)
        assert second.returncode == 3
        assert "another avow is starting or stopping the cluster" in second.stderr
    finally:
        _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors


def test_a_node_that_cannot_start_says_why_with_its_log(folder: Path) -> None:
    assert avow("up", "--brokers", "1", "--no-postgres", "--dir", folder).returncode == 0
    assert avow("down", "--dir", folder).returncode == 0
    (folder / "broker-1" / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=x\n")
    up = avow("up", "--dir", folder)
    assert up.returncode == 3
    assert "broker-1 ended right after its start; the end of its log:" in up.stderr
    assert "node" in up.stderr
    assert str(folder / "broker-1" / "log") in up.stderr


def test_an_unreadable_cluster_file_is_an_error_and_erases_nothing(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{")
    (folder / "mine.txt").write_text("not yours")
    up = avow("up", "--dir", folder)
    assert up.returncode == 3
    assert "cannot be read" in up.stderr
    assert (folder / "mine.txt").read_text() == "not yours"
    (folder / "cluster.json").unlink()
