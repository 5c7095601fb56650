"""The report of a proof, as HTML and as Markdown, from its history alone.

The matrix as a coloured grid with counts, a timeline per cell (records in the table over time, with bars where faults
were), and how to play each cell again. One file each, nothing loaded from elsewhere, light or dark as the reader's
machine is. Owns: looks. Must not know: how anything was found out.
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
from avow.prove.cells import FAULTS

WIDTH, HEIGHT = 720, 120
VERDICTS = ("held", "broken", "unproven", "unknown", "not-run", "caught", "missed")


@dataclass
class Played:
    """One cell as the history tells it. A cell that was played again has what came last."""

    name: str
    replay: str = ""
    began: float = 0
    rows: list[tuple[float, int]] = field(default_factory=list)  # (seconds from the beginning, rows)
    bars: list[tuple[float, float, str]] = field(default_factory=list)  # (from, until, fault)
    notes: list[tuple[float, str]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)  # the verdict's line

    @property
    def fault(self) -> str:
        return self.name.split("/")[0]

    @property
    def guarantee(self) -> str:
        return self.name.split("/")[1]

    @property
    def place(self) -> str:
        """Sink, mode and engine."""
        return "/".join(self.name.split("/")[2:])

    @property
    def verdict(self) -> str:
        return str(self.end.get("verdict", "unknown"))

    @property
    def counts(self) -> str:
        """What was found, in a few words."""
        check = {**self.end.get("check", {})}
        return ", ".join(f"{count:,} {kind}" for kind, count in check.items() if count)


def load(folder: Path) -> tuple[dict[str, Any], list[Played]]:
    """The proof's first line, and its cells."""
    header: dict[str, Any] = {}
    cells: dict[str, Played] = {}
    for event in history.read(folder):
        kind, name = event["event"], event["cell"]
        if kind == "proof":
            header = event
            continue
        if kind == "cell":
            cells[name] = Played(name, event.get("replay", ""), event["at"])
            continue
        cell = cells.setdefault(name, Played(name, began=event["at"]))
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


def summary(cells: Iterable[Played]) -> str:
    count = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])


def as_markdown(header: dict[str, Any], cells: list[Played]) -> str:
    lines = ["# Proof", "", f"{_when(header)}: {summary(cells)}.", ""]
    lines += [", ".join(f"{name} {found}" for name, found in header.get("versions", {}).items()), ""]
    for place in _places(cells):
        words = [str(word) for word in Guarantee]
        lines += [f"## {place}", "", f"| # | fault | {' | '.join(words)} |", f"|---|---|{'---|' * len(words)}"]
        for fault in _faults(cells, place):
            found = [_find(cells, place, fault, word) for word in words]
            shown = [f"{c.verdict}{f': {c.counts}' if c.counts else ''}" if c else "" for c in found]
            lines.append(f"| {FAULTS[fault].number or ''} | {FAULTS[fault].title} | {' | '.join(shown)} |")
        lines.append("")
    lines += ["## Cells", ""]
    for cell in cells:
        lines.append(f"- **{cell.name}**: {cell.verdict}. {_plain(cell.end.get('why', ''))}")
        lines += [f"  - fired: {_plain(proof)}" for proof in cell.end.get("fired", ()) if proof]
        lines.append(f"  - again: `avow prove {cell.replay}`")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """On one line, and no markup of its own."""
    return " ".join(text.replace("|", "/").replace("<", "‹").split())


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #6b7280; --paper: #fff; --line: #d9dce1; --bar: #f59e0b55;
  --held: #15803d; --broken: #b91c1c; --unproven: #b45309; --unknown: #a16207; --not: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3af; --paper: #14171a; --line: #343a42;
  --bar: #f59e0b44; --held: #4ade80; --broken: #f87171; --unproven: #fbbf24; --unknown: #fde047; --not: #9aa3af; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; } th, td { border-bottom: 1px solid var(--line);
  padding: .35rem .6rem; text-align: left; vertical-align: top; } th { color: var(--dim); font-weight: 500; }
td.number { color: var(--dim); text-align: right; } td a { text-decoration: none; }
.held, .caught { color: var(--held); } .broken, .missed { color: var(--broken); } .unproven { color: var(--unproven); }
.unknown { color: var(--unknown); } .not-run { color: var(--not); } .verdict { font-weight: 600; }
small, .dim { color: var(--dim); } code { font-size: .85em; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--line); padding: .6rem 0; } summary { cursor: pointer; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; } svg text { fill: var(--dim); font-size: 10px; }
ul.notes { margin: .3rem 0; padding-left: 1.2rem; color: var(--dim); font-size: .85em; }
"""


def as_html(header: dict[str, Any], cells: list[Played]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in header.get("versions", {}).items())
    grids = "".join(f"<h2>{html.escape(place)}</h2>{_grid(cells, place)}" for place in _places(cells))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>avow prove</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Proof</h1>"
        f"<p><b>{html.escape(summary(cells))}</b><br><small>{html.escape(_when(header))}. {html.escape(versions)}"
        f"</small></p>{grids}<h2>Cells</h2>{''.join(map(_cell, cells))}</body></html>\n"
    )


def _grid(cells: list[Played], place: str) -> str:
    words = [str(word) for word in Guarantee]
    rows = []
    for fault in _faults(cells, place):
        found = [_find(cells, place, fault, word) for word in words]
        rows.append(
            f'<tr><td class="number">{FAULTS[fault].number or ""}</td><td>{html.escape(FAULTS[fault].title)}</td>'
            + "".join(f"<td>{_box(cell)}</td>" for cell in found)
            + "</tr>"
        )
    head = "".join(f"<th>{word}</th>" for word in words)
    return f"<table><thead><tr><th></th><th>fault</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _box(cell: Played | None) -> str:
    if cell is None:
        return ""
    counts = f"<br><small>{html.escape(cell.counts)}</small>" if cell.counts else ""
    return f'<a class="verdict {cell.verdict}" href="#{_id(cell)}">{cell.verdict}</a>{counts}'


def _cell(cell: Played) -> str:
    fired = "".join(f"<li>fired: {html.escape(proof)}</li>" for proof in cell.end.get("fired", ()) if proof)
    notes = "".join(f"<li>{at:.1f} s: {html.escape(text)}</li>" for at, text in cell.notes)
    return (
        f'<details id="{_id(cell)}"{" open" if cell.verdict in ("broken", "missed", "unknown") else ""}><summary>'
        f'<span class="verdict {cell.verdict}">{cell.verdict}</span> {html.escape(cell.name)} '
        f"<small>{html.escape(cell.end.get('why', ''))}</small></summary>{timeline(cell)}"
        f'<ul class="notes">{fired}{notes}</ul><p><code>avow prove {html.escape(cell.replay)}</code></p></details>'
    )


def timeline(cell: Played) -> str:
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


def _id(cell: Played) -> str:
    return html.escape(cell.name.replace("/", "-"))


def _places(cells: list[Played]) -> list[str]:
    return list(dict.fromkeys(cell.place for cell in cells))


def _faults(cells: list[Played], place: str) -> list[str]:
    there = {cell.fault for cell in cells if cell.place == place}
    return [name for name in FAULTS if name in there]


def _find(cells: list[Played], place: str, fault: str, word: str) -> Played | None:
    return next((c for c in cells if (c.place, c.fault, c.guarantee) == (place, fault, word)), None)


def _when(header: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.get("at", 0)))
    return f"{at}, seed {header.get('seed', '?')}"
