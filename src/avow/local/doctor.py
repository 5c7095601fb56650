"""Checks that this machine has what avow needs, and says what to do where it has not. Changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from avow import native
from avow.errors import LocalError
from avow.local import broker, jars, java, spark
from avow.local.class_archive import ClassArchive
from avow.local.postgres import programs

MEMORY_GB = 4  # three brokers take 1 GB, Spark 2
DISK_GB = 5


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str
    advice: str = ""  # what to do about it; empty if nothing


def checks(folder: Path) -> Iterator[Check]:
    """One after another, as some take a second. ``folder`` is where the cluster would be."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("Python", sys.version_info >= (3, 11), version, "avow needs Python 3.11 or newer.")
    yield from _java()
    yield _memory()
    yield _disk(folder)
    complete = all(jar.is_right() for name in jars.ROOTS for jar in jars.locked(name))
    yield _cache(complete)
    yield _registry(complete)
    yield from _archives(complete)
    yield _postgres()
    here = jars.unpacked_folder("registry").exists() or all(jar.path.exists() for jar in jars.locked("registry"))
    found = "fetched" if here else "not fetched; `avow up --registry` fetches it (109 MB)"
    yield Check("schema registry", True, f"Apicurio {jars.REGISTRY_VERSION}, {found}")
    why_not = native.why_not()
    yield Check("avow-native", True, f"not used ({why_not}): slower, otherwise the same" if why_not else "used")


def _java() -> Iterator[Check]:
    try:
        installed = java.find()
    except LocalError as error:
        yield Check("Java", False, str(error), error.advice)
        return
    yield Check("Java", True, f"{installed.version} ({installed.path})")
    missing = installed.missing_modules()
    yield Check(
        "Java modules",
        not missing,
        f"missing: {', '.join(missing)}" if missing else "Kafka and Spark have all they need",
        "This is a reduced Java runtime. Install a full one, or set JAVA_HOME to one.",
    )


def _memory() -> Check:
    available = psutil.virtual_memory().available / 1e9
    return Check(
        "memory",
        available >= MEMORY_GB,
        f"{available:.1f} GB available",
        f"Three brokers and Spark need {MEMORY_GB} GB. Free some memory, or use `avow up --brokers 1`.",
    )


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    return Check(
        "disk",
        free >= DISK_GB,
        f"{free:.1f} GB free at {existing}",
        f"The cluster needs {DISK_GB} GB. Free some space, or put the cluster elsewhere with --dir.",
    )


def _cache(complete: bool) -> Check:
    folder = jars.repository()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return Check(
        "jar folder",
        complete or os.access(existing, os.W_OK),
        f"{folder}, {'complete' if complete else 'incomplete: `avow up` fetches the missing jars'}",
        "The folder is not writable. Set M2_REPO to one that is.",
    )


def _archives(complete: bool) -> Iterator[Check]:
    if complete:
        yield _archive(broker.class_archive())
    if find_spec("pyspark"):
        yield _archive(spark.class_archive())
    else:
        yield Check("Spark", True, "not installed; only the Spark engine needs it: pip install 'avow[spark]'")


def _archive(archive: ClassArchive) -> Check:
    try:
        path = archive.made()
    except LocalError:  # no Java, which has its own check
        path = None
    return Check(f"{archive.name}'s start", True, f"quick ({path})" if path else "slow: `avow setup` makes it quick")


def _registry(complete: bool) -> Check:
    advice = "Check the network, or set AVOW_MAVEN_MIRROR to a Maven repository you can reach."
    try:
        jars.reach_registry()
    except Exception as error:  # noqa: BLE001 - jgo lets any error of its HTTP client through
        needless = "; not needed, all jars are present" if complete else ""
        return Check("registry", complete, f"no response ({type(error).__name__}){needless}", advice)
    return Check("registry", True, "answers")


def _postgres() -> Check:
    try:
        command: list[str | Path] = [programs() / "postgres", "--version"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except LocalError as error:
        return Check("PostgreSQL", False, str(error), error.advice)
    except (OSError, subprocess.CalledProcessError) as error:
        advice = "The wheel of PostgreSQL is broken: reinstall avow (`make setup`)."
        return Check("PostgreSQL", False, str(error), advice)
    return Check("PostgreSQL", True, found)
