"""The ways of reading JSON by column that this machine has: a test that goes through ``READERS`` tests them all.

Where there is a C compiler, the library is compiled first; ``test_native_json`` asserts that it is there then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from avow import native

try:
    from avow_native.build import BuildError, build
except ImportError:
    READERS = ["arrow"]
else:
    with contextlib.suppress(BuildError):
        build()
    READERS = ["arrow", "native"] if native.library() else ["arrow"]


@contextlib.contextmanager
def reading_by(reader: str) -> Iterator[None]:
    """What is opened inside reads so."""
    native.allow(reader == "native")
    try:
        yield
    finally:
        native.allow(True)
