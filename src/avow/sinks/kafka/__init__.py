"""Kafka as a sink: records, dead letters and the input's position in one transaction.

``entries`` is the ledger as the reserved group's committed offsets hold it; ``clients`` are a process's producers and
readers; ``messages`` turns rows into records; ``letters`` are dead letters in a topic, ``register`` what it keeps
beside them; ``task`` is one task's side, ``store`` the driver's.
"""
