"""A driver as a real process, as far as it goes without a cluster."""

from __future__ import annotations

from pathlib import Path

from avow.prove.driver_process import DriverProcess


def test_a_driver_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    driver = DriverProcess(["run", str(tmp_path / "missing.toml")], tmp_path / "run.log", {})
    assert driver.wait(60) == 2
    assert "missing.toml" in driver.last_error()
    assert not driver.alive
    assert driver.process_tree() == [], "its pid may be somebody else's by now"
    driver.end()
    assert driver.code == 2
