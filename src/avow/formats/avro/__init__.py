"""``decode.format = "avro"``: ``plugin`` (settings, the way in), ``schema`` (what a schema says), ``resolution`` (how
records of one are read as another's, and the columns), ``reader`` (one record, strictly), ``native_columns`` (many),
``encode`` (JSON into Avro), ``plain`` (a value without columns), ``show`` (one for people), ``samples``. What formats
with schemas share is in ``formats.registry``.
"""
