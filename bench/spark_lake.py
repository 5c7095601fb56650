"""What people write today: Structured Streaming, ``from_json``, and Spark's own writer into a lake.

Run as a process of its own by ``lake``; its one argument is JSON. It drains the topic and ends, or merges once
(``merge``). It keeps no promise that a second run of a batch does not break.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.jdbc import rows, session

EXTENSIONS = {
    "delta": {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    },
    "iceberg": {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
    },
    "parquet": {},
}


def append(spark: SparkSession, settings: dict[str, Any]) -> None:
    kind, path = settings["format"], settings["path"]
    made = False

    def write(frame: DataFrame, _batch: int) -> None:
        nonlocal made
        if kind == "iceberg":
            writer = frame.writeTo("lake.db.t")
            if made:
                writer.append()
            else:
                writer.create()
            made = True
        else:
            frame.write.format(kind).mode("append").save(path)

    query = (
        rows(spark, settings)
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def merge(spark: SparkSession, settings: dict[str, Any]) -> None:
    """The changes of a Parquet file into a Delta table by key. Says how long it took, without the start."""
    spark.read.parquet(settings["changes"]).createOrReplaceTempView("changes")
    spark.sql(f"SELECT count(*) FROM delta.`{settings['path']}`").collect()
    began = time.monotonic()
    spark.sql(
        f"MERGE INTO delta.`{settings['path']}` t USING changes s ON t.id = s.id"
        " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    print(json.dumps({"seconds": time.monotonic() - began}))


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    more = dict(EXTENSIONS[settings["format"]])
    if settings["format"] == "iceberg":
        more["spark.sql.catalog.lake.warehouse"] = settings["path"]
    spark = session({**settings["spark"], **more})
    (merge if "changes" in settings else append)(spark, settings)
    spark.stop()


if __name__ == "__main__":
    main()
