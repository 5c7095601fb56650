"""A folder of documents, one file a key, like a search index. Writing one again changes nothing; losing one would.

Run: AVOW_BROKERS=host:port python at_least_once.py TOPIC [--once]
"""

import os
import signal
import sys
from pathlib import Path

from avow import CommitMode, Consumer, Record, RetryConfig

INDEX = Path(os.environ.get("INDEX", "index"))


def index(record: Record) -> None:
    """Raises if there is no key: after two more tries the record is a dead letter, and the next one is handled."""
    if record.key is None:
        raise ValueError("no key")
    (INDEX / record.key.hex()).write_bytes(record.value or b"")


INDEX.mkdir(exist_ok=True)
with Consumer(
    sys.argv[1],
    bootstrap_servers=os.environ["AVOW_BROKERS"],
    group_id="indexer",
    guarantee="at-least-once",
    commit=CommitMode.ASYNC,
    retry=RetryConfig(retries=2),
    dead_letters=True,
    once="--once" in sys.argv,
    on_event=print,
) as consumer:
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    totals = consumer.run(index)
print(f"indexed {totals.handled}, dead letters {totals.dead}")
