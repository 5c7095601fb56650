"""The examples of plain consumers, run as their READMEs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer
from tests.kafka_stage import read

from avow.kafka import metadata
from avow.local.cluster import Cluster

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def shop(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a folder, with the environment that the READMEs export."""

    def run(*command: str, cwd: Path = tmp_path, path: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
        own = {"AVOW_BROKERS": cluster.bootstrap, "DATABASE_URL": str(cluster.postgres_url), "PYTHONPATH": str(path)}
        env = {**os.environ, **own, "INDEX": str(tmp_path / "index")}
        done = subprocess.run(
            [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def produce(cluster: Cluster, topic: str, values: list[dict[str, object]], keys: list[str | None]) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap}, logger=metadata.QUIET)
    for value, key in zip(values, keys, strict=True):
        headers: list[tuple[str, str | bytes | None]] = [("avow-key", key)] if key else []
        producer.produce(topic, json.dumps(value), key, headers=headers)
    assert producer.flush(60) == 0


Run = Callable[..., subprocess.CompletedProcess[str]]


def test_plain_consumers(
    cluster: Cluster, shop: Run, make_topic: Callable[..., str], database: psycopg.Connection, tmp_path: Path
) -> None:
    topic, folder = make_topic(2), EXAMPLES / "plain-consumers"
    payments: list[dict[str, object]] = [{"account": f"a{n % 3}", "amount": n} for n in range(30)]
    produce(cluster, topic, payments, [None if n == 7 else f"k{n}" for n in range(30)])
    shown = shop(str(folder / "at_most_once.py"), topic, "--once").stdout.splitlines()
    assert len(shown) == 30
    assert shop(str(folder / "at_most_once.py"), topic, "--once").stdout == "", "never again"
    said = shop(str(folder / "at_least_once.py"), topic, "--once").stdout.splitlines()
    assert said[-1] == "indexed 29, dead letters 1"
    assert len(list((tmp_path / "index").iterdir())) == 29
    for _ in range(2):
        shop(str(folder / "exactly_once.py"), topic, "--once")
    wanted = [(f"a{a}", sum(n for n in range(30) if n % 3 == a)) for a in range(3)]
    assert database.execute("SELECT account, amount FROM balances ORDER BY 1").fetchall() == wanted


def test_exactly_once_with_an_idempotency_key(
    shop: Run, cluster: Cluster, make_topic: Callable[..., str], database: psycopg.Connection
) -> None:
    topic, folder, group = make_topic(2), EXAMPLES / "exactly-once-postgres", f"charges-{uuid4().hex[:8]}"
    database.execute((folder / "tables.sql").read_text())
    charges: list[dict[str, object]] = [{"account": f"a{n % 5}", "amount": n} for n in range(20)]
    produce(cluster, topic, charges, [f"m{n}" for n in range(20)])
    produce(cluster, topic, charges[:8], [f"m{n}" for n in range(8)])  # sent again: the acknowledgement was lost
    options = ("--guarantee", "exactly-once", "--handler", "charge:charge", "--on-failure", "dead-letter", "--once")
    shop("-m", "avow", "consume", topic, "--group", group, *options, "--retries", "0", cwd=folder, path=folder)
    found = database.execute("SELECT account, amount FROM charges ORDER BY amount").fetchall()
    assert found == [(f"a{n % 5}", n) for n in range(1, 20)], "0 breaks a rule of the table"
    asked = "SELECT sum(read), sum(written), sum(dead), sum(skipped) FROM avow.ledger WHERE pipeline = %s"
    assert database.execute(asked, (group,)).fetchone() == (28, 19, 2, 7)


def test_consume_transform_produce(shop: Run, cluster: Cluster, make_topic: Callable[..., str], tmp_path: Path) -> None:
    folder, topic = EXAMPLES / "consume-transform-produce", make_topic(2)
    orders: list[dict[str, object]] = [{"id": n, "item": ("pen", "book", "car")[n % 3], "count": n} for n in range(30)]
    produce(cluster, topic, orders, [f"k{n}" for n in range(30)])
    file = tmp_path / "enrich.toml"  # as it is, with names of this test's own
    text = (folder / "enrich.toml").read_text()
    file.write_text(text.replace('"orders', f'"{topic}').replace('"enrich"', f'"enrich-{topic}"'))
    for _ in range(2):
        shop("-m", "avow", "run", str(file), "--once", path=folder)
    found = [json.loads(one.value or b"") for one in read(cluster.bootstrap, f"{topic}-priced")]
    prices = {0: 2, 1: 15, 2: None}
    assert sorted(one["id"] for one in found) == list(range(30))
    assert {one["id"]: one["price"] for one in found} == {
        n: each and each * n for n in range(30) for each in [prices[n % 3]]
    }
