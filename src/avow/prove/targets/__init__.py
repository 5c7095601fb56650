"""The sinks as the harness knows them: how a cell's pipeline file names each, how far it is, and how it is read back.

A sink joins the matrix by its entry in ``TARGETS``; which faults concern it is said in ``cells``, by its kind.

Owns: the registry. Must not know: faults, verdicts, or any code of the sinks and the audit (the import linter sees to
that): PostgreSQL is read by psycopg, a topic by a plain consumer, a Delta table by deltalake, an Iceberg table by
pyiceberg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from avow.prove.targets.base import Around, Target
from avow.prove.targets.kafka import KafkaTarget
from avow.prove.targets.lakes import DeltaTarget, IcebergTarget, LakeTarget
from avow.prove.targets.postgres import PostgresTarget

__all__ = ["TARGETS", "LakeTarget", "PostgresTarget", "Target"]

TARGETS: Mapping[str, Callable[[Around, Path, str, str], Target]] = MappingProxyType(
    {"postgres": PostgresTarget, "delta": DeltaTarget, "iceberg": IcebergTarget, "kafka": KafkaTarget}
)
