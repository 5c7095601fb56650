"""Rows as output records, the ledger's text and the JSON they are made of, without a cluster."""

from __future__ import annotations

import gc
import json
import weakref
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from avow.errors import ConfigError
from avow.kafka.batches import HEADERS, headers_column, headers_from_text, headers_to_text
from avow.kafka.headers import CHECKSUM
from avow.kafka.log import TopicPartition
from avow.ledger import Counts, Entry, Fingerprint
from avow.plan import load_checked, plan
from avow.settings import PipelineConfig
from avow.sinks import json as as_json
from avow.sinks.base import DeadLetter, preview, refuse_whole
from avow.sinks.kafka import dead_letters, entries, messages
from avow.sinks.kafka.clients import EVER_MS, TopicLimits, cached, limits_of
from avow.sinks.kafka.config import on_other_cluster
from avow.sinks.kafka.entries import StoredEntry
from avow.sinks.kafka.messages import (
    Messages,
    Origins,
    RecordMapper,
    output_topics,
    read_origin,
    record_bytes,
    refuse_unfit,
)

WHERE = TopicPartition("t", 0)


def pipeline(
    folder: Path, sink: str = 'topic = "out"', *, guarantee: str = "exactly-once", more: str = ""
) -> PipelineConfig:
    path = folder / "p.toml"
    path.write_text(
        f'name = "p"\nguarantee = "{guarantee}"\n[source]\nbrokers = "a:1"\ntopics = ["in"]\n'
        f'[decode]\nformat = "json"\nschema = "id long not null, region string, n double"\n'
        f'[sink]\nkind = "kafka"\n{sink}\n{more}'
    )
    return load_checked(path)


def refused(folder: Path, sink: str, **more: str) -> str:
    with pytest.raises(ConfigError) as error:
        pipeline(folder, sink, **more)
    return str(error.value)


def test_the_ledgers_text_comes_back_as_it_went() -> None:
    entry = Entry(
        10**15, "a" * 22, 10**6, Counts(10**12, 10**12, 0, 0), Fingerprint(10**15 - 1, 1_700_000_000_000, 2**32 - 1)
    )
    kept = StoredEntry(entry, 5, 17, 1_700_000_000_000)
    text = entries.serialize(kept)
    assert len(text.encode()) < 400, "a broker takes 4,096 unless told otherwise, and a careful one less"
    assert entries.parse("g", WHERE, 10**15, text) == kept
    none = StoredEntry(Entry(0, "id", 1), 0, 0, 0)
    assert entries.parse("g", WHERE, 0, entries.serialize(none)) == none


@pytest.mark.parametrize(
    "text", [None, "", "x", "[]", "{}", '{"avow":1}', '{"avow":1,"run":1,"topic_id":"a","counts":[1,0,0,0]}']
)
def test_what_somebody_else_wrote_is_no_position(text: str | None) -> None:
    with pytest.raises(ConfigError, match=r"g is this pipeline's ledger, but another client committed offset 7 of t/0"):
        entries.parse("g", WHERE, 7, text)


def test_a_newer_ledger_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 2"):
        entries.parse("g", WHERE, 7, '{"avow":2}')


def test_json_is_exact() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([2**63 - 1, None], pa.int64()),
            "text": ['quote " back \\ line \n é 🎈', "plain"],
            "d": pa.array([Decimal("0.10"), None], pa.decimal128(38, 2)),
            "f": [0.1, 1e300],
            "at": pa.array([datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)]),
            "b": pa.array([b"\xff\x00", b""]),
            "l": [[1, None], []],
            'we"ird': [True, False],
        }
    )
    values, wrong = as_json.objects(rows)
    assert wrong == {}
    first, second = (json.loads(value, parse_float=Decimal) for value in values.to_pylist())
    assert first["id"] == 2**63 - 1
    assert first["text"] == 'quote " back \\ line \n é 🎈'
    assert first["d"] == Decimal("0.10")
    assert float(first["f"]) == 0.1
    assert float(second["f"]) == 1e300
    assert first["at"] == "0001-01-01T00:00:00.000000Z"
    assert second["at"] == "9999-12-31T23:59:59.999999Z"
    assert (first["b"], second["b"]) == ("/wA=", "")
    assert (first["l"], second["l"]) == ([1, None], [])
    assert (first['we"ird'], second["d"], second["id"]) == (True, None, None)


def test_nested_floats() -> None:
    type_ = pa.list_(pa.struct([("f", pa.float32()), ("d", pa.float64())]))
    found = [[{"f": 0.1, "d": -0.0}], [{"f": float("inf"), "d": 1.0}], None, [{"f": 1.0, "d": float("nan")}]]
    texts, wrong = as_json.objects(pa.RecordBatch.from_arrays([pa.array(found, type_)], ["n"]))
    assert texts.to_pylist() == [b'{"n":[{"f":0.1,"d":-0.0}]}', None, b'{"n":null}', None]
    assert wrong == {1: "n: JSON cannot represent inf", 3: "n: JSON cannot represent nan"}


def test_json_has_no_word_for_nan() -> None:
    values, wrong = as_json.objects(
        pa.RecordBatch.from_pydict({"a": [1.0, float("nan"), None], "b": [float("inf"), 1.0, 1.0]})
    )
    assert wrong == {0: "b: JSON cannot represent inf", 1: "a: JSON cannot represent nan"}
    assert values.to_pylist() == [None, None, b'{"a":null,"b":1}']


def test_origins() -> None:
    assert read_origin(b"a.b-c/12/34") == ("a.b-c", 12, 34)
    assert [read_origin(text) for text in (b"", b"a", b"a/b/c", b"a/-1/2", b"a/1/2/3", "a/\N{SUPERSCRIPT TWO}/1")] == [
        None
    ] * 6


def batch(**columns: pa.Array) -> pa.RecordBatch:
    size = len(next(iter(columns.values())))
    lineage = {
        "_kafka_topic": pa.array(["in"] * size),
        "_kafka_partition": pa.array([3] * size, pa.int32()),
        "_kafka_offset": pa.array(range(size), pa.int64()),
        "_kafka_timestamp": pa.array([0] * size, pa.int64()).cast(pa.timestamp("us", "UTC")),
        "_kafka_key": pa.array([b"k"] * size),
        "_kafka_headers": pa.nulls(size, HEADERS),
        "_kafka_value": pa.array([b"v"] * size),
    }
    return pa.RecordBatch.from_pydict(columns | lineage)


def test_a_checksum_stays_with_its_value_and_no_other(tmp_path: Path) -> None:
    headers = headers_column([[("a", b"1"), (CHECKSUM, b"12345678")]])
    rows = batch(region=pa.array(["eu"]))
    rows = rows.set_column(rows.schema.get_field_index("_kafka_headers"), "_kafka_headers", headers)

    def kept(sink: str, more: str = "") -> list[str]:
        found = RecordMapper(pipeline(tmp_path, sink, more=more)).messages(rows)
        return [name for name, _ in found.header_lists()[0]]

    assert kept('topic = "out"') == ["a", CHECKSUM, "avow-origin"]
    assert kept('topic = "out"\nvalue_column = "region"') == ["a", "avow-origin"]
    assert kept('topic = "out"\nvalue_column = "region"\norigin = false') == ["a"]


def test_a_checksum_is_left_out_wherever_the_column_begins(tmp_path: Path) -> None:
    pairs: list[Any] = [[("a", b"1"), (CHECKSUM, b"2"), ("é", None)], None, [(CHECKSUM, b"")], [], [("x", b"y")]] * 3
    mapper = RecordMapper(pipeline(tmp_path, 'topic = "out"\nvalue_column = "region"\norigin = false'))
    for start in range(len(pairs)):
        rows = batch(region=pa.array(["eu"] * (len(pairs) - start)))
        at = rows.schema.get_field_index("_kafka_headers")
        rows = rows.set_column(at, "_kafka_headers", headers_column(pairs).slice(start))
        kept = [[pair for pair in headers or () if pair[0] != CHECKSUM] for headers in pairs[start:]]
        assert mapper.messages(rows).header_lists() == kept


def test_routes_name_declared_topics_only(tmp_path: Path) -> None:
    routed = pipeline(tmp_path, 'topic = "o-{region}"\nroutes = ["o-eu", "o-us"]')
    found = RecordMapper(routed).messages(batch(region=pa.array(["eu", "us", "xx", None])))
    assert found.topic_list() == ["o-eu", "o-us", None, None]
    assert sorted(found.refused) == [2, 3]
    assert "region = 'xx'" in found.refused[2]
    assert output_topics(routed.sink, ["in"]) == ["o-eu", "o-us"]  # type: ignore[arg-type]
    mirror = pipeline(tmp_path, 'topic = "copy.{_kafka_topic}"')
    assert output_topics(mirror.sink, ["in", "other"]) == ["copy.in", "copy.other"]  # type: ignore[arg-type]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    assert "sink.topic: is missing" in refused(tmp_path, "")
    assert "is also read by this pipeline" in refused(tmp_path, 'topic = "in"')
    assert "is also read by this pipeline" in refused(tmp_path, 'topic = "{_kafka_topic}"')
    assert "sink.topic: 'p.dead-letters' is both an output topic and" in refused(tmp_path, 'topic = "p.dead-letters"')
    for output in ('topic = "{0}"', 'topic = "o-{{region}}"\nroutes = ["{0}"]', 'topic = "l.{{_kafka_topic}}"'):
        wrong = refused(tmp_path, output.format("l.in") + '\ndead_letter_topic = "l.in"')
        assert (
            "sink.dead_letter_topic: 'l.in' is both an output topic and the dead-letter topic; two different topics"
            in wrong
        )
    assert "sink.routes: is missing" in refused(tmp_path, 'topic = "o-{region}"')
    assert "sink.routes: is set, but sink.topic" in refused(tmp_path, 'topic = "o"\nroutes = ["o"]')
    assert "'nowhere' is not a column" in refused(tmp_path, 'topic = "o-{nowhere}"\nroutes = ["o-1"]')
    for wrong in ("a b", "../x", "o-{region!r}", "o-{region.x}", "o-{", "", "."):
        assert "sink.topic" in refused(tmp_path, f'topic = "{wrong}"\nroutes = ["o-1"]'), wrong
    assert "does not offer upsert" in refused(tmp_path, 'topic = "o"\nmode = "upsert"\nkey = ["id"]')
    assert "cannot be set" in refused(tmp_path, 'topic = "o"\n[sink.kafka]\n"transactional.id" = "x"')
    assert "transaction cannot" in refused(tmp_path, 'topic = "o"\nbrokers = "b:1"').replace("Kafka ", "")
    assert on_other_cluster(pipeline(tmp_path, 'topic = "o"\nbrokers = "b:1"', guarantee="at-least-once"))
    same = pipeline(tmp_path, 'topic = "o"\nbrokers = "a:1"')
    assert not on_other_cluster(same), "the source's own is the same cluster"


def test_the_plan_says_that_the_group_is_reserved(tmp_path: Path) -> None:
    made = plan(pipeline(tmp_path))
    assert any("The consumer group p is reserved" in warning for warning in made.warnings)
    assert not any("Database" in warning for warning in made.warnings)
    hops = {hop.name: hop for hop in made.hops}
    assert "committed offset of the consumer group p" in hops["positions"].does
    assert "topic p.dead-letters" in hops["dead letters"].does
    assert "Kafka topic out" in hops["sink"].does


def test_a_null_value_is_kept_unless_declared_otherwise(tmp_path: Path) -> None:
    assert pipeline(tmp_path).tombstones == "keep"


def output(
    topics: list[str], keys: list[bytes | None], values: list[bytes | None], stamps: list[int], **more: Any
) -> Messages:
    names = sorted(set(topics))
    routes = np.array([names.index(topic) for topic in topics], np.int32)
    headers = more.pop("headers", pa.nulls(len(topics), HEADERS))
    stamps_ms = np.array(stamps, np.int64)
    return Messages(
        names, routes, pa.array(keys, pa.binary()), pa.array(values, pa.binary()), headers, stamps_ms, **more
    )


def test_sizes_and_times_are_judged_by_topic() -> None:
    now = int(datetime.now(UTC).timestamp() * 1000)
    messages = output(
        ["a", "a", "b", "b", "b", "a"],
        [None] * 6,
        [b"x" * 900, b"x" * 2000, b"x" * 2000, b"", None, b""],
        [now, now, now, now + 7_200_000, 1, 0],
    )
    hour = 3_600_000
    refuse_unfit(messages, {"a": TopicLimits(1, 1100, EVER_MS, hour), "b": TopicLimits(1, 5000, hour, hour)})
    assert sorted(messages.refused) == [1, 3, 4]
    assert "2,128 bytes before compression, and max.message.bytes is 1,100" in messages.refused[1]
    assert "after.max.ms" in messages.refused[3]
    assert "before.max.ms" in messages.refused[4]


def test_a_compacted_topic_takes_no_record_without_a_key() -> None:
    messages = output(["a", "a", "b"], [None, b"", None], [b"x"] * 3, [0] * 3)
    kept, compacted = (TopicLimits(1, 1100, EVER_MS, EVER_MS, policy) for policy in ("delete", "compact,delete"))
    refuse_unfit(messages, {"a": compacted, "b": kept})
    assert sorted(messages.refused) == [0]
    assert "it has no key" in messages.refused[0]


@pytest.mark.parametrize("redriven", [False, True])
@pytest.mark.parametrize("start", [None, 0, 2])
def test_the_sizes_of_all_are_those_of_each(redriven: bool, start: int | None) -> None:
    offsets = [0, 9, 10, 99, 100, 10**18 - 1, 10**18, 2**63 - 1]
    headers: list[Any] = [[("a", b"1"), ("é\U0001f600", None)], None, [], [("", b"")], [("n" * 300, b"v" * 5000)]] * 2
    count = len(offsets) - (start or 0)
    parts = [None if n % 3 == 0 else b"k" * n for n in range(count)]
    # Columns that begin somewhere in their buffers, as those of a filter or a part do.
    column = headers_column(headers).slice(start or 0, count)
    origins = None if start is None else Origins("in.put/12/", np.array(offsets[start:]))
    messages = output(
        ["a"] * count, parts, parts[::-1], [0] * count, headers=column, redriven=redriven, origins=origins
    )
    each = [record_bytes(*record) for record in zip(parts, parts[::-1], messages.header_lists(), strict=True)]
    assert messages.sizes().tolist() == each


def test_routes_of_several_columns(tmp_path: Path) -> None:
    allowed = ["o-eu-1", "o-eu-2", "o-us-1"]
    routed = pipeline(tmp_path, f'topic = "o-{{region}}-{{id}}"\nroutes = {allowed}')
    regions, ids = ["us", "eu", "eu", None, "us", "eu"] * 50, [1, 2, 1, 1, 2, None] * 50
    found = RecordMapper(routed).messages(batch(region=pa.array(regions).dictionary_encode(), id=pa.array(ids)))
    named = [f"o-{region}-{number}" for region, number in zip(regions, ids, strict=True)]
    assert found.topic_list() == [name if name in allowed else None for name in named]
    assert sorted(found.refused) == [row for row, name in enumerate(named) if name not in allowed]
    assert found.refused[4] == "no topic of sink.routes is meant: region = 'us', id = 2"


def test_headers_of_another_type_are_cast_or_refused(tmp_path: Path) -> None:
    def headers(column: pa.Array) -> list[Any]:
        rows = batch(region=pa.array(["eu"]))
        rows = rows.set_column(rows.schema.get_field_index("_kafka_headers"), "_kafka_headers", column)
        return RecordMapper(pipeline(tmp_path)).messages(rows).header_lists()[0][:-1]

    pair = pa.struct([("value", pa.string()), ("key", pa.large_string())])
    assert headers(pa.array([[{"key": "a", "value": "é"}]], pa.list_(pair))) == [("a", "é".encode())]
    assert headers(pa.nulls(1)) == []
    with pytest.raises(ConfigError, match="'_kafka_headers' is string, and headers are a list"):
        headers(pa.array(["a"]))


def test_a_record_goes_in_with_all_its_rows_or_with_none() -> None:
    assert refuse_whole({2: "first", 3: "second"}, [7, 8, 8, 8, 9, 9]) == {1: "first", 2: "first", 3: "first"}


@pytest.mark.parametrize(
    ("told", "before", "after"),
    [
        ({"before": "5", "after": "7"}, 5, 7),
        ({"difference": "9"}, 9, 9),  # before Kafka 3.6
        ({"difference": "9", "before": "5", "after": str(EVER_MS)}, 5, 9),  # from 3.6 to 3.9 there are all three
        ({}, EVER_MS, EVER_MS),
    ],
)
def test_brokers_of_any_age_say_how_far_timestamps_may_lie(told: dict[str, str], before: int, after: int) -> None:
    config = {f"message.timestamp.{name}.max.ms": value for name, value in told.items()}
    found = limits_of(3, config | {"max.message.bytes": "1000", "cleanup.policy": "compact"})
    assert found == TopicLimits(3, 1000, before, after, "compact")


def test_headers_go_through_text_and_back() -> None:
    given = headers_column([[("a", b"\xff"), ("a", None), ("é", b"")], None, [("b", b"1")]])
    assert headers_from_text(headers_to_text(given)).equals(given)
    none = pa.nulls(2, HEADERS)
    assert headers_from_text(headers_to_text(none)).equals(none)


def test_clients_are_kept_of_one_pipeline_at_a_time(tmp_path: Path) -> None:
    one, other = pipeline(tmp_path), pipeline(tmp_path, guarantee="at-least-once").model_copy(update={"name": "q"})
    first = cached(one)
    assert cached(one) is first
    let_go = weakref.ref(first)
    del first
    cached(other)
    gc.collect()
    assert let_go() is None, "threads and connections of pipelines that are over would add up"


class Message:
    """A record as the client gives it: of what a letter was made."""

    def __init__(self, value: bytes, headers: list[tuple[str, bytes | str | None]]) -> None:
        self._value = value
        # As bytes: so they come out of the log.
        self._headers = [(name, part.encode() if isinstance(part, str) else part) for name, part in headers]

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000


def dead_letter(
    value: bytes | None, key: bytes = b"k", headers: tuple[tuple[str, bytes | None], ...] = ()
) -> DeadLetter:
    return DeadLetter("in", 3, 17, 5, key, value, list(headers), "wrong-type", "d" * 100_000)


@pytest.mark.parametrize(
    "letter",
    [
        dead_letter(b"v" * 50_000),
        dead_letter(b"v", key=b"k" * 50_000),
        dead_letter(b"v", headers=(("h", b"h" * 50_000),)),
        dead_letter(None, headers=(("avow-shortened", b"5"),) * 10_000),
        dead_letter(b""),
    ],
    ids=["value", "key", "header", "headers", "detail"],
)
def test_a_letter_that_the_topic_does_not_take_is_shortened_and_says_so(letter: DeadLetter) -> None:
    value, headers = dead_letters.message(letter, dead_letters.LEAST_BYTES)
    assert messages.record_bytes(dead_letters.key(letter), value, headers) <= dead_letters.LEAST_BYTES
    found = dead_letters.read(Message(value, headers))  # type: ignore[arg-type]
    assert found is not None
    short = found[0]
    assert (short.topic, short.partition, short.offset, short.timestamp_ms) == ("in", 3, 17, 5)
    assert short.full_bytes == len(letter.value or b"")
    assert (letter.value or b"").startswith(short.value or b"")
    assert "bytes, but max.message.bytes of its topic is 16,384: it was shortened" in short.detail
    assert preview(short).size == len(letter.value or b"")
    # A larger topic takes it whole, with headers that look like ours among its own.
    whole = dead_letters.read(Message(*dead_letters.message(letter, 1_000_000)))  # type: ignore[arg-type]
    assert whole is not None
    assert whole[0] == letter
