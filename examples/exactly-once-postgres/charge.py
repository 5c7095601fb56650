"""A handler for ``avow consume --guarantee exactly-once``: one charge a message, however often it was sent."""

import json

from avow import Record, Transaction


def charge(record: Record, tx: Transaction) -> None:
    """What this raises is tried again; what it wrote until then is undone."""
    payment = json.loads(record.value or b"")
    if tx.first_time():  # discard on repeat: by the header avow-key
        tx.connection.execute("INSERT INTO charges VALUES (%(account)s, %(amount)s)", payment)
    # Overwrite on repeat: the last word wins, and saying it again changes nothing.
    tx.connection.execute(
        "INSERT INTO accounts VALUES (%(account)s, %(amount)s)"
        " ON CONFLICT (account) DO UPDATE SET last_amount = excluded.last_amount",
        payment,
    )
