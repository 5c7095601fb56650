"""PostgreSQL as a sink: the table, and beside it the ledger, the claim log and the dead letters in schema ``avow``.

``session`` is one connection with transactions of our own making; ``tables`` makes and checks the target table;
``store`` is the driver's side (runs, positions, dead letters); ``task`` is the side of one Spark task, where rows and
claim go into one transaction.
"""

from avow.sinks.postgres.store import Store
from avow.sinks.postgres.task import PostgresTask

__all__ = ["PostgresTask", "Store"]
