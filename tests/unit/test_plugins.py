"""Sinks as plugins: found by name, ours and those of other packages, and named nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from avow import plugins
from avow.errors import ConfigError
from avow.plan import load_checked, plan
from avow.settings import load
from avow.sinks import SINKS, plugin_of
from avow.testing import install

SRC = Path(plugins.__file__).parent
FILE = """\
name = "p"
guarantee = "exactly-once"
source = { brokers = "a:1", topics = ["t"] }
decode = { format = "json", schema = "id long not null" }
[sink]
kind = "cellar"
"""
PLUGIN = """\
from typing import Literal
from pydantic import Field
from avow.sinks.postgres.plugin import PostgresPlugin
from avow.settings import SinkConfig

class CellarConfig(SinkConfig):
    kind: Literal["cellar"] = Field(description='"cellar"')
    shelf: int = Field(description="a number")

    @property
    def target(self):
        return f"shelf {self.shelf}"

class CellarPlugin(PostgresPlugin):
    kind, title, Config = "cellar", "Cellar", CellarConfig

CELLAR = CellarPlugin()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A package with two sinks, one of which cannot be imported."""
    (tmp_path / "avow_cellar.py").write_text(PLUGIN)
    points = 'cellar = "avow_cellar:CELLAR"\nattic = "avow_attic:ATTIC"\npostgres = "avow_cellar:CELLAR"\n'
    project = '[project]\nname = "avow-cellar"\nversion = "1.0"\n[project.entry-points."avow.sinks"]\n'
    (tmp_path / "pyproject.toml").write_text(project + points)
    with install.installed(tmp_path):
        yield tmp_path


def test_a_sink_of_another_package_is_found_by_its_entry_point(installed: Path) -> None:
    assert list(SINKS) == ["postgres", "delta", "iceberg", "kafka", "attic", "cellar"]
    file = installed / "p.toml"
    file.write_text(FILE + "shelf = 7\n")
    pipeline = load_checked(file, {})
    assert plugin_of(pipeline).title == "Cellar"
    assert "Cellar shelf 7, append" in plan(pipeline).hops[2].does
    assert pipeline.model_dump()["sink"]["shelf"] == 7
    file.write_text(FILE + 'shelf = "x"\nshelves = 1\n')
    with pytest.raises(ConfigError) as refused:
        load(file, {})
    assert "p.toml:7: sink.shelf: should be a valid integer" in str(refused.value)
    assert "p.toml:8: sink.shelves: is not a known key, did you mean shelf?; known keys: kind, mode" in str(
        refused.value
    )


def test_avows_own_sinks_cannot_be_replaced(installed: Path) -> None:  # noqa: ARG001
    assert SINKS["postgres"].title == "PostgreSQL"


def test_a_plugin_that_cannot_be_imported_is_named(installed: Path) -> None:
    (installed / "p.toml").write_text(FILE.replace("cellar", "attic"))
    with pytest.raises(
        ConfigError, match=r"plugin avow.sinks 'attic' cannot be loaded from avow_attic:ATTIC: No module"
    ):
        load(installed / "p.toml", {})


def test_what_depends_on_the_sink_is_asked_of_its_plugin() -> None:
    """That nobody imports a sink's package, the import linter sees to."""
    kinds = "|".join(SINKS)
    branch = re.compile(rf"""\b(?:kind|sink)\s*(?:[!=]=|(?:not )?in)\s*[({{\["']+(?:{kinds})\b""")
    found = [
        f"{path.relative_to(SRC)}:{number}: {line.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if branch.search(line)
    ]
    assert found == []


def test_reading_a_pipeline_file_imports_no_client(tmp_path: Path) -> None:
    lines = {
        "postgres": 'url = "postgresql://a@b/c"\ntable = "t"',
        "delta": 'path = "x"',
        "iceberg": 'table = "n.t"\ncatalog = { warehouse = "w" }',
        "kafka": 'topic = "o"',
    }
    for kind, more in lines.items():
        (tmp_path / f"{kind}.toml").write_text(FILE.replace("cellar", kind) + more)
    script = (
        "import sys\nfrom pathlib import Path\nfrom avow.plan import load_checked, plan\n"
        f"for file in Path({str(tmp_path)!r}).glob('*.toml'): plan(load_checked(file, {{}}))\n"
        "print([name for name in ('confluent_kafka', 'pyarrow', 'deltalake', 'pyiceberg', 'adbc_driver_postgresql', "
        "'psycopg', 'pyspark') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
