"""A Spark session on this machine's jars, and the class archive that lets its JVM start in half the time.

Half of a short run is Spark's JVM loading and checking the same fifteen thousand classes as the last time. Java can
keep them ready in a file (a class-data archive). It fits one Java and these very jars, with their times of change, and
the JVM does without it if anything differs; so its name tells both, and one that fits no more is not offered and goes
when the next is made. ``avow setup`` makes it; a run uses it if it is there, and never makes it by itself: where
nothing is kept from one start to the next (a container), making it would cost every start more than it gives.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from avow.engines.session import JAVA_SHORT, LOOPBACK, driver_settings, spark_session
from avow.errors import LocalError
from avow.local import jars, java
from avow.settings import PipelineConfig

MAKE_TIMEOUT_S = 300
# Packages of which a run uses most, and the training below little: it has no broker to talk to.
KAFKA_PACKAGES = ("org/apache/spark/sql/kafka010/", "org/apache/kafka/clients/", "org/apache/kafka/common/")


def session(pipeline: PipelineConfig, *, short: bool) -> SparkSession:
    """``short``: the run ends soon, so it should start soon."""
    return spark_session(pipeline, jars.classpath("spark"), short=short, archive=archive())


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
    spark = Path(pyspark.__file__).parent
    looked = ((jar, jar.stat()) for jar in (*sorted((spark / "jars").glob("*.jar")), *_class_path()) if jar.exists())
    fits = [str(found.path), found.version, *(f"{jar} {seen.st_size} {seen.st_mtime_ns}" for jar, seen in looked)]
    return cache() / f"spark-{_hash(str(spark))}-{_hash(os.pathsep.join(fits))}.jsa"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _class_path() -> list[Path]:
    return [jar.path for jar in jars.locked("spark")]


def _train(path: Path) -> None:
    """In a process of its own: what a run does, as far as it goes without a broker, then the JVM writes its archive."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = LOOPBACK | driver_settings(_class_path(), f"{JAVA_SHORT} -XX:ArchiveClassesAtExit={path}")
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    seen: list[int] = []

    def on_batch(frame: DataFrame, batch: int) -> None:
        texts = frame.selectExpr("CAST(value AS string) AS v", "timestamp", "map('a', 1) AS m", "array(1) AS a")
        texts.mapInArrow(lambda rows: rows, texts.schema).collect()
        seen.append(batch)

    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            spark.readStream.format("rate").option("rowsPerSecond", 100).load().writeStream.foreachBatch(on_batch)
        ).option("checkpointLocation", checkpoint)
        running = query.start()
        while len(seen) < 3 and running.isActive:
            time.sleep(0.2)
        running.stop()
    _load_kafka(spark)
    spark.stop()
    gateway.shutdown()  # type: ignore[no-untyped-call]
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _load_kafka(spark: SparkSession) -> None:
    """The Kafka source, against a port where nobody answers; and its classes by name."""
    nobody = spark.read.format("kafka").option("kafka.bootstrap.servers", "127.0.0.1:9").option("subscribe", "t")
    for key in ("default.api.timeout.ms", "request.timeout.ms"):
        nobody = nobody.option(f"kafka.{key}", "1000")
    with suppress(PySparkException, Py4JError):
        nobody.load().collect()
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.java.lang.ClassLoader.getSystemClassLoader()
    for jar in _class_path():
        for entry in zipfile.ZipFile(jar).namelist():
            if entry.startswith(KAFKA_PACKAGES) and entry.endswith(".class"):
                with suppress(Py4JError):  # some need libraries that nobody here uses
                    loader.loadClass(entry.removesuffix(".class").replace("/", "."))


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
