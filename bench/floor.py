"""The floor as a contender: ``floor.c``, compiled here, and linked with the libraries that wheels have inside.

Owns: where these libraries are, the table of its positions. Neighbour: ``contenders``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from bench.contenders import Task
from bench.measure import Command, NotMeasuredError, Rig

SOURCE = Path(__file__).with_name("floor.c")
FLAGS = ("-std=c11", "-O3", "-Wall", "-Wextra", "-pthread")
LIBRARIES = {"confluent-kafka": "librdkafka", "psycopg-binary": "libpq"}
POSITIONS = "floor_positions (name text, number int, position bigint, PRIMARY KEY (name, number))"
THREADS = 2
ROWS = 10_000  # of one transaction


def command(rig: Rig, task: Task) -> Command:
    program = rig.folder / "floor"
    if not program.is_file():
        compile_to(program)
    last = task.shape.partitions - 1
    rig.query(f"CREATE TABLE IF NOT EXISTS {POSITIONS}")
    rig.query(f"INSERT INTO floor_positions SELECT '{task.table}', n, 0 FROM generate_series(0, {last}) n")
    columns = ",".join(f"{name}:{kind[0]}" for name, kind in task.shape.fields())
    arguments = [program, rig.cluster.bootstrap, task.topic, rig.url, task.table, columns, THREADS, ROWS]
    return Command(list(map(str, arguments)), rig.new_folder("floor"))


def compile_to(program: Path) -> None:
    compilers = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    compiler = next((words for words in compilers if words and shutil.which(words[0])), None)
    if compiler is None:
        raise NotMeasuredError("there is no C compiler")
    libraries = [library(wheel, name) for wheel, name in LIBRARIES.items()]
    found_there = [f"-Wl,-rpath,{path.parent}" for path in libraries]
    words = [*compiler, *FLAGS, SOURCE, *libraries, *found_there, "-o", program]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise NotMeasuredError(f"{compiler[0]} cannot compile floor.c: {done.stderr.strip()[-500:]}")


def library(wheel: str, name: str) -> Path:
    """The shared library that a wheel has brought with it."""
    try:
        files = metadata.files(wheel) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith(name):
            return Path(str(file.locate())).resolve()
    raise NotMeasuredError(f"{wheel} is not installed as a wheel that has {name} inside")
