"""Where Spark's Python workers are forked from: pyspark's own daemon, with our modules loaded before the first fork.

Every worker would otherwise import them by itself, a second of CPU each, and all at once, in the first batch's tasks.
Spark starts it by name (``spark.python.daemon.module``), as ``python -m avow.engines.daemon``.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Spark puts zips of its Python side first in the path, which Python compiles anew at every start. Where they lie in an
# installed pyspark (site-packages/pyspark/python/lib), the very same modules are there, compiled.
INSTALLED = {str(Path(entry, "pyspark", "python", "lib")) for entry in sys.path}
sys.path[:] = [entry for entry in sys.path if not (entry.endswith(".zip") and str(Path(entry).parent) in INSTALLED)]

from pyspark.daemon import manager  # noqa: E402

import avow.engines.spark  # noqa: E402, F401 - what tasks are made of

if __name__ == "__main__":
    manager()  # type: ignore[no-untyped-call]
