"""What Delta Lake and Iceberg have in common: Parquet files from tasks, and one commit of the driver that carries them.

Theory of operation
-------------------
A task writes Parquet files beside the table's own and says what it wrote; nobody sees those files yet. The driver then
makes commits in the guarantee's order: one with files *and* positions under exactly-once, two under the weaker words.
The positions are part of the table, so the table itself refuses a driver that planned from older ones. A crash before a
commit leaves files that belong to nothing, and ``orphans`` finds them.

Every commit is made on the very version of the table on which the positions were read, and is not repeated by the
library: after a refusal they are read again. Unchanged (somebody compacted, deleted or altered), and the same commit is
made once more; moved, and another run has taken over.

Dead letters are a table of their own, with positions of its own. It is committed before the table of rows, so a crash
in between leaves it ahead; the next run takes back what lies beyond the claimed position (``driver.open_run``), once it
has fenced the one before in the table of rows: one that only stood still could claim what it had buried.

``book`` is the ledger as a table holds it; ``files`` writes Parquet; ``staging`` is a task's side; ``table`` is what a
format must do; ``driver`` is the driver's side; ``letters`` the dead letters. ``sinks.delta`` and ``sinks.iceberg`` are
the formats.
"""
