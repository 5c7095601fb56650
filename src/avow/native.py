"""avow's own C library, if the package ``avow-native`` is installed and its library was built.

It only makes things faster: whatever is read or written with it is the same without it. So nothing depends on it, and
only this module imports it; a caller that gets the library may import the modules of ``avow_native``.

Owns: whether the library is used. Must not know: what for.
"""

from __future__ import annotations

import ctypes

_is_allowed = True


def library() -> ctypes.CDLL | None:
    """The library, or None: then the caller uses its Python code."""
    if not _is_allowed:
        return None
    try:
        import avow_native
    except ImportError:
        return None
    return avow_native.load()


def why_not() -> str | None:
    """Why there is no library, for a person; nothing if there is one."""
    if not _is_allowed:
        return "switched off"
    try:
        import avow_native
    except ImportError:
        return "the package avow-native is not installed"
    return avow_native.status().why_not


def allow(allowed: bool) -> None:
    """Use the library where it is there, or do without it. For what is opened from now on, in this process."""
    global _is_allowed
    _is_allowed = allowed
