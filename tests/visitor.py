"""A visitor of a dashboard in this process, who fills in forms as its pages have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from avow.dashboard.app import make
from avow.dashboard.guard import AccessRules
from avow.dashboard.jobs import Jobs
from avow.dashboard.state import AppState
from avow.dashboard.watch import Watch
from avow.settings import Source

ADDRESS = "http://127.0.0.1:8642"


class Visitor(TestClient):
    def __init__(self, state: AppState) -> None:
        super().__init__(make(state), base_url=ADDRESS, raise_server_exceptions=False, follow_redirects=False)
        self.state = state

    def change(self, path: str, **form: str) -> Any:
        """Send a form of ours."""
        return self.post(path, data={"csrf": self.state.rules.form, **form})


def visitor(
    brokers: str | None,
    files: Sequence[Path],
    env: dict[str, str],
    evidence: Path,
    timeout_s: float = 30,  # the machine may be busy
    **rules: Any,
) -> Visitor:
    source = Source(brokers=brokers, topics_pattern=".*") if brokers else None
    watch = Watch(files, env, timeout_s=timeout_s)
    return Visitor(AppState(AccessRules(**rules), source, watch, Jobs(env), [evidence], timeout_s))
