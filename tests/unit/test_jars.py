"""Jars: what is in the cache is verified, what is wrong is fetched again, and nothing half is ever in place.

A small Maven repository on loopback (files over HTTP) stands where the registry would be.
"""

from __future__ import annotations

import hashlib
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from avow.errors import LocalError
from avow.local import jars

COORDINATES = ("org.example:first:1.0", "org.example:second:2.0")
ARCHIVE = "org.example:app:tar.gz:all:3.0"


class Handler(SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012 - shared on purpose: the test reads it

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A remote repository with two jars, the lock that names them, and an empty cache."""
    root = tmp_path / "remote"
    lines = ["[tiny]", "jars = ["]
    for coordinate in COORDINATES:
        group, artifact, version = coordinate.split(":")
        path = root.joinpath(*group.split("."), artifact, version, f"{artifact}-{version}.jar")
        path.parent.mkdir(parents=True)
        path.write_bytes(coordinate.encode() * 10_000)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f'{{ coordinate = "{coordinate}", size = {path.stat().st_size}, sha256 = "{digest}" }},')
    archive = root / "org" / "example" / "app" / "3.0" / "app-3.0-all.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "one.jar").write_bytes(b"one")
        tar.add(tmp_path / "lib", "lib")
    digest, size = hashlib.sha256(archive.read_bytes()).hexdigest(), archive.stat().st_size
    lines += ["]", "[packed]", f'jars = [{{ coordinate = "{ARCHIVE}", size = {size}, sha256 = "{digest}" }}']
    lock = tmp_path / "jars.lock"
    lock.write_text("\n".join([*lines, "]"]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(jars, "LOCK", lock)
    monkeypatch.setattr(jars, "FETCH_TRIES", 1)
    monkeypatch.setenv("M2_REPO", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unpacked"))
    monkeypatch.setenv("AVOW_MAVEN_MIRROR", f"http://127.0.0.1:{server.server_address[1]}/")
    Handler.asked.clear()
    yield root
    server.shutdown()
    thread.join()
    server.server_close()


def jars_asked() -> list[str]:
    return [path for path in Handler.asked if path.endswith(".jar")]


@pytest.mark.usefixtures("remote")
def test_fetches_all_then_asks_for_nothing() -> None:
    paths = jars.classpath("tiny")
    assert [path.name for path in paths] == ["first-1.0.jar", "second-2.0.jar"]
    assert [path.read_bytes().decode() for path in paths] == [name * 10_000 for name in COORDINATES]
    Handler.asked.clear()
    assert jars.classpath("tiny") == paths
    assert Handler.asked == [], "a complete cache works offline"
    assert not list(jars.repository().glob(".avow-*")), "no temporary folder is left"


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("damage", ["cut", "altered", "emptied"])
def test_a_damaged_jar_is_noticed_and_fetched_again(damage: str) -> None:
    path = jars.classpath("tiny")[0]
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-1], "altered": b"X" + whole[1:], "emptied": b""}[damage])
    Handler.asked.clear()
    assert jars.classpath("tiny")[0].read_bytes() == whole
    assert jars_asked() == ["/org/example/first/1.0/first-1.0.jar"], "only that one"


def test_a_jar_that_is_not_what_the_lock_says_is_never_put_in_place(remote: Path) -> None:
    served = remote / "org" / "example" / "first" / "1.0" / "first-1.0.jar"
    served.write_bytes(b"evil")
    with pytest.raises(LocalError, match=r"cannot fetch org.example:first:1.0: .*but jars.lock has"):
        jars.classpath("tiny")
    assert not jars.locked("tiny")[0].path.exists()


@pytest.mark.usefixtures("remote")
def test_a_missing_jar_or_a_dead_registry_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    jars.locked("tiny")[0].path.parent.mkdir(parents=True)
    monkeypatch.setenv("AVOW_MAVEN_MIRROR", "http://127.0.0.1:9/")
    with pytest.raises(LocalError, match=r"cannot fetch org[.]example:") as caught:
        jars.classpath("tiny")
    assert "AVOW_MAVEN_MIRROR" in caught.value.advice


@pytest.mark.usefixtures("remote")
def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("M2_REPO", str(tmp_path / "file" / "repository"))
    with pytest.raises(LocalError, match="cannot store jars in") as caught:
        jars.classpath("tiny")
    assert "M2_REPO" in caught.value.advice


@pytest.mark.usefixtures("remote")
def test_an_archive_is_unpacked_once_and_whole(tmp_path: Path) -> None:
    folder = jars.unpacked("packed")
    assert (folder / "lib" / "one.jar").read_bytes() == b"one"
    assert folder == jars.unpacked_folder("packed")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no temporary folder is left"
    (tmp_path / "cache" / "org" / "example" / "app" / "3.0" / "app-3.0-all.tar.gz").unlink()
    Handler.asked.clear()
    assert jars.unpacked("packed") == folder
    assert Handler.asked == [], "what is unpacked works offline"


def test_an_archive_that_cannot_be_unpacked_says_so(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(remote.parent / "jars.lock"))
    with pytest.raises(LocalError, match=r"cannot unpack app-3[.]0-all[.]tar[.]gz into") as caught:
        jars.unpacked("packed")
    assert "XDG_CACHE_HOME" in caught.value.advice


def test_the_real_lock_is_complete() -> None:
    for name, roots in (jars.ROOTS | jars.ON_REQUEST).items():
        pinned = jars.locked(name)
        assert set(roots) <= {jar.coordinate for jar in pinned}
        assert all(jar.size > 0 and len(jar.sha256) == 64 for jar in pinned)
        assert len({jar.coordinate for jar in pinned}) == len(pinned)
