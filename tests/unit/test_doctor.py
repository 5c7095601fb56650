"""``avow doctor``: each failure is found and comes with something to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from avow.cli import main
from avow.local import doctor


def found(folder: Path = Path(".avow")) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks(folder)}


def fake_java(folder: Path, version: str, modules: str = "java.base@17") -> str:
    """A java that tells what a slim or an old one would tell."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2; else echo {modules}; fi\n'
    )
    java.chmod(0o755)
    return str(folder)


def test_this_machine_is_fine() -> None:
    checks = found()
    assert list(checks) == [
        "Python",
        "Java",
        "Java modules",
        "memory",
        "disk",
        "jar folder",
        "registry",
        "Kafka's start",
        "Spark's start",
        "PostgreSQL",
        "schema registry",
        "avow-native",
    ]
    assert all(check.ok for check in checks.values()), checks


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check = found()["Java"]
    assert not check.ok
    assert "no java executable in JAVA_HOME" in check.found
    assert "version 17 or newer" in check.advice


def test_an_old_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", fake_java(tmp_path, "11.0.2"))
    check = found()["Java"]
    assert not check.ok
    assert "is Java 11.0.2; avow needs 17 or newer" in check.found


def test_a_slim_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", fake_java(tmp_path, "17.0.1"))
    check = found()["Java modules"]
    assert not check.ok
    assert "java.sql" in check.found
    assert "full one" in check.advice


def test_little_memory_and_little_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMORY_GB", 1e6)
    monkeypatch.setattr(doctor, "DISK_GB", 1e6)
    checks = found()
    assert not checks["memory"].ok
    assert "--brokers 1" in checks["memory"].advice
    assert not checks["disk"].ok
    assert "--dir" in checks["disk"].advice


def test_no_registry_matters_only_while_jars_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AVOW_MAVEN_MIRROR", "http://127.0.0.1:9/")
    assert found()["registry"].ok
    monkeypatch.setenv("M2_REPO", str(tmp_path / "empty"))
    check = found()["registry"]
    assert not check.ok
    assert "AVOW_MAVEN_MIRROR" in check.advice


def test_a_problem_is_shown_with_what_to_do_and_exit_code_3(tmp_path: Path) -> None:
    env = {**os.environ, "JAVA_HOME": str(tmp_path)}
    shown = CliRunner().invoke(main, ["doctor"], env=env)
    assert shown.exit_code == 3
    assert "problem Java" in shown.output
    assert "what to do: Install a Java runtime" in shown.output
    as_json = CliRunner().invoke(main, ["doctor", "--json"], env=env)
    assert as_json.exit_code == 3
    assert {check["name"]: check["ok"] for check in json.loads(as_json.output)}["Java"] is False
