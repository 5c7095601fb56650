"""A Spark session on this machine, and the class archive that lets its JVM start in half the time.

Half of a short run is Spark's JVM loading and checking the same fifteen thousand classes as the last time. Java can
keep them ready in a file (a class-data archive). It fits one Java and Spark's very jars, with their times of change,
and the JVM does without it if anything differs; so its name tells both, and one that fits no more is not offered, and
goes when the next is made. ``avow setup`` makes it; a run uses it if it is there, and never makes it by itself: where
nothing is kept from one start to the next (a container), making it would cost every start more than it gives.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from avow import extras
from avow.errors import LocalError
from avow.local import java
from avow.settings import PipelineConfig

if TYPE_CHECKING:  # this module is also asked whether Spark is there
    from pyspark.sql import SparkSession

    from avow.engines.session import SparkLease

MAKE_TIMEOUT_S = 300


def session(pipeline: PipelineConfig, *, short: bool) -> SparkSession:
    """``short``: the run ends soon, so it should start soon."""
    with extras.named():
        from avow.engines.session import spark_session
    return spark_session(pipeline, short=short, archive=archive())


def lease(pipeline: PipelineConfig, given: SparkSession | None, tell: Callable[[str], None]) -> SparkLease:
    """The caller's session or one that is active, else one of our own as long as it is needed."""
    with extras.named():
        from avow.engines.session import SparkLease
    return SparkLease(pipeline, lambda short: session(pipeline, short=short), given, tell)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "avow"


def archive() -> Path | None:
    """The archive that fits this Java and these jars, if it was made."""
    path = _archive_path()
    return path if path.is_file() else None


def make_archive() -> Path:
    """Run Spark once on what every run does, and keep the classes it loaded. Takes about half a minute."""
    path = _archive_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        made, log = Path(folder, "archive.jsa"), Path(folder, "log")
        with log.open("wb") as output:
            command = [sys.executable, "-m", "avow.local.spark", str(made)]
            ended = subprocess.run(
                command, cwd=folder, stdout=output, stderr=output, timeout=MAKE_TIMEOUT_S, check=False
            )
        if ended.returncode or not made.is_file():
            raise LocalError(
                f"Spark's class archive could not be made:\n{log.read_text(errors='replace')[-2000:]}",
                advice="Nothing needs it: runs only start slower. `avow doctor` checks Java.",
            )
        for old in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.jsa"):
            old.unlink()
        made.replace(path)
    return path


def _archive_path() -> Path:
    """Two environments on one machine have an archive each; one environment made again has a new one."""
    found = java.find()
    spark = _installed()
    looked = ((jar, jar.stat()) for jar in _class_path())
    fits = [str(found.path), found.version, *(f"{jar} {seen.st_size} {seen.st_mtime_ns}" for jar, seen in looked)]
    return cache() / f"spark-{_hash(str(spark))}-{_hash(os.pathsep.join(fits))}.jsa"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _class_path() -> list[Path]:
    return sorted(_installed().joinpath("jars").glob("*.jar"))


def _installed() -> Path:
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise extras.missing("pyspark") or AssertionError
    return Path(found.origin).parent


def _train(path: Path) -> None:
    """In a process of its own: what a run has Spark do, then the JVM writes its archive."""
    from pyspark.sql import SparkSession

    from avow.engines.session import JAVA_SHORT, LOOPBACK

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = LOOPBACK | {"spark.driver.extraJavaOptions": f"{JAVA_SHORT} -XX:ArchiveClassesAtExit={path}"}
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    # Jobs as a batch has them, with and without a query between the two Python functions.
    for _ in range(3):
        spark.range(0, 2, 1, 2).mapInArrow(lambda rows: rows, "id long").collect()
        spark.range(0, 2, 1, 2).mapInArrow(lambda rows: rows, "id long").createOrReplaceTempView("records")
        query = "SELECT upper(CAST(id AS string)) v, now() t, map('a', 1) m, array(1) a FROM records WHERE id >= 0"
        frame = spark.sql(query)
        frame.mapInArrow(lambda rows: rows, frame.schema).collect()
    spark.stop()
    gateway.shutdown()  # type: ignore[no-untyped-call]
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
