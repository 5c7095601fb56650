"""Who is measured: how each contender is started on a topic and a table.

Owns: command lines and settings, the same for all where they mean the same. Must not know: how it is measured.
Neighbours: ``jdbc`` and ``plain``, which are the contenders that are not avow.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from avow.local import jars
from bench.decode import SCHEMA
from bench.measure import Command, Rig

MASTER = f"local[{max(2, os.cpu_count() or 2)},4]"
MEMORY = "1g"
TUNED = {"batchsize": "10000"}
TUNED_URL = "&reWriteBatchedInserts=true"


@dataclass(frozen=True, slots=True)
class Task:
    """What a contender has to do, and with what."""

    topic: str
    table: str
    max_records: int  # of one batch
    master: str = MASTER
    memory: str = MEMORY  # of the driver's JVM


def avow(
    rig: Rig,
    task: Task,
    guarantee: str,
    *,
    java_options: str | None = None,
    engine: str = "spark",
    interval: str | None = None,
    once: bool = True,
) -> Command:
    """``avow run`` as a person uses it, under a name of its own. ``java_options`` go over avow's own; ``interval``: of
    batches, if it is not to be the engine's own; without ``once`` it runs until it is stopped."""
    folder = rig.new_folder("avow")
    spark = {"master": task.master, "driver.memory": task.memory}
    if java_options is not None:
        spark["driver.extraJavaOptions"] = java_options
    sections: dict[str, dict[str, Any]] = {
        "source": {"brokers": rig.cluster.bootstrap, "topics": [task.topic]},
        "decode": {"format": "json", "schema": SCHEMA},
        "sink": {"kind": "postgres", "url": "${env:DATABASE_URL}", "table": task.table},
        "batch": {"max_records": task.max_records} | ({"interval": interval} if interval else {}),
        "spark": spark,
    }
    lines = [f'name = "bench-{uuid4().hex[:8]}"', f'guarantee = "{guarantee}"', f'engine = "{engine}"']
    for section, settings in sections.items():
        # A JSON string, number or list of strings reads the same in TOML.
        lines += [f"[{section}]", *(f'"{key}" = {json.dumps(value)}' for key, value in settings.items())]
    file = folder / "pipeline.toml"
    file.write_text("\n".join(lines) + "\n")
    options = ["--once"] if once else []
    return Command([sys.executable, "-m", "avow", "run", str(file), *options, "--json"], folder)


def jdbc(rig: Rig, task: Task, *, tuned: bool, bare: bool = False, java_options: str = "") -> Command:
    """Spark's JDBC writer. ``bare``: without the columns that say where a record came from."""
    folder = rig.new_folder("jdbc")
    port = rig.cluster.layout.postgres_port
    settings = {
        "topic": task.topic,
        "table": task.table,
        "brokers": rig.cluster.bootstrap,
        "schema": SCHEMA,
        "bare": bare,
        "max_records": task.max_records,
        "url": f"jdbc:postgresql://127.0.0.1:{port}/postgres?user=postgres{TUNED_URL if tuned else ''}",
        "options": TUNED if tuned else {},
        "checkpoint": str(folder / "jdbc-checkpoint"),
        "spark": {
            "spark.master": task.master,
            "spark.driver.memory": task.memory,
            "spark.driver.extraJavaOptions": java_options,
            "spark.jars": ",".join(map(str, jars.classpath("bench"))),
        },
    }
    return Command([sys.executable, "-m", "bench.jdbc", json.dumps(settings)], folder)


def plain(rig: Rig, task: Task, records: int) -> Command:
    """One record, one INSERT, one COMMIT."""
    settings = {
        "topic": task.topic,
        "table": task.table,
        "brokers": rig.cluster.bootstrap,
        "url": rig.url,
        "records": records,
    }
    return Command([sys.executable, "-m", "bench.plain", json.dumps(settings)], rig.new_folder("plain"))
