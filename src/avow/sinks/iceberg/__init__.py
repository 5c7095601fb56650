"""Apache Iceberg as a sink, by way of ``pyiceberg``: the lake's table format, and nothing else (see ``sinks.lake``).

The ledger is a table property, set in the transaction that brings the files: what is kept in a snapshot goes when the
snapshot expires. A property alone is guarded by nothing, so every commit of ours makes a snapshot, if need be one
without files: a catalog compares the table's newest snapshot with the one that the commit was made on.

``pyiceberg`` repeats a refused append by itself, on whatever is there by then, which would bring the same records
twice. That is switched off on our handle, and ``lake.driver`` judges what to do.
"""
