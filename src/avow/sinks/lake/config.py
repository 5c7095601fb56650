"""``[sink]`` as far as Delta Lake and Iceberg have it in common.

Owns: these keys and the rules of their values. Must not know: either format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer, PlainValidator, StrictInt

from avow import schema as ddl
from avow.settings import TOPIC, PipelineConfig, Problem, TableSinkConfig
from avow.settings.values import has_control, refuse


@dataclass(frozen=True, slots=True)
class PartitionBy:
    """How a lake's files are put into folders: by a column's values, or by the day of a timestamp."""

    column: str
    day: bool = False

    def __str__(self) -> str:
        return f"day({self.column})" if self.day else self.column


def parse_partition_by(value: Any) -> PartitionBy:
    if not isinstance(value, str) or not value or has_control(value):
        refuse("is not a column", '"column" or "day(column)"')
    match = re.fullmatch(r"day\((.+)\)", value)
    return PartitionBy(match[1], day=True) if match else PartitionBy(value)


SCHEMES = ("file", "s3", "s3a")  # of the places of a lake

# Options of a store: without aws_, as the client of Delta's log spells them -> the same for the client that writes the
# files, if it concerns that one. What is not here would reach one of the two alone.
STORE_OPTIONS = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "token": "session_token",
    "region": "region",
    "default_region": "region",
    "endpoint_url": "endpoint_override",
    "endpoint": "endpoint_override",
    "virtual_hosted_style_request": "force_virtual_addressing",
    "skip_signature": "anonymous",
    "proxy_url": "proxy_options",
    "allow_http": "",
    "connect_timeout": "",
    "timeout": "",
}


def _or_none(value: object) -> str | None:
    return None if value is None else str(value)


NAME_BYTES_MAX = 255 - len("_dead_letters")  # of a table's own name, which is a folder's too


class LakeConfig(TableSinkConfig):
    reserved_columns: ClassVar[frozenset[str]] = frozenset(  # put beside a table's own while keys are matched
        {"__avow_deleted", "__avow_number", "__avow_row", "__avow_change"}
    )
    default_interval: ClassVar[timedelta] = timedelta(seconds=1)  # every batch makes files and a commit

    partition_by: Annotated[PartitionBy | None, PlainValidator(parse_partition_by), PlainSerializer(_or_none)] = Field(
        None, description='"column" or "day(column)"'
    )
    file_mb: StrictInt = Field(128, ge=1, le=4_096, description="a number from 1 to 4,096")
    evolve: Literal["refuse", "add"] = Field("refuse", description='"refuse" or "add"')

    def _table_of(self, name: str) -> str:
        return str(getattr(self, self.table_key)).replace(TOPIC, name)

    def check_table(self) -> None:
        for part in re.split(r"[./]", str(getattr(self, self.table_key))):
            if (size := len(part.encode())) > NAME_BYTES_MAX:
                refuse(f"{part!r} is {size} bytes long", f"names of at most {NAME_BYTES_MAX} bytes", self.table_key)

    @property
    def places(self) -> frozenset[str]:
        return frozenset({*super().places, *(f"{place}_dead_letters" for place in super().places)})

    def partition_problem(self, fields: Iterable[ddl.Field]) -> tuple[str, str] | None:
        """What keeps rows of these fields and the lineage from being put so, and what is allowed; None if nothing."""
        by, times = self.partition_by, (ddl.Scalar.TIMESTAMP, ddl.Scalar.TIMESTAMP_NTZ)
        if by is None:
            return None
        lineage = (ddl.Scalar.STRING, ddl.Scalar.INT, ddl.Scalar.LONG, ddl.Scalar.TIMESTAMP)
        types = {field.name: field.type for field in fields} | dict(zip(self.lineage, lineage, strict=True))
        type_ = types.get(by.column)
        if type_ is None:
            return f"{by.column!r} is not a column", "a column of the rows, in the same case"
        if by.day and type_ not in times:
            return f"{by.column!r} is not a timestamp", "day() of a timestamp, or a column without day()"
        if by.day and f"{by.column}_day".lower() in {name.lower() for name in types}:
            return (
                f"adds a column {by.column}_day, and a column of that name is declared",
                "another name for that column",
            )
        if not by.day and type_ in (*times, ddl.Scalar.FLOAT, ddl.Scalar.DOUBLE, ddl.Scalar.BINARY):
            return f"{by.column!r} has too many values", "a column of few values, or day() of a timestamp"
        if not isinstance(type_, ddl.Scalar | ddl.Decimal):
            return f"{by.column!r} is nested", "a scalar column"
        return None

    def problems(self, pipeline: PipelineConfig) -> Iterator[Problem]:
        if pipeline.transform is not None or not pipeline.decode.is_resolved:
            return  # the transform decides the sink's columns, and the sink asks when they are known
        if problem := self.partition_problem(pipeline.decode.columns.fields):
            yield Problem(("sink", "partition_by"), *problem)

    @classmethod
    def name_problem(cls, name: str) -> str:
        # Readers that know a column by its name in the files cannot take these.
        forbidden = sorted(set(name) & set(" ,;{}()=."))
        return super().name_problem(name) or (
            f"contains {forbidden[0]!r}, which Parquet readers do not support" if forbidden else ""
        )
