"""The report of a proof, as HTML and as Markdown, from its history alone.

The matrix as a coloured grid with counts, a timeline per cell (records in the table over time, with bars where faults
were), and how to run each cell again. One file each, nothing loaded from elsewhere, light or dark as the reader's
machine is. Owns: presentation. Must not know: how a verdict was reached.
"""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avow.guarantee import Guarantee
from avow.prove import history
from avow.prove.cells import FAULTS, CellVerdict

WIDTH, HEIGHT = 720, 120
VERDICTS = tuple(map(str, CellVerdict))
GUARANTEES = tuple(map(str, Guarantee))


@dataclass
class RecordedCell:
    """One cell, from the history. Of a cell that was run again, the last run counts."""

    name: str  # its parts are below
    replay: str = ""
    began: float = 0
    rows: list[tuple[float, int]] = field(default_factory=list)  # (seconds from the beginning, rows)
    bars: list[tuple[float, float, str]] = field(default_factory=list)  # (from, until, fault)
    notes: list[tuple[float, str]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)  # the verdict's line

    def __post_init__(self) -> None:
        self.fault, self.guarantee, self.sink, self.mode, self.engine = self.name.split("/")
        self.column = f"{self.sink}/{self.mode}/{self.engine}"

    @property
    def verdict(self) -> str:
        return str(self.end.get("verdict", "unknown"))

    @property
    def counts(self) -> str:
        """What was found, in a few words."""
        return ", ".join(f"{count:,} {kind}" for kind, count in self.end.get("check", {}).items() if count)

    @property
    def fired(self) -> list[str]:
        """The proofs of the faults that fired."""
        return [proof for proof in self.end.get("fired", ()) if proof]


def load(folder: Path) -> tuple[dict[str, Any], list[RecordedCell]]:
    """The proof's first line, and its cells."""
    header: dict[str, Any] = {}
    cells: dict[str, RecordedCell] = {}
    for event in history.read(folder):
        kind, name = event["event"], event["cell"]
        if kind == "proof":
            header = event
            continue
        if kind == "cell":
            cells[name] = RecordedCell(name, event.get("replay", ""), event["at"])
            continue
        cell = cells.setdefault(name, RecordedCell(name, began=event["at"]))
        at = event["at"] - cell.began
        match kind:
            case "rows":
                cell.rows.append((at, event["rows"]))
            case "fault":
                cell.bars.append((at, at, event["fault"]))
            case "heal" if cell.bars:
                cell.bars[-1] = (cell.bars[-1][0], at, event["fault"])
            case "note":
                cell.notes.append((at, event["text"]))
            case "verdict":
                cell.end = event
    return header, [cell for cell in cells.values() if cell.end]


def write(folder: Path) -> tuple[Path, Path]:
    """Both reports, beside the history."""
    header, cells = load(folder)
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(as_html(header, cells), encoding="utf-8")
    text.write_text(as_markdown(header, cells), encoding="utf-8")
    return page, text


def summary(cells: Iterable[RecordedCell]) -> str:
    count = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])


def as_markdown(header: dict[str, Any], cells: list[RecordedCell]) -> str:
    lines = ["# Proof", "", f"{_when(header)}: {summary(cells)}.", ""]
    lines += [_versions(header), ""]
    for column in dict.fromkeys(cell.column for cell in cells):
        lines += [f"## {column}", "", f"| # | fault | {' | '.join(GUARANTEES)} |"]
        lines.append(f"|---|---|{'---|' * len(GUARANTEES)}")
        shown = {(c.fault, c.guarantee): c for c in cells if c.column == column}
        for fault in _faults(shown.values()):
            row = [shown.get((fault, guarantee)) for guarantee in GUARANTEES]
            verdicts = [f"{c.verdict}{f': {c.counts}' if c.counts else ''}" if c else "" for c in row]
            lines.append(f"| {FAULTS[fault].number or ''} | {FAULTS[fault].title} | {' | '.join(verdicts)} |")
        lines.append("")
    lines += ["## Cells", ""]
    for cell in cells:
        lines.append(f"- **{cell.name}**: {cell.verdict}. {_plain(cell.end.get('why', ''))}")
        lines += [f"  - fired: {_plain(proof)}" for proof in cell.fired]
        lines.append(f"  - again: `avow prove {cell.replay}`")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """On one line, and no markup of its own."""
    return " ".join(text.replace("|", "/").replace("<", "‹").split())


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #5f6773; --paper: #fff; --line: #d9dce1; --bar: #f59e0b55;
  --held: #15803d; --broken: #b91c1c; --unproven: #b45309; --unknown: #854d0e; --not: #5f6773;
  --held-box: #e3f4e8; --broken-box: #fde2e1; --unsure-box: #fdf0cf; --not-box: #f1f2f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3af; --paper: #14171a; --line: #343a42;
  --bar: #f59e0b44; --held: #6ee7a0; --broken: #fca5a5; --unproven: #fcd34d; --unknown: #fde68a; --not: #9aa3af;
  --held-box: #16301f; --broken-box: #4c1c1e; --unsure-box: #42350f; --not-box: #22262b; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 78rem; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2.2rem 0 .4rem; font-size: 1.2rem; }
h3 { margin: 1.4rem 0 .3rem; font-size: 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: separate; border-spacing: 2px; font-size: .85rem; width: 100%; }
th { color: var(--dim); font-weight: 500; text-align: left; padding: .1rem .4rem; vertical-align: bottom; }
th.word { border-bottom: 2px solid var(--line); color: var(--ink); }
td { padding: .1rem .4rem; vertical-align: top; } td.number { color: var(--dim); text-align: right; }
td.fault { min-width: 15rem; position: sticky; left: 0; background: var(--paper); }
td.box { min-width: 5.2rem; padding: 0; } td.box a { display: block; padding: .1rem .4rem; border-radius: 3px;
  text-decoration: none; line-height: 1.35; } td.box a:hover { outline: 1px solid currentColor; }
.chip { display: inline-block; border-radius: 3px; padding: .05rem .5rem; margin: .6rem .3rem 0 0; }
.held, .caught { color: var(--held); background: var(--held-box); }
.broken, .missed { color: var(--broken); background: var(--broken-box); }
.unproven { color: var(--unproven); background: var(--unsure-box); }
.unknown { color: var(--unknown); background: var(--unsure-box); }
.not-run { color: var(--not); background: var(--not-box); }
.verdict { font-weight: 600; } small, .dim { color: var(--dim); } td.box small { color: inherit; display: block; }
code { font-size: .85em; overflow-wrap: anywhere; } details { border-top: 1px solid var(--line); padding: .3rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; } summary .verdict { border-radius: 3px; padding: 0 .4rem; }
.more { padding: .3rem 0 .6rem 1.1rem; } .more:target { outline: 2px solid var(--line); outline-offset: 4px; }
svg { width: 100%; max-width: 60rem; height: auto; display: block; margin: .5rem 0; }
svg text { fill: var(--dim); font-size: 10px; }
@media (max-width: 50rem) { td.fault { min-width: 9rem; } }
ul.notes { margin: .3rem 0; padding-left: 1.2rem; color: var(--dim); font-size: .85em; overflow-wrap: anywhere; }
"""


def as_html(header: dict[str, Any], cells: list[RecordedCell]) -> str:
    count = Counter(cell.verdict for cell in cells)
    chips = "".join(f'<span class="chip {v}"><b>{count[v]}</b> {v}</span>' for v in VERDICTS if count[v])
    grids = "".join(
        f"<h2>{html.escape(sink)} on {html.escape(engine)}</h2>"
        + _grid([cell for cell in cells if (cell.sink, cell.engine) == (sink, engine)])
        for sink, engine in dict.fromkeys((cell.sink, cell.engine) for cell in cells)
    )
    faults = "".join(
        f"<h3>{html.escape(FAULTS[fault].title)} <small>{html.escape(fault)}</small></h3>"
        + "".join(_cell(cell) for cell in cells if cell.fault == fault)
        for fault in _faults(cells)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>avow prove</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Proof</h1>{chips}"
        f"<p><small>{html.escape(_when(header))}. {html.escape(_versions(header))}</small></p>"
        f"{grids}<h2>Cells</h2>{faults}</body></html>\n"
    )


def _grid(cells: list[RecordedCell]) -> str:
    """One sink on one engine: a row for each fault, a column for each guarantee and mode."""
    by_column = {(cell.fault, cell.guarantee, cell.mode): cell for cell in cells}
    there = sorted({(cell.guarantee, cell.mode) for cell in cells})
    columns = [column for guarantee in GUARANTEES for column in there if column[0] == guarantee]
    rows = ""
    for fault in _faults(cells):
        boxes = "".join(_box(by_column.get((fault, guarantee, mode))) for guarantee, mode in columns)
        title = html.escape(FAULTS[fault].title)
        rows += f'<tr><td class="number">{FAULTS[fault].number or ""}</td><td class="fault">{title}</td>{boxes}</tr>'
    spans = Counter(guarantee for guarantee, _ in columns)
    top = "".join(f'<th class="word" colspan="{span}">{guarantee}</th>' for guarantee, span in spans.items())
    head = "".join(f"<th>{html.escape(mode)}</th>" for _, mode in columns)
    return (
        f'<div class="scroll"><table><thead><tr><th></th><th></th>{top}</tr>'
        f"<tr><th>#</th><th>fault</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _box(cell: RecordedCell | None) -> str:
    if cell is None:
        return "<td></td>"
    counts = f"<small>{html.escape(cell.counts)}</small>" if cell.counts else ""
    return f'<td class="box"><a class="{cell.verdict}" href="#{_id(cell)}"><b>{cell.verdict}</b>{counts}</a></td>'


def _cell(cell: RecordedCell) -> str:
    """The id is inside, so that a link from the grid opens it."""
    fired = "".join(f"<li>fired: {html.escape(proof)}</li>" for proof in cell.fired)
    notes = "".join(f"<li>{at:.1f} s: {html.escape(text)}</li>" for at, text in cell.notes)
    return (
        f"<details{' open' if cell.verdict in ('broken', 'missed', 'unknown') else ''}><summary>"
        f'<span class="verdict {cell.verdict}">{cell.verdict}</span> {html.escape(f"{cell.guarantee}, {cell.column}")} '
        f"<small>{html.escape(cell.end.get('why', ''))}</small></summary>"
        f'<div class="more" id="{_id(cell)}">{timeline(cell)}<ul class="notes">{fired}{notes}</ul>'
        f"<p><code>avow prove {html.escape(cell.replay)}</code></p></div></details>"
    )


def timeline(cell: RecordedCell) -> str:
    """Records in the table over time, as a line; faults as bars behind it."""
    if len(cell.rows) < 2:
        return ""
    end = max(cell.rows[-1][0], *(until for _, until, _ in cell.bars), 1.0) if cell.bars else cell.rows[-1][0] or 1.0
    base = min(rows for _, rows in cell.rows)  # not 0 where the pipeline comes from the cell before
    top = max(*(rows for _, rows in cell.rows), base + 1)
    left, bottom = 50, HEIGHT - 18

    def x(at: float) -> float:
        return left + at / end * (WIDTH - left - 8)

    def y(rows: int) -> float:
        return bottom - (rows - base) / (top - base) * (bottom - 14)

    bars = "".join(
        f'<rect x="{x(start):.1f}" y="0" width="{max(2, x(until) - x(start)):.1f}" height="{bottom}" '
        f'fill="var(--bar)"><title>{html.escape(fault)}, {start:.1f} s to {until:.1f} s</title></rect>'
        f'<text x="{x(start) + 2:.1f}" y="10">{html.escape(fault)}</text>'
        for start, until, fault in cell.bars
    )
    points = " ".join(f"{x(at):.1f},{y(rows):.1f}" for at, rows in cell.rows)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="records in the table over time">{bars}'
        f'<line x1="{left}" y1="{bottom}" x2="{WIDTH - 8}" y2="{bottom}" stroke="var(--line)"/>'
        f'<polyline points="{points}" fill="none" stroke="var(--held)" stroke-width="1.5"/>'
        f'<text x="{left - 4}" y="{y(top) + 4:.1f}" text-anchor="end">{top:,}</text>'
        f'<text x="{left - 4}" y="{bottom + 3}" text-anchor="end">{base:,}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 5}" text-anchor="end">{end:.0f} s</text></svg>'
    )


def _id(cell: RecordedCell) -> str:
    return html.escape(cell.name.replace("/", "-"))


def _faults(cells: Iterable[RecordedCell]) -> list[str]:
    """In the table's order."""
    names = {cell.fault for cell in cells}
    return [name for name in FAULTS if name in names]


def _versions(header: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in header.get("versions", {}).items())


def _when(header: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.get("at", 0)))
    return f"{at}, seed {header.get('seed', '?')}"
