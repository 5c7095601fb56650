"""The schema's spelling: what it means, what it refuses and why, and that it prints itself back."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.errors import ConfigError
from avow.schema import (
    ALIASES,
    MAX_DEPTH,
    MAX_PRECISION,
    Array,
    Decimal,
    Field,
    Map,
    Scalar,
    Schema,
    Struct,
    Type,
    parse,
)


def test_the_designs_example() -> None:
    text = "id long not null, account string not null, amount double, at timestamp, note string"
    schema = parse(text)
    assert schema.fields == (
        Field("id", Scalar.LONG, required=True),
        Field("account", Scalar.STRING, required=True),
        Field("amount", Scalar.DOUBLE),
        Field("at", Scalar.TIMESTAMP),
        Field("note", Scalar.STRING),
    )
    assert str(schema) == text


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        *[(scalar.value, scalar) for scalar in Scalar],
        *ALIASES.items(),
        ("BigInt", Scalar.LONG),
        ("decimal", Decimal(10, 0)),
        ("numeric(5)", Decimal(5, 0)),
        ("DECIMAL ( 38 , 38 )", Decimal(38, 38)),
        ("array<array<int>>", Array(Array(Scalar.INT))),
        ("map<STRING, double>", Map(Scalar.DOUBLE)),
        (
            "struct<a: int not null, `b:c` string>",
            Struct((Field("a", Scalar.INT, True), Field("b:c", Scalar.STRING))),
        ),
    ],
)
def test_types(spelled: str, meant: Type) -> None:
    assert parse(f"c {spelled}").fields == (Field("c", meant),)
    assert parse(f"c: {spelled} NOT\n NULL").fields == (Field("c", meant, required=True),)


def test_names_in_backticks_take_any_character() -> None:
    names = ["order id", "a`b", 'x"; DROP TABLE x; --', "$", "select", "1", "größe", "a.b", "<,>", "not"]
    text = ", ".join("`" + name.replace("`", "``") + "` int" for name in names)
    assert [field.name for field in parse(text)] == names


def test_keywords_are_names_too() -> None:
    assert [field.name for field in parse("not int not null, null int, string string, array array<int>")] == [
        "not",
        "null",
        "string",
        "array",
    ]


@pytest.mark.parametrize(
    ("text", "wrong", "allowed"),
    [
        ("", "no column", "id long"),
        ("  \n", "no column", "id long"),
        ("id", "column 1: the end is not a type", "timestamp_ntz"),
        ("id long, x strng", "column 2: 'strng' is not a type (did you mean string?)", "decimal(p,s)"),
        ("id `long`", "column 1: '`long`' is not a type", "decimal(p,s)"),
        ("id long,", "column 2: the end instead of a name", "backticks"),
        ("id long, 1x int", "column 2: '1x' instead of a name", "backticks"),
        ("id long note string", "column 1: 'note' after its type", "commas"),
        ("id long not nul", "column 1: 'nul' after `not`", "not null"),
        ("id long comment 'x'", "character 17 is not part of a schema", "backticks"),
        ("größe int", "'ö' at character 3", "backticks"),
        ("id long, `open int", "the backtick at character 10", "``"),
        ("id long, `` int", "column 2: the name is empty", "at least one"),
        ("`a\x00` int", "contains a control character", "Any other"),
        ("a int, b int, a int", "column 3: the name 'a' is declared twice", "case"),
        ("Id int, iD int", "column 2: the name 'iD' is declared twice", "case"),
        ("s struct<a: int, A: int>", "column 1: the name 'A' is declared twice", "case"),
        ("a int, d decimal(39,0)", "column 2: decimal(39,0) is not valid", "1 to 38"),
        ("d decimal(0,0)", "decimal(0,0) is not valid", "1 to 38"),
        ("d decimal(5,6)", "decimal(5,6) is not valid", "scale"),
        ("d decimal(5,-1)", "'-' at character 13", ""),
        ("d decimal(x)", "'x' instead of a number", "decimal(precision,scale)"),
        ("d decimal(" + "9" * 5000 + ")", "instead of a number", "decimal(precision,scale)"),
        ("d decimal(5", "the end instead of ')'", "decimal(precision,scale)"),
        ("m map<int,string>", "'int' instead of 'string'", "key is always a string"),
        ("m map<string>", "'>' instead of ','", "map<string,T>"),
        ("a array<int", "the end instead of '>'", "array<T>"),
        ("s struct<a int", "the end instead of '>'", "struct<"),
        ("s struct<>", "'>' instead of a name", "backticks"),
        ("c varchar(10)", "'varchar' is not a type", "string"),
    ],
)
def test_refusals_say_where_and_what_is_allowed(text: str, wrong: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert wrong in str(refused.value)
    assert allowed in refused.value.advice


def _nested(depth: int) -> str:
    return "c " + "array<" * depth + "int" + ">" * depth


def test_nesting_has_a_bound() -> None:
    assert str(parse(_nested(MAX_DEPTH))) == _nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ConfigError, match="nested more than 32 deep"):
            parse(_nested(depth))


_names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from(list("`\"' <>:,$.;")),
    min_size=1,
    max_size=12,
)
_decimals = st.integers(1, MAX_PRECISION).flatmap(lambda p: st.builds(Decimal, st.just(p), st.integers(0, p)))


def _fields(types: st.SearchStrategy[Type]) -> st.SearchStrategy[tuple[Field, ...]]:
    fields = st.builds(Field, _names, types, st.booleans())
    return st.lists(fields, min_size=1, max_size=5, unique_by=lambda field: field.name.lower()).map(tuple)


_types: st.SearchStrategy[Type] = st.recursive(
    st.sampled_from(Scalar) | _decimals,
    lambda inner: st.builds(Array, inner) | st.builds(Map, inner) | st.builds(Struct, _fields(inner)),
    max_leaves=8,
)


@given(st.builds(Schema, _fields(_types)))
def test_a_schema_prints_itself_back(schema: Schema) -> None:
    assert parse(str(schema)) == schema


@given(st.text(st.characters() | st.sampled_from(list("`<>(),: ")), max_size=40))
def test_any_text_is_a_schema_or_refused(text: str) -> None:
    try:
        schema = parse(text)
    except ConfigError:
        return
    assert len(schema) > 0
    assert not any(unicodedata.category(c) == "Cc" for field in schema for c in field.name)
