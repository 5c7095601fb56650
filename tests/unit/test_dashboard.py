"""What of the dashboard needs no cluster: who may ask, how strangers' bytes are shown, and the explained page."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from starlette.datastructures import Headers
from tests.fix_dashboard import small_proof
from tests.visitor import visitor

from avow.cli import main
from avow.dashboard import assets, openapi
from avow.dashboard.app import THREADS, App, TimedOut
from avow.dashboard.explained import LOG, ExplainedParams, Fault, play
from avow.dashboard.formatting import (
    HEADERS_MAX,
    HERE,
    SHORT_CHARS,
    environment,
    format_headers,
    format_record,
    format_value,
    hex_lines,
    number,
    url,
    visible,
)
from avow.dashboard.guard import AccessRules
from avow.dashboard.jobs import Jobs
from avow.dashboard.messages import containing, parse_cursor, write_cursor
from avow.dashboard.metrics import lag_seconds
from avow.dashboard.pages import MENU, PAGES
from avow.dashboard.pipelines import JobRow, PipelineAnswer, row
from avow.dashboard.state import AppState
from avow.dashboard.watch import PartitionSample, Sample, Watch, WatchedPipeline
from avow.guarantee import Guarantee
from avow.kafka.browse import BrowsedRecord


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8642", True),
        ("localhost", True),
        ("[::1]:8642", True),
        ("192.168.1.7:80", True),
        ("board.example", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8642", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_a_name_must_be_known_and_an_address_need_not(host: str, known: bool) -> None:
    assert AccessRules(frozenset({"board.example"})).host_allowed(host) is known


def test_the_token_is_shown_by_header_or_by_the_login() -> None:
    rules = AccessRules(token="t" * 20)

    def admitted(rules: AccessRules = rules, **headers: str) -> bool:
        return rules.admits(Headers(headers), "ours")

    assert not admitted()
    assert not admitted(authorization="Bearer wrong")
    assert not admitted(cookie=f"ours={'t' * 20}"), "the token itself is no session"
    assert admitted(authorization=f"Bearer {'t' * 20}")
    assert admitted(cookie=f"ours={rules.session}")
    assert admitted(cookie=f'x={{"a":1}}; b[c]=d; =; ours={rules.session}; z'), "whatever stands beside it"
    assert not admitted(cookie=f"of-another-port={rules.session}")
    assert not admitted(AccessRules(token="t" * 20), cookie=f"ours={rules.session}"), "of another life"
    assert "tttt" not in repr(rules)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "no token is set"),
        (["--host", "example.org"], "no token is set"),
        (["--host", "0.0.0.0", "--token", "short"], "fewer than 16 characters"),
        (["nowhere.toml"], "no such file"),
        (["--brokers", "nonsense"], "--brokers: entry 1 is not host:port"),
        (["--brokers", "h:1", "--kafka", "group.id=x"], "--kafka group.id: cannot be set"),
        (["--brokers", "h:1", "--kafka", "sasl.password=${env:NOT_THERE}"], "variable NOT_THERE is not set"),
        (["--brokers", "h:1", "--kafka", "sasl.password"], "the value is missing"),
    ],
)
def test_what_is_refused_before_anything_listens(arguments: list[str], said: str) -> None:
    before = dict(os.environ)
    done = CliRunner().invoke(main, ["dashboard", *arguments])
    assert dict(os.environ) == before
    assert done.exit_code == 2, (done.output, done.exception)
    assert said in done.output


HOSTILE = "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202egnp.exe \u2066x\u2069 \x00 \ufeff"


def test_control_codes_and_direction_marks_are_shown_and_not_obeyed() -> None:
    text = visible(HOSTILE)
    assert "\\x1b[31m" in text
    assert "\\u202egnp.exe" in text
    assert not set(text) & {"\x1b", "\u202e", "\u2066", "\u2069", "\x00", "\ufeff"}
    assert visible("café ☕ 漢字") == "café ☕ 漢字"


def test_templates_escape_what_they_show() -> None:
    made = environment().from_string("<p title='{{ text }}'>{{ text }}</p>").render(text="'\"><img src=x onerror=1>")
    assert "<img" not in made
    assert made.count("'") == 2


def test_names_of_strangers_are_shown_and_not_obeyed_without_a_word_in_the_template() -> None:
    rendered = environment().from_string("{{ name }} {{ markup }}").render(name="\u202egnp\x1b[2J\n", markup=1)
    assert rendered == "\\u202egnp\\x1b[2J\n 1"


def test_bytes_are_shown_in_part() -> None:
    long = format_value(b"x" * 20_000_000)
    assert long is not None
    assert (long.size, long.cut, len(long.text)) == (20_000_000, True, SHORT_CHARS)
    pretty = format_value(b'{"b":1,"a":[2]}', whole=True)
    assert pretty is not None
    assert (pretty.kind, json.loads(pretty.text)) == ("json", {"b": 1, "a": [2]})
    assert pretty.text.startswith('{\n  "b": 1')
    binary = format_value(bytes(range(256)), whole=True)
    assert binary is not None
    assert binary.kind == "binary"
    assert binary.hex.splitlines()[4].startswith("000040  40 41 42")
    assert binary.hex_bytes == 256
    long = format_value(b"x" * 5_000, whole=True)
    assert long is not None
    assert (len(long.text), long.cut, long.hex_bytes) == (5_000, False, 4_096), "of the hex view there is more"
    deep = format_value(b"[" * 5_000 + b"]" * 5_000, whole=True)
    assert deep is not None, "nesting that Python does not follow is text"
    # A cut in the middle of a character does not make text binary.
    cut = format_value(b"a" + "é".encode() * 5_000)
    assert cut is not None
    assert cut.kind == "text"
    assert format_value(None) is None
    stored = format_record(None, b"the beginning", [], full_bytes=5_000)["value"]
    assert (stored.size, stored.cut) == (5_000, True), "of a dead letter that could not be stored whole"


TOKENS = b'{"a":1.10,"a":12345678901234567890.123456789,"b":[1e999,-0,{}, [ ]],"c":{"x, \\"y\\": [":"\\u00e9"}}'


def test_json_is_laid_out_and_not_changed() -> None:
    found = format_value(TOKENS, whole=True)
    assert found is not None
    assert found.kind == "json"
    assert found.raw == TOKENS.decode()
    assert found.text.splitlines() == [
        "{",
        '  "a": 1.10,',
        '  "a": 12345678901234567890.123456789,',
        '  "b": [',
        "    1e999,",
        "    -0,",
        "    {},",
        "    []",
        "  ],",
        '  "c": {',
        '    "x, \\"y\\": [": "\\u00e9"',
        "  }",
        "}",
    ]
    # Deep nesting does not make a page of a gigabyte.
    wide = format_value(b"[" * 800 + b"1," * 50_000 + b"1" + b"]" * 800, whole=True)
    assert wide is not None
    assert (wide.kind, wide.text.count("\n1") + wide.text.count(" 1")) == ("json", 50_001)
    assert len(wide.text) < 5_000_000


def test_headers_are_shown_whole_within_a_bound() -> None:
    found = format_headers([("a" * 1_000, b"x" * 100_000), ("b", None), ("c", b"y" * 100_000), *[("d", b"z")] * 600])
    assert len(found) == HEADERS_MAX
    assert [name for name, _ in found[:3]] == ["a" * SHORT_CHARS, "b", "c"]
    assert [value and (len(value.text), value.cut) for _, value in found[:3]] == [
        (100_000, False),
        None,
        (SHORT_CHARS, True),
    ]


def test_hex_lines() -> None:
    assert hex_lines(b"ab\n") == "000000  61 62 0a" + " " * 41 + "ab."


def test_numbers() -> None:
    assert [number(value) for value in (0, 1234.5, 12.34, None)] == ["0", "1,234", "12.3", "–"]


def test_paths_are_quoted() -> None:
    assert url("topics", "t", partition=0, offset=0, q="", internal=False) == "/topics/t?partition=0&offset=0"
    assert url("groups", "a/b <c>", q="x&y", left_out=None) == "/groups/a%2Fb%20%3Cc%3E?q=x%26y"


def test_cursors() -> None:
    assert parse_cursor(write_cursor({1: 5, 0: 120})) == {0: 120, 1: 5}
    for bad in ("1", "a:b", "1:-1", "1:2:3", "1:" + "9" * 30):
        with pytest.raises(ValueError, match="not a cursor"):
            parse_cursor(bad)


def test_a_search_looks_into_key_value_and_headers() -> None:
    one = BrowsedRecord("t", 0, 0, 0, b"Key-1", None, (("Trace", b"ABC"), ("none", None)))
    assert [containing(text)(one) for text in ("key-1", "trace", "abc", "value")] == [True, True, True, False]


# The explained page


def places(guarantee: Guarantee, fault: Fault) -> list[int]:
    frames = play(ExplainedParams(guarantee=guarantee, fault=fault)).frames
    return [frame.number for frame in frames if frame.can_fail]


@pytest.mark.parametrize(("guarantee", "fault"), [*itertools.product(Guarantee, get_args(Fault))])
def test_wherever_the_fault_is_placed_only_what_is_permitted_happens(guarantee: Guarantee, fault: Fault) -> None:
    found = set()
    for after in places(guarantee, fault):
        told = play(ExplainedParams(guarantee=guarantee, fault=fault, after=after))
        assert told.after == after
        assert [frame.number for frame in told.frames if frame.fault] == [after + 1]
        assert told.frames[-1].position == len(LOG), "it always gets to the end"
        found |= ({"lost"} if told.lost else set()) | ({"duplicated"} if told.doubled else set())
        assert ("lost" in told.outcome, "duplicated" in told.outcome) == (bool(told.lost), bool(told.doubled))
    assert found <= {str(one) for one in guarantee.permits}
    # A crash shows what the word permits; an explanation without it would explain nothing.
    if fault == "crash":
        assert found == {str(one) for one in guarantee.permits}


def test_without_a_fault_every_record_is_there_once() -> None:
    for guarantee in Guarantee:
        told = play(ExplainedParams(guarantee=guarantee))
        assert (told.after, told.lost, told.doubled) == (0, (), ())


# The API


def references(found: Any) -> set[str]:
    if isinstance(found, dict):
        inside = set().union(*map(references, found.values())) if found else set()
        return inside | ({found["$ref"]} if isinstance(found.get("$ref"), str) else set())
    return set().union(*map(references, found)) if isinstance(found, list) else set()


def test_the_document_describes_every_page_and_refers_to_nothing_that_is_not_there() -> None:
    told = openapi.document()
    assert set(told["paths"]) == {f"/api{page.path}" for page in PAGES}
    there = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    assert references(told) <= there
    for path, item in told["paths"].items():
        operation = item["get"]
        assert operation["summary"], path
        assert set(operation["responses"]) == {"200", "400", "401", "404", "409", "502", "504"}
        named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)", path))
    json.dumps(told)


def test_every_page_has_its_template_and_every_menu_entry_a_key_of_its_own() -> None:
    made = environment()
    for page in PAGES:
        if page.template:
            made.get_template(page.template)
    keys = [key for *_, key in MENU]
    assert len(set(keys)) == len(keys)


def test_no_template_has_what_the_policy_forbids() -> None:
    for path in sorted((HERE / "templates").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script(?! src=\"/static/)|\sstyle=|\son\w+=[\"']|javascript:|https?://", text), (
            path.name
        )
        assert "| safe" not in text, path.name


def test_the_javascript_libraries_are_installed_with_their_licences() -> None:
    assets.check()
    used = set(re.findall(r"/static/vendor/([^\"]+)", (HERE / "templates" / "base.html").read_text()))
    assert used == {"htmx.min.js", "chart.min.js"}
    assert used | {name.replace(".min.js", ".LICENSE") for name in used} == set(assets.FILES)
    for name in assets.FILES:
        assert (assets.VENDOR / name).stat().st_size > 500


def test_missing_javascript_is_reported_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = assets.VENDOR / assets.VERSIONS
    (tmp_path / assets.VERSIONS).write_text(whole.read_text())
    monkeypatch.setattr(assets, "VENDOR", tmp_path)
    before = dict(os.environ)
    done = CliRunner().invoke(main, ["dashboard", "--port", "0"])
    assert dict(os.environ) == before
    assert (done.exit_code, "JavaScript files in" in done.output) == (3, True), done.output
    assert "avow setup" in done.output
    assert assets.install() == tmp_path
    assert assets.installed()
    (tmp_path / assets.VERSIONS).write_text("of another version")
    assert not assets.installed()


def test_without_a_cluster_there_is_a_page_that_helps(tmp_path: Path) -> None:
    with visitor(None, (), {}, tmp_path) as somebody:
        assert somebody.get("/").headers["location"] == "/pipelines"
        assert "avow dashboard pipelines/" in somebody.get("/pipelines").text
        for path in ("/cluster", "/topics", "/topics/t/messages", "/groups", "/transactions"):
            answer = somebody.get(path)
            assert answer.status_code == 409
            assert "no Kafka cluster is configured" in answer.text
            assert "--brokers host:port" in answer.text
        for path in ("/evidence", "/explained", "/api", "/metrics"):
            assert somebody.get(path).status_code == 200


def test_the_advice_on_a_page_is_that_of_its_error(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        'name = "p"\nguarantee = "exactly-once"\n[source]\nbrokers = "127.0.0.1:9"\ntopics = ["t"]\n'
        '[decode]\nformat = "raw"\n[sink]\nkind = "postgres"\nurl = "postgresql://u@127.0.0.1:9/d"\ntable = "t"\n'
    )
    kafka, postgres = (
        "Check that the cluster is up, and that source.brokers",
        "Check that the server runs, and check sink.url",
    )
    with visitor("127.0.0.1:9", [file], {}, tmp_path, timeout_s=1) as somebody:
        for path, fits, other in (
            ("/cluster", kafka, "sink.url"),
            ("/pipelines/p/dead-letters", postgres, "cluster is up"),
        ):
            answer = somebody.get(path)
            assert (answer.status_code, fits in answer.text, other in answer.text) == (502, True, False), answer.text
            assert "<code>avow up</code>" not in answer.text, "it is not known to be a local cluster"


@pytest.mark.parametrize(
    "path",
    [
        "/pipelines/p/receipt?topic=t&partition=2147483648&offset=0",
        f"/pipelines/p/receipt?topic=t&partition=0&offset={2**63}",
        "/pipelines/p/dead-letters?partition=99999999999",
        f"/pipelines/p/dead-letters?from_offset={2**64}",
        f"/topics/t/messages/0/{2**63}",
        f"/topics/t/messages?at=offset&offset={2**63}",
    ],
)
def test_numbers_that_kafka_cannot_have_are_refused(tmp_path: Path, path: str) -> None:
    with visitor("127.0.0.1:9", (), {}, tmp_path, timeout_s=1) as somebody:
        assert somebody.get(path).status_code == 400


def test_a_form_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    with visitor(None, (), {}, tmp_path) as somebody:
        answer = somebody.change("/topics", **{f"field{number}": "" for number in range(60)})
        assert (answer.status_code, "more than 50 fields" in answer.text) == (400, True)


def test_a_group_is_not_said_to_be_missing_by_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    with visitor("127.0.0.1:9", (), {}, tmp_path, timeout_s=1) as somebody:
        for _ in range(3):  # at times the client gives an empty list, with the error beside it
            assert somebody.get("/api/groups/g").status_code in (502, 504)


def test_evidence_of_another_version_or_of_strangers_hides_nothing_else(tmp_path: Path) -> None:
    small_proof(tmp_path)
    strange = [{}, [], {"pipeline": "p"}, {"pipeline": "p", "verdict": 7, "seconds": "x", "findings": 3, "notes": 1}]
    (tmp_path / "audits").mkdir()
    for at, report in enumerate(strange):
        (tmp_path / "audits" / f"{at}.json").write_text(json.dumps({"at": at, "report": report}))
    (tmp_path / "audits" / "nan.json").write_text('{"at": NaN, "report": {}}')
    for at, line in enumerate(('{"at": 1}', "[]", '{"event": "proof", "cell": "", "at": "x", "seed": "y"}', "{")):
        (tmp_path / f"proof{at}").mkdir()
        (tmp_path / f"proof{at}" / "history.jsonl").write_text(f"{line}\n")
    with visitor(None, (), {}, tmp_path) as somebody:
        found = somebody.get("/api/evidence").json()
        assert ([one["name"] for one in found["proofs"]], found["audits"]) == (["small"], [])
        assert somebody.get("/evidence").status_code == 200


# Threads


def test_what_hangs_keeps_its_thread_and_takes_no_other() -> None:
    state = AppState(AccessRules(), None, Watch(), Jobs({}), timeout_s=0.1)
    app = App(state)
    go_on = threading.Event()
    begun: list[int] = []

    def hangs(number: int) -> None:
        begun.append(number)
        go_on.wait(60)

    async def params(function: Callable[..., Any], *given: Any) -> Any:
        try:
            return await app._in_thread(function, *given)
        except TimedOut:
            return "slow"

    async def many() -> None:
        before = threading.active_count()
        for _ in range(3):  # each time all of them are given up
            told = await asyncio.gather(*(params(hangs, number) for number in range(THREADS)))
            assert told == ["slow"] * THREADS
        assert threading.active_count() - before <= THREADS
        assert len(begun) == THREADS, "nobody else had a thread"
        assert await params(str, 7) == "slow", "none is free, and the page says so"
        go_on.set()
        for _ in range(100):
            if (answer := await params(str, 7)) != "slow":
                break
        assert answer == "7", "they are free again when they have ended"
        assert len(begun) == THREADS, "what nobody waits for any more is not begun"

    try:
        asyncio.run(many())
    finally:
        go_on.set()
        app.close()


# Pipelines by their files


def test_a_folder_gives_its_pipelines_and_leaves_other_files_out(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "torn.toml").write_text("name = [")
    (tmp_path / "bad.toml").write_text('name = "bad"\nguarantee = "sometimes"\n[source]\n')
    (tmp_path / "good.toml").write_text(
        'name = "good"\nguarantee = "exactly-once"\n[source]\nbrokers = "h:1"\ntopics = ["t"]\n'
        '[decode]\nformat = "raw"\n[sink]\nkind = "postgres"\nurl = "postgresql://u:hunter2@h/d"\ntable = "t"\n'
    )
    found = {one.name: one for one in Watch([tmp_path]).pipelines()}
    assert set(found) == {"bad", "good"}
    assert found["bad"].pipeline is None
    assert "sometimes" in found["bad"].problem
    assert found["good"].reads == {"t"}
    # A file that was named itself is never passed over in silence.
    (torn,) = Watch([tmp_path / "torn.toml"]).pipelines()
    assert torn.problem


# How a pipeline is


def watched(tmp_path: Path, engine: str, lag: int, **seen: Any) -> WatchedPipeline:
    file = tmp_path / "p.toml"
    file.write_text(
        f'name = "p"\nguarantee = "exactly-once"\nengine = "{engine}"\n[source]\nbrokers = "127.0.0.1:9"\n'
        'topics = ["t"]\n[decode]\nformat = "raw"\n[sink]\nkind = "postgres"\nurl = "postgresql://u@h/d"\ntable = "t"\n'
    )
    (one,) = Watch([file], {}).pipelines()
    where = PartitionSample("t", 0, 0, 10, 10, 10 - lag, lag, 10 - lag, 10 - lag, 0, 0)
    one.sample = Sample(time.time(), (where,), **seen)
    return one


@pytest.mark.parametrize(
    ("engine", "lag", "processes", "still_s", "expected"),
    [
        ("consumer", 0, 0, None, "stopped"),
        ("consumer", 5, 0, 5, "stopped"),
        ("consumer", 5, 0, 100, "stopped"),
        ("consumer", 0, 2, None, "drained"),
        ("consumer", 5, 2, 5, "behind"),
        ("consumer", 5, 2, 100, "stalled"),
        ("consumer", 5, None, 5, "behind"),  # the group may not be described
        ("spark", 0, 0, None, "drained"),  # its driver joins no group
        ("spark", 5, 0, 5, "behind"),
        ("spark", 5, 0, 100, "stalled"),
    ],
)
def test_a_pipeline_is_said_to_be_stopped_only_where_that_is_known(
    tmp_path: Path, engine: str, lag: int, processes: int | None, still_s: float | None, expected: str
) -> None:
    one = watched(tmp_path, engine, lag, processes=processes)
    one.waiting_since = None if still_s is None else time.time() - still_s
    state = AppState(AccessRules(), None, Watch(), Jobs({}), timeout_s=0.1)
    seen = row(state, one)
    assert (seen.state, seen.processes) == (expected, processes)
    body = environment().get_template("pipeline_part.html").render(answer=PipelineAnswer(seen, (), (), (), ()))
    assert ("No process runs." in body) == (expected == "stopped")
    assert f'<span class="pill {expected}">' in body


def test_a_lag_has_an_age_or_says_why_not(tmp_path: Path) -> None:
    state = AppState(AccessRules(), None, Watch(), Jobs({}), timeout_s=0.1)
    unknown = row(state, watched(tmp_path, "spark", 5, lag_note="the oldest unclaimed record has no timestamp"))
    body = environment().get_template("pipeline_part.html").render(answer=PipelineAnswer(unknown, (), (), (), ()))
    assert "age unknown" in body
    assert "the oldest unclaimed record has no timestamp" in body
    assert lag_seconds(unknown) is None, "an alarm is not told of 0 s"
    assert lag_seconds(row(state, watched(tmp_path, "spark", 5, lag_seconds=7.0))) == 7.0
    assert lag_seconds(row(state, watched(tmp_path, "spark", 0))) == 0


def test_a_job_that_has_said_its_last_word_may_not_have_ended_yet() -> None:
    job = JobRow(1, "audit", "p", True, time.time(), None, (), "held: all is there", "held", "", "")
    assert "held: all is there" in environment().get_template("job_part.html").render(answer=job)
