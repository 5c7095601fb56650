"""``decode.format = "raw"`` and ``"string"``: the record's own key and value, as bytes or as text."""
