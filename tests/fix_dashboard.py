"""The dashboard as fixtures: its application in this process, the real command, and a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from avow.local.cluster import Cluster
from avow.prove.history import History

if TYPE_CHECKING:  # they bring a web server and a browser's client, which no other test need wait for
    from playwright.sync_api import Browser

    from tests.visitor import Visitor


@pytest.fixture
def visit(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Visitor]]:
    """Makes visitors of dashboards; each is closed afterwards."""
    from tests.visitor import visitor

    with ExitStack() as stack:

        def made(
            files: Sequence[Path] = (), *, brokers: str | None = None, env: dict[str, str] | None = None, **rules: Any
        ) -> Visitor:
            environment = {**os.environ, "DATABASE_URL": cluster.postgres_url or "", **(env or {})}
            return stack.enter_context(
                visitor(brokers or cluster.bootstrap, files, environment, tmp_path / "evidence", **rules)
            )

        yield made


@pytest.fixture
def serve(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts ``avow dashboard`` as a person does, and gives its address."""
    children: list[subprocess.Popen[str]] = []

    def started(*arguments: str | Path) -> str:
        options = ("--port", "0", "--timeout", "30", "--dir", cluster.folder, "--evidence", tmp_path / "evidence")
        child = subprocess.Popen(
            [sys.executable, "-m", "avow", "dashboard", *map(str, (*arguments, *options))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "DATABASE_URL": cluster.postgres_url or "", "COLUMNS": "200"},
        )
        children.append(child)
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                return found[0].rstrip("/")
        raise AssertionError("".join(lines))

    yield started
    for child in children:
        child.terminate()
        out, _ = child.communicate(timeout=60)
        assert "Traceback" not in out, out


def small_proof(folder: Path) -> None:
    """One cell that was played, as `avow prove --out` leaves it."""
    history = History(folder / "proofs" / "small")
    cell = "killed-after-write/exactly-once/postgres/append/spark"
    history.add("proof", seed=4, versions={"avow": "0.1.0"})
    history.add("cell", cell, replay="--fault killed-after-write")
    for rows in (0, 200, 400):
        history.add("rows", cell, rows=rows)
    history.add("fault", cell, fault="killed-after-write")
    history.add("heal", cell, fault="killed-after-write")
    history.add("verdict", cell, verdict="held", why="as promised", fired=["kill -9"], check={}, seconds=3)
    history.close()


def chromium() -> str:
    """Debian's own; Playwright's is not needed. Installed where that can be done without asking anybody."""
    found = shutil.which("chromium")
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(command, capture_output=True, timeout=600, check=False)
        found = shutil.which("chromium")
    if found is None:
        pytest.fail("these tests need chromium: apt-get install chromium (as root, `make test` does it by itself)")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: as long as it is there, its event loop runs in this thread, and tests elsewhere have theirs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield launched
        launched.close()
