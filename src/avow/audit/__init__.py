"""The audit: a pipeline's own topics against its own table, dead letters and ledger, offset by offset.

``findings`` holds the words; ``compare`` (rows by offset), ``keys`` (rows by key) and ``judge`` (the ledger, the
verdict) are pure; ``values`` says when two rows are the same; ``table`` reads the sink on one snapshot, and ``spark``
reads the topics and brings the two together.
"""
