"""The sinks as the harness knows them: how a cell's pipeline file names each, how far it is, and how it is read back.

A sink's plugin names its own (``SinkPlugin.oracle``), and which faults concern it (``SinkPlugin.faults``).

Must not know: faults, verdicts, or any code of the sinks and the audit (the import linter sees to that): PostgreSQL is
read by psycopg, a topic by a plain consumer, a Delta table by deltalake, an Iceberg table by pyiceberg.
"""
