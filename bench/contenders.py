"""Who is measured: how each contender is started on a topic and a table.

Owns: command lines and settings, the same for all where they mean the same. Must not know: how it is measured.
Neighbours: ``floor``, ``jdbc`` and ``plain``, which are contenders that are not avow.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from avow.local import jars
from bench.measure import USUAL, Command, NotMeasuredError, Rig
from bench.records import COLUMN_TYPES, Shape

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
    shape: Shape = USUAL  # of the records


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
        "decode": {"format": "json", "schema": task.shape.schema},
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
    return avow_run(file, engine=engine, once=once)


def avow_run(file: Path, *, engine: str = "spark", once: bool = True) -> Command:
    options = ["--once"] if once else []
    arguments = [sys.executable, "-m", "avow", "run", str(file), *options, "--json"]
    return Command(arguments, file.parent, reports_batches=engine == "spark")


def jdbc(rig: Rig, task: Task, *, tuned: bool, bare: bool = False, java_options: str = "") -> Command:
    """Spark's JDBC writer. ``bare``: without the columns that say where a record came from."""
    folder = rig.new_folder("jdbc")
    port = rig.cluster.layout.postgres_port
    settings = {
        "topic": task.topic,
        "table": task.table,
        "brokers": rig.cluster.bootstrap,
        "schema": task.shape.schema,
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
        "columns": [name for name, _ in task.shape.fields()],
    }
    return Command([sys.executable, "-m", "bench.plain", json.dumps(settings)], rig.new_folder("plain"))


def kcat(rig: Rig, task: Task) -> Command:
    """What somebody types who needs it once: kcat into psql, and PostgreSQL reads the JSON. All or nothing, and no
    position is left behind. COPY's text format would take a backslash for its own: there is none in these records."""
    if missing := [name for name in ("kcat", "psql") if not shutil.which(name)]:
        raise NotMeasuredError(f"{' and '.join(missing)} not installed (Debian: kcat, postgresql-client)")
    fields = ", ".join(f"{name} {COLUMN_TYPES[kind]}" for name, kind in task.shape.fields())
    statements = [
        'CREATE TEMP TABLE staged (topic text, partition int, "offset" bigint, ms bigint, value jsonb)',
        "COPY staged FROM STDIN",
        f'INSERT INTO {task.table} SELECT v.*, topic, partition, "offset", to_timestamp(ms / 1000.0)'
        f" FROM staged, jsonb_to_record(value) AS v({fields})",
    ]
    read = ["kcat", "-C", "-q", "-e", "-b", rig.cluster.bootstrap, "-t", task.topic, "-o", "beginning"]
    read += ["-f", r"%t\t%p\t%o\t%T\t%s\n"]
    write = ["psql", rig.url, "-q", "-X", "-v", "ON_ERROR_STOP=1", *(word for s in statements for word in ("-c", s))]
    pipe = f"set -o pipefail; {shlex.join(read)} | {shlex.join(write)}"
    return Command(["bash", "-c", pipe], rig.new_folder("kcat"), is_one_batch=True)
