"""A format of another package, as its author would write it: one line of CSV is one record.

``install`` puts it on the path with an entry point, as an installer would. ``docs/ARCHITECTURE.md`` refers to it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import pytest
from pydantic import Field, model_validator

from avow import plugins, schema
from avow.formats.base import DecodeError, Decoder, FormatPlugin, Reason, Samples
from avow.formats.rows import RowDecoder
from avow.formats.text import text_of
from avow.formats.tombstones import key_fields
from avow.schema import Scalar
from avow.settings import DeclaredColumns, PipelineConfig
from avow.settings.values import refuse


class CsvConfig(DeclaredColumns):
    """[decode] with format = "csv"."""

    format: Literal["csv"] = Field(description='"csv"')
    delimiter: str = Field(",", min_length=1, max_length=1, description="one character")

    @model_validator(mode="after")
    def _check_types(self) -> Self:
        for field in self.declared:
            if field.type not in (Scalar.LONG, Scalar.STRING):
                refuse(f"{field.name} is {field.type}", "csv has long and string", "schema")
        return self


class CsvFormat(FormatPlugin):
    format = "csv"
    Config = CsvConfig

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        decode = pipeline.decode
        assert isinstance(decode, CsvConfig)
        fields, delimiter = decode.columns.fields, decode.delimiter

        def read(value: bytes) -> dict[str, object]:
            try:
                (cells,) = csv.reader([text_of(value)], delimiter=delimiter, strict=True)
            except (csv.Error, ValueError) as error:
                raise DecodeError("not-csv", f"not one line of CSV: {error}") from None
            if len(cells) != len(fields):
                raise DecodeError("not-csv", f"{len(cells)} cell(s), and {len(fields)} column(s) are declared")
            return {field.name: _cell(cell, field) for cell, field in zip(cells, fields, strict=True)}

        def read_key(key: bytes) -> dict[str, object]:
            (field,) = key_fields(pipeline)
            return {field.name: _cell(text_of(key), field)}

        return RowDecoder(pipeline, read, refuse_nul=refuse_nul, read_key=read_key)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:
        return (
            f"Read each value as CSV into the {len(pipeline.decode.columns)} declared column(s).",
            "An empty cell is null.",
        )

    def samples(self) -> Samples:
        return Samples(
            decode={"format": "csv", "schema": "id long not null, note string", "delimiter": ";"},
            good=(
                (b"1;a note", {"id": 1, "note": "a note"}),
                (b'-2;"a;""b"\r\n', {"id": -2, "note": 'a;"b'}),
                (b"3;", {"id": 3, "note": None}),
            ),
            bad=(
                (b"", "not-csv"),
                (b"1", "not-csv"),
                (b'1;"a', "not-csv"),
                (b"1;a\n2;b", "not-csv"),
                (b"1;\xff", Reason.NOT_UTF8),
                (b"1;\0", Reason.NUL),
                (b";a", Reason.MISSING_FIELD),
                (b"one;a", Reason.WRONG_TYPE),
                (b"9223372036854775808;a", Reason.WRONG_TYPE),
            ),
        )


def _cell(cell: str, field: schema.Field) -> object:
    if not cell:
        return None
    if field.type is Scalar.LONG:
        if not re.fullmatch("-?[0-9]{1,20}", cell, re.ASCII):
            raise DecodeError(Reason.WRONG_TYPE, "not a whole number", field.name)
        return int(cell)
    return cell


CSV = CsvFormat()


@contextmanager
def install(folder: Path) -> Iterator[None]:
    """The format as an installed package has it: found by its entry point."""
    info = folder / "avow_csv-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: avow-csv\nVersion: 1.0\n")
    points = "csv = tests.csv_format:CSV\njson = tests.csv_format:CSV\nivory = avow_ivory:IVORY\n"
    (info / "entry_points.txt").write_text(f"[avow.formats]\n{points}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(plugins.FORMATS, "_loaded", {})
        plugins._entry_points.cache_clear()
        yield
    plugins._entry_points.cache_clear()
