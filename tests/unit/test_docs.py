"""The docs say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from avow.guarantee import Guarantee
from avow.plan import load_checked

DOCS = Path(__file__).parents[2] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert GENERATE["rewrite"](text) == text, "run: make docs"


def test_the_guarantees_page_shows_every_word_and_its_diagram() -> None:
    text = (DOCS / "GUARANTEES.md").read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- /generated -->") == 1
    assert text.count("```mermaid") == len(Guarantee)
    for guarantee in Guarantee:
        assert f"| **{guarantee}** |" in text
        assert guarantee.meaning in text


def test_every_picture_is_shown_and_small_enough_to_be_looked_at() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    shown = {
        page.name: set(re.findall(r"\]\((?:docs/)?(images/[\w-]+\.png)\)", page.read_text("utf-8"))) for page in pages
    }
    named = set[str]().union(*shown.values())
    assert named == {f"images/{path.name}" for path in (DOCS / "images").glob("*.png")}
    for picture in named:
        assert (DOCS / picture).stat().st_size < 200_000, picture


def test_the_readmes_pipeline_is_accepted(tmp_path: Path) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (pipeline,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    file = tmp_path / "payments.toml"
    file.write_text(pipeline)
    assert load_checked(file, {"DATABASE_URL": "postgresql://somewhere/else"}).name == "payments"


def test_the_pipelines_of_the_page_about_kafka_connect_are_accepted(tmp_path: Path) -> None:
    page = (DOCS / "KAFKA-CONNECT.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(examples) == len(re.findall(r"```json\n", page)) == 2
    for number, text in enumerate(examples):
        file = tmp_path / f"{number}.toml"
        # The registry of the first is asked in tests/integration/test_look_and_write.py.
        file.write_text(
            text.replace(
                '"registry"', '"""{"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}"""'
            )
        )
        env = {"DATABASE_URL": "postgresql://somewhere/else", "REGISTRY_URL": "http://127.0.0.1:1"}
        assert load_checked(file, env).guarantee is Guarantee.EXACTLY_ONCE


def test_an_old_part_is_replaced_and_the_rest_is_kept() -> None:
    old = "before\n<!-- generated: orders -->\nold\n<!-- /generated -->\nafter\n"
    new = GENERATE["rewrite"](old)
    assert new.startswith("before\n<!-- generated: orders -->\n| word |")
    assert new.endswith("```\n<!-- /generated -->\nafter\n")
    assert "old" not in new


def test_a_part_that_nothing_generates_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="unknown"):
        GENERATE["rewrite"]("<!-- generated: unknown -->\n<!-- /generated -->")
