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
    executable = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if executable is None:
        place = f"JAVA_HOME ({home})" if home else "PATH"
        raise LocalError(f"no java executable in {place}", advice=ADVICE)
    try:
        output = subprocess.run([executable, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise LocalError(f"{executable} cannot be run: {error}", advice=ADVICE) from error
    match = re.search(r'version "((\d+)[^"]*)"', output)
    if match is None:
        raise LocalError(f"{executable} does not report its version: {output.strip()}", advice=ADVICE)
    java = Java(Path(executable), int(match[2]), match[1])
    if java.major < OLDEST:
        raise LocalError(f"{executable} is Java {java.version}; avow needs {OLDEST} or newer", advice=ADVICE)
    return java
