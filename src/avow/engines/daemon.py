"""Where Spark's Python workers are forked from: pyspark's own daemon, with our modules loaded before the first fork.

Every worker would otherwise import them by itself, a second of CPU each, and all at once, in the first batch's tasks.
Spark starts it by name (``spark.python.daemon.module``), as ``python -m avow.engines.daemon``.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

# Spark puts archives first in the path: zips of its Python side, which Python compiles anew at every start, and its
# core jar. Before every task pyspark has Python forget what it knows of the path, and read these archives' directories
# again. Where they lie in an installed pyspark (site-packages/pyspark/python/lib, pyspark/jars), the very same modules
# are there, compiled.
INSTALLED = {str(Path(entry, "pyspark", *part)) for entry in sys.path for part in (("python", "lib"), ("jars",))}


def is_sparks(entry: str) -> bool:
    """Whether it is one of Spark's archives, or a folder in one; the user's own are theirs."""
    return any(
        part.suffix in (".zip", ".jar") and str(part.parent) in INSTALLED
        for part in (Path(entry), *Path(entry).parents)
    )


sys.path[:] = [entry for entry in sys.path if not is_sparks(entry)]

import psycopg  # noqa: E402, F401 - the PostgreSQL sink's client takes a fifth of a second
from pyspark.daemon import manager  # noqa: E402

import avow.engines.spark  # noqa: E402, F401 - what tasks are made of

for entry in [*filter(is_sparks, sys.path_importer_cache)]:
    del sys.path_importer_cache[entry]

if __name__ == "__main__":
    gc.freeze()  # what is loaded by now is never garbage: no collection in a worker need walk through it
    # pyspark collects after every task. Meanwhile there are batches of columns, and few objects that could be garbage.
    gc.set_threshold(200_000)
    manager()  # type: ignore[no-untyped-call]
