"""The report: its sentences, its data, and how it looks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from avow.audit import archive
from avow.audit.compare import Tally
from avow.audit.judge import EXIT_CODES, Verdict
from avow.audit.report import _ADVICE, Audited, AuditReport, summarize, unknown
from avow.cli import main
from avow.cli.audit import show
from avow.dashboard.evidence import Evidence
from avow.findings import Finding, Kind, Span, split_phantoms
from avow.ledger import Counts
from avow.plan import load_checked
from avow.settings import PipelineConfig

PIPELINE = """
name = "payments"
guarantee = "{guarantee}"
[source]
brokers = "localhost:1"
topics = ["payments"]
[decode]
format = "string"
[sink]
kind = "postgres"
url = "postgresql://me:s3cret@localhost/x"
table = "payments"
"""
PARTITIONS = tuple(
    Audited("payments", n, 0, 1_234_567, Tally(1_234_000, 1_233_990, 8, 1, 1), Counts(1_234_000, 1_233_991, 8, 1))
    for n in range(2)
)
LOST = Finding(Kind.LOST, "payments", 1, (Span(17, 18, 1), Span(30, 45, 14)), 15)
CORRUPTED = Finding(Kind.CORRUPTED, "payments", 0, (Span(4711, 4712, 1),), 1, ("amount", "a\x1b[31m[b]"))


@pytest.fixture
def pipeline(tmp_path: Path, request: pytest.FixtureRequest) -> PipelineConfig:
    path = tmp_path / "pipeline.toml"
    path.write_text(PIPELINE.format(guarantee=getattr(request, "param", "exactly-once")))
    return load_checked(path, {})


def report(pipeline: PipelineConfig, *findings: Finding, records: bool = True) -> AuditReport:
    return summarize(pipeline, PARTITIONS if records else (), findings, ["a note [of mine]"], 0, 6.54)


def shown(of: AuditReport, max_shown: int = 10) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    show(console, of, max_shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_held(pipeline: PipelineConfig) -> None:
    held = report(pipeline)
    assert held.sentence == "held: 2,468,000 records, each delivered as exactly-once promises."
    assert (held.verdict, held.advice) == (Verdict.HELD, "")


@pytest.mark.parametrize("pipeline", ["at-most-once"], indirect=True)
def test_held_with_what_is_permitted(pipeline: PipelineConfig) -> None:
    held = report(pipeline, LOST)
    assert held.sentence.startswith("held: 15 lost, which at-most-once permits;")
    assert "permitted" in shown(held)


def test_broken_names_what_is_not_permitted(pipeline: PipelineConfig) -> None:
    broken = report(pipeline, CORRUPTED, LOST)
    assert broken.sentence == "broken: 15 lost, 1 corrupted. exactly-once does not permit that."
    assert broken.advice == _ADVICE[Kind.LOST]


def test_unknown(pipeline: PipelineConfig) -> None:
    assert report(pipeline, records=False).verdict is Verdict.UNKNOWN
    assert unknown(pipeline, "Kafka is away", "Look for it.").sentence == "unknown: Kafka is away"
    assert EXIT_CODES == {"held": 0, "broken": 1, "unknown": 2}


def test_every_kind_has_its_advice() -> None:
    assert set(_ADVICE) == set(Kind)


def test_the_page_is_narrow_aligned_and_escaped(pipeline: PipelineConfig) -> None:
    text = shown(report(pipeline, CORRUPTED, LOST))
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"^lost +payments/1 +15  17, \[30, 45\) *$", text, re.MULTILINE)
    assert r"in amount, a\x1b[31m[b]" in text
    assert "note: a note [of mine]" in text
    assert "2,468,000 read = 2,467,980 written + 16 dead + 2 skipped + 2 lost;" in text
    assert "s3cret" not in text
    assert len({line.index("1,234,000") for line in text.splitlines() if "1,234,000" in line}) == 1


def test_no_more_ranges_than_asked_for(pipeline: PipelineConfig) -> None:
    text = shown(report(pipeline, LOST), 1)
    assert "17, and 1 ranges more" in text
    assert "[30, 45)" not in text


def test_as_data(pipeline: PipelineConfig) -> None:
    told = json.loads(json.dumps(report(pipeline, LOST).as_json(1)))
    assert told["verdict"] == "broken"
    assert told["findings"] == [
        {
            "kind": "lost",
            "topic": "payments",
            "partition": 1,
            "spans": [[17, 18, 1]],
            "count": 15,
            "columns": [],
            "detail": "",
            "permitted": False,
        }
    ]
    assert told["tally"]["lost"] == 2
    assert told["counts"]["written"] == 2_467_982


def test_phantoms_told_apart() -> None:
    phantoms = Finding(Kind.PHANTOM, "t", 0, (Span(5, 8, 3), Span(20, 21, 1)), 6)
    phantom, aborted = split_phantoms(phantoms, np.array([6, 7, 9]))
    assert (phantom.kind, phantom.spans, phantom.count) == (Kind.PHANTOM, (Span(5, 6, 1), Span(20, 21, 1)), 4)
    assert (aborted.kind, aborted.spans, aborted.count) == (Kind.ABORTED_READ, (Span(6, 8, 2),), 2)


def test_a_report_is_kept_where_the_dashboard_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE.format(guarantee="exactly-once").replace("localhost/x", "127.0.0.1:9/x"))

    def seen(*options: str) -> list[str]:
        assert CliRunner().invoke(main, ["audit", str(file), *options]).exit_code == 2, "nobody is there"
        return [
            str(row.verdict)
            for folder in (".avow", "other")
            if (row := Evidence([Path(folder)]).last_audit("payments"))
        ]

    assert seen("--out", "-") == []
    assert seen() == ["unknown"]
    assert seen("--out", "other") == ["unknown", "unknown"]
    # A folder that cannot be written does not change what the audit says.
    (tmp_path / ".avow" / "audits").rename(tmp_path / ".avow" / "before")
    (tmp_path / ".avow" / "audits").write_text("a file")
    assert seen() == ["unknown"]


def test_the_newest_reports_of_each_pipeline_stay(
    pipeline: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "KEPT_MAX", 2)
    places = tmp_path / "audits"
    places.mkdir()
    old = [f"payments-2026010{day}-000000-1.json" for day in (1, 2, 3)]
    for name in (*old, "payments-eu-20260101-000000-1.json", "mine.json"):
        (places / name).write_text("{}")
    new = archive.keep(report(pipeline), tmp_path)
    assert sorted(path.name for path in archive.files(tmp_path)) == sorted(
        [old[-1], new.name, "payments-eu-20260101-000000-1.json", "mine.json"]
    )
