"""What `make dist` builds of avow-native: a wheel has one library, for the machine that its name says, and it works."""

from __future__ import annotations

import re
import shutil
import struct
import sys
import zipfile
from pathlib import Path
from platform import machine

import pytest
from tests.acceptance.test_base_install import ROOT, did

pytestmark = pytest.mark.long

GLIBC, MACOS = (2, 17), (11, 0)  # the oldest that must do
ELF = {"x86_64": 62, "aarch64": 183}
MACH_O = {"x86_64": 0x01000007, "arm64": 0x0100000C}
BUILD_VERSION, VERSION_MIN = 0x32, 0x24  # load commands

USE = """
import avow_native, pyarrow as pa
from avow_native import copy
library = avow_native.load()
assert library is not None, avow_native.status()
rows = pa.RecordBatch.from_pydict({"id": [1, 2]})
print(b"".join(bytes(part) for part in copy.chunks(library, rows)).hex())
"""
COPIED = b"PGCOPY\n\377\r\n\0" + bytes(8) + b"".join(struct.pack(">hiq", 1, 8, n) for n in (1, 2)) + b"\xff\xff"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


def built(target: str, dist: Path, source: Path = ROOT / "native") -> Path:
    """As `make dist` does it."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--wheel", "--no-build-isolation", "--python", sys.executable]
    did(uv, "build", *options, "--config-setting", f"target={target}", "--out-dir", dist, source)
    return max(dist.glob("avow_native-*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)


def library(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as files:
        assert files.testzip() is None
        (name,) = (name for name in files.namelist() if name.startswith("avow_native/_avow_native-"))
        (about,) = (name for name in files.namelist() if name.endswith(".dist-info/WHEEL"))
        tag = wheel.stem.split("-", 2)[2]
        assert f"Tag: {tag}\n" in files.read(about).decode()
        return files.read(name)


def targets() -> list[str]:
    text = re.sub(r"\\\n", " ", (ROOT / "Makefile").read_text())
    found = re.search(r"^TARGETS := (.*)$", text, re.MULTILINE)
    assert found
    return found[1].split()


@pytest.mark.parametrize("target", targets())
def test_a_wheel_has_a_library_for_its_machine(target: str, dist: Path) -> None:
    wheel = built(target, dist)
    data, (platform, architecture) = library(wheel), platform_of(wheel)
    if platform.startswith("macosx"):
        assert data[:4] == struct.pack("<I", 0xFEEDFACF)
        assert struct.unpack_from("<I", data, 4)[0] == MACH_O[architecture]
        assert platform == "macosx_11_0"
        assert oldest_macos(data) <= MACOS
        return
    assert data[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", data, 18)[0] == ELF[architecture]
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)}
    if platform == "manylinux_2_17":
        assert needed
        assert max(needed) <= GLIBC
    else:
        assert platform == "musllinux_1_2"
        assert not needed


def platform_of(wheel: Path) -> tuple[str, str]:
    found = re.fullmatch(r".*-py3-none-(\w+?)_(x86_64|aarch64|arm64)", wheel.stem)
    assert found, wheel
    return found[1], found[2]


def oldest_macos(data: bytes) -> tuple[int, int]:
    count, at = struct.unpack_from("<I", data, 16)[0], 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        if command in (BUILD_VERSION, VERSION_MIN):
            (version,) = struct.unpack_from("<I", data, at + (12 if command == BUILD_VERSION else 8))
            return version >> 16, version >> 8 & 0xFF
        at += size
    raise AssertionError("it does not say for which macOS it is")


@pytest.mark.skipif(sys.platform != "linux", reason="the wheels for Linux are tried")
def test_the_wheel_for_this_machine_works_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    wheel = built(f"{machine()}-linux-gnu.2.17", dist)
    uv = Path(sys.executable).with_name("uv")
    did(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    did(uv, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "requirements.lock", wheel)
    assert did(python, "-c", USE).strip() == COPIED.hex()


def test_a_build_leaves_the_checkout_as_it_was_with_the_library_that_is_there(dist: Path, tmp_path: Path) -> None:
    source = tmp_path / "native"
    shutil.copytree(ROOT / "native", source, ignore=shutil.ignore_patterns("_avow_native-*", "__pycache__"))
    (source / "src/avow_native/_avow_native-0-0.so").touch()
    before = sorted(source.rglob("*"))
    assert library(built("aarch64-macos.11.0", dist, source))
    assert [path for path in sorted(source.rglob("*")) if "__pycache__" not in path.parts] == before
