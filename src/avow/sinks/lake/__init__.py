"""What Delta Lake and Iceberg have in common: Parquet files from tasks, and one commit of the driver that carries them.

Theory of operation
-------------------
A task writes Parquet files beside the table's own and reports what it wrote; the files are not visible yet. The driver
then makes commits in the guarantee's order: one with files *and* positions under exactly-once, two under the weaker
words. The positions are part of the table, so the table itself refuses a driver that planned from older ones. A crash
before a commit leaves files that belong to nothing, and ``maintenance.orphans`` finds them.

Every commit is made on the very version of the table on which the positions were read, and is not repeated by the
library: after a refusal they are read again. Unchanged (another writer compacted, deleted or altered), and the same
commit is made once more; moved, and another run has taken over.

Dead letters are a table of their own, with positions of its own. It is committed before the table of rows, so a crash
in between leaves it ahead; the next run removes what lies beyond the claimed position (``driver.open_run``), once it
has fenced the one before in the table of rows: a run that was only suspended could still claim what it had committed.

``ledger_snapshot`` is the ledger as a table stores it; ``files`` writes Parquet; ``task`` is a task's side; ``table``
is what a format must do; ``columns`` compares a table with what rows need; ``new_rows`` is what a batch adds;
``driver`` is the driver's side; ``dead_letters`` and ``redrive`` are for dead letters, ``maintenance`` for files.
``sinks.delta`` and ``sinks.iceberg`` are the formats.
"""
