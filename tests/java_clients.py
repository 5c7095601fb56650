"""Java's producer and consumer, as Spark's own Kafka sink and source use them: a process of its own, for their jars.

``python -m tests.java_clients BOOTSTRAP WRITE READ`` writes a record for each key in the JSON list on standard input to
the topic WRITE, and prints key and header names of every committed record of READ. Keys are in hexadecimal.
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
    bootstrap, written, read = sys.argv[1:]
    builder = SparkSession.builder.config("spark.jars", ",".join(map(str, jars.classpath("bench"))))
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    brokers = {"kafka.bootstrap.servers": bootstrap}
    keys = [(bytes.fromhex(key), b"v") for key in json.load(sys.stdin)]
    frame = spark.createDataFrame(keys, "key binary, value binary")
    frame.write.format("kafka").options(**brokers, topic=written).save()
    options = {**brokers, "subscribe": read, "kafka.isolation.level": "read_committed", "includeHeaders": "true"}
    rows = spark.read.format("kafka").options(**options).load().select("key", "headers").collect()
    print(json.dumps([(bytes(row.key).hex(), [header.key for header in row.headers]) for row in rows]))
    spark.stop()


if __name__ == "__main__":
    main()
