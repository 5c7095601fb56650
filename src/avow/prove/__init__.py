"""``avow prove``: real faults on real processes, and the evidence they leave.

A *cell* is one guarantee of one sink, in one mode and on one engine, under one fault. ``cells`` lists them, ``runner``
runs one, ``faults`` inject failures, ``oracles`` read the sink back and ``check`` compares it with what was sent,
without any code of the sinks or the audit. Every event goes into the ``history``; the ``report`` is made from that
alone.
"""
