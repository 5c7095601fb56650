"""uv's build backend, with the dashboard's JavaScript put in place first: what is built or installed has it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uv_build
from uv_build import (  # noqa: F401 - hooks that stay as they are
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).parent / "src"))

from avow.dashboard import assets

Settings = Mapping[Any, Any] | None


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    assets.install()
    return uv_build.build_wheel(folder, settings, metadata)


def build_sdist(folder: str, settings: Settings = None) -> str:
    assets.install()
    return uv_build.build_sdist(folder, settings)


def build_editable(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    assets.install()
    return uv_build.build_editable(folder, settings, metadata)
