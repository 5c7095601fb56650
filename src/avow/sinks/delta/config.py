"""``[sink]`` with ``kind = "delta"``.

Owns: its keys and the rules of their values.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from avow.settings import ClientSettings, Problem
from avow.settings.values import client_settings, climbs, has_control, raise_if_any, refuse
from avow.sinks.lake.config import SCHEMES, STORE_OPTIONS, LakeConfig


def lake_path(value: str) -> str:
    allowed = "a folder, or s3://bucket/folder"
    scheme = re.match(r"([^/]*):/+", value)
    if not value or has_control(value) or (scheme and (scheme[1] not in SCHEMES or scheme.end() == len(value))):
        refuse("is not a supported location", allowed)
    if climbs(value) or "%" in value or "\\" in value:
        refuse("contains .., % or a backslash", allowed)
    return value.rstrip("/") or "/"


def store_settings(value: Any) -> dict[str, str]:
    settings = client_settings(value)
    unknown = [name for name in settings if name.lower().removeprefix("aws_") not in STORE_OPTIONS]
    allowed = f"{', '.join(STORE_OPTIONS)}, with or without aws_ before it"
    raise_if_any([Problem((name,), "is not a supported option", allowed) for name in unknown])
    return settings


class DeltaConfig(LakeConfig):
    table_key: ClassVar[str] = "path"

    kind: Literal["delta"] = Field(description='"delta"')
    path: Annotated[str, AfterValidator(lake_path)] = Field(
        description="a folder, or s3://bucket/folder; {topic} in it stands for the topic"
    )
    options: Annotated[ClientSettings, BeforeValidator(store_settings)] = Field(
        {}, description="a table of the store's settings"
    )

    @property
    def target(self) -> str:
        return f"table {self.shown('path')}"
