"""The audit: a pipeline's own topics against its own table, dead letters and ledger, offset by offset.

``findings`` holds the words; ``compare`` (rows by offset), ``keys`` (rows by key) and ``judge`` (the ledger, the
verdict) are pure; ``values`` says when two rows are the same. ``partition`` brings records and rows of one partition
together, ``spark`` and ``inprocess`` do that for all of them, and ``auditor`` is the whole, from the first question to
the ``report``. docs/AUDIT.md says what is found and what cannot be.
"""
