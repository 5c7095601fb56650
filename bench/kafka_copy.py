"""What people write today: Spark Structured Streaming from Kafka into Kafka, with Spark's own sink.

Run as a process of its own by ``kafka``; its one argument is JSON. It copies key, value and headers, drains the topic
and ends. Its sink is at-least-once: a batch that is run again is written again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.jdbc import session


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    spark = session(settings["spark"])
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings["brokers"])
        .option("subscribe", settings["topic"])
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", str(settings["max_records"]))
        .load()
    )
    writer = (
        records.select("key", "value", "headers")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", settings["brokers"])
        .option("topic", settings["output"])
        .option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
    )
    for name, value in settings["options"].items():
        writer = writer.option(f"kafka.{name}", value)
    writer.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
