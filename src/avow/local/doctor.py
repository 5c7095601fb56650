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

from avow.errors import LocalError
from avow.local import jars, java, spark
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
    yield _python()
    yield from _java()
    yield _memory()
    yield _disk(folder)
    complete = all(jar.is_right() for name in jars.ROOTS for jar in jars.locked(name))
    yield _cache(complete)
    yield _registry(complete)
    yield _archive()
    yield _postgres()


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", sys.version_info >= (3, 11), found, "avow needs Python 3.11 or newer.")


def _java() -> Iterator[Check]:
    try:
        found = java.find()
    except LocalError as error:
        yield Check("Java", False, str(error), error.advice)
        return
    yield Check("Java", True, f"{found.version} ({found.path})")
    missing = found.missing_modules()
    yield Check(
        "Java modules",
        not missing,
        f"missing: {', '.join(missing)}" if missing else "all that Kafka and Spark need",
        "This is a slimmed-down runtime. Install a full one, or set JAVA_HOME to one.",
    )


def _memory() -> Check:
    available = psutil.virtual_memory().available / 1e9
    return Check(
        "memory",
        available >= MEMORY_GB,
        f"{available:.1f} GB available",
        f"{MEMORY_GB} GB are wanted for three brokers and Spark. End something, or use `avow up --brokers 1`.",
    )


def _disk(folder: Path) -> Check:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    return Check(
        "disk",
        free >= DISK_GB,
        f"{free:.1f} GB free at {there}",
        f"{DISK_GB} GB are wanted. Free some, or use --dir to put the cluster elsewhere.",
    )


def _cache(complete: bool) -> Check:
    folder = jars.repository()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return Check(
        "jar folder",
        complete or os.access(there, os.W_OK),
        f"{folder}, {'complete' if complete else 'not complete: `avow up` fetches what is missing'}",
        "It cannot be written. Set M2_REPO to a folder that can.",
    )


def _archive() -> Check:
    if not find_spec("pyspark"):
        return Check("Spark", True, "not installed, and needed by the Spark engine only: pip install 'avow[spark]'")
    try:
        made = spark.archive()
    except LocalError:  # no Java, which is told already
        made = None
    return Check("Spark's start", True, f"quick ({made})" if made else "slow: `avow setup` makes it quick")


def _registry(complete: bool) -> Check:
    try:
        jars.reach_registry()
    except Exception as error:  # noqa: BLE001 - jgo lets any error of its HTTP client through
        return Check(
            "registry",
            complete,
            f"no answer ({type(error).__name__}){', and none needed' if complete else ''}",
            "Check the network, or set AVOW_MAVEN_MIRROR to a Maven repository you can reach.",
        )
    return Check("registry", True, "answers")


def _postgres() -> Check:
    try:
        told = subprocess.run([programs() / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    except LocalError as error:
        return Check("PostgreSQL", False, str(error), error.advice)
    except (OSError, subprocess.CalledProcessError) as error:
        return Check("PostgreSQL", False, str(error), "Its wheel is broken: install avow again (`make setup`).")
    return Check("PostgreSQL", True, told.strip())
