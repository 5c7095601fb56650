"""What people write today: Structured Streaming, ``from_json``, and Spark's own writer into a lake.

Run as a process of its own by ``lake``; its one argument is JSON. It drains the topic and ends, or merges (``merge``).
It keeps no promise that a second run of a batch does not break. Its last line says what Spark could not do.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
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
    """The changes of a Parquet file into each Delta table by key. Says how long each took, without the start."""
    spark.read.parquet(settings["changes"]).createOrReplaceTempView("changes")
    seconds = []
    for path in settings["paths"]:
        spark.sql(f"SELECT count(*) FROM delta.`{path}`").collect()
        began = time.monotonic()
        spark.sql(
            f"MERGE INTO delta.`{path}` t USING changes s ON t.id = s.id"
            " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        seconds.append(time.monotonic() - began)
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    kind = settings["format"]
    more = dict(EXTENSIONS[kind])
    if kind == "iceberg":
        more["spark.sql.catalog.lake.warehouse"] = settings["path"]
    try:
        spark = session({**settings["spark"], **more})
        (merge if "changes" in settings else append)(spark, settings)
        spark.stop()
    except (Py4JError, PySparkException) as error:
        causes = re.findall(r"^(?:Caused by: |: )(.*)", str(error), re.MULTILINE) or str(error).splitlines()
        sys.exit(f"{kind} does not work on Spark {pyspark.__version__}: {causes[-1]}")


if __name__ == "__main__":
    main()
