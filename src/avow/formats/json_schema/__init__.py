"""``decode.format = "json-schema"``: ``plugin`` (settings, the way in), ``document`` (a schema and what it refers to),
``columns`` (the columns of one), ``validation`` (which values are valid), ``proofs`` (which need not be asked about),
``readers``, ``samples``. The JSON itself is read by ``formats.json``; what formats with schemas share is in
``formats.registry``.
"""
