"""``decode.format = "json"``: ``plugin`` (settings, and the way in), ``decoder`` (which record is read which way),
``columns`` (many at once), ``document`` and ``values`` (one, strictly), ``keys``, ``samples``."""
