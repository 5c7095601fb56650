"""Kafka as a sink: records, dead letters and the input's position in one transaction.

``entries`` is the ledger as the reserved group's committed offsets hold it; ``clients`` are a process's producers and
readers; ``messages`` turns rows into records; ``dead_letters`` is the dead-letter topic, ``start_records`` what else
is in it; ``task`` is one task's side, ``driver`` the driver's.
"""
