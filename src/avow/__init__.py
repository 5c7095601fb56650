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
    from avow.clients.config import CommitConfig, CommitMode, CommitUnit, PollConfig, RetryConfig
    from avow.clients.consumer import Consumer, Handler, TransactionHandler
    from avow.clients.delivery import Delivery
    from avow.clients.durability import Durability
    from avow.clients.postgres_offsets import Transaction
    from avow.clients.producer import Producer
    from avow.clients.receipts import Receipt, Receipts
    from avow.clients.records import Record
    from avow.pipeline import Pipeline, RunSummary

    __version__: str

# Imported when they are asked for: they bring Kafka's client with them, or pydantic.
_LAZY = {
    name: f"avow.{module}"
    for module, names in {
        "clients.config": ("CommitConfig", "CommitMode", "CommitUnit", "PollConfig", "RetryConfig"),
        "clients.consumer": ("Consumer", "Handler", "TransactionHandler"),
        "clients.delivery": ("Delivery",),
        "clients.durability": ("Durability",),
        "clients.postgres_offsets": ("Transaction",),
        "clients.producer": ("Producer",),
        "clients.receipts": ("Receipt", "Receipts"),
        "clients.records": ("Record",),
        "pipeline": ("Pipeline", "RunSummary"),
    }.items()
    for name in names
}

__all__ = [
    "Anomaly",
    "AvowError",
    "CommitConfig",
    "CommitMode",
    "CommitUnit",
    "ConfigError",
    "Consumer",
    "Delivery",
    "Durability",
    "Guarantee",
    "Handler",
    "LocalError",
    "Pipeline",
    "PollConfig",
    "Producer",
    "ProtocolViolation",
    "Receipt",
    "Receipts",
    "Record",
    "RetryConfig",
    "RunSummary",
    "SinkError",
    "SourceError",
    "Transaction",
    "TransactionHandler",
    "__version__",
]


if not TYPE_CHECKING:  # to a type checker they are imported above, and no other name is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":  # a build imports avow before it is installed
            return version("avow")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)
