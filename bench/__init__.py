"""Measurements on the real parts. Nothing here is a test: a machine's speed is not right or wrong."""
