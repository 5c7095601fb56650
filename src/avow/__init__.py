"""avow: a delivery guarantee that is declared in one word, kept, proven and audited.

Public names only. Everything else is reached through its module.
"""

from importlib.metadata import version

from avow.errors import (
    AvowError,
    ConfigError,
    LocalError,
    ProtocolViolation,
    SinkError,
    SourceError,
)
from avow.guarantee import Anomaly, Guarantee

__version__ = version("avow")

__all__ = [
    "Anomaly",
    "AvowError",
    "ConfigError",
    "Guarantee",
    "LocalError",
    "ProtocolViolation",
    "SinkError",
    "SourceError",
    "__version__",
]
