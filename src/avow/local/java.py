"""Finds Java and says what it can do. Owns nothing else; brokers, Spark and ``doctor`` ask it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from avow.errors import LocalError

OLDEST = 17
# What Kafka and Spark reach for; a slimmed-down runtime (jlink, some container images) may lack one.
MODULES = frozenset(
    {
        "java.base",
        "java.compiler",
        "java.instrument",
        "java.logging",
        "java.management",
        "java.naming",
        "java.net.http",
        "java.rmi",
        "java.scripting",
        "java.security.jgss",
        "java.security.sasl",
        "java.sql",
        "java.xml",
        "jdk.management",
        "jdk.unsupported",
    }
)
ADVICE = (
    f"Install a Java runtime, version {OLDEST} or newer (Debian: apt-get install openjdk-17-jre-headless), "
    "or set JAVA_HOME to one."
)


@dataclass(frozen=True, slots=True)
class Java:
    path: Path
    major: int
    version: str

    def missing_modules(self) -> list[str]:
        """The modules Kafka or Spark would miss."""
        listed = subprocess.run([self.path, "--list-modules"], capture_output=True, text=True, check=True).stdout
        return sorted(MODULES - {line.partition("@")[0] for line in listed.splitlines()})


def find() -> Java:
    """JAVA_HOME's java, else the one on PATH; refused if it is older than what Kafka runs on."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if found is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        raise LocalError(f"no java in {where}", advice=ADVICE)
    try:
        told = subprocess.run([found, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise LocalError(f"{found} does not run: {error}", advice=ADVICE) from error
    match = re.search(r'version "((\d+)[^"]*)"', told)
    if match is None:
        raise LocalError(f"{found} does not tell its version: {told.strip()}", advice=ADVICE)
    java = Java(Path(found), int(match[2]), match[1])
    if java.major < OLDEST:
        raise LocalError(f"{found} is Java {java.version}, {OLDEST} is needed", advice=ADVICE)
    return java
