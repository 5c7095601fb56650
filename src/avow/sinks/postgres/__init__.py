"""PostgreSQL as a sink: the table, and beside it the ledger, the claim log and the dead letters in schema ``avow``.

``session`` is one connection with transactions of our own making; ``tables`` makes and checks the target table;
``store`` is the driver's side (runs, positions); ``task`` is the side of one Spark task, where rows and claim go into
one transaction; ``letters`` looks at dead letters.
"""
