"""A cell's pipeline file, the harness's own or made from a user's; and records made from a schema."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from avow import schema
from avow.errors import ConfigError
from avow.plan import load_checked
from avow.prove.cells import ENGINES, FAULTS, Cell, matrix
from avow.prove.form import Numbered, Own, sample, toml
from avow.settings import Postgres, load

ENV = {"DATABASE_URL": "postgresql://me@localhost/scratch"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "payments.toml"
CELL = next(cell for cell in matrix() if cell.fault.name == "zombie" and cell.guarantee == "exactly-once")


@pytest.mark.parametrize("cell", [c for c in matrix() if c.fault.name == "zombie"], ids=lambda cell: cell.name)
def test_every_cell_has_a_pipeline_that_avow_accepts(cell: Cell, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(Numbered().text(cell, "p-1", "p_1", "127.0.0.1:1", 500))
    made = load_checked(path, ENV)
    declared = (cell.guarantee, cell.mode, ENGINES[cell.engine].name)
    assert (made.guarantee, made.sink.mode, made.engine) == declared


def test_a_users_pipeline_keeps_what_it_does_and_not_where(tmp_path: Path) -> None:
    own = Own(EXAMPLE, load_checked(EXAMPLE, ENV))
    path = tmp_path / "pipeline.toml"
    path.write_text(own.text(CELL, "p-1", "p_1", "127.0.0.1:1", 500))
    before, after = load_checked(EXAMPLE, ENV), load_checked(path, ENV)
    assert (after.decode, after.transform, after.sink.mode) == (before.decode, before.transform, before.sink.mode)
    assert isinstance(after.sink, Postgres)
    assert (after.name, after.source.topics, str(after.sink.table)) == ("p-1", ("p-1",), "p_1")
    assert own.left_to_audit, "a transform may leave records out"


def test_a_users_records_are_what_its_schema_declares() -> None:
    own = Own(EXAMPLE, load_checked(EXAMPLE, ENV))
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
    own = Own(path, load_checked(path, ENV))
    assert json.loads(own.value(7, 2))["account"] == "text 2"
    path.write_text(text.replace("account string not null", "account string"))
    assert json.loads(Own(path, load_checked(path, ENV)).value(4, 4))["account"] == "text 4", "never null"
    path.write_text(text.replace('["account"]', '["amount"]'))
    with pytest.raises(ConfigError, match="amount"):
        Own(path, load(path, ENV))


def test_every_type_has_a_sample() -> None:
    kinds = [*map(str, schema.Scalar), "decimal(12,2)", "array<int>", "map<string,long>", "struct<a: int not null>"]
    fields = schema.parse(", ".join(f"c{n} {kind} not null" for n, kind in enumerate(kinds)))
    assert all(sample(field, 4) is not None for field in fields)


def test_toml_as_written_is_read_back() -> None:
    document = {"a.b": 1, "c": [True, 'x "y" \\ é'], "d": {"e": 0.5, "f": {}}}
    assert tomllib.loads(f"x = {toml(document)}")["x"] == document


def test_there_is_a_cell_for_every_fault() -> None:
    assert {cell.fault.name for cell in matrix()} == FAULTS.keys()


def test_a_sink_that_is_not_played_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lake.toml"
    text = EXAMPLE.read_text()
    path.write_text(f'{text[: text.index("[sink]")]}[sink]\nkind = "delta"\npath = "{tmp_path}/lake"\n')
    with pytest.raises(ConfigError, match=r"sink\.kind: a proof cannot be made into delta yet"):
        Own(path, load_checked(path, ENV))
