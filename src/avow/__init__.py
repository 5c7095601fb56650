"""avow: a delivery guarantee that is declared in one word, kept, proven and audited.

Public names only. Everything else is reached through its module.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from avow.errors import (
    AvowError,
    ConfigError,
    LocalError,
    ProtocolViolation,
    SinkError,
    SourceError,
)
from avow.guarantee import Anomaly, Guarantee

if TYPE_CHECKING:
    from avow.clients.consumer import Consumer

__version__ = version("avow")

# Imported when used: they bring Kafka's client, and `avow plan` should not wait for it.
_CLIENTS = {"Consumer": "consumer"}


def __getattr__(name: str) -> object:
    if name in _CLIENTS:
        return getattr(import_module(f"avow.clients.{_CLIENTS[name]}"), name)
    raise AttributeError(f"module 'avow' has no attribute {name!r}")


__all__ = [
    "Anomaly",
    "AvowError",
    "ConfigError",
    "Consumer",
    "Guarantee",
    "LocalError",
    "ProtocolViolation",
    "SinkError",
    "SourceError",
    "__version__",
]
