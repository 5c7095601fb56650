"""A cell's pipeline file, the harness's own or made from a user's; and records made from a schema."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.csv_format import install

from avow import schema
from avow.errors import ConfigError
from avow.formats.json.samples import sample
from avow.plan import load_checked
from avow.prove.cells import ENGINES, FAULTS, PLAIN, Cell, matrix
from avow.prove.cluster import ProofCluster
from avow.prove.oracles.base import Oracle
from avow.prove.scenario import oracle_class
from avow.prove.workload_spec import NumberedRecords, UserPipeline, toml
from avow.settings import load
from avow.sinks.delta.config import DeltaConfig
from avow.sinks.iceberg.config import IcebergConfig
from avow.sinks.lake.config import LakeConfig
from avow.sinks.postgres.config import PostgresConfig

ENV = {"DATABASE_URL": "postgresql://me@localhost/scratch"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "payments.toml"
CELL = next(cell for cell in matrix() if cell.fault.name == "zombie" and cell.guarantee == "exactly-once")


def oracle(sink: str, folder: Path) -> Oracle:
    """As a scenario has it; the cluster is not used."""
    return oracle_class(sink)(ProofCluster(folder), folder, "p-1", "p_1")


WITH_A_FILE = [c for c in matrix() if c.fault.name == "zombie" and c.engine not in PLAIN]


@pytest.mark.parametrize("cell", WITH_A_FILE, ids=lambda cell: cell.name)
def test_every_cell_has_a_pipeline_that_avow_accepts(cell: Cell, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(NumberedRecords().text(cell, "p-1", oracle(cell.sink, tmp_path), "127.0.0.1:1", 500))
    made = load_checked(path, ENV)
    declared = (cell.guarantee, cell.mode, ENGINES[cell.engine].name)
    assert (made.guarantee, made.sink.mode, made.engine) == declared


def test_a_users_pipeline_keeps_what_it_does_and_not_where(tmp_path: Path) -> None:
    own = UserPipeline(EXAMPLE, load_checked(EXAMPLE, ENV))
    path = tmp_path / "pipeline.toml"
    path.write_text(own.text(CELL, "p-1", oracle("postgres", tmp_path), "127.0.0.1:1", 500))
    before, after = load_checked(EXAMPLE, ENV), load_checked(path, ENV)
    assert (after.decode, after.transform, after.sink.mode) == (before.decode, before.transform, before.sink.mode)
    assert isinstance(after.sink, PostgresConfig)
    assert (after.name, after.source.topics, str(after.sink.table)) == ("p-1", ("p-1",), "p_1")
    assert own.only_audit_counts, "a transform may leave records out"


def test_a_users_records_are_what_its_schema_declares() -> None:
    own = UserPipeline(EXAMPLE, load_checked(EXAMPLE, ENV))
    assert json.loads(own.value(3, 3)) == {
        "id": 3,
        "account": "text 3",
        "amount": 0.75,
        "at": "2026-01-04T12:00:03Z",
        "note": "text 3",
    }
    assert json.loads(own.value(4, 4))["note"] is None


def test_key_columns_are_made_from_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keyed.toml"
    text = EXAMPLE.read_text().replace('mode  = "append"', 'mode = "upsert"\nkey = ["account"]')
    path.write_text(text)
    own = UserPipeline(path, load_checked(path, ENV))
    assert json.loads(own.value(7, 2))["account"] == "text 2"
    path.write_text(text.replace("account string not null", "account string"))
    assert json.loads(UserPipeline(path, load_checked(path, ENV)).value(4, 4))["account"] == "text 4", "never null"
    path.write_text(text.replace('["account"]', '["amount"]'))
    with pytest.raises(ConfigError, match="amount"):
        UserPipeline(path, load(path, ENV))


def test_records_as_they_are_have_the_key_in_the_column_key(tmp_path: Path) -> None:
    path = tmp_path / "raw.toml"
    text = re.sub(r"(?s)\[decode\].*?\n(?=\[)", '[decode]\nformat = "string"\n', EXAMPLE.read_text())
    text = re.sub(r"(?s)\[transform\].*?\n(?=\[)", "", text).replace(
        'mode  = "append"', 'mode = "upsert"\nkey = ["key"]'
    )
    path.write_text(text)
    assert UserPipeline(path, load_checked(path, ENV)).value(7, 2) == b"record 7"
    path.write_text(text.replace('["key"]', '["value"]'))
    with pytest.raises(ConfigError, match="cannot generate records for the key 'value'"):
        UserPipeline(path, load_checked(path, ENV))


def test_a_format_that_makes_no_records_cannot_be_proved(tmp_path: Path) -> None:
    path = tmp_path / "csv.toml"
    columns = '[decode]\nformat = "csv"\nschema = "id long not null, account string"\n'
    path.write_text(re.sub(r"(?s)\[decode\].*?\n(?=\[)", columns, EXAMPLE.read_text()))
    with install(tmp_path), pytest.raises(ConfigError, match="avow prove cannot generate records of format csv"):
        UserPipeline(path, load_checked(path, ENV))


def test_every_type_has_a_sample() -> None:
    kinds = [*map(str, schema.Scalar), "decimal(12,2)", "array<int>", "map<string,long>", "struct<a: int not null>"]
    fields = schema.parse(", ".join(f"c{n} {kind} not null" for n, kind in enumerate(kinds)))
    assert all(sample(field, 4) is not None for field in fields)


def test_toml_as_written_is_read_back() -> None:
    document = {"a.b": 1, "c": [True, 'x "y" \\ é'], "d": {"e": 0.5, "f": {}}}
    assert tomllib.loads(f"x = {toml(document)}")["x"] == document


def test_there_is_a_cell_for_every_fault() -> None:
    assert {cell.fault.name for cell in matrix()} == FAULTS.keys()


# What a user's lake may have that a proof must not touch, and what it must keep.
LAKES = {
    "delta": 'path = "s3://theirs/payments"\noptions = { aws_region = "x" }\npartition_by = "day(at)"',
    "iceberg": 'table = "their.payments"\ncatalog = { type = "rest", uri = "http://theirs" }\npartition_by = "day(at)"',
}


@pytest.mark.parametrize("kind", LAKES)
def test_a_users_lake_becomes_a_folder_of_the_cells(kind: str, tmp_path: Path) -> None:
    file, path = tmp_path / "lake.toml", tmp_path / "pipeline.toml"
    text = EXAMPLE.read_text()
    file.write_text(f'{text[: text.index("[sink]")]}[sink]\nkind = "{kind}"\n{LAKES[kind]}\n')
    cell = next(c for c in matrix() if c.sink == kind and c.fault.name == "zombie" and c.guarantee == "exactly-once")
    path.write_text(
        UserPipeline(file, load_checked(file, ENV)).text(cell, "p-1", oracle(kind, tmp_path), "127.0.0.1:1", 500)
    )
    made, theirs = load_checked(path, ENV).sink, load_checked(file, ENV).sink
    assert isinstance(made, LakeConfig)
    assert isinstance(theirs, LakeConfig)
    assert made.partition_by == theirs.partition_by
    if isinstance(made, DeltaConfig):
        assert (made.path, made.options) == (str(tmp_path / "lake" / "p_1"), {})
    else:
        assert isinstance(made, IcebergConfig)
        assert made.table == "lake.p_1"
        assert made.catalog.keys() == {"warehouse"}
