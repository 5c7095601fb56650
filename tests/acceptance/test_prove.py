"""``avow prove`` as a person uses it: a short chaos smoke on a cluster of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from avow.prove import history

pytestmark = pytest.mark.cluster

CELLS = {
    "canary-swapped/at-least-once/postgres/append/spark": "caught",
    "killed-after-write/at-least-once/postgres/append/spark": "held",
    "commit-reply-lost/at-least-once/postgres/append/spark": "held",
    "leader-killed/at-least-once/postgres/append/spark": "held",
    "produce-reply-lost/at-least-once/postgres/append/spark": "not-run",
}


def prove(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "avow", "prove", *options], capture_output=True, text=True, timeout=400, check=False
    )


def test_a_few_cells_hold_and_the_canary_is_caught(tmp_path: Path) -> None:
    faults = [word for cell in CELLS for word in ("--fault", cell.split("/")[0])]
    out = tmp_path / "proof"
    options = [*faults, "--guarantee", "at-least-once", "--mode", "append", "--records", "800", "--out", str(out)]
    done = prove(*options, "--seed", "11")
    told = history.verdicts(out)
    shown = json.dumps(told, indent=1) + done.stdout + done.stderr
    assert {name: line["verdict"] for name, line in told.items()} == CELLS, shown
    assert done.returncode == 0, shown
    assert told["killed-after-write/at-least-once/postgres/append/spark"]["check"]["duplicated"] > 0
    assert told["commit-reply-lost/at-least-once/postgres/append/spark"]["check"]["duplicated"] > 0
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4
    again = prove(*options, "--resume")
    assert again.returncode == 0
    assert again.stdout.startswith("0 cells"), "nothing is left to do"


def test_no_cells_is_a_mistake() -> None:
    done = prove()
    assert done.returncode == 2
    assert "--quick" in done.stderr
