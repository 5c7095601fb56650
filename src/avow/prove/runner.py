"""A proof: cells on clusters side by side, and what all of them share.

Owns: the sites, and who plays which cell. Must not know: how a cell is played. Neighbour: ``play``.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from avow.local import jars, java
from avow.prove.cells import Cell, Queue
from avow.prove.form import Form
from avow.prove.history import History
from avow.prove.play import Judges, Options, Outcome, Player, Proof, Tell
from avow.prove.site import Site


def prove(
    cells: Iterable[Cell],
    folder: Path,
    options: Options,
    *,
    tell: Tell,
    jobs: int = 1,
    keep: bool = False,
    own: Form | None = None,
) -> Iterator[Outcome]:
    """Play cells, on ``jobs`` clusters side by side. Outcomes come as they are reached."""
    listed = list(cells)
    if not listed:
        return
    waiting = Queue(listed)
    done: SimpleQueue[Outcome | BaseException] = SimpleQueue()
    proof = Proof(folder, options, History(folder), Judges(), tell, keep, own)
    proof.history.add("proof", seed=options.seed, options=asdict(options), versions=versions())
    sites: list[Site] = []

    def work(number: int) -> None:
        try:
            with _site(folder / f"cluster-{number}") as site:
                sites.append(site)
                player = Player(site, proof)
                try:
                    while cell := waiting.take(player.column):
                        done.put(player.play(cell))
                finally:
                    player.close()
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            done.put(error)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for number in range(1, min(jobs, len(listed)) + 1):
                pool.submit(work, number)
            for _ in listed:
                outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            waiting.clear()
            for site in sites:
                site.closing.set()
    proof.judges.close()
    proof.history.close()


@contextmanager
def _site(folder: Path) -> Iterator[Site]:
    # In a short folder of its own: PostgreSQL as nobody has to get there, and evidence needs no broker's data.
    scratch = Path(tempfile.mkdtemp(prefix="avow-prove-"))
    site = Site(scratch)
    try:
        yield site.start()
    finally:
        site.stop()
        for part in site.parts():
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
