"""``avow prove`` as a person uses it: a short chaos smoke on a cluster of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from avow.prove import history
from avow.testing.install import installed

pytestmark = pytest.mark.cluster

VERDICTS = {
    "canary-swapped": "caught",
    "killed-after-write": "held",
    "commit-reply-lost": "held",
    "leader-killed": "held",
}


# What a user may have: nested columns, a query that leaves records out and takes others apart, a key that may be null.
OWN = """
name = "orders"
guarantee = "exactly-once"
source = { brokers = "nowhere.invalid:9092", topics = ["orders"] }
sink = { kind = "postgres", url = "${env:DATABASE_URL}", table = "orders", mode = "upsert", key = ["id"] }

[decode]
format = "json"
schema = \"\"\"id long, customer struct<name: string not null, address: struct<city: string, zip: int>> not null,
    lines array<struct<sku: string not null, price: decimal(12,2)>>, extra map<string,long>, at timestamp not null\"\"\"

[transform]
sql = "SELECT *, customer.address.city AS city, size(lines) AS n FROM records WHERE id % 7 <> 3"
"""


def prove(*options: str) -> subprocess.CompletedProcess[str]:
    elsewhere = {"DATABASE_URL": "postgresql://nobody@nowhere.invalid/none"}  # a proof goes to no place of the user's
    command = [sys.executable, "-m", "avow", "prove", *options]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **elsewhere})
    try:
        out, err = child.communicate(timeout=900)
    except BaseException:
        child.terminate()  # not by kill -9, which would leave its cluster behind
        child.wait(60)
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@pytest.mark.parametrize(
    ("engine", "faults", "sinks"),
    [
        ("consumer", list(VERDICTS)[:2], ["sqlite"]),
        pytest.param("spark", list(VERDICTS), ["postgres"], marks=pytest.mark.long),
    ],
    ids=["consumer", "spark"],
)
def test_a_few_cells_hold_and_the_canary_is_caught(
    tmp_path: Path, engine: str, faults: list[str], sinks: list[str]
) -> None:
    """The SQLite sink is found by its entry point, in the processes of a proof too; its own oracle reads it back."""
    cells = {f"{fault}/at-least-once/{sink}/append/{engine}": fault for fault in faults for sink in sinks}
    out = tmp_path / "proof"
    options = [word for fault in faults for word in ("--fault", fault)]
    options += [word for sink in sinks for word in ("--sink", sink)]
    options += ["--guarantee", "at-least-once", "--mode", "append", "--engine", engine, "--records", "800"]
    options += ["--out", str(out)]
    with installed(Path(__file__).parents[2] / "examples/sqlite-sink"):
        done = prove(*options, "--seed", "11")
        verdicts = history.verdicts(out)
        output = json.dumps(verdicts, indent=1) + done.stdout + done.stderr
        expected = {cell: VERDICTS[fault] for cell, fault in cells.items()}
        assert {cell: line["verdict"] for cell, line in verdicts.items()} == expected, output
        assert done.returncode == 0, output
        for cell, fault in cells.items():
            if fault in ("killed-after-write", "commit-reply-lost"):
                assert verdicts[cell]["check"]["duplicated"] > 0, output
        page = (out / "report.html").read_text()
        assert page.count("<svg") == len(cells)
        again = prove(*options, "--resume")
    assert again.returncode == 0
    assert again.stdout.startswith("0 cells"), "nothing is left to do"


@pytest.mark.long
def test_lakes_without_a_jvm(tmp_path: Path) -> None:
    """A commit with an unknown outcome, and members of the group that come and are killed."""
    out = tmp_path / "proof"
    faults = ("lake-commit-unknown", "group-rebalance")
    options = [word for fault in faults for word in ("--fault", fault)]
    options += ["--guarantee", "at-least-once", "--mode", "append", "--engine", "consumer", "--records", "800"]
    done = prove(*options, "--sink", "delta", "--sink", "iceberg", "--seed", "11", "--out", str(out))
    told = history.verdicts(out)
    shown = json.dumps(told, indent=1) + done.stdout + done.stderr
    cells = [f"{fault}/at-least-once/{sink}/append/consumer" for fault in faults for sink in ("delta", "iceberg")]
    assert {name: line["verdict"] for name, line in told.items()} == dict.fromkeys(cells, "held"), shown
    assert all(told[name]["check"]["duplicated"] > 0 for name in cells if name.startswith("lake")), shown
    assert done.returncode == 0, shown


@pytest.mark.long
def test_plain_consumers(tmp_path: Path) -> None:
    """They have no ledger here, so one judge: it must see what the word permits."""
    out = tmp_path / "proof"
    done = prove(
        *("--fault", "killed-after-write", "--guarantee", "at-least-once", "--engine", "plain"),
        *("--records", "200", "--seed", "11", "--out", str(out)),
    )
    told = history.verdicts(out)
    shown = json.dumps(told, indent=1) + done.stdout + done.stderr
    (line,) = told.values()
    assert (line["cell"], line["verdict"]) == ("killed-after-write/at-least-once/postgres/append/plain", "held"), shown
    assert line["check"].keys() == {"duplicated"}, shown
    assert line["why"].endswith("by the check alone, because there is no ledger to audit"), shown
    assert done.returncode == 0, shown


@pytest.mark.long
def test_a_pipeline_of_ones_own(tmp_path: Path) -> None:
    file, out = tmp_path / "orders.toml", tmp_path / "proof"
    file.write_text(OWN)
    done = prove("--pipeline", str(file), "--fault", "postgres-cut", "--seed", "3", "--out", str(out))
    told = history.verdicts(out)
    shown = json.dumps(told, indent=1) + done.stdout + done.stderr
    assert done.returncode == 0, shown
    (line,) = told.values()
    assert (line["cell"], line["verdict"]) == ("postgres-cut/exactly-once/postgres/upsert/spark", "held"), shown
    assert line["records"] > 500, shown
    assert line["audit_verdict"] == "held", shown


def test_no_cells_is_a_mistake() -> None:
    done = prove()
    assert done.returncode == 2
    assert "--quick" in done.stderr
