"""Compiles every C file beside this one into the shared library: ``python -m avow_native.build [--target TRIPLE]``.

The compiler is the first of ``$CC``, ``cc``, ``gcc``, ``clang`` and the ``ziglang`` package that works; zig also
compiles for other machines, which it is told by a target such as ``aarch64-linux-gnu.2.17``. The library's name has a
hash of the sources and one of the compiler, so that a change of either makes another file, and an old one is not taken
for the new one. It stands beside the package, or in the user's cache where the package cannot be written.

Owns: compiling, and the library's name and places. Must not know: what the sources do.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra")
_STRIPPED = ("-g0", "-s")
_COMPILE_TIMEOUT_S = 300
_HASH_CHARS = 12


class BuildError(Exception):
    """The library could not be made."""


@dataclass(frozen=True, slots=True)
class Built:
    path: Path
    compiler: str
    is_new: bool


def build(*, target: str | None = None, folder: Path | None = None, flags: Sequence[str] = ()) -> Built:
    """The library for this machine, or for ``target``; compiled only if it is not there yet. ``flags`` come after ours,
    for a debugger or a sanitizer; without any, the library has no symbols but its functions."""
    failures = []
    for command in _compilers(target):
        try:
            return _build(command, folder or _writable(), (*FLAGS, *(flags or _STRIPPED)))
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{shlex.join(command)}: {error}")
    if failures:
        raise BuildError("no compiler could make the library:\n" + "\n".join(failures))
    raise BuildError("there is no C compiler: install gcc or clang, or `pip install ziglang`, or set CC")


def libraries() -> Iterator[Path]:
    """Where the library of these sources may be, the likeliest first."""
    for folder in (PACKAGE, _cache()):
        yield from sorted(folder.glob(f"{_stem()}-*"))


def sources() -> list[Path]:
    return sorted(PACKAGE.glob("*.c"))


def sources_hash() -> str:
    files = sorted([*sources(), *PACKAGE.glob("*.h")])
    return _hash(*(part for file in files for part in (file.name.encode(), file.read_bytes())))


def _compilers(target: str | None) -> Iterator[list[str]]:
    """Commands to try. For another machine only zig has what is needed."""
    if not target:
        for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
            if command and shutil.which(command[0]):
                yield command
    if importlib.util.find_spec("ziglang"):
        yield [sys.executable, "-m", "ziglang", "cc", *(["-target", target] if target else [])]


def _build(command: list[str], folder: Path, flags: Sequence[str]) -> Built:
    with tempfile.TemporaryDirectory() as elsewhere:  # zig leaves a file where it is asked
        compiler = _run([*command, "--version"], elsewhere).partition("\n")[0].strip()
    machine = f"{sys.platform} {platform.machine()}"
    key = _hash(*(part.encode() for part in (shlex.join(command), compiler, machine, *flags)))
    path = folder / f"{_stem()}-{key}{'.dll' if sys.platform == 'win32' else '.so'}"
    if path.is_file():
        return Built(path, compiler, is_new=False)
    defines = [f'-DAVOW_NATIVE_SOURCES="{sources_hash()}"', f'-DAVOW_NATIVE_COMPILER="{_c_text(compiler)}"']
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
        made = Path(building, path.name)
        _run([*command, *flags, *defines, *map(str, sources()), "-o", str(made)])
        if folder == PACKAGE:  # no other checkout has its libraries here
            for old in folder.glob("_avow_native-*"):
                old.unlink()
        made.replace(path)
    return Built(path, compiler, is_new=True)


def _run(command: list[str], folder: str | None = None) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    if ended.returncode:
        raise BuildError(f"exit code {ended.returncode}\n{ended.stderr[-4000:].strip()}")
    return ended.stdout


def _writable() -> Path:
    folder = PACKAGE if os.access(PACKAGE, os.W_OK) else _cache()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "avow"


def _stem() -> str:
    return f"_avow_native-{sources_hash()}"


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:_HASH_CHARS]


def _c_text(text: str) -> str:
    return "".join(char if char.isascii() and char.isprintable() and char not in '"\\' else "?" for char in text)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m avow_native.build", description="Compile avow's native library.")
    options.add_argument("--target", help="another machine, as zig names it: aarch64-linux-gnu.2.17")
    options.add_argument("--folder", type=Path, help="where to put it; beside the package unless said otherwise")
    given = options.parse_args()
    try:
        built = build(target=given.target, folder=given.folder)
    except BuildError as error:
        raise SystemExit(f"avow-native is not built: {error}") from None
    print(f"{'compiled' if built.is_new else 'already there:'} {built.path}\nwith {built.compiler}")


if __name__ == "__main__":
    main()
