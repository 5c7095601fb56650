"""The plan: what it refuses, what it says of each guarantee and mode, and how it looks."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner, Result

from avow.cli import main
from avow.errors import ConfigError
from avow.guarantee import Anomaly, Guarantee
from avow.plan import Hop, Plan, load_checked, plan
from avow.settings import Mode
from avow.sinks import SINKS, Offer
from avow.sinks.postgres.plugin import PostgresPlugin

EXAMPLE = Path(__file__).parents[2] / "examples/payments.toml"
ENV = {"DATABASE_URL": "postgresql://me@db/shop"}
MODES: tuple[Mode, ...] = get_args(Mode)


def pipeline_file(tmp_path: Path, guarantee: Guarantee, mode: Mode = "append", more: str = "") -> Path:
    """A pipeline; ``more`` may set keys of the sink, and open further sections."""
    key = "" if mode == "append" else 'key = ["id"]'
    path = tmp_path / "p.toml"
    path.write_text(f"""\
name = "payments"
guarantee = "{guarantee}"
source = {{ brokers = "localhost:9092", topics = ["payments"] }}
decode = {{ format = "json", schema = "id long not null, note string" }}
[sink]
kind = "postgres"
url = "${{env:DATABASE_URL}}"
table = "payments"
mode = "{mode}"
{key}
{more}
""")
    return path


def planned(tmp_path: Path, guarantee: Guarantee, mode: Mode = "append", more: str = "") -> Plan:
    return plan(load_checked(pipeline_file(tmp_path, guarantee, mode, more), ENV))


def hop(made: Plan, name: str) -> Hop:
    (found,) = [hop for hop in made.hops if hop.name == name]
    return found


# --- offers ---------------------------------------------------------------------------------------------


def test_every_kind_that_settings_know_is_registered() -> None:
    assert list(SINKS) == ["postgres", "delta", "iceberg", "kafka"]
    assert all(kind == sink.kind for kind, sink in SINKS.items())


def test_postgres_offers_every_guarantee_in_every_mode() -> None:
    assert {mode: SINKS["postgres"].offered(mode) for mode in MODES} == {mode: frozenset(Guarantee) for mode in MODES}


def test_what_a_sink_does_not_offer_is_refused_with_its_line(tmp_path: Path) -> None:
    class Weak(PostgresPlugin):
        title = "Weak"
        offers = {"append": Offer({Guarantee.AT_LEAST_ONCE: "x", Guarantee.AT_MOST_ONCE: "x"})}  # noqa: RUF012

    weak = Weak()
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE)
    with pytest.raises(ConfigError) as refused:
        load_checked(path, ENV, {"postgres": weak})
    assert str(refused.value) == (
        f"{path}:2: guarantee: Weak cannot keep it with append; with append: at-most-once, at-least-once"
    )
    path = pipeline_file(tmp_path, Guarantee.AT_LEAST_ONCE, "upsert")
    with pytest.raises(ConfigError) as refused:
        load_checked(path, ENV, {"postgres": weak})
    assert str(refused.value) == f"{path}:9: sink.mode: Weak does not offer upsert; modes: append"
    load_checked(pipeline_file(tmp_path, Guarantee.AT_LEAST_ONCE), ENV, {"postgres": weak})


# --- hops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("guarantee", "mode"), list(product(Guarantee, MODES)))
def test_every_offer_is_explained(guarantee: Guarantee, mode: Mode, tmp_path: Path) -> None:
    made = planned(tmp_path, guarantee, mode)
    assert made.guarantee is guarantee
    assert made.meaning == guarantee.meaning
    assert made.permits == tuple(guarantee.permits)
    assert [hop.name for hop in made.hops] == ["source", "decode", "sink", "dead letters", "positions"]
    assert SINKS["postgres"].offers[mode].notes[guarantee] in hop(made, "sink").promises


@pytest.mark.parametrize(
    ("guarantee", "order", "permitted"),
    [
        (Guarantee.AT_MOST_ONCE, "claim their offsets, then write the rows.", Anomaly.LOST),
        (Guarantee.AT_LEAST_ONCE, "write the rows, then claim their offsets.", Anomaly.DUPLICATED),
        (Guarantee.EXACTLY_ONCE, "write the rows and claim their offsets in one act.", None),
    ],
)
def test_the_order_of_acts(guarantee: Guarantee, order: str, permitted: Anomaly | None, tmp_path: Path) -> None:
    sink = hop(planned(tmp_path, guarantee), "sink")
    assert sink.does == f"PostgreSQL table payments, append: {order}"
    assert [text.split(":")[0] for text in sink.permits] == ([permitted] if permitted else [])


def test_the_source_says_where_it_begins_and_what_stops_it(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE)
    text = path.read_text()
    for written, said in [
        ('"earliest"', "from the earliest offset."),
        ('"latest"', "from the latest offset."),
        ('"2026-01-31T12:00:00Z"', "from the first record at or after 2026-01-31T12:00:00+00:00."),
        ("{ payments = { 0 = 1, 3 = 2 } }", "from the declared offsets of 2 partition(s), and the earliest offset of"),
    ]:
        path.write_text(text.replace('["payments"]', f'["payments"], start = {written}'))
        source = hop(plan(load_checked(path, ENV)), "source")
        assert said in source.does
        assert (
            "Records that retention deleted before they were claimed stop the run with retention-loss."
            in source.promises
        )
        assert source.permits == ()
    path.write_text(text.replace('["payments"]', '["payments"], on_data_loss = "skip"'))
    source = hop(plan(load_checked(path, ENV)), "source")
    assert "claimed as skipped" in source.permits[0]
    assert not any("retention" in promise for promise in source.promises)


def test_a_pattern_is_shown(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE)
    path.write_text(path.read_text().replace('topics = ["payments"]', "topics_pattern = 'pay.*'"))
    assert "every topic that matches pay.*" in hop(plan(load_checked(path, ENV)), "source").does


def test_decode_says_what_becomes_of_nulls_and_unknown_fields(tmp_path: Path) -> None:
    assert hop(planned(tmp_path, Guarantee.EXACTLY_ONCE), "decode").promises[1:] == (
        "A JSON field that is not declared makes the record a dead letter.",
        "A null value makes the record a dead letter.",
    )
    assert (
        hop(planned(tmp_path, Guarantee.EXACTLY_ONCE, "upsert"), "decode").promises[-1]
        == "A null value deletes the row of its key."
    )
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE)
    path.write_text(
        path.read_text().replace('"json", schema = "id long not null, note string"', '"raw", tombstones="skip"')
    )
    raw = hop(plan(load_checked(path, ENV)), "decode")
    assert raw.does == "Store each record unchanged in the columns key and value (key binary, value binary)."
    assert raw.promises[1:] == ("A record with a null value is counted as skipped.",)


def test_a_transform_is_a_hop_of_its_own(tmp_path: Path) -> None:
    made = planned(tmp_path, Guarantee.EXACTLY_ONCE, "upsert", '[transform]\npython = "shop:clean"')
    assert [hop.name for hop in made.hops] == ["source", "decode", "transform", "sink", "dead letters", "positions"]
    transform = hop(made, "transform")
    assert transform.does == "Pass the records through the function shop:clean."
    assert transform.assumes[-1] == "The transform outputs the key columns id, never null."


@pytest.mark.parametrize(("share", "shown"), [("0", "0%"), ("0.07", "7%"), ("0.0005", "0.05%"), ("1", "100%")])
def test_the_share_of_dead_letters(share: str, shown: str, tmp_path: Path) -> None:
    letters = hop(
        planned(tmp_path, Guarantee.EXACTLY_ONCE, more=f"[dead_letters]\nmax_share = {share}"), "dead letters"
    )
    assert letters.promises[-1] == f"The run stops when more than {shown} of the records are dead letters."


# --- warnings -------------------------------------------------------------------------------------------

WARNINGS = {
    "lost": "at-most-once: records can be lost",
    "doubled": "at-least-once with append: duplicates are possible after a crash",
    "risen": "upsert: a deleted row leaves no offset to compare with",
    "dedupe order": "dedupe: records of one key in two partitions have no order",
    "upsert order": "upsert: records of one key in two partitions have no order",
    "share": "dead_letters.max_share is not declared: the default is 1%",
    "connections": "Database connections: one for the driver and one for each Python worker",
}
ALWAYS = {"share", "connections"}


@pytest.mark.parametrize(
    ("guarantee", "mode", "expected"),
    [
        (Guarantee.AT_MOST_ONCE, "append", {"lost"}),
        (Guarantee.AT_LEAST_ONCE, "append", {"doubled"}),
        (Guarantee.EXACTLY_ONCE, "append", set()),
        (Guarantee.AT_MOST_ONCE, "dedupe", {"lost", "dedupe order"}),
        (Guarantee.AT_LEAST_ONCE, "dedupe", {"dedupe order"}),
        (Guarantee.EXACTLY_ONCE, "dedupe", {"dedupe order"}),
        (Guarantee.AT_MOST_ONCE, "upsert", {"lost", "risen", "upsert order"}),
        (Guarantee.AT_LEAST_ONCE, "upsert", {"risen", "upsert order"}),
        (Guarantee.EXACTLY_ONCE, "upsert", {"upsert order"}),
    ],
)
def test_warnings(guarantee: Guarantee, mode: Mode, expected: set[str], tmp_path: Path) -> None:
    warnings = planned(tmp_path, guarantee, mode).warnings
    found = {name for name, start in WARNINGS.items() if any(w.startswith(start) for w in warnings)}
    assert found == expected | ALWAYS
    assert len(warnings) == len(found)


def test_warnings_of_the_source_and_of_the_share(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE, more="[dead_letters]\nmax_share = 1")
    path.write_text(path.read_text().replace('["payments"]', '["payments"], start = "latest", on_data_loss = "skip"'))
    starts = [warning.split(":")[0] for warning in plan(load_checked(path, ENV)).warnings]
    assert starts[:3] == ['source.on_data_loss = "skip"', 'source.start = "latest"', "dead_letters.max_share = 1"]


# --- the command ----------------------------------------------------------------------------------------


def run(*arguments: str, env: dict[str, str] = ENV) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], env=env)


def test_the_report_fits_80_columns_and_says_everything(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.AT_LEAST_ONCE, "upsert", '[transform]\npython = "shop:clean"')
    result = run(str(path), env=ENV | {"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    words = " ".join(result.output.split())
    made = plan(load_checked(path, ENV))
    for hop in made.hops:
        for text in (hop.name, hop.does, *hop.promises, *hop.permits, *hop.assumes):
            assert _words(text) in _words(words), text
    for text in (made.meaning, *made.warnings):
        assert _words(text) in _words(words), text


def _words(text: str) -> str:
    """Without the labels and the spaces between which the report is wrapped."""
    return "".join(text.replace("promises", "").replace("permits", "").replace("assumes", "").replace("!", "").split())


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE)
    path.write_text(path.read_text().replace('table = "payments"', 'table = "[bold]pay[/bold]"'))
    assert 'table "[bold]pay[/bold]", append' in run(str(path)).output


def test_json_is_the_plan(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.AT_LEAST_ONCE)
    result = run(str(path), "--json")
    assert result.exit_code == 0
    read = json.loads(result.output)
    made = plan(load_checked(path, ENV))
    assert read["guarantee"] == "at-least-once"
    assert read["permits"] == ["duplicated"]
    assert [hop["name"] for hop in read["hops"]] == [hop.name for hop in made.hops]
    assert read["warnings"] == list(made.warnings)


def test_a_bad_file_ends_with_2_and_says_why(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path, Guarantee.EXACTLY_ONCE, more="typo = 1")
    result = run(str(path))
    assert result.exit_code == 2
    assert f"error: {path}:11: sink.typo: is not a known key" in result.stderr
    assert "what to do: " in result.stderr
    assert run(str(tmp_path / "none.toml")).exit_code == 2


def test_the_example() -> None:
    result = run(str(EXAMPLE))
    assert result.exit_code == 0
    assert result.output.startswith("payments: exactly-once\n")
