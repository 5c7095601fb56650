"""uv's build backend, with the C library compiled first: a wheel is for one platform, and for every Python 3 on it.

    pip wheel native/                                         for this machine, with its compiler
    pip wheel native/ -C target=aarch64-linux-gnu.2.17        for another one, with the ziglang package

The library is compiled into a folder of its own and put into the wheel: one in the checkout is in use, and stays out
(``pyproject.toml`` excludes it). An editable install has no library: ``python -m avow_native.build`` makes it in place,
and again after a change.
"""

import base64
import hashlib
import re
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uv_build
from uv_build import (  # noqa: F401 - hooks that stay as they are
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).parent / "src"))

from avow_native.build import PACKAGE, build

Settings = Mapping[Any, Any] | None
# What zig calls a machine, and what a wheel does. A wheel's name for a Mac's processor is not zig's.
_TAGS = {
    r"(\w+)-linux-gnu\.(\d+)\.(\d+)": r"manylinux_\2_\3_\1",
    r"(\w+)-linux-musl": r"musllinux_1_2_\1",
    r"(x86_64)-macos\.(\d+)\.(\d+)": r"macosx_\2_\3_\1",
    r"aarch64-macos\.(\d+)\.(\d+)": r"macosx_\1_\2_arm64",
    r"x86_64-windows": "win_amd64",
    r"aarch64-windows": "win_arm64",
}


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    target = (settings or {}).get("target")
    with tempfile.TemporaryDirectory() as building:
        library = build(target=target, folder=Path(building)).path
        wheel = Path(folder, uv_build.build_wheel(folder, None, metadata))
        return _for_platform(wheel, platform_tag(target), library).name


def platform_tag(target: str | None) -> str:
    if target is None:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    for form, tag in _TAGS.items():
        if found := re.fullmatch(form, target):
            return found.expand(tag)
    raise SystemExit(f"no wheel tag is known for {target}: say, for example, x86_64-linux-gnu.2.17, aarch64-macos.11.0")


def _for_platform(wheel: Path, platform: str, library: Path) -> Path:
    """The same wheel with the library in it, declared to be for this platform alone."""
    renamed = wheel.with_name(wheel.name.replace("-any.whl", f"-{platform}.whl"))
    with zipfile.ZipFile(wheel) as source:
        files = {name: source.read(name) for name in source.namelist()}
    about, record = (next(n for n in files if n.endswith(f".dist-info/{part}")) for part in ("WHEEL", "RECORD"))
    text = files[about].decode().replace("-none-any", f"-none-{platform}")
    changed = {
        f"{PACKAGE.name}/{library.name}": library.read_bytes(),
        about: text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode(),
    }
    kept = [line for line in files[record].decode().splitlines() if line.split(",")[0] not in changed]
    added = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in changed.items()]
    files |= changed | {record: "\n".join([*added, *kept, ""]).encode()}
    with zipfile.ZipFile(renamed, "w") as target:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)  # of 1980: the same sources make the same wheel
            info.external_attr = 0o644 << 16
            target.writestr(info, data, zipfile.ZIP_DEFLATED)
    wheel.unlink()
    return renamed


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
