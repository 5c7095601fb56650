"""The durability-latency trade as bars in a terminal, and as one SVG file with nothing loaded from elsewhere, light or
dark as the reader's is.

Owns: the presentation. Must not know: how anything was measured. Its neighbour is ``measure``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from rich.bar import Bar
from rich.table import Table

from avow.clients.measure import Measured

_LABELS, _PANEL, _GAP, _ROW, _TOP = 130, 380, 60, 46, 64
_RIGHT = 90  # room for a bar's figure
_STYLE = """
svg { color-scheme: light dark; font: 13px system-ui, sans-serif; background: #fff; }
text { fill: #1c2024; } .dim { fill: #5f6773; font-size: 11px; } .grid { stroke: #d9dce1; }
.span { stroke: #2f6db3; stroke-width: 3; stroke-opacity: .35; } .dot { fill: #2f6db3; } .bar { fill: #4a9c6d; }
@media (prefers-color-scheme: dark) { svg { background: #14171a; } text { fill: #e6e8eb; } .dim { fill: #9aa3af; }
  .grid { stroke: #343a42; } .span { stroke: #7fb2e8; } .dot { fill: #7fb2e8; } .bar { fill: #6cc493; } }
"""


_FLOOR_MS = 0.01  # below it is no network
_BAR_WIDTHS = (20, 12)  # in characters: all of it fits into 80


def bars(measurements: Sequence[Measured]) -> Table:
    """For a terminal: latency on a logarithmic scale, and throughput."""
    low, high = _decades(measurements)
    most = max(measured.records_per_s for measured in measurements)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("durability")
    table.add_column("")
    table.add_column(f"{10.0**low:g} to {10.0**high:g} ms", min_width=_BAR_WIDTHS[0])
    table.add_column("ms", justify="right")
    table.add_column("", min_width=_BAR_WIDTHS[1])
    table.add_column("records/s", justify="right")
    for measured in measurements:
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            ms = measured.percentile(share)
            length = (math.log10(max(ms, _FLOOR_MS)) - low) / (high - low)
            first = name == "p50"
            table.add_row(
                str(measured.choice.durability) if first else "",
                name,
                Bar(1, 0, length, width=_BAR_WIDTHS[0], color="blue"),
                f"{ms:.2f}",
                Bar(1, 0, measured.records_per_s / most, width=_BAR_WIDTHS[1], color="green") if first else "",
                f"{measured.records_per_s:,.0f}" if first else "",
            )
    return table


def _decades(measurements: Sequence[Measured]) -> tuple[int, int]:
    """The powers of ten, in milliseconds, that all latencies lie between."""
    every = [max(measured.percentile(share), _FLOOR_MS) for measured in measurements for share in (0.5, 0.99)]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    return low, max(high, low + 1)


def svg(measurements: Sequence[Measured], title: str) -> str:
    """Latency percentiles on a logarithmic scale on the left, throughput on the right."""
    height = _TOP + _ROW * len(measurements) + 40
    width = _LABELS + 2 * _PANEL + _GAP + _RIGHT
    body = [
        f'<text x="16" y="24" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{_LABELS}" y="46" class="dim">one record: p50, p95, p99 in ms (each step is ten times)</text>',
        f'<text x="{_LABELS + _PANEL + _GAP}" y="46" class="dim">many records: records per second</text>',
        *_latencies(measurements, height),
        *_rates(measurements),
    ]
    for row, measured in enumerate(measurements):
        y = _TOP + _ROW * row + _ROW / 2
        body.append(f'<text x="16" y="{y:.0f}">{measured.choice.durability}</text>')
        body.append(f'<text x="16" y="{y + 14:.0f}" class="dim">acks {measured.choice.level.acks}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{html.escape(title)}</title><style>{_STYLE}</style>{"".join(body)}</svg>\n'
    )


def _latencies(measurements: Sequence[Measured], height: int) -> list[str]:
    low, high = _decades(measurements)

    def x(ms: float) -> float:
        return _LABELS + _PANEL * (math.log10(max(ms, _FLOOR_MS)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - 36}"/>')
        parts.append(f'<text class="dim" text-anchor="middle" x="{at:.1f}" y="{height - 18}">{10.0**power:g}</text>')
    for row, measured in enumerate(measurements):
        y = _TOP + _ROW * row + _ROW / 2
        p50, p95, p99 = (measured.percentile(share) for share in (0.5, 0.95, 0.99))
        parts.append(f'<line class="span" x1="{x(p50):.1f}" x2="{x(p99):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        for value, radius in ((p50, 6), (p95, 4), (p99, 3)):
            parts.append(f'<circle class="dot" cx="{x(value):.1f}" cy="{y:.1f}" r="{radius}"/>')
        label = f"{p50:.2f} · {p95:.2f} · {p99:.2f}"
        parts.append(f'<text class="dim" x="{x(p50):.1f}" y="{y + 18:.1f}">{label}</text>')
    return parts


def _rates(measurements: Sequence[Measured]) -> list[str]:
    start, most = _LABELS + _PANEL + _GAP, max(measured.records_per_s for measured in measurements)
    parts = []
    for row, measured in enumerate(measurements):
        y = _TOP + _ROW * row + _ROW / 2
        length = _PANEL * measured.records_per_s / most
        parts.append(f'<rect class="bar" x="{start}" y="{y - 10:.1f}" width="{length:.1f}" height="18" rx="3"/>')
        parts.append(
            f'<text class="dim" x="{start + length + 6:.1f}" y="{y + 4:.1f}">{measured.records_per_s:,.0f}</text>'
        )
    return parts
