"""Java's producer and consumer, as Spark's own Kafka sink and source use them: a process of its own, for their jars.

``python -m tests.java_clients write BOOTSTRAP TOPIC`` writes a record for each key in the JSON list on standard input;
``read`` prints key and header names of every committed record. Keys are in hexadecimal.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

from avow.local import jars

SETTINGS = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main() -> None:
    what, bootstrap, topic = sys.argv[1:]
    builder = SparkSession.builder.config("spark.jars", ",".join(map(str, jars.classpath("bench"))))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    brokers = {"kafka.bootstrap.servers": bootstrap}
    if what == "write":
        keys = [(bytes.fromhex(key), b"v") for key in json.load(sys.stdin)]
        frame = spark.createDataFrame(keys, "key binary, value binary")
        frame.write.format("kafka").options(**brokers, topic=topic).save()
        print("null")
    else:
        options = {**brokers, "subscribe": topic, "kafka.isolation.level": "read_committed", "includeHeaders": "true"}
        rows = spark.read.format("kafka").options(**options).load().select("key", "headers").collect()
        print(json.dumps([(bytes(row.key).hex(), [header.key for header in row.headers]) for row in rows]))
    spark.stop()


if __name__ == "__main__":
    main()
