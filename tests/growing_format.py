"""A format whose columns come from outside the pipeline's file: its schema is the text of a file that others may
change, as a registry's subject is. A record is JSON; a field that is not among the columns has its decoder look there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from avow import schema
from avow.errors import ColumnsChanged
from avow.formats.base import DecodeError, Decoder, FormatPlugin, Reason, Samples
from avow.formats.rows import RowDecoder
from avow.settings import DeclaredColumns, FormatConfig, PipelineConfig, Source
from avow.testing.install import installed


class GrowingConfig(DeclaredColumns):
    """[decode] with format = "growing"."""

    format: Literal["growing"] = Field(description='"growing"')
    subject: str = Field(description="the path of a file")

    def for_source(self, source: Source) -> Self:  # noqa: ARG002
        return self.model_copy(update={"declared": _subject(self)})


class GrowingFormat(FormatPlugin):
    format = "growing"
    Config = GrowingConfig

    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
        names = {field.name for field in pipeline.decode.columns}

        def read(value: bytes) -> dict[str, object]:
            row: dict[str, object] = json.loads(value)
            if unknown := row.keys() - names:
                if unknown <= {field.name for field in _subject(pipeline.decode)}:
                    raise ColumnsChanged(f"the subject has {', '.join(sorted(unknown))} by now")
                raise DecodeError(Reason.UNKNOWN_FIELD, "not in the subject either")
            return {name: row.get(name) for name in names}

        return RowDecoder(pipeline, read, refuse_nul=refuse_nul)

    def explain(self, pipeline: PipelineConfig) -> tuple[str, ...]:  # noqa: ARG002
        return ("Read each value as JSON.",)

    def samples(self) -> Samples:
        return Samples({"format": "growing", "schema": "id long", "subject": "/"}, ((b'{"id":1}', {"id": 1}),), ())


def _subject(decode: FormatConfig) -> schema.Schema:
    assert isinstance(decode, GrowingConfig)
    return schema.parse(Path(decode.subject).read_text())


GROWING = GrowingFormat()


@contextmanager
def install(folder: Path) -> Iterator[None]:
    """As an installed package: found by its entry point, here and in processes that begin meanwhile."""
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "avow-growing"\nversion = "1.0"\n'
        '[project.entry-points."avow.formats"]\ngrowing = "tests.growing_format:GROWING"\n'
    )
    with installed(folder):
        yield
