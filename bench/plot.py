"""The comparison as a picture: rows per second, and core-seconds per million rows, as plain bars.

Must not know how it was measured. Neighbour: ``postgres``.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.measure import GROUPS, Outcome

COLOURS = {"brokers": "#8c8c8c", "jvm": "#d9822b", "client": "#2f6db3", "postgres": "#4a9c6d"}
LABELS = {"brokers": "brokers", "jvm": "JVM", "client": "client", "postgres": "PostgreSQL"}


def bars(rounds: list[dict[str, Outcome]], path: Path, title: str) -> Path:
    """Medians over the rounds; a contender that never wrote what it should has no bar."""
    sound = {name: [each[name] for each in rounds if not each[name].problem] for name in rounds[0]}
    sound = {name: outcomes for name, outcomes in sound.items() if outcomes}
    names = list(sound)
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(11, 1.5 + 0.45 * len(names)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    speeds = [median(o.drain.rows_per_s for o in outcomes) for outcomes in sound.values()]
    found = left.barh(names, speeds, color=COLOURS["client"])
    left.bar_label(found, labels=[f"{speed:,.0f}" for speed in speeds], padding=3)
    left.set_xlabel("rows/s")
    left.margins(x=0.2)
    start = [0.0] * len(names)
    for group in GROUPS:
        costs = [median(o.drain.core_s_per_million(group) for o in outcomes) for outcomes in sound.values()]
        right.barh(names, costs, left=start, color=COLOURS[group], label=LABELS[group])
        start = [before + cost for before, cost in zip(start, costs, strict=True)]
    right.set_xlabel("core-seconds per million rows")
    figure.legend(loc="outside lower right", ncols=len(GROUPS), frameon=False)  # beside the bars, never on them
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path
