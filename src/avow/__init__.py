"""avow: a delivery guarantee that is declared in one word, kept, proven and audited.

Public names only. Everything else is reached through its module.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

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
    from avow.clients.producer import Producer
    from avow.clients.receipts import Receipt, Receipts
    from avow.pipeline import Pipeline, RunSummary

__version__ = version("avow")

# Imported when they are asked for: they bring Kafka's client with them, or pydantic.
_LAZY = {
    "Consumer": "avow.clients.consumer",
    "Pipeline": "avow.pipeline",
    "Producer": "avow.clients.producer",
    "Receipt": "avow.clients.receipts",
    "Receipts": "avow.clients.receipts",
    "RunSummary": "avow.pipeline",
}

__all__ = [
    "Anomaly",
    "AvowError",
    "ConfigError",
    "Consumer",
    "Guarantee",
    "LocalError",
    "Pipeline",
    "Producer",
    "ProtocolViolation",
    "Receipt",
    "Receipts",
    "RunSummary",
    "SinkError",
    "SourceError",
    "__version__",
]


if not TYPE_CHECKING:  # to a type checker they are imported above, and no other name is there

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)
