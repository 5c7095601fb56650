"""Delta Lake as a sink, by way of ``deltalake``: the lake's table format, and nothing else (see ``sinks.lake``).

The ledger is in the table's own transactions (``txn`` in the log): one number for each thing that is known of a
partition, of which the position is one. Delta keeps them through checkpoints and log clean-up. Which partitions there
are, their topic's id and where they started is in a table property, which is written before the first position is.
"""
