"""A pipeline as a Spark application: spark-submit --master 'local[2]' payments.py

Needs ``pip install 'avow[spark]'`` in the Python that runs this file and the tasks (PYSPARK_PYTHON), and DATABASE_URL
in the environment. It drains the topic, audits what is in the table, and ends.
"""

import logging
import sys

from pyspark.sql import SparkSession

import avow

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
logging.getLogger("py4j").setLevel(logging.WARNING)

spark = SparkSession.builder.appName("payments").config("spark.sql.session.timeZone", "UTC").getOrCreate()

payments = avow.Pipeline(
    name="payments",
    guarantee="exactly-once",
    source={"brokers": "localhost:9092", "topics": ["payments"]},
    decode={"format": "json", "schema": "id long not null, account string not null, amount double"},
    transform={"sql": "SELECT *, CAST(amount * 100 AS long) AS cents FROM records"},
    sink={"kind": "postgres", "url": "${env:DATABASE_URL}", "table": "payments"},
    dead_letters={"max_share": 0.5},
)
print(payments.run(once=True, spark=spark))
report = payments.audit(spark=spark)
print(report.verdict, report.sentence)
spark.stop()
sys.exit(0 if report.verdict == "held" else 1)
