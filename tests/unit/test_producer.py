"""The producer without a cluster: what words come to, what errors mean, lines, and totals that always add up."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from rich.console import Console

import avow
from avow.cli import main
from avow.clients.chart import bars, svg
from avow.clients.delivery import Delivery, Outcome, outcome_of, words_of
from avow.clients.durability import OFFERS, Choice, Durability, TopicFacts, choose, explain
from avow.clients.imports import Position
from avow.clients.jsonl import BadLine, Line, MessageFormat, read
from avow.clients.measure import CHOICES, Measured
from avow.clients.producer import Producer
from avow.errors import ConfigError, SourceError
from avow.guarantee import Guarantee
from avow.kafka.metadata import QUIET

EVERY = [Choice(word, level) for word, levels in OFFERS.items() for level in levels]


@pytest.mark.parametrize(
    ("guarantee", "durability", "acks", "retries", "idempotent"),
    [
        ("at-most-once", None, "0", "0", "false"),
        ("at-most-once", "leader", "1", "0", "false"),
        ("at-most-once", "all", "all", "0", "false"),
        ("at-least-once", None, "all", None, "false"),
        ("exactly-once", None, "all", None, "true"),
        ("exactly-once", "transactional", "all", None, "true"),
    ],
)
def test_what_the_words_come_to(
    guarantee: str, durability: str | None, acks: str, retries: str | None, idempotent: str
) -> None:
    settings = choose(guarantee, durability).settings()
    assert settings["acks"] == acks
    assert settings.get("message.send.max.retries") == retries, "None: as often as it takes"
    assert settings["enable.idempotence"] == idempotent
    assert (settings.get("max.in.flight") == "1") == (guarantee == "at-least-once"), "a retry must not overtake"
    AdminClient({"bootstrap.servers": "localhost:1", **settings}, logger=QUIET)  # librdkafka knows them all


def test_pairs_that_keep_no_word_are_refused_with_the_reason() -> None:
    refused = {(word, level): "" for word in Guarantee for level in Durability if Choice(word, level) not in EVERY}
    for word, level in refused:
        with pytest.raises(ConfigError) as error:
            choose(word, level)
        refused[word, level] = str(error.value)
        assert OFFERS[word][0] in error.value.advice
    assert "is lost if its leader is" in refused[Guarantee.AT_LEAST_ONCE, Durability.LEADER]
    assert "would not recognise a retried record" in refused[Guarantee.EXACTLY_ONCE, Durability.ALL]
    assert "never retries" in refused[Guarantee.AT_MOST_ONCE, Durability.IDEMPOTENT]
    with pytest.raises(ConfigError, match="'maybe' is not known"):
        choose("maybe")


@pytest.mark.parametrize("choice", EVERY, ids=lambda one: f"{one.guarantee}-{one.durability}")
def test_the_explanation_says_what_can_be_lost_and_doubled(choice: Choice) -> None:
    said = "\n".join(explain(choice, TopicFacts("t", 3, 3, 3, 2)))
    assert f"acks {choice.level.acks}." in said
    assert ("retried until" in said) == (choice.guarantee != Guarantee.AT_MOST_ONCE)
    assert ("Duplicated: nothing" in said) == (choice.guarantee != Guarantee.AT_LEAST_ONCE)
    assert ("Lost: nothing" in said) == (choice.guarantee != Guarantee.AT_MOST_ONCE)
    assert "min.insync.replicas 2" in said
    assert ("with up to 1 replicas down" in said) == (choice.level.acks == "all")


def test_the_explanation_knows_when_nothing_can_be_sent() -> None:
    choice = choose("exactly-once")
    assert "NOT MET" in "\n".join(explain(choice, TopicFacts("t", 1, 3, 1, 2)))
    assert "No replica may be down" in "\n".join(explain(choice, TopicFacts("t", 1, 2, 2, 2)))
    assert "The leader may be the only in-sync replica" in "\n".join(explain(choice, TopicFacts("t", 1, 2, 2, 1)))


def test_only_a_refusal_is_a_failure() -> None:
    failed = {KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._UNKNOWN_TOPIC}
    unknown = {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.UNKNOWN,
    }
    assert {outcome_of(KafkaError(code)) for code in failed} == {Outcome.FAILED}
    assert {outcome_of(KafkaError(code)) for code in unknown} == {Outcome.UNKNOWN}
    assert "min.insync.replicas" in words_of(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS))


def nobody(**more: object) -> Producer:
    """A producer whose cluster does not answer."""
    return Producer("127.0.0.1:1", guarantee="at-least-once", delivery_timeout_ms=1_000, **more)  # type: ignore[arg-type]


def test_totals_add_up_when_nobody_answers_and_the_block_says_so() -> None:
    producer = nobody()
    one = producer.send("t", b"1")
    producer.send("t", "2", key="k", headers=[("a", None)], tag="second")
    big = producer.send("t", b"x" * 105_000_000)
    assert big.outcome is Outcome.FAILED, "the client itself does not take it"
    assert producer.totals.pending == 2
    assert producer.totals.adds_up
    with pytest.raises(SourceError, match=r"unknown: no acknowledgement came in time"):
        one.wait()
    with (
        pytest.raises(SourceError, match=r"3 sent: 0 acknowledged, 1 failed, 2 unknown; the first, ") as error,
        producer,
    ):
        pass
    assert error.value.advice
    assert producer.totals.adds_up
    assert producer.totals.pending == 0
    with pytest.raises(SourceError, match="closed"):
        producer.send("t", b"3")


def test_whoever_asks_for_failures_gets_them_and_the_block_is_silent() -> None:
    bad: list[Delivery] = []
    with nobody(on_failure=bad.append) as producer:
        producer.send("t", None, tag="the tombstone")
    assert [(one.tag, one.outcome) for one in bad] == [("the tombstone", Outcome.UNKNOWN)]


def without_an_answer(**kafka: str) -> tuple[Producer, list[Delivery]]:
    """A producer that nobody answers, and what became of its sends."""
    ended: list[Delivery] = []
    given = {f"queue.buffering.max.{name}": value for name, value in kafka.items()}
    producer = Producer(
        "127.0.0.1:1", guarantee="at-least-once", on_failure=ended.append, delivery_timeout_ms=1_000, config=given
    )
    return producer, ended


def test_a_full_queue_is_waited_for_and_bounded() -> None:
    producer, ended = without_an_answer(messages="10")
    with producer:
        for number in range(25):
            producer.send("t", b"%d" % number)
            assert producer.totals.pending <= 10, "at the bound, some have to end before there is room"
        assert len(ended) >= 15
    assert (producer.totals.unknown, producer.totals.adds_up) == (25, True)


def test_what_never_fits_or_is_not_to_be_waited_for_has_failed() -> None:
    producer, _ = without_an_answer(kbytes="1")
    with producer:
        large = producer.send("t", b"x" * 2_000)
        assert (large.outcome, "larger than queue.buffering.max.kbytes" in large.error) == (Outcome.FAILED, True)
        assert producer.send("t", b"x" * 1_000).outcome is Outcome.PENDING
    assert (producer.totals.failed, producer.totals.unknown) == (1, 1)

    producer, _ = without_an_answer(messages="1")
    with producer:
        producer.send("t", b"1")
        threading.Timer(0.3, producer.stop_waiting).start()  # as Ctrl-C does
        waiting = producer.send("t", b"2")
        assert (waiting.outcome, "queue is full" in waiting.error) == (Outcome.FAILED, True)
    assert (producer.totals.failed, producer.totals.unknown) == (1, 1)


def test_an_error_of_the_blocks_own_is_not_covered_by_ours() -> None:
    producer = nobody()
    producer.send("t", b"1")
    with pytest.raises(ZeroDivisionError), producer:
        raise ZeroDivisionError
    assert producer.totals.unknown == 1


def test_settings_that_are_the_words_own_are_refused_and_no_value_is_shown() -> None:
    with pytest.raises(ConfigError, match="config: acks is set by guarantee and durability"):
        Producer("a:1", guarantee="exactly-once", config={"acks": "0"})
    with pytest.raises(ConfigError) as error:
        Producer("a:1", guarantee="exactly-once", config={"sasl.password": "hunter2", "no.such": "hunter2"})
    assert "config.no.such" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_transactions_are_for_transactional_producers() -> None:
    with nobody() as producer:
        refused = pytest.raises(ConfigError, match="durability all has no transactions")
        with refused, producer.transaction():
            pass


def test_lines_have_their_numbers_and_bad_ones_say_them() -> None:
    text = b'{"id": 1}\n\n{"id": 2, "n": 7}\r\n[]\n{"id": null}\n{"id": tru\n{"id":"\xff"}\n{"id": true}'
    form = MessageFormat("f.jsonl", key_field="id")
    keys, wrong = [], []
    for line in read(io.BytesIO(text)):
        if line.blank:
            continue
        try:
            keys.append((form.message(line).key, line.value))
        except BadLine as bad:
            wrong.append(str(bad))
    assert keys == [("1", b'{"id": 1}'), ("2", b'{"id": 2, "n": 7}'), ("true", b'{"id": true}')]
    assert [problem.split(": ")[0] for problem in wrong] == [f"f.jsonl:{n}" for n in (4, 5, 6, 7)]
    assert "expected a JSON object, found an array" in wrong[0]
    assert 'the key field "id" is not a string, number or boolean' in wrong[1]
    assert line.until == len(text)
    assert [one.number for one in read(io.BytesIO(b"a\nb"), Line(9, b"", 100))] == [10, 11]


def test_idempotency_keys_are_made_or_taken_from_a_field() -> None:
    line = Line(1, b'{"id": "a-1"}', 0)
    assert MessageFormat("f", idempotency_field="id").message(line).idempotency_key == "a-1"
    made = {MessageFormat("f", make_idempotency_key=True).message(line).idempotency_key for _ in range(2)}
    assert len(made) == 2


def test_a_position_comes_back_as_it_went_and_no_other_does() -> None:
    position = Position(10**9, 10**12, "ab" * 16)
    assert len(position.written()) < 200
    assert Position.read(10**9, position.written(), "g") == position
    for text in (None, "", "{}", "[]", '{"avow-import": 2, "bytes": 1, "digest": ""}'):
        with pytest.raises(ConfigError, match="consumer group g has offset 7"):
            Position.read(7, text, "g")


def test_the_picture_is_one_file_without_references() -> None:
    found = [Measured(choice, [0.2, 1.0, 40.0 * n + 1], [1000.0 * (n + 1)]) for n, choice in enumerate(CHOICES)]
    drawn = svg(found, "<5> records")
    assert drawn.count('<rect class="bar"') == len(CHOICES)
    assert "&lt;5&gt; records" in drawn
    assert "href" not in drawn
    assert "url(" not in drawn
    assert found[0].as_dict()["p50_ms"] == 1.0


def test_the_bars_are_of_every_durability_and_in_proportion() -> None:
    found = [Measured(choice, [0.2, 10.0**n, 100.0], [1000.0 * (n + 1)]) for n, choice in enumerate(CHOICES[:3])]
    screen = Console(width=80, file=io.StringIO())
    screen.print(bars(found))
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1::2]] == [str(one.choice.durability) for one in found]
    assert "1 to 100 ms" in lines[0]
    # Latency: one, ten and a hundred milliseconds are nothing, half and all; throughput: a third, two, and all.
    assert [line.count("█") for line in lines[1::2]] == [0 + 4, 10 + 8, 20 + 12]
    assert [line.count("█") for line in lines[2::2]] == [20] * 3
    assert lines[5].split()[-1] == "3,000"


def test_the_command_refuses_before_it_connects(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["produce", "--brokers", "127.0.0.1:1", *arguments])
        return done.exit_code, done.output

    assert run("t", "-", "--guarantee", "exactly-once", "--durability", "transactional")[0] == 2
    assert "cannot be kept" in run("t", "--guarantee", "at-least-once", "--durability", "leader")[1]
    assert run()[0] == 2
    assert run("t", str(tmp_path / "not-there"))[0] == 2
    code, said = run("t", "--kafka", "sasl.password")
    assert (code, "--kafka sasl.password: the value is missing" in said) == (2, True), said
    code, said = run("t", "--kafka", "no.such.setting=1")
    assert (code, "no.such.setting" in said) == (2, True), said
    code, said = run("--explain", "--guarantee", "at-most-once", "--json")
    assert code == 0
    assert json.loads(said)["settings"]["acks"] == "0"


def test_the_public_name_is_there_and_costs_nothing_until_it_is_used() -> None:
    assert avow.Producer is Producer
    with pytest.raises(AttributeError):
        avow.Nothing  # type: ignore[attr-defined]  # noqa: B018
    quick = "import avow, sys; assert 'confluent_kafka' not in sys.modules; avow.Producer"
    subprocess.run([sys.executable, "-c", quick], check=True, timeout=120)
