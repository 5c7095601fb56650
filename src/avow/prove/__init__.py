"""``avow prove``: real faults on real processes, and the evidence they leave.

A *cell* is one guarantee of one sink, in one mode and on one engine, under one fault. ``cells`` lists them, ``runner``
plays one, ``faults`` does the harm, ``witnesses`` say what is in the sink and ``check`` compares it with what was sent,
without any code of the sinks or the audit. Everything that happens goes into the ``history``, and the ``report`` comes
of nothing else.
"""
