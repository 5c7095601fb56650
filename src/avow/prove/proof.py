"""A proof: cells run on clusters in parallel, with one history and one audit session for all of them.

Owns: the clusters, and which of them runs which cell. Must not know: how a cell is run. Neighbour: ``runner``.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from avow.local import jars, java
from avow.prove.cells import Cell, Queue
from avow.prove.cluster import ProofCluster
from avow.prove.history import History
from avow.prove.runner import CellResult, CellRunner, Notify, Options, ProofContext, SharedAudit
from avow.prove.workload_spec import WorkloadSpec


def prove(
    cells: Iterable[Cell],
    folder: Path,
    options: Options,
    *,
    notify: Notify,
    jobs: int = 1,
    keep: bool = False,
    own: WorkloadSpec | None = None,
) -> Iterator[CellResult]:
    """Run cells on ``jobs`` clusters in parallel. Results are yielded as cells finish."""
    listed = list(cells)
    if not listed:
        return
    waiting = Queue(listed)
    done: SimpleQueue[CellResult | BaseException] = SimpleQueue()
    proof = ProofContext(folder, options, History(folder), SharedAudit(), notify, keep, own)
    proof.history.add("proof", seed=options.seed, options=asdict(options), versions=versions())
    clusters: list[ProofCluster] = []

    def work(number: int) -> None:
        try:
            started = _started_cluster(folder / f"cluster-{number}")
            with started as cluster, closing(CellRunner(cluster, proof)) as runner:
                clusters.append(cluster)
                while cell := waiting.take(runner.column):
                    done.put(runner.run(cell))
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            done.put(error)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for number in range(1, min(jobs, len(listed)) + 1):
                pool.submit(work, number)
            for _ in listed:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            waiting.clear()
            for cluster in clusters:
                cluster.closing.set()
    proof.audit.close()
    proof.history.close()


@contextmanager
def _started_cluster(folder: Path) -> Iterator[ProofCluster]:
    # In a temporary folder: PostgreSQL, as user nobody, must reach it, and brokers' data is not evidence.
    scratch = Path(tempfile.mkdtemp(prefix="avow-prove-"))
    cluster = ProofCluster(scratch)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        for part in cluster.parts():
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                shutil.copy(part.log, folder / f"{part.name}.log")
        shutil.rmtree(scratch, ignore_errors=True)


def versions() -> dict[str, str]:
    clients = ("confluent-kafka", "psycopg", "adbc-driver-postgresql", "deltalake", "pyiceberg")
    packages = ("avow", "pyspark", "pyarrow", *clients)
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "java": java.find().version,
        "kafka": jars.KAFKA_VERSION,
        **{name: version(name) for name in packages},
    }
