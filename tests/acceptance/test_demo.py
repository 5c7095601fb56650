"""``avow demo`` as a person starts it, into a table, from topic to topic and into a lake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("sink", "engine", "guarantee", "format_", "verdict"),
    [
        ("postgres", "consumer", "exactly-once", "json", r"^held: (?!.*permits)"),
        pytest.param("postgres", "consumer", "exactly-once", "avro", r"^held: (?!.*permits)", marks=pytest.mark.long),
        pytest.param("kafka", "consumer", "exactly-once", "json", r"^held: (?!.*permits)", marks=pytest.mark.long),
        pytest.param("kafka", "spark", "exactly-once", "json", r"^held: (?!.*permits)", marks=pytest.mark.long),
        pytest.param(
            *("iceberg", "spark", "at-least-once", "json", r"^held: [\d,]+ duplicated, which at-least-once permits"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["postgres", "avro", "kafka-consumer", "kafka", "iceberg"],
)
def test_killed_again_and_again_and_audited(
    tmp_path: Path, sink: str, engine: str, guarantee: str, format_: str, verdict: str
) -> None:
    command = [sys.executable, "-m", "avow", "demo", "--sink", sink, "--guarantee", guarantee, "--records", "20000"]
    command += ["--engine", engine, "--format", format_]
    env = {**os.environ, "COLUMNS": "160"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=env) as playing:
        try:
            told, errors = playing.communicate(timeout=300)
        finally:
            playing.terminate()  # politely: it takes its cluster down
    assert playing.returncode == 0, told + errors
    assert told.count("kill -9") == 4
    assert re.search(verdict, told, re.MULTILINE), told
    assert not list((tmp_path / ".avow").iterdir()), "nothing is left of it"
