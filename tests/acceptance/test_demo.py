"""``avow demo`` as a person starts it, from topic to topic and into a lake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("sink", "guarantee", "verdict"),
    [
        ("kafka", "exactly-once", r"^held: (?!.*permits)"),
        pytest.param(
            *("iceberg", "at-least-once", r"^held: [\d,]+ duplicated, which at-least-once permits"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["kafka", "iceberg"],
)
def test_killed_again_and_again_and_audited(tmp_path: Path, sink: str, guarantee: str, verdict: str) -> None:
    command = [sys.executable, "-m", "avow", "demo", "--sink", sink, "--guarantee", guarantee, "--records", "20000"]
    env = {**os.environ, "COLUMNS": "160"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env) as playing:
        try:
            told, _ = playing.communicate(timeout=300)
        finally:
            playing.terminate()  # politely: it takes its cluster down
    assert playing.returncode == 0, told
    assert told.count("kill -9") == 4
    assert re.search(verdict, told, re.MULTILINE), told
    assert not list((tmp_path / ".avow").iterdir()), "nothing is left of it"
