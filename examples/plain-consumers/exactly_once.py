"""Adds up balances. The change of a balance and the position are one transaction: a crash leaves both, or neither.

Run: AVOW_BROKERS=host:port DATABASE_URL=postgresql://... python exactly_once.py TOPIC [--once]
"""

import json
import os
import signal
import sys

import psycopg

from avow import Consumer

with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    connection.execute("CREATE TABLE IF NOT EXISTS balances (account text PRIMARY KEY, amount bigint NOT NULL)")

with Consumer(
    sys.argv[1],
    bootstrap_servers=os.environ["AVOW_BROKERS"],
    group_id="balances",
    guarantee="exactly-once",
    database=os.environ["DATABASE_URL"],
    once="--once" in sys.argv,
) as consumer:
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    while not consumer.ended:
        with consumer.transaction() as tx:
            for record in tx.records:
                payment = json.loads(record.value or b"{}")
                tx.connection.execute(
                    "INSERT INTO balances VALUES (%(account)s, %(amount)s)"
                    " ON CONFLICT (account) DO UPDATE SET amount = balances.amount + excluded.amount",
                    payment,
                )
print(f"handled {consumer.totals.handled}")
