"""The sinks as the harness knows them: how a cell's pipeline file names each, how far it is, and how it is read back.

A sink joins the matrix by its entry in ``WITNESSES``; which faults concern it is said in ``cells``, by its kind.

Owns: the registry. Must not know: faults, verdicts, or any code of the sinks and the audit (the import linter sees to
that): PostgreSQL is read by psycopg, a topic by a plain consumer, a Delta table by deltalake, an Iceberg table by
pyiceberg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from avow.prove.witnesses.base import Around, Witness
from avow.prove.witnesses.kafka import KafkaWitness
from avow.prove.witnesses.lakes import DeltaWitness, IcebergWitness, LakeWitness
from avow.prove.witnesses.postgres import GroupWitness, PostgresWitness

__all__ = ["WITNESSES", "GroupWitness", "LakeWitness", "PostgresWitness", "Witness"]

WITNESSES: Mapping[str, Callable[[Around, Path, str, str], Witness]] = MappingProxyType(
    {"postgres": PostgresWitness, "delta": DeltaWitness, "iceberg": IcebergWitness, "kafka": KafkaWitness}
)
