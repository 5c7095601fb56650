"""The dashboard in a real browser: every page in light and dark, the live parts, and changes made by hand.

Screenshots of every page are left in the folder that AVOW_SCREENSHOTS names, or in pytest's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from tests.fix_dashboard import small_proof
from tests.fix_pipeline import Scenario, payment

from avow.audit.archive import keep
from avow.audit.judge import Verdict
from avow.audit.report import AuditReport
from avow.guarantee import Guarantee
from avow.kafka import metadata
from avow.local.cluster import Cluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dashboard_browser")]

PATIENCE_MS = 60_000
WIDE: ViewportSize = {"width": 1280, "height": 800}
NARROW: ViewportSize = {"width": 390, "height": 800}
HOSTILE = b"<script>window.hurt = 1</script><svg onload='window.hurt = 1'></svg><img src=x onerror='window.hurt = 1'>"


HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


# Whether a table whose rows are cards on a narrow screen is wider than its place.
SIDEWAYS = "[...document.querySelectorAll('.scroll:has(> .stack)')].some((one) => one.scrollWidth > one.clientWidth)"


# What a hostile record would do is told, on whichever page it happens.
TRAP = "Object.defineProperty(window, 'hurt', { set() { console.error('a record was obeyed'); } })"


@contextmanager
def visiting(browser: Browser, address: str, *, refused: bool = False) -> Iterator[Page]:
    """A page that must not complain, ask another host, or run what it shows.

    ``refused``: that an answer is a refusal may be told, as browsers do.
    """
    wrong: list[str] = []
    context = browser.new_context(base_url=address, viewport=WIDE, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(TRAP)
    page = context.new_page()

    def said(message: ConsoleMessage) -> None:
        if message.type != "log" and not (refused and message.text.startswith("Failed to load resource")):
            wrong.append(f"{page.url}: {message.type}: {message.text}")

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(address) else wrong.append(asked.url))
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def stage(scenario: Callable[..., Scenario], cluster: Cluster, tmp_path: Path) -> Scenario:
    """A pipeline that has run, with dead letters, a hostile record, a group, a proof and an audit."""
    one = scenario(2)
    one.produce([*map(payment, range(300)), HOSTILE, b'{"id": "x"}'])
    one.drain(one.file(), "consumer")
    one.produce(map(payment, range(300, 320)))
    client = metadata.admin(cluster.bootstrap)
    group = f"g-{one.name}"
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(one.topic, 0, 50)])
    client.alter_consumer_group_offsets([request])[group].result()
    evidence = tmp_path / "evidence"
    sentence = "held: 302 records, each delivered as exactly-once promises."
    keep(AuditReport(one.name, Guarantee.EXACTLY_ONCE, "append", Verdict.HELD, sentence, ""), evidence)
    small_proof(evidence)
    return one


def paths(one: Scenario, page: Page) -> dict[str, str]:
    """Every page, by the name of its screenshot."""
    page.goto("/evidence")
    kept = {
        kind: page.locator(f"a[href^='/evidence/{kind}s/']").first.get_attribute("href") or ""
        for kind in ("audit", "proof")
    }
    return {
        "pipelines": "/pipelines",
        "pipeline": f"/pipelines/{one.name}",
        "dead-letters": f"/pipelines/{one.name}/dead-letters",
        "dead-letter": f"/pipelines/{one.name}/dead-letters/{one.topic}/0/150",
        "job": "/jobs/1",
        "cluster": "/cluster",
        "topics": "/topics",
        "topic": f"/topics/{one.topic}",
        "messages": f"/topics/{one.topic}/messages",
        "tail": f"/topics/{one.topic}/messages",
        "message": f"/topics/{one.topic}/messages/0/150",
        "groups": "/groups",
        "group": f"/groups/g-{one.name}",
        "transactions": "/transactions",
        "evidence": "/evidence",
        **kept,
        "explained": "/explained?guarantee=at-least-once&after=6",
        "api": "/api",
        "login": "/login",
        "problem": "/topics/not-there",
    }


def load_whole(page: Page, name: str, path: str) -> None:
    """A page, as soon as all of it is there."""
    page.goto(path)
    page.locator("h1").wait_for()
    if name == "tail":
        page.get_by_role("button", name="Live tail").click()
        page.locator(".pill", has_text="following").wait_for()
    for waiting in page.locator(".wait").all():  # parts that load by themselves
        waiting.wait_for(state="detached")


def test_every_page_in_light_and_dark_and_on_a_narrow_screen(
    serve: Callable[..., str], browser: Browser, stage: Scenario, tmp_path: Path
) -> None:
    address = serve(stage.folder / "pipeline.toml")
    shots = Path(os.environ.get("AVOW_SCREENSHOTS", tmp_path / "screenshots"))
    with visiting(browser, address) as page:
        page.goto(f"/pipelines/{stage.name}/dead-letters")
        page.get_by_role("button", name="Redrive 2").click()
        page.get_by_text("2 still dead letters").wait_for()
        every = paths(stage, page)
    with visiting(browser, address, refused=True) as page:
        for name, path in every.items():
            page.set_viewport_size(WIDE)
            load_whole(page, name, path)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=shots / f"{name}-{scheme}.png")
            page.set_viewport_size(NARROW)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} is wider than the screen"
            if name in ("pipelines", "pipeline", "dead-letters", "messages", "tail"):
                assert not page.evaluate(SIDEWAYS), f"{name} has a table that has to be moved sideways"
    assert len(list(shots.glob("*.png"))) >= 2 * len(every)


def test_with_a_token_and_without_tls(serve: Callable[..., str], browser: Browser, stage: Scenario) -> None:
    """From another machine: no page without the token; there is no clipboard for pages, and Copy works all the same."""
    token = "a token that is long"
    port = urlsplit(serve(stage.folder / "pipeline.toml", "--host", "0.0.0.0", "--token", token)).port
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some if one.family == AF_INET]
    outside = next((address for address in addresses if not address.startswith("127.")), "0.0.0.0")
    with visiting(browser, f"http://{outside}:{port}", refused=True) as page:
        page.goto("/cluster")
        page.wait_for_url("**/login?next=/cluster")
        page.get_by_label("Token").fill("another one")
        page.get_by_role("button", name="Enter").click()
        page.get_by_text("Wrong token.").wait_for()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Enter").click()
        page.wait_for_url("**/cluster")
        page.locator(".card", has_text="brokers up").wait_for()

        page.goto(f"/topics/{stage.topic}/messages/0/1")
        assert page.evaluate("isSecureContext") is False
        value = page.locator(".panel", has_text="Value")
        for tab, beginning in (("JSON", '{\n  "id": 2,'), ("Raw", '{"id": 2, '), ("Hex", "000000  7b 22 69 64")):
            value.get_by_role("button", name=tab).click()
            assert value.locator("pre:visible").inner_text().startswith(beginning)
            value.get_by_role("button", name="Copy").click()
            value.get_by_role("button", name="Copied").wait_for()
            page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), { id: 'paste' }))")
            page.locator("#paste").focus()
            page.keyboard.press("Control+V")
            assert page.locator("#paste").input_value().startswith(beginning)
            page.evaluate("document.querySelector('#paste').remove()")
            value.get_by_role("button", name="Copy", exact=True).wait_for()
        page.goto(f"/topics/{stage.topic}/messages?q=%22id%22:%207,")
        with page.expect_download() as saved:
            page.get_by_role("link", name="Export").click()
        assert saved.value.suggested_filename == f"{stage.topic}.jsonl"
        (line,) = saved.value.path().read_text().splitlines()
        assert json.loads(json.loads(line)["value"])["id"] == 7


def test_a_person_looks_around_and_changes_things(
    serve: Callable[..., str], browser: Browser, stage: Scenario, cluster: Cluster
) -> None:
    address = serve(stage.folder / "pipeline.toml")
    with visiting(browser, address) as page:
        # The menu by keys, the search by its key, the theme by its switch.
        page.goto("/")
        page.wait_for_url("**/pipelines")
        page.keyboard.press("g")
        page.keyboard.press("t")
        page.wait_for_url("**/topics")
        page.keyboard.press("/")
        page.keyboard.type(stage.topic)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/topics?q={stage.topic}*")
        assert page.locator("tbody tr").count() == 1
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 27)"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.get_by_role("button", name="Auto").click()

        # A topic is made, followed while records come, and deleted by typing its name.
        name = f"made-{uuid4().hex[:8]}"
        page.goto("/topics")
        page.get_by_text("Create a topic").click()
        page.get_by_label("Name").fill(name)
        page.get_by_role("button", name="Create").click()
        page.wait_for_url(f"**/topics/{name}")
        page.get_by_role("link", name="Messages", exact=True).click()
        with page.expect_request(re.compile("/live/topics/")):
            page.get_by_role("button", name="Live tail").click()
        producer = Producer({"bootstrap.servers": cluster.bootstrap}, logger=metadata.QUIET)
        rows = page.locator("#tail-rows tr")
        for number in range(120):  # the tail begins where the log ends when it begins: send until it shows one
            producer.produce(name, json.dumps({"n": number}).encode() + HOSTILE)
            producer.flush(30)
            if rows.count():
                break
            page.wait_for_timeout(500)
        rows.first.wait_for()
        assert "<script>" in rows.first.inner_text(), "it is shown as text"
        # A tab that is not seen gives its connection back. What came meanwhile is there when it is seen again.
        with page.expect_event("requestfailed", lambda asked: "/live/topics/" in asked.url):
            page.evaluate(HIDE, True)
        producer.produce(name, b"while nobody looked")
        producer.flush(30)
        with page.expect_request(re.compile("/live/topics/.*onwards=")):
            page.evaluate(HIDE, False)
        page.locator("#tail-rows td.value", has_text="while nobody looked").wait_for()
        page.get_by_role("link", name="Stop").click()
        page.get_by_label("Search in key, value and headers").fill('{"n": 0}')
        page.get_by_role("button", name="Show", exact=True).click()
        page.locator("td.value", has_text='{"n": 0}').wait_for()
        # What is typed chooses where to begin, and another choice takes it away.
        begin, offset, moment = (page.locator(f"[name={field}]") for field in ("at", "offset", "time"))
        offset.fill("0")
        assert begin.input_value() == "offset"
        moment.fill("2020-01-01T00:00:00")
        assert (begin.input_value(), offset.input_value()) == ("time", "")
        begin.select_option("oldest")
        assert moment.input_value() == ""
        page.get_by_role("button", name="Show", exact=True).click()
        page.wait_for_url("**at=oldest**")
        page.locator("td.value", has_text='{"n": 0}').wait_for()
        page.goto(f"/topics/{name}")
        page.get_by_text("Delete this topic").click()
        page.get_by_label("Type its name to confirm").fill(name)
        page.get_by_role("button", name="Delete", exact=True).click()
        page.wait_for_url("**/topics")
        # The tail of a topic that is gone ends, and says so once.
        page.goto(f"/topics/{stage.topic}/messages")
        page.evaluate(
            "(gone) => document.querySelector('[hx-get]').setAttribute('hx-get', gone)", f"/topics/{name}/messages/tail"
        )
        page.evaluate("htmx.process(document.querySelector('[hx-get]'))")
        page.get_by_role("button", name="Live tail").click()
        rows.first.wait_for()
        page.locator(".pill", has_text="ended").wait_for()
        page.wait_for_timeout(5_000)  # a browser would have connected again
        assert rows.count() == 1


def test_a_pipeline_is_followed_and_its_dead_letter_redriven(
    serve: Callable[..., str], browser: Browser, stage: Scenario
) -> None:
    address = serve(stage.folder / "pipeline.toml")
    with visiting(browser, address) as page:
        page.goto(f"/pipelines/{stage.name}")
        page.locator(".pill.behind").wait_for()  # by the live part, as soon as it was looked at
        stage.drain(stage.folder / "pipeline.toml", "consumer")
        page.locator(".flow .hop.sink b", has_text="320").wait_for()  # and again, without a reload
        page.locator(".pill.moving").wait_for()
        page.locator(".chart canvas").first.wait_for()
        page.get_by_label("Offset", exact=True).fill("150")
        page.get_by_role("button", name="Find", exact=True).click()
        page.locator("#receipt", has_text="Dead-lettered").wait_for()

        page.get_by_role("link", name="Dead letters").click()
        page.locator("td.value", has_text="<script>").wait_for()
        page.get_by_role("button", name="Redrive 2").click()
        page.wait_for_url("**/jobs/*")
        page.get_by_text("0 written, 0 skipped, 2 still dead letters").wait_for()  # by the live part


def test_the_fault_is_placed_by_hand(serve: Callable[..., str], browser: Browser) -> None:
    address = serve("--read-only")
    with visiting(browser, address) as page:
        page.goto("/explained")
        page.locator(".choice", has_text="at-most-once").click()
        page.wait_for_url("**guarantee=at-most-once**")
        claimed = page.locator(".story li", has_text="claims [0, 3)")
        claimed.get_by_text("fault here").click()
        page.locator("#outcome", has_text="Offsets 0, 1, 2 lost").wait_for()
        assert page.locator(".frame.now.fault").count() == 1
        page.keyboard.press("ArrowLeft")
        assert page.locator(".frame.now", has_text="claims [0, 3)").count() == 1
        page.locator(".choice", has_text="exactly-once").click()
        page.locator(".story li", has_text="writes 0, 1, 2 and claims").get_by_text("fault here").click()
        page.locator("#outcome", has_text="Every record is in the sink once").wait_for()
        # Nothing can be changed here, and nothing offers to.
        assert page.get_by_text("read-only").is_visible()
        for path in ("/topics", "/pipelines", "/groups"):
            page.goto(path)
            assert page.locator("form[method=post]").count() == 0
