"""The librdkafka that the confluent-kafka wheel brings with it, and the handles of its clients, for the parts in C.

A client stays a ``confluent_kafka.Consumer`` or ``Producer``. Its handle, an ``rd_kafka_t *``, is the first member of
that object; it is used only if librdkafka itself says that it belongs to this very object. ``load`` and ``handle`` give
None where anything is not as it was when this was written: then the caller does without.

Owns: which versions are known, the handle. Must not know: what is done with a client.
"""

from __future__ import annotations

import ctypes as c
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import confluent_kafka
from confluent_kafka import cimpl

# The versions whose handles and functions are known to be as they are used here.
CLIENT_VERSIONS = ((2, 0), (3, 0))
LIBRARY_VERSIONS = (0x02000000, 0x03000000)
# rd_kafka_type_t, and the classes of such clients.
PRODUCER, CONSUMER = 0, 1
_CLASSES: dict[int, type[object]] = {PRODUCER: cimpl.Producer, CONSUMER: cimpl.Consumer}

Calls = dict[str, Callable[..., Any]]
Signatures = Mapping[str, tuple[Any, Iterable[Any]]]  # of our functions: the result, the arguments


class Librdkafka:
    """The library of the client, whose versions are known."""

    def __init__(self, library: c.CDLL) -> None:
        self._library = library
        self._type, self._opaque = library.rd_kafka_type, library.rd_kafka_opaque
        self._type.restype, self._type.argtypes = c.c_int, (c.c_void_p,)
        self._opaque.restype, self._opaque.argtypes = c.c_void_p, (c.c_void_p,)

    def table(self, names: Sequence[str]) -> c.Array[c.c_void_p]:
        """The addresses of these functions; ``AttributeError`` if there is no such function."""
        addresses = [c.cast(getattr(self._library, name), c.c_void_p) for name in names]
        return (c.c_void_p * len(addresses))(*addresses)

    def handle(self, client: object, kind: int) -> int | None:
        """The client's ``rd_kafka_t *``. None if it is closed, of another kind, or not where it is looked for."""
        class_ = _CLASSES[kind]
        if not isinstance(client, class_) or class_.__basicsize__ < _SLOT + c.sizeof(c.c_void_p):
            return None
        if _slot(class_.__new__(class_)):  # not initialized, so it can have no client yet
            return None
        handle = _slot(client)
        # What follows asks librdkafka about the handle: it must not be a Python object.
        if handle is None or handle % c.sizeof(c.c_void_p) or handle in map(id, gc.get_referents(client)):
            return None
        # confluent-kafka leaves its object with the handle, for callbacks.
        return handle if self._type(handle) == kind and self._opaque(handle) == id(client) else None


_SLOT = object.__basicsize__


def _slot(client: object) -> int | None:
    return c.c_void_p.from_address(id(client) + _SLOT).value


def load() -> Librdkafka | None:
    """The client's librdkafka; None if it, or the client, is not one that is known."""
    try:
        library = c.CDLL(cimpl.__file__)  # it brings its librdkafka with it
        return Librdkafka(library) if _is_known(library) else None
    except (OSError, AttributeError):  # no such library, no such function
        return None


def _is_known(library: c.CDLL) -> bool:
    """Whether this is the client, and the librdkafka it uses, that the structures were taken from."""
    release: str = metadata.version("confluent-kafka")
    known = CLIENT_VERSIONS[0] <= tuple(map(int, release.split(".")[:2])) < CLIENT_VERSIONS[1]
    version: int = library.rd_kafka_version()
    # Another librdkafka on this machine would know nothing of the client's handle.
    return known and version == confluent_kafka.libversion()[1] and LIBRARY_VERSIONS[0] <= version < LIBRARY_VERSIONS[1]


def calls(library: c.CDLL, prefix: str, signatures: Signatures) -> Calls:
    """Our own functions, described to ctypes; ``AttributeError`` if there is no such function."""
    found: Calls = {}
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"{prefix}{name}")
        function.restype, function.argtypes = result, tuple(arguments)
        found[name] = function
    return found
