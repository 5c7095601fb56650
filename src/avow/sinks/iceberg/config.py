"""``[sink]`` with ``kind = "iceberg"``.

Owns: its keys and the rules of their values.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from avow.settings import ClientSettings, Problem
from avow.settings.values import client_settings, matching, raise_if_any, refuse
from avow.sinks.lake.config import SCHEMES, LakeConfig


def catalog_settings(value: Any) -> dict[str, str]:
    settings = client_settings(value)
    if not {"uri", "warehouse", "type"} & settings.keys():
        refuse("has neither warehouse nor uri", '{ warehouse = "folder" }, or the settings of your catalog')
    found = re.match(r"([^/]*):/", settings.get("warehouse", ""))
    if found and found[1] not in SCHEMES:
        known = f"a folder, {' or '.join(f'{scheme}://' for scheme in SCHEMES)}"
        raise_if_any([Problem(("warehouse",), f"{found[1]} is not a supported storage scheme", known)])
    return settings


class IcebergConfig(LakeConfig):
    table_key: ClassVar[str] = "table"
    reserved_columns: ClassVar[frozenset[str]] = LakeConfig.reserved_columns | frozenset(
        {"_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id"}
    )

    kind: Literal["iceberg"] = Field(description='"iceberg"')
    table: Annotated[
        str,
        matching(
            r"([A-Za-z0-9_-]|\{topic\})+(\.([A-Za-z0-9_-]|\{topic\})+)+",
            "is not a table name",
            '"namespace.table", with {topic} where each topic has a table of its own',
        ),
    ] = Field(description='"namespace.table"; {topic} in it stands for the topic')
    catalog: Annotated[ClientSettings, BeforeValidator(catalog_settings)] = Field(
        description='a table of pyiceberg\'s catalog settings; { warehouse = "folder" } is a local one'
    )

    @property
    def target(self) -> str:
        return f"table {self.shown('table')}"
