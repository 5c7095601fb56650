"""Pipelines from a real topic through real Spark into a real topic: guarantees, transforms, bad records, audits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic
from tests.fix_pipeline import ON_ENGINES, SCHEMA, Scenario, payment, session_spark
from tests.into_kafka import sink
from tests.into_lake import audited
from tests.kafka_stage import Read, read

from avow.audit.report import AuditReport
from avow.engines.redrive import redrive
from avow.kafka import metadata
from avow.ledger import Counts
from avow.sinks.base import Selection
from avow.sinks.kafka.dead_letters import KafkaDeadLetters
from avow.sinks.kafka.driver import KafkaDriver

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("spark")]

Make = Callable[..., Scenario]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("guarantee", "engine"), ON_ENGINES)
def test_pass_through(scenario: Make, guarantee: str, engine: str) -> None:
    s = scenario(partitions=3)
    target = f"o-{uuid4().hex[:10]}"
    values: list[bytes | None] = [payment(n) for n in range(5_000)]
    values[10] = b'{"id": "ten", "account": "a"}'
    values[12] = None
    s.produce(values, keys=[b"acc-%d" % (n % 97) for n in range(5_000)])
    path = s.file(guarantee, sink=sink(target))
    events = s.drain(path, engine)
    assert f"made topic {target}" in events
    found = read(s.cluster.bootstrap, target)
    assert sorted(one.value or b"" for one in found) == sorted(v or b"" for n, v in enumerate(values) if n != 10)
    with KafkaDriver(s.load(path)) as store:
        entries = store.entries().values()
    assert [sum(getattr(e.counts, name) for e in entries) for name in ("read", "written", "dead")] == [5_000, 4_999, 1]
    # More records go on where it ended; a run with nothing to do changes nothing.
    s.drain(path, engine)
    s.produce([payment(n) for n in range(5_000, 5_100)])
    s.drain(path, engine)
    assert len(read(s.cluster.bootstrap, target)) == 5_099
    report = audited(s, path)
    assert (report.verdict, report.findings) == ("held", ()), report
    assert sum(one.tally.read for one in report.partitions) == 5_100


def test_sql_keeps_keys_headers_and_tombstones(scenario: Make) -> None:
    s = scenario(partitions=2)
    target = f"o-{uuid4().hex[:10]}"
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    for n in range(400):
        value = None if n == 100 else payment(n)
        # -1: no timestamp. Kafka's client gives it another on its way out, which the audit does not mind.
        stamp = -1 if n == 42 else 0
        producer.produce(s.topic, value, b"k%d" % (n % 10), n % 2, headers=[("n", b"%d" % n)], timestamp=stamp)
    assert producer.flush(30) == 0
    own = "struct('cents' AS k, base64(encode(string(amount * 100), 'UTF-8')) AS v)"
    headers = f"to_json(array_append(from_json(_kafka_headers, 'array<struct<k string, v string>>'), {own}))"
    query = f"SELECT id, amount * 100 AS cents, note, _kafka_topic, _kafka_partition, _kafka_offset, _kafka_timestamp, \
_kafka_key, {headers} AS _kafka_headers, _kafka_tombstone FROM records WHERE id IS NULL OR id % 2 = 0"
    path = s.file(
        sink=sink(target),
        transform=f'sql = "{query}"',
        decode=f'format = "json"\nschema = "{SCHEMA.replace(" not null", "")}"',
    )
    s.drain(path)
    found = read(s.cluster.bootstrap, target)
    assert len(found) == 200
    by_n = {int(dict(one.headers)["n"] or 0): one for one in found}
    assert by_n[100].value is None
    assert by_n[100].key == b"k0"
    assert json.loads(by_n[42].value or b"") == {"id": 42, "cents": 1050.0, "note": "x" * 20}
    assert by_n[42].key == b"k2"
    assert by_n[42].headers[:2] == [("n", b"42"), ("cents", b"1050.0")]
    assert by_n[100].headers[:2] == [("n", b"100"), ("cents", None)]
    assert by_n[42].timestamp_ms > 0
    report = audited(s, path)
    assert (report.verdict, report.findings) == ("held", ()), report


def test_a_record_of_many_rows_is_one_record(scenario: Make) -> None:
    """Its rows straddle Arrow's batches of 50,000, and one of them, behind such a border, cannot go out."""
    s = scenario(partitions=1)
    target = f"o-{uuid4().hex[:10]}"
    s.produce([payment(n) for n in range(4)])
    query = "SELECT *, IF(id = 1 AND i = 29999, double('NaN'), 0.5) AS x FROM records \
LATERAL VIEW explode(sequence(1, 30000)) AS i"
    path = s.file(sink=sink(target), transform=f'sql = "{query}"')
    s.drain(path)
    pipeline = s.load(path)
    with KafkaDriver(pipeline) as store:
        assert [entry.counts for entry in store.entries().values()] == [Counts(4, 3, 1, 0)]
    found = Counter(one.origin.rpartition("/")[2] for one in read(s.cluster.bootstrap, target))
    assert found == {"0": 30_000, "2": 30_000, "3": 30_000}
    with KafkaDeadLetters(pipeline) as letters:
        assert [one.offset for one in letters.select(Selection(), 5)] == [1]
    report = audited(s, path)
    assert (report.verdict, report.findings) == ("held", ()), report


def test_a_transform_that_loses_the_key_is_refused(scenario: Make) -> None:
    s = scenario(partitions=1)
    s.produce([payment(1)])
    query = "SELECT id, _kafka_topic, _kafka_partition, _kafka_offset, _kafka_timestamp FROM records"
    with pytest.raises(Exception, match="_kafka_key"):
        s.drain(s.file(sink=sink(f"o-{uuid4().hex[:10]}"), transform=f'sql = "{query}"'))


def test_dead_letters_redriven_and_planted_anomalies_named(scenario: Make) -> None:
    s = scenario(partitions=2)
    target = f"o-{uuid4().hex[:10]}"
    values = [payment(n) for n in range(1_000)]
    values[20], values[30] = b'{"id": 20, "account": 5}', b"{"
    s.produce(values)
    path = s.file(sink=sink(target))
    s.drain(path)
    pipeline = s.load(path)
    with KafkaDeadLetters(pipeline) as letters:
        assert [one.reason for one in letters.select(Selection(), 5)] == ["wrong-type", "not-json"]
    mended = s.load(s.file(sink=sink(target), decode='format = "raw"'))
    done = redrive(mended, Selection(reason="wrong-type"), lambda: session_spark(pipeline))
    assert (done.written, done.still_dead) == (1, 0)
    report = audited(s, s.file(sink=sink(target), decode='format = "raw"'))
    # Under the mended decoding the letter that is left would be a row, and stands among the letters: it is not lost.
    assert report.verdict == "held", report
    # Somebody else's hands.
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    producer.produce(target, b"another value", None, 0, headers=[("avow-origin", f"{s.topic}/0/5".encode())])
    producer.produce(target, b"foreign", None, 0)
    producer.produce(target, b"phantom", None, 0, headers=[("avow-origin", f"{s.topic}/0/99999".encode())])
    assert producer.flush(30) == 0
    report = audited(s, s.file(sink=sink(target), decode='format = "raw"'))
    assert report.verdict == "broken"
    assert {str(finding.kind) for finding in report.findings} >= {"duplicated", "phantom"}, report.findings
    assert any("no avow-origin" in note for note in report.notes)


def planted(s: Scenario, found: list[Read], name: str = "", **config: str) -> str:
    """A topic with these records, as a plain producer writes them."""
    name = name or f"c-{uuid4().hex[:10]}"
    admin = metadata.admin(s.cluster.bootstrap)
    admin.create_topics([NewTopic(name, 2, 1, config=config)], operation_timeout=30)[name].result()
    producer = Producer({"bootstrap.servers": s.cluster.bootstrap}, logger=metadata.QUIET)
    for one in found:
        producer.produce(name, one.value, one.key, one.partition, headers=[*one.headers], timestamp=one.timestamp_ms)
    assert producer.flush(30) == 0
    return name


def test_what_the_output_lets_go_is_not_taken_for_lost(scenario: Make) -> None:
    s = scenario(partitions=2)
    target = f"o-{uuid4().hex[:10]}"
    s.produce([payment(n) for n in range(200)], keys=[b"acc-%d" % (n % 13) for n in range(200)])
    s.drain(s.file(sink=sink(target)))

    def judged(output: str, guarantee: str = "exactly-once") -> AuditReport:
        return audited(s, s.file(guarantee, sink=sink(output)))

    found = read(s.cluster.bootstrap, target)
    compacted = judged(planted(s, found[1:], **{"cleanup.policy": "compact"}))
    assert (compacted.verdict, compacted.findings) == ("unknown", ()), compacted
    assert "1 claimed records are not in the output, which deletes records (c-" in compacted.sentence
    assert "is compacted" in compacted.sentence
    # As after retention.
    admin = metadata.admin(s.cluster.bootstrap)
    for asked in admin.delete_records([TopicPartition(target, 0, 10), TopicPartition(target, 1, 20)]).values():
        asked.result(30)
    left = judged(target)
    assert (left.verdict, left.findings, left.tally.lost) == ("unknown", (), 30), left
    assert f"30 claimed records are not in the output, which deletes records ({target}/0 begins at" in left.sentence
    assert any(f"{target}/1 begins at offset 20" in note for note in left.notes)
    # A crash may lose records, and nobody can say whether one did: the counts, which would tell, are of no use here.
    weaker = judged(target, "at-most-once")
    assert (weaker.verdict, {str(finding.kind) for finding in weaker.findings}) == ("unknown", {"lost"}), weaker
    assert "30 claimed records are not in the output, which deletes records" in weaker.sentence


@pytest.mark.parametrize(
    "lines", [(), pytest.param(("origin = false",), marks=pytest.mark.long)], ids=["origin", "no origin"]
)
def test_an_output_that_was_made_again_is_never_held(scenario: Make, lines: tuple[str, ...]) -> None:
    s = scenario(partitions=1)
    target = f"o-{uuid4().hex[:10]}"
    s.produce([payment(n) for n in range(20)])
    path = s.file("at-most-once", sink=sink(target, *lines))
    s.drain(path, "consumer")
    found = read(s.cluster.bootstrap, target)
    admin = metadata.admin(s.cluster.bootstrap)
    admin.delete_topics([target], operation_timeout=30)[target].result()
    time.sleep(1)  # else a broker may still know the one before
    planted(s, found[10:], name=target)
    report = audited(s, path)
    kinds = {str(finding.kind): finding for finding in report.findings}
    assert (report.verdict, kinds.keys() >= {"lost", "topic-recreated"}) == ("broken", True), report
    assert f"output topic {target} had id" in kinds["topic-recreated"].detail


def test_an_audit_without_positions_is_unknown_and_says_why(scenario: Make) -> None:
    s = scenario(partitions=1)
    target = f"o-{uuid4().hex[:10]}"
    s.produce([payment(n) for n in range(20)])
    path = s.file(sink=sink(target))
    s.drain(path, "consumer")
    admin = metadata.admin(s.cluster.bootstrap)
    admin.delete_consumer_groups([s.name])[s.name].result()
    report = audited(s, path)
    assert report.verdict == "unknown", report
    assert f"the position of {s.topic}/0 is gone from the consumer group" in report.sentence


def test_without_origin_counts_and_order_are_audited_and_the_rest_is_said(scenario: Make) -> None:
    s = scenario(partitions=2)
    target = f"o-{uuid4().hex[:10]}"
    values: list[bytes | None] = [payment(n) for n in range(600)]
    values[7], values[20] = None, b'{"id": 20, "account": 5}'
    s.produce(values, keys=[b"acc-%d" % (n % 13) for n in range(600)])
    # The same again, a moment later: alike but for their time, and so not alike.
    s.produce([payment(3)], keys=[b"acc-3"], partition=1)
    s.drain(s.file(sink=sink(target, "origin = false")))
    mended = s.load(s.file(sink=sink(target, "origin = false"), decode='format = "raw"'))
    assert redrive(mended, Selection(), lambda: session_spark(mended)).written == 1

    def judged(output: str) -> tuple[str, dict[str, list[int]], AuditReport]:
        report = audited(s, s.file(sink=sink(output, "origin = false"), decode='format = "raw"'))
        assert "only counts and order" in report.sentence, report
        found = {str(f.kind): [f.partition, *(span.start for span in f.spans)] for f in report.findings}
        return report.verdict, found, report

    found = read(s.cluster.bootstrap, target)
    assert len(found) == 601
    assert {name for one in found for name, _ in one.headers} == {"avow-redriven"}
    verdict, wrong, report = judged(target)
    assert (verdict, wrong) == ("held", {}), report
    assert report.tally.read == report.tally.written == 601
    # Somebody else's hands. Record n is at offset n // 2 of partition n % 2.
    at = {one.value: number for number, one in enumerate(found)}
    gone, twice, late = at[payment(100)], at[payment(201)], at[payment(300)]
    verdict, wrong, report = judged(planted(s, found[:gone] + found[gone + 1 :]))
    assert (verdict, wrong, report.tally.lost) == ("broken", {"lost": [0, 50]}, 1), report
    assert judged(planted(s, [*found, found[twice]]))[:2] == ("broken", {"duplicated": [1, 100]})
    # Behind the next record of its input partition in the same output partition.
    after = next(
        n
        for n, one in enumerate(found)
        if n > late and one.partition == found[late].partition and json.loads(one.value or b'{"id": 1}')["id"] % 2 == 0
    )
    swapped = [*found]
    swapped[late], swapped[after] = swapped[after], swapped[late]
    assert judged(planted(s, swapped))[:2] == ("broken", {"reordered": [0, 150]})
    # What cannot be told is not guessed: a stranger's record, and one that was changed.
    stranger = replace(found[0], value=b"not of ours")
    verdict, wrong, report = judged(planted(s, [*found, stranger]))
    assert (verdict, wrong) == ("unknown", {}), report
    assert "1 records of the output match no compared record" in report.sentence
    changed = [replace(one, value=b"changed") if n == gone else one for n, one in enumerate(found)]
    verdict, wrong, report = judged(planted(s, changed))
    assert (verdict, wrong) == ("broken", {"lost": [0, 50]}), report
    assert any("1 records of the output match no compared record" in note for note in report.notes)


def test_java_clients_agree_on_partitions_and_read_what_is_committed(scenario: Make) -> None:
    """Spark's own Kafka sink and source are Java's producer and consumer."""
    s = scenario(partitions=2)
    target, theirs = f"o-{uuid4().hex[:10]}", f"j-{uuid4().hex[:10]}"
    admin = metadata.admin(s.cluster.bootstrap)
    for name in (target, theirs):
        admin.create_topics([NewTopic(name, 7, 1)], operation_timeout=30)[name].result()
    keys = [b"key %d" % n for n in range(500)] + [bytes([n]) * (n % 9 + 1) for n in range(0, 256, 5)]
    s.produce([b"v%d" % n for n in range(len(keys))], keys=keys)
    path = s.file(sink=sink(target), decode='format = "raw"')
    s.drain(path, "spark")
    # Something that was begun and never committed stands in front of nobody.
    other = Producer(
        {"bootstrap.servers": s.cluster.bootstrap, "transactional.id": f"x-{target}"}, logger=metadata.QUIET
    )
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(target, b"never", b"never")
    other.flush(30)
    other.abort_transaction(30)
    found = java_clients(s.cluster.bootstrap, theirs, target, [key.hex() for key in keys])
    chosen = {one.key: one.partition for one in read(s.cluster.bootstrap, theirs)}
    assert {one.key: one.partition for one in read(s.cluster.bootstrap, target)} == chosen
    assert sorted(bytes.fromhex(key) for key, _ in found) == sorted(keys)
    assert {headers[-1] for _, headers in found} == {"avow-origin"}


def java_clients(bootstrap: str, written: str, read: str, keys: list[str]) -> Any:
    """In a process of its own, for jars of its own."""
    command = [sys.executable, "-m", "tests.java_clients", bootstrap, written, read]
    done = subprocess.run(
        command, input=json.dumps(keys), capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
