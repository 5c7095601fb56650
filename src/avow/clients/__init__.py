"""Clients for services that are not pipelines: ``producer`` sends with a declared durability, ``consumer`` passes
records to a function under a declared guarantee, ``receipts`` reports what became of a record that was sent.
"""
