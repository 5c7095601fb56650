"""Rewrites the generated parts of the docs from the code's own tables: ``make docs``.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``. Owns: what stands
there. Must not know: what the tables say; that is ``avow.guarantee``.
"""

from __future__ import annotations

import re
from pathlib import Path

from avow.guarantee import Act, Guarantee, diagram

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


PARTS = {"orders": orders}


def rewrite(text: str) -> str:
    """The text with its generated parts made anew."""
    return PART.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if rewrite(text) != text:
            page.write_text(rewrite(text), encoding="utf-8")
