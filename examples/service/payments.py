"""A pipeline inside a service, without Spark and without a JVM: python payments.py, until Ctrl-C or SIGTERM.

Needs ``pip install avow``, and DATABASE_URL in the environment. Start it several times: the processes share the
partitions. After a kill -9 start it again: it goes on from the position in the database.
"""

import logging
import signal

import avow

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

payments = avow.Pipeline(
    name="payments",
    guarantee="exactly-once",
    engine="consumer",
    source={"brokers": "localhost:9092", "topics": ["payments"]},
    decode={"format": "json", "schema": "id long not null, account string not null, amount double"},
    sink={"kind": "postgres", "url": "${env:DATABASE_URL}", "table": "payments"},
    dead_letters={"max_share": 0.5},
)

run = payments.start(on_progress=lambda progress: logging.info("%s written", progress.counts.written))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: run.stop())  # ends after the batch in progress

# Your service does its own work here. This one waits, and raises what the run failed with.
while (summary := run.await_termination(timeout=1)) is None:
    pass
print(summary)
