"""A folder of documents, one file a key, like a search index. Writing one again changes nothing; losing one would.

Run: AVOW_BROKERS=host:port python at_least_once.py TOPIC [--once]
"""

import os
import signal
import sys
from pathlib import Path

from avow import Consumer
from avow.clients.consumer import Record

INDEX = Path(os.environ.get("INDEX", "index"))


def index(record: Record) -> None:
    """Raises if there is no key: after two more tries the record is a dead letter, and the next one is handled."""
    if record.key is None:
        raise ValueError("no key")
    (INDEX / record.key.hex()).write_bytes(record.value or b"")


INDEX.mkdir(exist_ok=True)
with Consumer(
    os.environ["AVOW_BROKERS"],
    sys.argv[1],
    "indexer",
    "at-least-once",
    commit="async",
    retries=2,
    on_failure="dead-letter",
    once="--once" in sys.argv,
    on_event=print,
) as consumer:
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    totals = consumer.run(index)
print(f"indexed {totals.handled}, dead letters {totals.dead}")
