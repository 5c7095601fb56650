"""Shows a sensor's readings as they come. One shown twice would be counted twice; one that is lost is not missed.

Run: AVOW_BROKERS=host:port python at_most_once.py TOPIC [--once]
"""

import os
import signal
import sys

from avow import Consumer

with Consumer(
    sys.argv[1],
    bootstrap_servers=os.environ["AVOW_BROKERS"],
    group_id="display",
    guarantee="at-most-once",
    once="--once" in sys.argv,
) as consumer:
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    for record in consumer:
        # Its position is committed already: whatever happens now, it does not come again.
        print(f"{record.topic} {record.partition} {record.offset}", flush=True)
