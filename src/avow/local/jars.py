"""Jars by Maven coordinates: pinned in ``jars.lock``, fetched with jgo, verified before every use.

The lock file beside this module names each jar with its size and SHA-256, in sets: ``kafka`` is what a broker runs on,
``connect`` what a worker of Kafka Connect runs on, ``registry`` is a schema registry, ``debezium`` a connector and
``converter`` what writes Avro for it (archives, which ``unpacked`` unpacks), ``dashboard`` holds the JavaScript of the
dashboard, ``bench`` and ``lake`` are for the benches. Jars live in Maven's local repository, so what Maven or another
tool has fetched is used as it is; nothing is asked of the network for a jar that is there and right. A jar that is
there and wrong (cut short, altered) is fetched again.

Settings, all from the environment: ``M2_REPO`` moves the folder (Maven's own habit), ``AVOW_MAVEN_MIRROR``
names another repository to fetch from. No address is written here: the default is jgo's.

``python -m avow.local.jars fetch [SET ...]`` brings the jars (without a name: ``kafka``);
``... lock`` resolves the sets anew.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from avow.errors import LocalError
from avow.local.class_archive import cache

LOCK = Path(__file__).with_name("jars.lock")
FETCHES_AT_ONCE = 8
FETCH_TRIES = 3

KAFKA_VERSION = "4.3.1"
DEBEZIUM_VERSION = "3.6.2.Final"
REGISTRY_VERSION = "3.0.9"  # the newest that runs on Java 17
CONVERTER_VERSION = "2.5.11.Final"  # the newest that is published as an archive with all it needs
SPARK_VERSION = "4.1.3"

# What `lock` resolves. Kafka's jars come with all they depend on.
ROOTS = {
    "kafka": (
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",  # without it a broker has no log at all
    ),
}
RESOLVED_FURTHER = {"kafka", "connect"}
# Fetched only when they are asked for by name. The lists are explicit: pyspark ships the rest, and resolving Spark's
# Kafka source would ask for a token-provider jar that was never published for this version (the one of 4.0.0 works).
ON_REQUEST = {
    "registry": (f"io.apicurio:apicurio-registry-app:tar.gz:all:{REGISTRY_VERSION}",),
    "connect": (
        f"org.apache.kafka:connect-runtime:{KAFKA_VERSION}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
    ),
    "debezium": (f"io.debezium:debezium-connector-postgres:tar.gz:plugin:{DEBEZIUM_VERSION}",),
    "converter": (f"io.apicurio:apicurio-registry-distro-connect-converter:tar.gz::{CONVERTER_VERSION}",),
    "dashboard": (  # unpacked by dashboard/assets.py
        "org.webjars.npm:htmx.org:2.0.10",
        "org.webjars.npm:chart.js:4.5.1",
    ),
    "bench": (  # what Spark's own Kafka source and JDBC writer need
        f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_VERSION}",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
        "org.apache.kafka:kafka-clients:3.9.1",
        "org.apache.commons:commons-pool2:2.12.1",
        "org.postgresql:postgresql:42.7.14",
    ),
    "lake": (  # what Spark's own writers into lakes need
        # Delta up to 4.2 calls a constructor of Spark's that 4.1.2 has changed.
        "io.delta:delta-spark_4.1_2.13:4.4.0",
        "io.delta:delta-storage:4.4.0",
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
    ),
}


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock."""

    coordinate: str  # group:artifact:version, or group:artifact:packaging:classifier:version
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where Maven's layout puts it."""
        group, artifact, packaging, classifier, version = _parts(self.coordinate)
        name = "-".join(filter(None, (artifact, version, classifier)))
        return repository().joinpath(*group.split("."), artifact, version, f"{name}.{packaging}")

    def is_right(self) -> bool:
        """There, whole and unaltered."""
        try:
            if self.path.stat().st_size != self.size:
                return False
            return digest(self.path) == self.sha256
        except OSError:  # not there, or not to be read: either way it has to be brought
            return False


def _parts(coordinate: str) -> tuple[str, str, str, str, str]:
    """Group, artifact, packaging, classifier and version, as Maven writes them."""
    group, artifact, *kind, version = coordinate.split(":")
    packaging, classifier = kind or ("jar", "")
    return group, artifact, packaging, classifier, version


def repository() -> Path:
    """Maven's local repository, where jars are kept."""
    return Path(os.environ.get("M2_REPO") or Path.home() / ".m2" / "repository").expanduser()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def locked(name: str) -> list[Jar]:
    """The jars of one set, as the lock has them."""
    return [Jar(**line) for line in tomllib.loads(LOCK.read_text())[name]["jars"]]


def classpath(name: str) -> list[Path]:
    """The verified jars of one set, fetching what is missing or wrong."""
    jars = locked(name)
    wanted = [jar for jar in jars if not jar.is_right()]
    if wanted:
        _fetch_all(name, wanted)
    return [jar.path for jar in jars]


def unpacked_folder(name: str) -> Path:
    """Where ``unpacked`` puts the archive that is this set. It is there whole, or not at all."""
    (archive,) = locked(name)
    return cache() / f"{name}-{archive.sha256[:12]}"


def unpacked(name: str) -> Path:
    """The content of the archive that is this set, fetched and unpacked if it is not there."""
    folder = unpacked_folder(name)
    if folder.exists():
        return folder
    (archive,) = classpath(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as temporary:
            content = Path(temporary, "content")
            with tarfile.open(archive) as tar:
                tar.extractall(content, filter="data")
            content.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another process was faster
            raise LocalError(
                f"cannot unpack {archive.name} into {folder.parent}: {error}",
                advice="Free some space, make the folder writable, or set XDG_CACHE_HOME to another one.",
            ) from error
    return folder


def _fetch_all(name: str, wanted: list[Jar]) -> None:
    console = Console(stderr=True)
    total = sum(jar.size for jar in wanted)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    label = f"{len(wanted)} {name} jars"
    if not console.is_terminal:
        console.print(f"fetching {label}, {total / 1e6:.0f} MB", highlight=False)
    try:
        # Beside the final place, so that putting a jar there is one rename, and never half a jar.
        repository().mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=repository(), prefix=".avow-") as folder,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
            ThreadPoolExecutor(FETCHES_AT_ONCE) as pool,
        ):
            bar = progress.add_task(f"fetching {label}", total=total)
            list(pool.map(lambda jar: _fetch(jar, Path(folder), lambda n: progress.advance(bar, n)), wanted))
    except OSError as error:
        raise LocalError(
            f"cannot store jars in {repository()}: {error}",
            advice="Make the folder writable, or set M2_REPO to another one.",
        ) from error


def _fetch(jar: Jar, folder: Path, advance: Callable[[int], None]) -> None:
    """Fetch one jar into ``folder``, verify it, then put it in place."""
    problem = ""
    for attempt in range(FETCH_TRIES):
        if attempt:
            time.sleep(attempt)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            try:
                fetched = _resolve(jar.coordinate, Path(temporary), advance=advance)
            except Exception as error:  # noqa: BLE001 - jgo lets any error of its HTTP client through
                problem = f"{type(error).__name__}: {error}"
                continue
            actual = digest(fetched)
            if actual != jar.sha256:
                problem = f"the downloaded file has SHA-256 {actual}, but jars.lock has {jar.sha256}"
                continue
            jar.path.parent.mkdir(parents=True, exist_ok=True)
            fetched.replace(jar.path)
            return
    raise LocalError(
        f"cannot fetch {jar.coordinate}: {problem}",
        advice="Check the network, or set AVOW_MAVEN_MIRROR to a Maven repository you can reach. "
        "Fetched jars are kept; run the command again to continue.",
    )


def _resolve(
    coordinate: str, cache: Path, *, packaging: str = "", advance: Callable[[int], None] = lambda _: None
) -> Path:
    """The file in the cache, downloaded if it is not there. ``packaging``: another than the coordinate's."""
    # Imported here: jgo costs a third of a second, and a set that is complete never needs it.
    from jgo.maven import MavenContext, PythonResolver

    @contextmanager
    def report(_filename: str, _size: int) -> Iterator[Callable[[int], None]]:
        yield advance

    group, artifact, own, classifier, version = _parts(coordinate)
    mirror = os.environ.get("AVOW_MAVEN_MIRROR")
    context = MavenContext(
        resolver=PythonResolver(progress_callback=report),
        repo_cache=cache,
        remote_repos={"mirror": mirror.rstrip("/")} if mirror else None,
        timeout=30,
    )
    component = context.project(group, artifact).at_version(version)
    return Path(component.artifact(classifier=classifier, packaging=packaging or own).resolve())


def reach_registry() -> None:
    """Download one small file from the repository into a temporary folder. Raises if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        _resolve(ROOTS["kafka"][0], Path(folder), packaging="pom")


def write_lock() -> None:
    """Resolve ``ROOTS`` and ``ON_REQUEST`` anew and write the lock."""
    lines = ["# Written by `python -m avow.local.jars lock` (make lock). Do not edit.", ""]
    for name, roots in (ROOTS | ON_REQUEST).items():
        lines += [f"[{name}]", "jars = ["]
        for coordinate in _with_dependencies(roots) if name in RESOLVED_FURTHER else roots:
            path = _resolve(coordinate, repository())
            lines.append(
                f'    {{ coordinate = "{coordinate}", size = {path.stat().st_size}, sha256 = "{digest(path)}" }},'
            )
        lines += ["]", ""]
    LOCK.write_text("\n".join(lines).rstrip() + "\n")


def _with_dependencies(roots: tuple[str, ...]) -> list[str]:
    import jgo

    artifacts = [artifact for root in roots for artifact in jgo.resolve(root)]
    return list(dict.fromkeys(f"{a.groupId}:{a.artifactId}:{a.version}" for a in artifacts))


def main(arguments: list[str]) -> None:
    match arguments:
        case ["fetch", *names] if set(names) <= ROOTS.keys() | ON_REQUEST.keys():
            for name in names or ROOTS:
                print(f"{name}: {len(classpath(name))} jars, verified")
        case ["lock"]:
            write_lock()
            print(f"wrote {LOCK}")
        case _:
            sys.exit(f"usage: python -m avow.local.jars fetch [{' '.join(ROOTS | ON_REQUEST)}] | lock")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LocalError as error:
        sys.exit(f"error: {error}\n{error.advice}")
