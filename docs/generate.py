"""Rewrites the generated parts of the docs from the code's own tables: ``make docs``.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``. Owns: what stands
there. Must not know: what the tables say; those are ``avow.guarantee`` and ``avow.prove.cells``.
"""

from __future__ import annotations

import re
from pathlib import Path

from avow.guarantee import Act, Guarantee, diagram
from avow.prove.cells import CANARIES, ENGINES, FAULTS, Cell, concerns, unseen
from avow.sinks import SINKS

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def orders() -> str:
    """The table of guarantees and their diagrams."""
    lines = ["| word | order | permitted anomaly | meaning |", "|---|---|---|---|"]
    for guarantee in Guarantee:
        order = ", then ".join(" and ".join(act for act in Act if act in step) for step in guarantee.steps)
        order += ", one act" if guarantee.atomic else ""
        permits = ", ".join(sorted(guarantee.permits)) or "none"
        lines.append(f"| **{guarantee}** | {order} | {permits} | {guarantee.meaning} |")
    for guarantee in Guarantee:
        lines += ["", f"**{guarantee}**", "", "```mermaid", diagram(guarantee), "```"]
    return "\n".join(lines) + "\n"


def faults() -> str:
    """The faults, and what each must come to."""
    words = [str(word) for word in Guarantee]
    lines = [f"| # | name | fault | on | into | {' | '.join(words)} |", f"|---|---|---|---|---|{'---|' * len(words)}"]
    for fault in FAULTS.values():
        cells = [Cell(fault, word) for word in Guarantee]
        not_there = ", ".join(kind for kind in SINKS if unseen(fault, kind))
        but = f" ({not_there}: held)" if not_there else ""
        due = [f"must show: {cell.must_show}{but}" if cell.must_show else "held" for cell in cells]
        due = [what if cell.guarantee in fault.guarantees else "" for what, cell in zip(due, cells, strict=True)]
        if fault.stop:
            due = [f"stops: {fault.stop_name}"] * len(words)
        if fault.name in CANARIES:
            due = ["must be caught" if word is CANARIES[fault.name] else "" for word in Guarantee]
        sinks = ", ".join(kind for kind in SINKS if fault.only and concerns(fault, kind)) or "every sink"
        kinds = [kind for kind in SINKS if concerns(fault, kind)]
        engines = [name for name in fault.engines if any(ENGINES[name].supports(kind, "append", "") for kind in kinds)]
        where = f"{', '.join(engines)} | {sinks}{', append' if fault.append_only else ''}"
        lines.append(f"| {fault.number or ''} | `{fault.name}` | {fault.title} | {where} | {' | '.join(due)} |")
    return "\n".join(lines) + "\n"


PARTS = {"orders": orders, "faults": faults}


def rewrite(text: str) -> str:
    """The text with its generated parts made anew."""
    return PART.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if rewrite(text) != text:
            page.write_text(rewrite(text), encoding="utf-8")
