"""A background process of the local cluster, known by its pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KILLER = """
import sys
from pathlib import Path
from avow.local.part import ClusterPart
class Sleeper(ClusterPart):
    def command(self): ...
part = Sleeper("sleeper", Path(sys.argv[1]), 0)
assert part.state == "up", part.state
part.kill()
assert part.state == "down", part.state
"""


def test_a_killed_process_is_gone_although_its_parent_does_not_reap_it(tmp_path: Path) -> None:
    """As when a guard ends the cluster of a test run that itself waits for the guard."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    with subprocess.Popen(sleep, start_new_session=True) as child:
        (tmp_path / "pid").write_text(str(child.pid))
        done = subprocess.run([sys.executable, "-c", KILLER, tmp_path], capture_output=True, text=True, check=False)
        child.kill()
    assert done.returncode == 0, done.stderr
