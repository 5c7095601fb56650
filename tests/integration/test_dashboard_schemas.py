"""Messages that a schema registry has a schema for, on the dashboard's pages and in a real browser."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.test_dashboard_browser import HOSTILE, visiting

from avow.clients.producer import Producer
from avow.dashboard.app import make
from avow.dashboard.guard import AccessRules
from avow.dashboard.jobs import Jobs
from avow.dashboard.state import PAGE_TIMEOUTS, AppState
from avow.dashboard.watch import Watch
from avow.formats.avro.encode import encode
from avow.formats.avro.schema import parse
from avow.formats.registry.frame import framed
from avow.guarantee import Guarantee
from avow.local.cluster import Cluster, PortPicker
from avow.local.registry import Registry
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.settings import Source

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from starlette.testclient import TestClient

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dashboard_browser")]

FIELDS = [{"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}]
SCHEMA = json.dumps({"type": "record", "name": "Payment", "namespace": "shop", "fields": FIELDS})
UNKNOWN = 2**31 - 7
PIPELINE = """\
name = "decoded"
guarantee = "at-least-once"
[source]
brokers = "{brokers}"
topics = ["{topic}"]
[decode]
format = "avro"
schema = "registry"
[decode.registry]
url = "{url}"
[sink]
kind = "postgres"
url = "${{env:DATABASE_URL}}"
table = "decoded"
"""


def fill(cluster: Cluster, url: str, topic: str) -> int:
    """Records of every kind, one an offset; the id of their schema."""
    number = SchemaRegistry(RegistrySettings(url=url)).register(f"{topic}-value", "AVRO", SCHEMA)
    write = parse(SCHEMA)
    with Producer(cluster.bootstrap, guarantee=Guarantee.AT_LEAST_ONCE) as producer:
        for value in (
            framed(number, encode(write, {"id": 7, "note": "a note"})),
            framed(number, encode(write, {"id": 8, "note": HOSTILE.decode()})),
            framed(number, b"\x02"),
            framed(UNKNOWN, b"\x02\0"),
            b'{"plain": "json"}',
        ):
            producer.send(topic, value)
    return number


@contextmanager
def opened(cluster: Cluster, registry: RegistrySettings | None, timeout_s: float) -> Iterator[TestClient]:
    """The application in this process."""
    from starlette.testclient import TestClient

    source = Source(brokers=cluster.bootstrap, topics_pattern=".*")
    state = AppState(AccessRules(), source, Watch(), Jobs(dict(os.environ)), (), timeout_s, registry)
    with TestClient(make(state), base_url="http://127.0.0.1:8642") as client:
        yield client


def parts(client: TestClient, path: str) -> Any:
    answer = client.get(f"/api{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_messages_are_decoded_and_what_cannot_be_says_why(
    cluster: Cluster, schema_registry: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    number = fill(cluster, schema_registry, topic)
    with opened(cluster, RegistrySettings(url=schema_registry), 30) as client:
        rows = {row["offset"]: row["value"] for row in parts(client, f"/topics/{topic}/messages")["messages"]}
        assert json.loads(rows[0]["text"]) == {"id": 7, "note": "a note"}
        assert rows[0]["kind"] == "avro"
        assert rows[0]["schema"] == {"id": number, "type": "shop.Payment", "subjects": [], "problem": ""}
        assert rows[2]["schema"]["problem"] == "not-avro: note: it ends where a number is due"
        assert rows[3]["schema"]["problem"].startswith("unknown-schema-id: ")
        assert rows[4]["schema"] is None
        whole = parts(client, f"/topics/{topic}/messages/0/0")["value"]
        assert whole["text"] == '{\n  "id": 7,\n  "note": "a note"\n}'
        assert whole["hex"].startswith("000000  00 ")
        assert f"{topic}-value version 1" in whole["schema"]["subjects"]
        exported = [json.loads(line) for line in client.get(f"/topics/{topic}/export?at=oldest").text.splitlines()]
        assert exported[0]["value"] == {"id": 7, "note": "a note"}
        assert exported[3]["value_schema_id"] == UNKNOWN
        # A page has all of it escaped, and the bytes as they are to be saved.
        page = client.get(f"/topics/{topic}/messages/0/1").text
        assert "&lt;script&gt;" in page
        assert "<script>window.hurt" not in page
        assert client.get(f"/topics/{topic}/messages/0/2/value").content == framed(number, b"\x02")
    with opened(cluster, None, 30) as client:
        assert all(row["value"]["schema"] is None for row in parts(client, f"/topics/{topic}/messages")["messages"])


def test_a_registry_that_hangs_or_dies_costs_a_page_little_and_nothing_else(
    cluster: Cluster, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "registry", PortPicker().free())
    registry.prepare()
    registry.start()
    timeout_s = 8.0
    watch = Watch()
    try:
        registry.await_ready()
        topic = make_topic()
        fill(cluster, registry.url, topic)
        file = tmp_path / "decoded.toml"
        file.write_text(PIPELINE.format(brokers=cluster.bootstrap, topic=topic, url=registry.url))
        watch = Watch([file], {"DATABASE_URL": cluster.postgres_url or ""})
        with opened(cluster, RegistrySettings(url=registry.url), timeout_s) as client:
            registry.pause()
            for path in (f"/topics/{topic}/messages/0/0", f"/topics/{topic}/messages"):
                began = time.monotonic()
                answer = parts(client, path)
                assert time.monotonic() - began < timeout_s * PAGE_TIMEOUTS
                value = answer["value"] if "value" in answer else answer["messages"][-1]["value"]
                assert value["schema"]["problem"].startswith("not-decoded: ")
                assert "no answer within 2 s" in value["schema"]["problem"]
                assert value["size"] > 5
            registry.resume()
            registry.kill()
            watch.sample_now()
            (watched,) = watch.pipelines()
            assert watched.pipeline is not None, "a pipeline is known while its registry is away"
            time.sleep(5.2)  # it is left alone so long
            value = parts(client, f"/topics/{topic}/messages/0/0")["value"]
            assert "cannot be asked" in value["schema"]["problem"]
            registry.start()
            registry.await_ready()
            time.sleep(5.2)
            assert json.loads(parts(client, f"/topics/{topic}/messages/0/0")["value"]["text"])["id"] == 7
    finally:
        watch.close()
        registry.resume()
        registry.stop()


def test_in_a_browser_by_the_registry_of_a_pipeline(
    serve: Callable[..., str],
    browser: Browser,
    cluster: Cluster,
    schema_registry: str,
    make_topic: Callable[..., str],
    tmp_path: Path,
) -> None:
    topic = make_topic()
    number = fill(cluster, schema_registry, topic)
    file = tmp_path / "decoded.toml"
    file.write_text(PIPELINE.format(brokers=cluster.bootstrap, topic=topic, url=schema_registry))
    with visiting(browser, serve(file)) as page:
        page.goto(f"/topics/{topic}/messages")
        assert page.get_by_text('{"id": 7, "note": "a note"}').is_visible()
        assert page.get_by_text(f"schema {UNKNOWN}, not decoded").is_visible()
        page.goto(f"/topics/{topic}/messages/0/0")
        assert page.get_by_text(f"Schema {number}, shop.Payment").is_visible()
        value = page.locator(".panel", has_text="Value")
        for tab, beginning in (("JSON", '{\n  "id": 7,'), ("Hex", "000000  00 ")):
            value.get_by_role("button", name=tab).click()
            assert value.locator("pre:visible").inner_text().startswith(beginning)
        page.screenshot(path=Path(os.environ.get("AVOW_SCREENSHOTS", tmp_path)) / "message-avro-light.png")
        page.goto(f"/topics/{topic}/messages/0/1")  # a hostile one; visiting sees what it would do
        assert page.get_by_text("<script>window.hurt").is_visible()
        page.goto(f"/topics/{topic}/messages/0/2")
        assert page.get_by_text("Not decoded: not-avro: note: it ends where a number is due").is_visible()
