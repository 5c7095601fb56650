"""Records whose value is a message of Protocol Buffers. See ``plugin``."""
