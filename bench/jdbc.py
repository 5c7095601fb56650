"""What people write today: Spark Structured Streaming, ``from_json``, and Spark's own JDBC writer.

Run as a process of its own by ``contenders``; its one argument is JSON. It drains the topic and ends. It keeps no
promise: a batch that is run again is written again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

LINEAGE = ("topic", "partition", "offset", "timestamp")


def session(settings: dict[str, str]) -> SparkSession:
    common = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.appName("bench jdbc")
    for key, value in (common | settings).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def rows(spark: SparkSession, settings: dict[str, Any]) -> DataFrame:
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings["brokers"])
        .option("subscribe", settings["topic"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(settings["max_records"]))
        .load()
    )
    lineage = [] if settings["bare"] else [f.col(name).alias(f"_kafka_{name}") for name in LINEAGE]
    document = f.from_json(f.col("value").cast("string"), settings["schema"]).alias("document")
    return records.select(document, *lineage).select("document.*", *(f"_kafka_{n}" for n in LINEAGE if lineage))


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    spark = session(settings["spark"])
    properties = {"driver": "org.postgresql.Driver", **settings["options"]}

    def write(frame: DataFrame, _batch: int) -> None:
        frame.write.jdbc(settings["url"], settings["table"], mode="append", properties=properties)

    query = (
        rows(spark, settings)
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
