"""``decode.format = "debezium"``: ``plugin`` (settings, and the way in), ``decoder`` (what becomes of each record),
``change`` (the envelope), ``keys``, ``names`` and ``columns`` (a table's row), ``values`` (one value as Debezium has
it), ``connect`` (types as Kafka Connect has them, and what a payload must give), ``json_payload``, ``avro_payload``,
``samples``."""
