"""A plugin's project as if it was installed, for this process and those that it starts.

Owns: that. Must not know: what a plugin is. Its neighbour is ``avow.plugins``, which finds plugins by entry points.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from avow import plugins


@contextmanager
def installed(project: Path) -> Iterator[None]:
    """Register the entry points that ``project/pyproject.toml`` declares; modules are imported from ``project``."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name, version = declared["name"], declared["version"]
    with tempfile.TemporaryDirectory(prefix="avow-installed-") as folder:
        metadata = Path(folder, f"{name.replace('-', '_')}-{version}.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = declared.get("entry-points", {}).items()
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        added = [folder, str(project.absolute())]
        before = sys.path.copy(), os.environ.get("PYTHONPATH")
        sys.path[:0] = added
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [before[1]])])
        plugins.forget()
        try:
            yield
        finally:
            sys.path[:] = before[0]
            del os.environ["PYTHONPATH"]
            os.environ |= {"PYTHONPATH": before[1]} if before[1] is not None else {}
            plugins.forget()
