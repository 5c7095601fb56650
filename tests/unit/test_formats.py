"""Formats as plugins: each keeps the contract, those of other packages are found, and none is named elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.csv_format import CSV, CsvFormat, install

from avow import extras, plugins
from avow.errors import ConfigError
from avow.formats import FORMATS, plugin_of
from avow.formats.avro.plugin import AVRO
from avow.formats.base import Decoded, Decoder
from avow.formats.debezium.plugin import DEBEZIUM
from avow.formats.json.plugin import JSON
from avow.formats.json_schema.plugin import JSON_SCHEMA
from avow.formats.protobuf.plugin import PROTOBUF
from avow.formats.raw.plugin import RAW, STRING
from avow.plan import load_checked, plan
from avow.settings import PipelineConfig, load
from avow.testing.formats import FormatContract

SRC = Path(plugins.__file__).parent
FILE = """\
name = "p"
guarantee = "exactly-once"
source = { brokers = "a:1", topics = ["t"] }
sink = { kind = "postgres", url = "postgresql://a@b/c", table = "t" }
[decode]
format = "csv"
"""


class TestAvro(FormatContract):
    plugin = AVRO


class TestJson(FormatContract):
    plugin = JSON


class TestJsonSchema(FormatContract):
    plugin = JSON_SCHEMA


class TestProtobuf(FormatContract):
    plugin = PROTOBUF


class TestRaw(FormatContract):
    plugin = RAW


class TestString(FormatContract):
    plugin = STRING


class TestDebezium(FormatContract):
    plugin = DEBEZIUM


class TestCsv(FormatContract):
    plugin = CSV


OWN = {
    case.plugin.format: case.plugin
    for case in (TestAvro, TestDebezium, TestJson, TestJsonSchema, TestProtobuf, TestRaw, TestString)
}


def test_the_contract_is_tested_over_every_format() -> None:
    assert OWN == {**FORMATS}


# ---- the contract finds what is wrong ------------------------------------------------------------------------------

Decode = Callable[[pa.RecordBatch], Decoded]


def raises(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    decoded = decode(batch)
    if decoded.refused:
        raise ValueError(decoded.refused[0].detail)
    return decoded


def loses_a_record(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    decoded = decode(batch)
    size = max(len(decoded.rows) - (len(batch) > 100), 0)
    return replace(decoded, rows=decoded.rows.slice(0, size), rows_at=decoded.rows_at.slice(0, size))


def loses_a_refused_record(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    return replace(decode(batch), refused=())


def refuses_the_neighbours(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    decoded = decode(batch)
    if not decoded.refused:
        return decoded
    first = decoded.refused[0]
    refused = tuple(replace(first, index=index) for index in range(len(batch)))
    return replace(decoded, rows=decoded.rows.slice(0, 0), rows_at=decoded.rows_at.slice(0, 0), refused=refused)


def forgets_where_a_slice_begins(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    column = batch.column("value")
    whole = pa.Array.from_buffers(column.type, len(column), column.buffers())
    return decode(batch.set_column(1, "value", whole))


def ignores_a_null_value(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    there = pa.compute.indices_nonzero(batch.column("value").is_valid())
    return decode(batch.take(there))


def has_a_column_of_its_own(decode: Decode, batch: pa.RecordBatch) -> Decoded:
    decoded = decode(batch)
    return replace(decoded, rows=decoded.rows.append_column("more", pa.nulls(len(decoded.rows))))


def broken(change: Callable[[Decode, pa.RecordBatch], Decoded]) -> CsvFormat:
    class Changed:
        def __init__(self, inner: Decoder) -> None:
            self._inner = inner

        def decode(self, batch: pa.RecordBatch) -> Decoded:
            return change(self._inner.decode, batch)

    class Broken(CsvFormat):
        def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:
            return Changed(super().decoder(pipeline, refuse_nul=refuse_nul))

    return Broken()


class TakesNul(CsvFormat):
    def decoder(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> Decoder:  # noqa: ARG002
        return super().decoder(pipeline, refuse_nul=False)


def fails(plugin: CsvFormat, test: str) -> bool:
    """Whether a test of the contract fails."""
    case: Any = type("Case", (FormatContract,), {"plugin": plugin})()
    try:
        getattr(case, test)()
    except Exception:  # noqa: BLE001 - whatever it is, the test has failed
        return True
    return False


@pytest.mark.parametrize(
    ("change", "test"),
    [
        (raises, "test_every_bad_sample_is_refused_alone"),
        (loses_a_record, "test_every_good_sample_gives_its_row"),
        (loses_a_refused_record, "test_every_bad_sample_is_refused_alone"),
        (refuses_the_neighbours, "test_every_bad_sample_is_refused_alone"),
        (forgets_where_a_slice_begins, "test_a_slice_is_decoded_as_the_whole"),
        (ignores_a_null_value, "test_null_values_are_what_the_pipeline_declares"),
        (ignores_a_null_value, "test_a_delete_is_never_lost"),
        (has_a_column_of_its_own, "test_every_good_sample_gives_its_row"),
    ],
)
def test_a_format_that_breaks_the_contract_is_caught(change: Any, test: str) -> None:
    assert fails(broken(change), test)
    assert not fails(CSV, test)


def test_a_format_that_takes_nul_is_caught() -> None:
    assert fails(TakesNul(), "test_every_bad_sample_is_refused_alone")


# ---- formats of other packages -------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with install(tmp_path):
        yield tmp_path / "p.toml"


def problems(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, {})
    return str(refused.value)


def test_a_format_of_another_package_is_found_by_its_entry_point(installed: Path) -> None:
    assert list(FORMATS) == [*OWN, "csv", "ivory"]
    installed.write_text(f'{FILE}schema = "id long not null, note string"\ndelimiter = ";"\n')
    pipeline = load_checked(installed, {})
    assert plugin_of(pipeline) is CSV
    hop = plan(pipeline).hops[1]
    assert hop.does == "Read each value as CSV into the 2 declared column(s)."
    assert hop.promises[1] == "An empty cell is null."
    assert pipeline.model_dump()["decode"]["delimiter"] == ";"


def test_its_settings_are_checked_like_our_own(installed: Path) -> None:
    message = problems(installed, f'{FILE}schema = "id date"\nquote = "x"\n')
    assert "p.toml:8: decode.quote: is not a known key; known keys: format, tombstones, schema, delimiter" in message
    message = problems(installed, f'{FILE}schema = "id date"\n')
    assert "p.toml:7: decode.schema: id is date; csv has long and string" in message
    message = problems(installed, f'{FILE}delimiter = ";;"\n')
    assert "p.toml:5: decode.schema: is missing; columns in Spark's spelling" in message
    assert "p.toml:7: decode.delimiter: " in message


def test_an_unknown_format_is_refused_with_those_there_are(installed: Path) -> None:
    message = problems(installed, FILE.replace('"csv"', '"cvs"'))
    assert message.endswith(
        f"decode.format: 'cvs' is not known, did you mean csv?; known formats: {', '.join(OWN)}, csv, ivory"
    )
    assert "decode.format: is missing; known formats: avro" in problems(installed, FILE.replace('format = "csv"', ""))
    assert "decode.format: 5 is not known; known formats" in problems(installed, FILE.replace('"csv"', "5"))


def test_avows_own_formats_cannot_be_replaced(installed: Path) -> None:  # noqa: ARG001
    assert FORMATS["json"].format == "json"


def test_a_plugin_that_cannot_be_imported_is_named_and_the_extra_that_brings_it(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_text(FILE.replace("csv", "ivory"))
    with pytest.raises(ConfigError, match=r"'ivory' cannot be loaded from avow_ivory:IVORY: No module") as refused:
        load(installed, {})
    assert refused.value.advice == "Install its dependencies, or uninstall the package that provides it."
    monkeypatch.setitem(extras.MODULES, "avow_ivory", "ivory")
    with pytest.raises(ConfigError) as refused:
        load(installed, {})
    assert refused.value.advice == "Install it: pip install 'avow[ivory]'"


def test_what_depends_on_the_format_is_asked_of_its_plugin() -> None:
    """That nobody imports a format's package, the import linter sees to."""
    names = "|".join(FORMATS)
    branch = re.compile(
        rf"""\bformat\b["'\]]*\s*(?:[!=]=|(?:not )?in)\s*[({{\["']+(?:{names})\b|\bmatch .*\bdecode\.format\b"""
        rf"""|["'](?:{names})["']\s*[!=]=\s*[\w.]*\bformat\b"""
    )
    for text in (
        'decode.format == "json"',
        'x.format in ("raw", "string")',
        "match p.decode.format:",
        '"json" != a.format',
    ):
        assert branch.search(text), text
    found = [
        f"{path.relative_to(SRC)}:{number}: {line.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        if not path.relative_to(SRC).as_posix().startswith(("formats/json/", "formats/raw/", "formats/debezium/"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if branch.search(line)
    ]
    assert found == []
