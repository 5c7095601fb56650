"""PostgreSQL as a sink: the table, and beside it the ledger, the claim log and the dead letters in schema ``avow``.

``session`` is one connection with transactions of our own making; ``copy_format`` makes COPY data of Arrow columns;
``tables`` makes and checks the target table; ``driver`` is the driver's side (runs, positions); ``task`` is the side of
one Spark task, where rows and claim go into one transaction; ``dead_letters`` looks at dead letters; ``audit`` reads
everything back, by a client of its own (``arrow_session``).
"""
