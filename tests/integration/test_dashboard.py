"""The dashboard over a real cluster, through its own application: pages, JSON, changes, and who may ask."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from tests.fix_dashboard import small_proof
from tests.fix_pipeline import Scenario, payment

from avow.dashboard import messages
from avow.dashboard.pages import PAGES
from avow.kafka import metadata
from avow.kafka.admin import Admin
from avow.kafka.headers import NOT_UTF8
from avow.kafka.log import Log
from avow.local.cluster import Cluster
from avow.prove import raw_producer
from avow.prove.raw_producer import RawRecord

if TYPE_CHECKING:
    from tests.visitor import Visitor

pytestmark = pytest.mark.cluster

Visit = Callable[..., "Visitor"]
HOSTILE = [
    b"<script>window.hurt = 1</script>",
    b'"><svg onload="window.hurt = 1"><img src=x onerror="window.hurt = 1">',
    b"\x1b[2J\x1b[31mred\x07",
    "\u202egnp.exe \u2066isolate\u2069 \ufeff".encode(),
    b"{{ 7 * 7 }} {% raw %} ${7*7}",
    b"\xff\xfe\x00\x01",
    b"long " * 200_000,
]


def until(found: Callable[[], Any], what: str, timeout_s: float = 90) -> Any:
    """What is found at last."""
    deadline = time.monotonic() + timeout_s
    while not (answer := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return answer


def produce(cluster: Cluster, topic: str, values: list[bytes], **more: Any) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap, "message.max.bytes": 30_000_000}
    producer = Producer(settings, logger=metadata.QUIET)
    for value in values:
        producer.produce(topic, value, **more)
    assert producer.flush(60) == 0


def told(visitor: Visitor, path: str, status: int = 200) -> Any:
    answer = visitor.get(f"/api{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_topic_from_its_making_to_its_end(visit: Visit, cluster: Cluster) -> None:
    visitor = visit()
    name = f"t-{uuid4().hex[:10]}"
    made = visitor.change("/topics", name=name, partitions="2", replicas="3", config="retention.ms = 3600000\n\n")
    assert (made.status_code, made.headers["location"]) == (303, f"/topics/{name}")
    produce(cluster, name, [b'{"n": 1}', b'{"n": 2}', b"needle in the haystack"], key=b"k", partition=1)

    brokers = told(visitor, "/cluster")["brokers"]
    assert [(one["id"], one["up"]) for one in brokers] == [(1, True), (2, True), (3, True)]
    assert sum(one["controller"] for one in brokers) == 1
    assert all(one["version"] == "4.3" and one["disk_bytes"] > 0 for one in brokers)
    assert all(0 < one["free_bytes"] < one["total_bytes"] for one in brokers)
    (row,) = told(visitor, f"/topics?q={name.upper()}")["topics"]
    assert (row["partitions"], row["replicas"], row["offsets"], row["under_replicated"]) == (2, 3, 3, 0)
    topic = told(visitor, f"/topics/{name}")
    assert topic["config"] == {"retention.ms": "3600000"}
    assert [one["end"] for one in topic["partitions"]] == [0, 3]
    sizes = [one["bytes"] for one in topic["partitions"]]
    assert sizes[0] == 0 < sizes[1], "nothing is in the first"
    assert topic["disk_bytes"] == row["disk_bytes"] == 3 * sizes[1], "each of three replicas has all of it"

    # Newest first; then page by page, in both directions, until nothing is left.
    first = told(visitor, f"/topics/{name}/messages?limit=2")
    assert [one["offset"] for one in first["messages"]] == [2, 1]
    older = told(visitor, f"/topics/{name}/messages?limit=2&before={first['older']}")
    assert ([one["offset"] for one in older["messages"]], older["older"]) == ([0], "")
    oldest = told(visitor, f"/topics/{name}/messages?at=oldest&limit=1&partition=1")
    assert [one["offset"] for one in oldest["messages"]] == [0]
    newer = told(visitor, f"/topics/{name}/messages?onwards={oldest['newer']}&partition=1")
    assert [one["offset"] for one in newer["messages"]] == [1, 2]
    at = told(visitor, f"/topics/{name}/messages?at=offset&offset=2")
    assert [one["value"]["text"] for one in at["messages"]] == ["needle in the haystack"]
    past = told(visitor, f"/topics/{name}/messages?at=time&time=2020-01-01T00:00")
    assert len(past["messages"]) == 3
    before = told(visitor, f"/topics/{name}/messages?at=time&time=1969-12-31T23:59:59.999")
    assert len(before["messages"]) == 3, "to Kafka, the millisecond before 1970 is a word for the end"
    future = told(visitor, f"/topics/{name}/messages?at=time&time=2090-01-01T00:00")
    assert future["messages"] == []
    for typed in ("offset=2", "at=oldest&offset=2", "at=offset&time=2020-01-01T00:00", "at=offset", "at=time"):
        assert " needs " in told(visitor, f"/topics/{name}/messages?{typed}", 400)["problem"], "nothing is passed over"
    found = told(visitor, f"/topics/{name}/messages?q=NEEDLE")
    assert [(one["partition"], one["offset"]) for one in found["messages"]] == [(1, 2)]
    assert (found["scanned"], found["older"]) == (3, "")
    lines = [json.loads(line) for line in visitor.get(f"/topics/{name}/export?q=needle").text.splitlines()]
    assert [(line["key"], line["value"]) for line in lines] == [("k", "needle in the haystack")]
    assert told(visitor, f"/topics/{name}/messages/1/9", 404)["problem"].startswith("no record is at offset 9")
    told(visitor, f"/topics/{name}/messages?partition=7", 404)

    # Too many partitions to look at side by side: one has to be chosen, and the page has the form for it.
    wide = f"{name}-wide"
    assert visitor.change("/topics", name=wide, partitions="65", replicas="1").status_code == 303
    until(lambda: told(visitor, f"/topics/{wide}")["all_partitions"] == 65, "it is made")
    many = told(visitor, f"/topics/{wide}/messages")
    assert (many["choose"], many["partitions"], many["messages"]) == (True, 65, [])
    assert "Choose a partition" in visitor.get(f"/topics/{wide}/messages").text
    assert not told(visitor, f"/topics/{wide}/messages?partition=64")["choose"]
    assert visitor.get(f"/topics/{wide}/export").status_code == 409

    # What cannot be undone is typed.
    wrong = visitor.change(f"/topics/{name}/delete", confirm="something else")
    assert wrong.status_code == 409
    assert "nothing was changed" in wrong.text
    assert visitor.change(f"/topics/{name}/delete", confirm=name).status_code == 303
    until(lambda: visitor.get(f"/topics/{name}").status_code == 404, "it was deleted")
    assert visitor.change("/topics", name="bad name").status_code == 400
    own = visitor.change("/topics/__consumer_offsets/delete", confirm="__consumer_offsets")
    assert (own.status_code, "is an internal topic of Kafka" in own.text) == (409, True)
    assert told(visitor, "/topics/__consumer_offsets")["internal"]
    for wrong, words in (
        ({"config": "no.such.setting = 1"}, "Unknown topic config name: no.such.setting"),
        ({"config": "retention.ms = soon"}, "retention.ms"),
        ({"replicas": "7"}, "replication"),
        ({"name": ".."}, "Topic name is invalid"),
    ):
        refused = visitor.change("/topics", **{"name": f"{name}-again", **wrong})
        assert refused.status_code == 409, refused.text
        assert words in refused.text, "in the broker's own words"
        assert "Not possible" in refused.text


def test_a_topic_that_is_deleted_while_a_page_is_made(
    visit: Visit, make_topic: Callable[..., str], admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of everything say nothing of it, and fail for nobody: on a busy cluster somebody always deletes a topic."""
    here, gone = make_topic(), make_topic(2)
    stale = admin.cluster()
    monkeypatch.setattr(Log, "cluster", lambda _log: stale)
    admin.delete_topic(gone)
    visitor = visit()
    shown = [row["name"] for row in told(visitor, f"/topics?q={here}")["topics"]]
    assert (shown, told(visitor, f"/topics?q={gone}")["topics"]) == ([here], [])
    assert told(visitor, "/transactions")["partitions"] >= 1
    told(visitor, "/groups")


def test_large_records_are_shown_however_few_at_a_time(
    visit: Visit, cluster: Cluster, make_topic: Callable[..., str]
) -> None:
    """A look keeps 24 MB. What is looked at backwards must be read from its beginning to its end."""
    topic = make_topic(max_message_bytes="30000000")
    produce(cluster, topic, [b"%02d " % number + b"x" * 1_000_000 for number in range(50)])
    visitor = visit()
    for question in ("", "&q=xxx"):
        seen: list[int] = []
        place = ""
        while len(seen) < 50:
            answer = told(visitor, f"/topics/{topic}/messages?before={place}{question}")
            assert answer["messages"], f"after {len(seen)} with {question!r}"
            seen += [one["offset"] for one in answer["messages"]]
            place = answer["older"]
        assert seen == list(reversed(range(50)))
        assert not place
    found = told(visitor, f"/topics/{topic}/messages?q=03+xx")
    assert [one["offset"] for one in found["messages"]] == [3]
    # Each alone is nearly all that a look may keep.
    fat = make_topic(max_message_bytes="30000000")
    produce(cluster, fat, [b"y" * 20_000_000] * 3)
    newest = told(visitor, f"/topics/{fat}/messages")
    assert newest["messages"][0]["offset"] == 2
    assert newest["messages"][0]["value"]["size"] == 20_000_000


def test_records_say_what_became_of_their_transaction(
    visit: Visit, cluster: Cluster, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    settings = {"bootstrap.servers": cluster.bootstrap, "transactional.id": f"d-{topic}"}
    producer = Producer(settings, logger=metadata.QUIET)
    producer.init_transactions(30)
    for value, end in ((b"committed", producer.commit_transaction), (b"aborted", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        end(30)
    visitor = visit()
    assert all(one["topic"] != topic for one in told(visitor, "/transactions")["transactions"])
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(30)
    seen = told(visitor, f"/topics/{topic}/messages")["messages"]
    assert [(one["value"]["text"], one["state"]) for one in seen] == [
        ("open", "open"),
        ("aborted", "aborted"),
        ("committed", "committed"),
    ]
    (opened,) = (one for one in told(visitor, "/transactions")["transactions"] if one["topic"] == topic)
    assert (opened["first_offset"], opened["waiting"], opened["hanging"]) == (4, 1, False)
    holder = opened["holder"]
    assert (holder["transactional_id"], holder["state"], holder["timeout_ms"]) == (f"d-{topic}", "open", 60_000)
    assert f"d-{topic}" in visitor.get("/transactions").text
    assert told(visitor, f"/topics?q={topic}")["topics"][0]["open"]
    page = visitor.get(f"/topics/{topic}/messages/0/2").text
    assert "Its transaction was aborted." in page
    # A marker is no record.
    told(visitor, f"/topics/{topic}/messages/0/1", 404)
    producer.abort_transaction(30)
    until(lambda: told(visitor, f"/topics/{topic}/messages")["messages"][0]["state"] == "aborted", "the abort is seen")


def test_what_strangers_write_is_shown_and_never_obeyed(
    visit: Visit, cluster: Cluster, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(max_message_bytes="5000000")
    hostile = HOSTILE[0]
    produce(
        cluster, topic, HOSTILE, key=hostile, headers=[("<b>name</b>", hostile), ("none", None), ("long", b"h" * 3_000)]
    )
    visitor = visit()
    pages = [f"/topics/{topic}/messages", f"/topics/{topic}/messages?q=%3Cscript%3E%22%3E%3Csvg"]
    pages += [f"/topics/{topic}/messages/0/{offset}" for offset in range(len(HOSTILE))]
    for path in pages:
        answer = visitor.get(path)
        assert answer.status_code == 200
        assert not re.search(r"<script>|<svg onload|<img|<b>name", answer.text), path
        assert not set(answer.text) & set("\x1b\x07\x00\u202e\u2066\u2069\ufeff"), path
        assert len(answer.text) < 1_500_000
    assert "&lt;script&gt;" in visitor.get(pages[0]).text
    assert "49" not in visitor.get(pages[6]).text.split("<main")[1].split("Value")[1].split("</pre>")[0]
    assert "h" * 3_000 in visitor.get(pages[2]).text, "a header is shown whole"
    saved = visitor.get(f"/topics/{topic}/messages/0/0/value")
    assert saved.content == hostile
    assert saved.headers["content-disposition"].startswith("attachment")
    assert saved.headers["content-type"] == "application/octet-stream"
    # A group may be called anything.
    group = f"<img src=x>/{uuid4().hex[:8]}"
    client = metadata.admin(cluster.bootstrap)
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 1)])
    client.alter_consumer_group_offsets([request])[group].result()
    listed = visitor.get("/groups")
    assert "<img" not in listed.text
    link = next(link for link in re.findall(r'href="(/groups/[^"]+)"', listed.text) if group[-8:] in link)
    one = visitor.get(link)
    assert one.status_code == 200
    assert "<img" not in one.text
    assert any(one["group"] == group for one in told(visitor, f"/topics/{topic}/groups")["groups"])


def test_every_record_that_a_producer_can_make_has_a_page(
    visit: Visit, cluster: Cluster, scenario: Callable[..., Scenario]
) -> None:
    """Header names that are not UTF-8, timestamps beyond the year 9999, keys of any bytes; in the list, on a page of
    its own, among dead letters, in the export, and as they come."""
    one = scenario(1)
    config = {"message.timestamp.after.max.ms": str(2**63 - 1), "message.timestamp.before.max.ms": str(2**63 - 1)}
    resource = ConfigResource(
        ResourceType.TOPIC,
        one.topic,
        incremental_configs=[
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in config.items()
        ],
    )
    metadata_client = metadata.admin(cluster.bootstrap)
    metadata_client.incremental_alter_configs([resource])[resource].result(30)
    every = bytes(range(256))
    records = [
        RawRecord(every, every, ((b"\x7f", every),), 253_402_300_800_000),
        RawRecord(b"", b"", timestamp_ms=2**63 - 1),
        RawRecord(b"[" * 100_000, b"\xff" * 100_000, timestamp_ms=1),
        RawRecord(b"1e400", headers=((b"", b""), (b"x" * 10_000, b"y" * 100_000))),
    ]
    raw_producer.produce(cluster.bootstrap, one.topic, records)
    file = one.file(dead_letters="max_share = 1.0")
    one.drain(file, "consumer")  # each is a dead letter
    strange = RawRecord(b"after", headers=((b"caf\xe9", b"x"), (b"good", b"y")), timestamp_ms=-(10**15))
    raw_producer.produce(
        cluster.bootstrap, one.topic, [strange] * 20
    )  # many: a call that is made often is made in another way
    visitor = visit([file])
    visitor.state.watch.sample_now()
    pages = [
        f"/topics/{one.topic}/messages",
        f"/topics/{one.topic}/messages?q=zzz",
        f"/pipelines/{one.name}/dead-letters",
    ]
    pages += ["/pipelines", f"/pipelines/{one.name}", f"/topics/{one.topic}"]
    pages += [f"/topics/{one.topic}/messages/0/{offset}" for offset in range(5)]
    pages += [f"/pipelines/{one.name}/dead-letters/{one.topic}/0/{offset}" for offset in range(4)]
    for page in pages:
        for path in (page, f"/api{page}"):
            answer = visitor.get(path)
            assert answer.status_code == 200, (path, answer.text[:2_000])
    assert "10000-01-01 00:00:00.000Z" in visitor.get(pages[0]).text
    newest = told(visitor, f"/topics/{one.topic}/messages?limit=1&at=offset&offset=23")["messages"][0]
    assert (newest["value"]["text"], newest["headers"]) == ("after", 2)
    assert NOT_UTF8 in visitor.get(f"/topics/{one.topic}/messages/0/4").text
    lines = [json.loads(line) for line in visitor.get(f"/topics/{one.topic}/export").text.splitlines()]
    assert len(lines) == 24
    assert sum(NOT_UTF8 in json.dumps(line["headers"]) for line in lines) == 20
    tail = messages.tail(visitor.state, messages.TailParams(topic=one.topic, onwards="0:0"), lambda: False)
    seen: list[int] = []
    while len(seen) < 24:
        seen += [row.offset for row in next(tail)[0]]
    assert seen == list(range(24))


def test_positions_of_a_group_are_set_and_those_of_a_pipeline_are_not(
    visit: Visit, alone: Cluster, scenario: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scenario(2)
    one.produce(map(payment, range(20)))
    visitor = visit([one.file()])
    group = f"g-{uuid4().hex[:8]}"
    client = metadata.admin(alone.bootstrap)
    for name in (group, one.name):
        request = ConsumerGroupTopicPartitions(name, [TopicPartition(one.topic, number, 4) for number in (0, 1)])
        client.alter_consumer_group_offsets([request])[name].result()

    def positions() -> dict[int, int]:
        return {lag["partition"]: lag["position"] for lag in told(visitor, f"/groups/{group}")["lags"]}

    described = told(visitor, f"/groups/{group}")
    assert (described["records"], described["state"], described["reserved"]) == (12, "empty", "")
    assert next(row["lag"] for row in told(visitor, f"/groups?q={group}")["groups"]) == 12
    # A topic's groups are looked for some at a time: here, one.
    monkeypatch.setattr("avow.dashboard.cluster.GROUPS_MAX", 1)
    first = told(visitor, f"/topics/{one.topic}/groups")
    pages = [told(visitor, f"/topics/{one.topic}/groups?page={page + 1}") for page in range(first["pages"])]
    assert {found["group"] for page in pages for found in page["groups"]} == {group, one.name}
    assert [(page["first"], page["last"]) for page in pages] == [(n, n) for n in range(1, first["all_groups"] + 1)]
    assert "Search the next groups" in visitor.get(f"/topics/{one.topic}/groups").text
    assert "Search the next groups" not in visitor.get(f"/topics/{one.topic}/groups?page={first['pages']}").text
    monkeypatch.undo()
    assert visitor.change(f"/groups/{group}/reset", topic=one.topic, confirm="wrong").status_code == 409
    assert positions() == {0: 4, 1: 4}
    form = {"topic": one.topic, "confirm": group, "offset": "", "time": ""}
    assert visitor.change(f"/groups/{group}/reset", **form, to="latest", partition="1").status_code == 303
    assert positions() == {0: 4, 1: 10}
    for typed in ({"offset": "7"}, {"offset": "7", "to": "time"}, {"time": "2020-01-01T00:00"}, {"to": "offset"}):
        refused = visitor.change(f"/groups/{group}/reset", **{**form, **typed})
        assert (refused.status_code, positions()) == (400, {0: 4, 1: 10}), typed
    visitor.change(f"/groups/{group}/reset", **{**form, "offset": "7"}, to="offset", partition="")
    assert positions() == {0: 7, 1: 7}
    visitor.change(f"/groups/{group}/reset", **{**form, "time": "2020-01-01T00:00:00"}, to="time")
    assert positions() == {0: 0, 1: 0}
    # Not while somebody is in it, nor where the positions are a pipeline's claims.
    member = Consumer({"bootstrap.servers": alone.bootstrap, "group.id": group}, logger=metadata.QUIET)
    member.subscribe([one.topic])
    until(lambda: member.poll(0.1) is None and member.assignment(), "it is a member")
    occupied = visitor.change(f"/groups/{group}/reset", **form, to="latest")
    member.close()
    assert (occupied.status_code, "it has active members" in occupied.text) == (409, True)
    ledger = f"g-{uuid4().hex[:8]}"
    writer = Consumer({"bootstrap.servers": alone.bootstrap, "group.id": ledger}, logger=metadata.QUIET)
    writer.commit(offsets=[TopicPartition(one.topic, 0, 3, '{"avow": 1}')], asynchronous=False)
    writer.close()
    claims = visitor.change(f"/groups/{ledger}/reset", **{**form, "confirm": ledger}, to="latest")
    assert (claims.status_code, "its offsets are claims" in claims.text) == (409, True)
    assert told(visitor, f"/groups/{ledger}")["lags"][0]["position"] == 3
    reserved = visitor.change(f"/groups/{one.name}/reset", topic=one.topic, confirm=one.name, to="latest")
    assert reserved.status_code == 409
    assert f"it belongs to pipeline {one.name}" in reserved.text
    assert {lag["position"] for lag in told(visitor, f"/groups/{one.name}")["lags"]} == {4}


def test_a_pipeline_its_dead_letters_and_an_audit(
    visit: Visit, scenario: Callable[..., Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_proof(tmp_path / "evidence")
    one = scenario(2)
    bad = b'{"id": 7, "account": "<script>window.hurt = 1</script>", "amount": "much"}'
    one.produce([*map(payment, range(40)), bad], partition=0)
    file = one.file()
    visitor = visit([file])

    def row() -> Any:
        visitor.state.watch.sample_now()
        (found,) = told(visitor, "/pipelines")["pipelines"]
        return found

    assert (row()["state"], row()["lag"]) == ("never-ran", 41)
    assert row()["lag_seconds"] > 0, "what waits has an age before the first run too"
    told(visitor, f"/pipelines/{one.name}/claims")
    one.drain(file, "consumer")
    assert row()["state"] == "moving", "at its end for a moment, as far as anybody knows"
    monkeypatch.setattr("avow.dashboard.pipelines.MOVING_S", 0)
    seen = row()
    assert (seen["state"], seen["lag"], seen["written"], seen["dead"]) == ("drained", 0, 40, 1)
    assert seen["last_batch_at"] is not None
    where = told(visitor, f"/pipelines/{one.name}")["partitions"][0]
    assert (where["position"], where["stable_end"], where["read"]) == (41, 41, 41)
    claims = told(visitor, f"/pipelines/{one.name}/claims")
    assert claims["kept"]
    assert sum(claim["read"] for claim in claims["claims"]) == 41
    assert sum(told(visitor, f"/pipelines/{one.name}/charts")["batch_records"]["values"]) == 41

    # The letter, everywhere escaped; and where records are.
    dead_letters = told(visitor, f"/pipelines/{one.name}/dead-letters")
    assert [(reason["reason"], reason["count"]) for reason in dead_letters["reasons"]] == [("wrong-type", 1)]
    assert told(visitor, f"/pipelines/{one.name}/dead-letters?reason=other")["selected"] == 0
    told(visitor, f"/pipelines/{one.name}/dead-letters?reason=$1", 400)
    path = f"/pipelines/{one.name}/dead-letters/{one.topic}/0/40"
    for page in (path, f"/pipelines/{one.name}/dead-letters", f"/pipelines/{one.name}"):
        assert visitor.get(page).status_code == 200
        assert "<script>window" not in visitor.get(page).text
    assert told(visitor, path)["value"]["kind"] == "json"
    told(visitor, f"/pipelines/{one.name}/dead-letters/{one.topic}/0/3", 404)

    def receipt(offset: int, partition: int = 0) -> str:
        query = f"topic={one.topic}&partition={partition}&offset={offset}"
        return str(told(visitor, f"/pipelines/{one.name}/receipt?{query}")["state"])

    assert [receipt(3), receipt(40), receipt(41), receipt(0, partition=9)] == [
        "written",
        "dead-lettered",
        "unknown",  # beyond the log's end
        "unknown",
    ]

    metrics = visitor.get("/metrics").text
    assert f'avow_position{{pipeline="{one.name}",topic="{one.topic}",partition="0"}} 41' in metrics
    labels = f'pipeline="{one.name}",guarantee="exactly-once",sink="PostgreSQL"'
    assert f"avow_records_written_total{{{labels}}} 40" in metrics
    assert f"avow_dead_letters{{{labels}}} 1" in metrics
    for verdict, reached in (("held", 1), ("broken", 0), ("missed", 0), ("unproven", 0), ("unknown", 0)):
        assert f'avow_proof_verdict{{pipeline="{one.name}",verdict="{verdict}"}} {reached}' in metrics
    assert f"avow_proof_timestamp_seconds{{{labels}}}" in metrics

    # After a change of the schema, the letter is taken. Both jobs start a process, and the audit starts Spark.
    def finished(answer: Any) -> Any:
        assert answer.status_code == 303, answer.text
        job = answer.headers["location"]
        until(lambda: not told(visitor, job)["running"], "it ends", timeout_s=600)
        return told(visitor, job)

    schema = "id long not null, account string not null, amount string, note string"
    one.execute(f'ALTER TABLE "{one.table}" ALTER amount TYPE text')
    one.file(decode=f'format = "json"\nschema = "{schema}"')
    until(lambda: row()["state"] == "drained", "the file is read again")
    good = finished(visitor.change(f"/pipelines/{one.name}/redrive", topic=one.topic, partition="0", from_offset="40"))
    assert good["done"] == "1 written, 0 skipped, 0 still dead letters", good
    assert told(visitor, f"/pipelines/{one.name}/dead-letters")["selected"] == 0

    # The audit is kept, and both pages show it. The rows were written as numbers and are texts now: it says so.
    audit = finished(visitor.change(f"/pipelines/{one.name}/audit"))
    assert audit["progress"]
    assert audit["verdict"] == "broken", audit
    (kept,) = until(lambda: told(visitor, "/evidence")["audits"], "it is kept")
    assert (kept["pipeline"], kept["verdict"]) == (one.name, audit["verdict"])
    assert visitor.get(f"/evidence/audits/{kept['id']}").status_code == 200
    assert row()["audit"]["id"] == kept["id"]
    assert f'avow_audit_verdict{{pipeline="{one.name}",verdict="{audit["verdict"]}"}} 1' in visitor.get("/metrics").text


def test_a_pipeline_is_stopped_when_its_last_process_has_ended(visit: Visit, scenario: Callable[..., Scenario]) -> None:
    one = scenario(1)
    one.produce(map(payment, range(20)))
    file = one.file()
    file.write_text(f'engine = "consumer"\n{file.read_text()}')
    visitor = visit([file])

    def row() -> Any:
        visitor.state.watch.sample_now()
        (found,) = told(visitor, "/pipelines")["pipelines"]
        return found

    child = one.start(file)
    until(lambda: row()["written"] == 20, "it runs")
    assert (row()["processes"], row()["state"] in ("moving", "drained")) == (1, True)
    assert re.search(r"avow_pipeline_processes{.*} 1\n", visitor.get("/metrics").text)
    assert "1 process runs." in visitor.get(f"/pipelines/{one.name}").text
    child.terminate()
    child.communicate(timeout=60)
    until(lambda: row()["state"] == "stopped", "it has ended")
    assert "No process runs." in visitor.get(f"/pipelines/{one.name}").text
    assert row()["processes"] == 0


def test_what_was_seen_stays_while_the_database_is_away_and_not_when_the_file_changes(
    visit: Visit, scenario: Callable[..., Scenario], healthy: Cluster, make_topic: Callable[..., str]
) -> None:
    one = scenario(1)
    one.produce(map(payment, range(40)))
    file = one.file()
    visitor = visit([one.folder])
    watch = visitor.state.watch

    def row() -> Any:
        watch.sample_now()
        (found,) = told(visitor, "/pipelines")["pipelines"]
        return found

    one.drain(file, "consumer")
    assert row()["written"] == 40
    one.produce(map(payment, range(40, 45)))
    before = row()
    assert before["lag"] == 5
    healthy.part("postgres").stop()
    try:
        away = row()
        assert (away["state"], away["rate"]) == ("unreachable", None)
        assert before["seen_at"] <= away["seen_at"] < away["failed_at"]
        assert all(away[name] == before[name] for name in ("read", "written", "dead", "lag", "run", "last_batch_at"))
        assert told(visitor, f"/pipelines/{one.name}")["partitions"][0]["position"] == 40
        charts = told(visitor, f"/pipelines/{one.name}/charts")
        assert charts["lag"]["values"][-1] == 5
        assert "PostgreSQL" in charts["problem"]
        for page in ("/pipelines", f"/pipelines/{one.name}"):
            text = visitor.get(page).text
            assert "not audited" in text or page != "/pipelines", "evidence does not need the sink"
            assert re.search(r">\s*40\s*<", text)
            assert "could not connect to PostgreSQL" in text
        metrics = visitor.get("/metrics").text
        assert re.search(r"avow_pipeline_up{.*} 0", metrics)
        assert "avow_lag_records{" not in metrics, "what is told to an alarm is of now"
    finally:
        healthy.start("postgres")
    assert until(lambda: row()["failed_at"] is None, "it is seen again")

    # Another topic, by the same file: Kafka is asked about that one, and nothing is left of the other.
    other = make_topic(3)
    one.file(source=f'brokers = "{healthy.bootstrap}"\ntopics = ["{other}"]')
    watch.sample_now()
    seen = told(visitor, f"/pipelines/{one.name}")
    assert {(where["topic"], where["partition"]) for where in seen["partitions"]} == {(other, p) for p in range(3)}
    assert set(told(visitor, f"/pipelines/{one.name}/charts")["lag"]["values"]) == {0}
    file.unlink()
    watch.sample_now()
    assert (watch.pipelines(), watch._logs) == ([], {})


def test_a_cluster_or_a_database_that_is_not_there_gives_a_page_that_helps(
    visit: Visit, scenario: Callable[..., Scenario]
) -> None:
    one = scenario()
    file = one.file()
    elsewhere = {"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:9/d"}
    visitor = visit([file], brokers="127.0.0.1:9", env=elsewhere, timeout_s=1)
    answer = visitor.get("/cluster")
    assert answer.status_code == 502
    assert "no answer within 1 s" in answer.text
    assert "Check that the cluster is up" in answer.text
    assert "127.0.0.1:9" in told(visitor, "/topics", 502)["problem"]
    visitor.state.watch.sample_now()
    (row,) = told(visitor, "/pipelines")["pipelines"]
    assert row["state"] == "unreachable"
    assert "could not connect to PostgreSQL" in row["problem"]
    for path in ("/pipelines", f"/pipelines/{one.name}", "/metrics", f"/api/pipelines/{one.name}"):
        answer = visitor.get(path)
        assert answer.status_code == 200
        assert "hunter2" not in answer.text
    dead_letters = visitor.get(f"/pipelines/{one.name}/dead-letters")
    assert dead_letters.status_code == 502
    assert "hunter2" not in dead_letters.text
    # And a file that is refused.
    one.file(guarantee="sometimes")
    visitor.state.watch.sample_now()
    assert "sometimes" in visitor.get("/pipelines").text


def test_a_broker_that_hangs_and_one_that_is_killed_are_told(
    visit: Visit, healthy: Cluster, make_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(3, min_insync_replicas="3")
    produce(healthy, topic, [b"x"])
    visitor = visit(timeout_s=2)
    until(lambda: told(visitor, f"/topics/{topic}")["under_replicated"] == 0, "all replicas are in sync")

    # Paused, none of them answers: every page says so in its time.
    for broker in healthy.brokers():
        broker.pause()
    try:
        for path in ("/cluster", "/topics", f"/topics/{topic}/messages", "/groups", "/transactions"):
            began = time.monotonic()
            answer = visitor.get(path)
            assert answer.status_code in (502, 504), path
            assert "no answer within" in answer.text or "timed out after" in answer.text, path
            assert "Check that the cluster is up" in answer.text or "slow or unreachable" in answer.text, path
            assert time.monotonic() - began < 30, path
    finally:
        for broker in healthy.brokers():
            broker.resume()
    until(lambda: visitor.get("/api/cluster").status_code == 200, "they answer again")

    # Killed, it is missed in plain sight.
    healthy.part("broker-3").kill()

    def cluster() -> Any:
        answer = visitor.get("/api/cluster")
        return answer.json() if answer.status_code == 200 else {}

    seen = until(lambda: (now := cluster()).get("under_min_isr", 0) >= 3 and now, "it is missed")
    assert [(one["id"], one["up"]) for one in seen["brokers"]] == [(1, True), (2, True), (3, False)]
    problems = {(one["topic"], one["partition"]): one for one in seen["problems"]}
    for partition in range(3):
        one = problems[topic, partition]
        assert (one["what"], sorted(one["in_sync"]), len(one["replicas"])) == ("under-min-isr", [1, 2], 3)
    # Others' topics may have had their only replica there.
    kinds = [("offline", "under-min-isr", "under-replicated").index(one["what"]) for one in seen["problems"]]
    assert kinds == sorted(kinds), "the worst first"
    page = visitor.get("/cluster").text
    assert "2 of 3" in page
    assert re.search(r'<span class="pill bad">under-min-isr</span>', page)
    assert told(visitor, f"/topics?q={topic}")["topics"][0]["under_replicated"] == 3

    # What takes longer than a page may is told too, whatever it is.
    monkeypatch.setattr("avow.dashboard.app.PAGE_TIMEOUTS", 0.0001)
    assert "Timed out" in visitor.get("/cluster").text
    assert "the request timed out after" in told(visitor, "/cluster", 504)["problem"]


def test_who_may_ask(visit: Visit, tmp_path: Path) -> None:
    open_ = visit()
    assert open_.get("/", headers={"host": "evil.example"}).status_code == 421
    assert "No pipelines</h2>" in open_.get("/pipelines").text
    every = [page.path for page in PAGES if "{" not in page.path] + ["/api", "/metrics", "/login"]
    for path in every:
        answer = open_.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert float(re.findall(r"dur=([\d.]+)", answer.headers.get("server-timing", "dur=0"))[0]) < 10_000

    # A change without the form's secret, or from elsewhere, changes nothing.
    form = {"name": "never-made", "partitions": "1"}
    secret = {"csrf": open_.state.rules.form}
    assert open_.post("/topics", data=form).status_code == 403
    assert open_.post("/topics", data={**form, "csrf": "wrong"}).status_code == 403
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
        assert open_.post("/topics", data={**form, **secret}, headers=headers).status_code == 403
    assert open_.put("/topics").status_code == 405
    assert open_.post("/topics", content=b"x" * 100_000).status_code == 413
    for path in ("/topics/../../etc/passwd", "/static/../app.py", "/static/%2e%2e/app.py"):
        assert open_.get(path).status_code == 404

    closed = visit(read_only=True)
    assert closed.post("/topics", data={**form, "csrf": closed.state.rules.form}).status_code == 403
    assert "Create a topic" not in closed.get("/topics").text
    assert told(open_, "/topics?q=never-made")["topics"] == []

    token = "a long enough token"
    locked = visit(token=token)
    assert locked.get("/cluster").headers["location"] == "/login?next=/cluster"
    for path in ("/api/cluster", "/api", "/api/openapi.json", "/metrics"):
        assert locked.get(path).status_code == 401
    assert locked.get("/live/pipelines").status_code == 303
    assert locked.get("/api/cluster", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert locked.post("/login", data={"token": "wrong"}).status_code == 403
    assert locked.get("/cluster").status_code == 303
    entered = locked.post("/login?next=//evil.example", data={"token": token})
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert entered.headers["set-cookie"].startswith("avow-dashboard-8642=")
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert locked.get("/cluster").status_code == 200
    assert token not in locked.get("/cluster").text
    # Through a proxy that calls us by our address, a visitor comes from the proxy's own name.
    behind = visit(token=token, hosts=frozenset({"board.example"}))
    for origin, status in (("https://board.example", 303), ("https://board.example:8443", 303), ("https://x.y", 403)):
        entering = behind.post("/login", data={"token": token}, headers={"origin": origin})
        assert entering.status_code == status, origin
    assert not (tmp_path / "evidence").exists(), "looking leaves nothing behind"
