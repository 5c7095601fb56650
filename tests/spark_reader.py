"""Spark with the readers of delta-spark and of Iceberg's own runtime: a process of its own, for jars of its own.

Its one argument is a file with questions as JSON: which table, and which rows of it. The answer to question N is
``N.arrow`` beside that file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import copyfile
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from avow.local import jars

SETTINGS = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}


def table(spark: SparkSession, kind: str, where: str, folder: Path) -> DataFrame:
    if kind == "delta":
        return spark.read.format("delta").load(where)
    # Without a catalog Spark finds a table's metadata by its name alone.
    folder.mkdir(parents=True)
    copyfile(where.removeprefix("file://"), folder / "v1.metadata.json")
    (folder / "version-hint.text").write_text("1")
    return spark.read.format("iceberg").load(str(folder.parent))


def main() -> None:
    file = Path(sys.argv[1])
    questions: list[dict[str, Any]] = json.loads(file.read_text())
    builder = SparkSession.builder.config("spark.jars", ",".join(map(str, jars.classpath("lake"))))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for number, question in enumerate(questions):
        found = table(spark, question["kind"], question["table"], file.parent / f"{number}/metadata")
        answer = (found.where(question["rows"]) if question["rows"] else found).toArrow()
        with pa.ipc.new_file(file.parent / f"{number}.arrow", answer.schema) as writer:
            writer.write_table(answer)
    spark.stop()


if __name__ == "__main__":
    main()
