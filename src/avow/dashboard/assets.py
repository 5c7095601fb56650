"""The JavaScript libraries of the pages: taken out of their Maven jars ("webjars") into ``static/vendor``.

git has none of these files. They are put in place when the package is built (``build_backend.py``), so that a wheel has
them, and by ``avow setup``. The jars, their versions and their SHA-256 are in ``local/jars.lock`` (set ``dashboard``).

Owns: which files of which jar. Must not know: how a jar is fetched; ``avow.local.jars`` does.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from avow.errors import LocalError
from avow.local import jars

VENDOR = Path(__file__).parent / "static" / "vendor"
VERSIONS = "VERSIONS"  # written last: what is there, and that it is complete
# File in VENDOR -> artifact, and the file of its npm package.
FILES = {
    "htmx.min.js": ("htmx.org", "dist/htmx.min.js"),
    "htmx.LICENSE": ("htmx.org", "LICENSE"),
    "chart.min.js": ("chart.js", "dist/chart.umd.min.js"),
    "chart.LICENSE": ("chart.js", "LICENSE.md"),
}


def install() -> Path:
    """Put the files in place, unless they are there in the versions of the lock. Returns their folder."""
    if not installed():
        VENDOR.mkdir(exist_ok=True)
        for path in jars.classpath("dashboard"):
            version, artifact = path.parent.name, path.parent.parent.name
            with zipfile.ZipFile(path) as jar:
                for name, (source, file) in FILES.items():
                    if source == artifact:
                        entry = f"META-INF/resources/webjars/{artifact}/{version}/{file}"
                        (VENDOR / name).write_bytes(jar.read(entry))
        (VENDOR / VERSIONS).write_text(_locked())
    return VENDOR


def installed() -> bool:
    try:
        return (VENDOR / VERSIONS).read_text() == _locked() and all((VENDOR / name).exists() for name in FILES)
    except FileNotFoundError:
        return False


def check() -> None:
    """Raises if a page would come without its JavaScript."""
    if not installed():
        raise LocalError(
            f"the dashboard's JavaScript files in {VENDOR} are missing or have other versions",
            advice="Fetch them with `avow setup` (`make setup` in a checkout). A wheel of avow contains them.",
        )


def _locked() -> str:
    return "".join(f"{jar.coordinate} {jar.sha256}\n" for jar in jars.locked("dashboard"))
