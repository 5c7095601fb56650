"""examples/receipt-service as a caller sees it: 202 while nobody runs the pipeline, then 201; 422 for a bad order."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fix_pipeline import Scenario

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parents[2] / "examples/receipt-service"
ORDER = b'{"id": 1, "account": "a", "amount": 9.5}'


@pytest.fixture
def service(scenario: Callable[..., Scenario]) -> Iterator[tuple[Scenario, Path, str]]:
    """The example's own file, with names that are no other test's; the service on a port of its own."""
    s = scenario(partitions=2)
    text = (FOLDER / "orders.toml").read_text()
    path = s.folder / "orders.toml"
    path.write_text(
        text.replace('name      = "orders"', f'name = "{s.name}"')
        .replace('["orders"]', f'["{s.topic}"]')
        .replace('table = "orders"', f'table = "{s.table}"')
    )
    child = subprocess.Popen(
        [sys.executable, str(FOLDER / "service.py"), str(path), "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROKERS": s.cluster.bootstrap, "DATABASE_URL": s.url},
    )
    try:
        assert child.stdout is not None
        yield s, path, child.stdout.readline().rpartition("/")[2].strip()
    finally:
        child.kill()
        child.communicate()


def asked(address: str, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_service(service: tuple[Scenario, Path, str]) -> None:
    s, path, address = service
    status, first = asked(address, "POST", "/orders", ORDER)
    assert (status, first["state"]) == (202, "not-yet"), "nobody runs the pipeline"
    s.start(path, BROKERS=s.cluster.bootstrap)
    deadline = time.monotonic() + 90
    while (found := asked(address, "GET", f"/receipts/{first['record']}"))[0] == 202:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert (found[0], found[1]["state"]) == (201, "written")
    bad = ORDER.replace(b"1", b'"one"', 1)
    for body, expected in [(ORDER, (201, "written")), (bad, (422, "dead-lettered"))]:
        status, said = asked(address, "POST", "/orders", body)
        while status == 202 and time.monotonic() < deadline:  # a busy machine: ask again, as a caller would
            status, said = asked(address, "GET", f"/receipts/{said['record']}")
        assert (status, said["state"]) == expected, said
    assert said["reason"] == "wrong-type"
    assert s.rows(f'SELECT id, amount FROM "{s.table}"') == [(1, 9.5)] * 2
    assert asked(address, "POST", "/nowhere", ORDER)[0] == 400
    assert asked(address, "GET", "/receipts/other/0/0")[1]["state"] == "unknown"
