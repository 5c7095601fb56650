"""A Spark session on this machine, and the class archive that lets its JVM start in half the time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from avow import extras
from avow.local.class_archive import ClassArchive
from avow.settings import PipelineConfig

if TYPE_CHECKING:  # this module is also asked whether Spark is there
    from pyspark.sql import SparkSession

    from avow.engines.session import SparkLease


def session(pipeline: PipelineConfig, *, short: bool) -> SparkSession:
    """``short``: the run ends soon, so it should start soon."""
    with extras.named():
        from avow.engines.session import spark_session
    return spark_session(pipeline, short=short, archive=archive())


def lease(pipeline: PipelineConfig, caller: SparkSession | None, notify: Callable[[str], None]) -> SparkLease:
    """The caller's session or one that is active, else one of our own as long as it is needed."""
    with extras.named():
        from avow.engines.session import SparkLease
    return SparkLease(pipeline, lambda short: session(pipeline, short=short), caller, notify)


def class_archive() -> ClassArchive:
    """Of the classes that a run loads. Two environments on one machine have one each."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise extras.missing("pyspark") or AssertionError
    installed = Path(spec.origin).parent
    return ClassArchive("Spark", "avow.local.spark", installed, sorted(installed.joinpath("jars").glob("*.jar")))


def archive() -> Path | None:
    return class_archive().made()


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
        records = spark.range(0, 2, 1, 2).mapInArrow(lambda rows: rows, "id long")
        query = "SELECT upper(CAST(id AS string)) v, now() t, map('a', 1) m, array(1) a FROM records WHERE id >= 0"
        query = f"WITH records AS (SELECT * FROM {{records}}) SELECT * FROM ({query})"
        spark.sql(f"EXPLAIN EXTENDED {query}", records=records).collect()
        frame = spark.sql(query, records=records)
        frame.mapInArrow(lambda rows: rows, frame.schema).collect()
    spark.stop()
    gateway.shutdown()  # type: ignore[no-untyped-call]
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
