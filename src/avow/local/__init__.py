"""The local cluster: real Kafka nodes and a real PostgreSQL, without Docker, for trying, tests and proofs.

``cluster`` is the front; ``broker`` and ``postgres`` are its parts, ``part`` is what the two have in common
(one background process, known by its pid), ``jars`` and ``java`` bring what a broker runs on.
"""
