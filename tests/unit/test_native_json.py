"""The native JSON reader: what it vouches for is what the strict reader reads, and it vouches for all that is usual.

The tests of decoding (``test_decode``, ``test_decode_property``) run over it too; ``tests/fuzz_decode.py`` has commands
for long runs, also with sanitizers. The tests go through the readers that there are: Arrow's, which must keep the same
promise, and the native one. Without a compiler that one is not among them; a test asserts that it is with one.
"""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import struct
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz_decode import Counts, comparable, play_native
from tests.json_readers import READERS, reading_by
from tests.unit.test_decode_property import SCHEMAS, STRANGE, cases, ddl
from tests.unit.test_decode_property import pipeline as declared

from avow import native, schema
from avow.formats import decoder
from avow.formats.base import DecodeError
from avow.formats.json import arrow_columns
from avow.formats.json.arrow_columns import ArrowColumns
from avow.formats.json.decoder import ColumnReader, StrictReader
from avow.formats.json.native_columns import NativeColumns
from avow.formats.json.plugin import JsonConfig
from avow.settings import PipelineConfig

NATIVE = [reader for reader in READERS if reader == "native"]  # one or none


def config(columns: str, policy: str = "reject") -> JsonConfig:
    pipeline = {
        "name": "p",
        "guarantee": "exactly-once",
        "source": {"brokers": "localhost:9092", "topics": ["t"]},
        "decode": {"format": "json", "schema": columns, "unknown_fields": policy},
        "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t"},
    }
    decode = PipelineConfig.model_validate(pipeline).decode
    assert isinstance(decode, JsonConfig)
    return decode


@pytest.fixture(autouse=True, scope="module")
def few_records_are_read_by_column() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_columns, "_PIECE_ROWS_MIN", 1)
        yield


def column_reader(reader: str, decode: JsonConfig, *, refuse_nul: bool = True) -> ColumnReader:
    if reader == "arrow":
        return ArrowColumns(decode.columns, refuse_nul=refuse_nul)
    return NativeColumns(decode.columns, refuse_nul=refuse_nul, ignore_unknown=decode.unknown_fields == "ignore")


def vouched(reader: str, decode: JsonConfig, values: list[bytes], *, refuse_nul: bool = True) -> dict[int, Any]:
    """What is read by column, checked against the strict reader."""
    if reader == "arrow" and not ArrowColumns.can_read(decode.columns):
        return {}
    columns = column_reader(reader, decode, refuse_nul=refuse_nul)
    strict = StrictReader(decode.columns, decode.unknown_fields, refuse_nul=refuse_nul)
    rows, doubtful = columns.read(pa.array(values, pa.binary()))
    rows.validate(full=True)
    doubts = doubtful.to_pylist()
    assert doubts == sorted(set(doubts))
    assert len(rows) + len(doubts) == len(values)
    read = dict(zip(sorted(set(range(len(values))) - set(doubts)), rows.to_pylist(), strict=True))
    for index, row in read.items():
        due = strict.row(values[index])  # raises where it must not be read
        due.pop("_rest", None)
        assert comparable(row) == comparable(due), values[index]
    return read


def test_the_library_is_there_where_a_compiler_is() -> None:
    assert (native.library() is not None) == bool(NATIVE)
    if any(map(shutil.which, ("cc", "gcc", "clang"))):
        assert native.why_not() is None
        assert READERS == ["arrow", "native"]


@pytest.mark.parametrize("reader", READERS)
def test_the_decoder_reads_as_it_is_told(reader: str) -> None:
    with reading_by(reader):
        opened = decoder(declared(SCHEMAS["flat"], "reject"), refuse_nul=True)
        assert (native.library() is not None) == (reader == "native")
    name = type(opened._inner._columns).__name__  # type: ignore[attr-defined]
    assert name == {"arrow": "ArrowColumns", "native": "NativeColumns"}[reader]


def test_without_the_library_nothing_is_native() -> None:
    with reading_by("arrow"):
        assert not NativeColumns.can_read(schema.parse("id long"))
        assert native.why_not() == "switched off"


# Every type: what must be read natively. A doubt here is not wrong, but slow.
USUAL = {
    "boolean": ["true", "false", "null"],
    "byte": ["-128", "127", "0", "-0"],
    "short": ["-32768", "32767"],
    "int": ["-2147483648", "2147483647"],
    "long": ["-9223372036854775808", "9223372036854775807", "17"],
    "float": ["0.1", "-12.5", "1e10", "16777216", "0.30000000000000004", "3.4e27", "0", "-0.0"],
    "double": ["0.1", "1e22", "1e23", "-0", "-0.0", "0.30000000000000004", "123456789.123456789", "9007199254740992"],
    "decimal(12,2)": ["1.5", '"1.5"', "1e2", "1.230", '"+.5"', '"5."', '"007"', "-9999999999.99", "0e5", "-0.00"],
    "decimal(38,20)": ["123456789012345678.12345678901234567890", '"1e-20"'],
    "decimal(38,38)": ['"0.99999999999999999999999999999999999999"', "0"],
    "string": ['""', '"é😀"', r'"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00\u0041"', '"\x7f"', '"' + "long enough " * 9 + '"'],
    "binary": ['""', '"AP8="', '"QQ=="', '"+/+/"'],
    "date": ['"2024-02-29"', '"1969-12-31"', '"0001-01-02"', '"9999-12-30"', '"1900-03-01"', '"2000-02-29"'],
    "timestamp": [
        '"2026-01-01T00:00:00Z"',
        '"2026-01-01t23:59:59.999999z"',
        '"1969-12-31T23:59:59.5-23:59"',
        '"2026-01-01T00:00:00.1234560000+05:30"',
    ],
    "timestamp_ntz": ['"2026-01-01T12:00:00.5"', '"0001-01-02T00:00:00"'],
    "array<int>": ["[]", "[1,null,3]", "[ 1 , 2 ]"],
    "array<array<string>>": ['[[],["a",null],null]'],
    "map<string,int>": ["{}", r'{"a":1,"b":null,"\u0061b":2}'],
    "map<string,array<date>>": ['{"":["2026-01-01"],"x":null}'],
    "struct<x: int not null, y: string>": ['{"x":1}', '{"y":"b", "x":2}', "null"],
    "array<struct<x: int, m: map<string,boolean>>>": ['[{"m":{"t":true}},{"x":1},null,{}]'],
}


@pytest.mark.parametrize("type", USUAL)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_usual_is_read_natively(reader: str, type: str) -> None:
    values = [f'{{"f":{text}}}'.encode() for text in USUAL[type]]
    read = vouched(reader, config(f"f {type}"), values)
    assert reader == "arrow" or sorted(read) == list(range(len(values)))


@pytest.mark.parametrize("reader", READERS)
def test_records_as_people_write_them(reader: str) -> None:
    decode = config("id long not null, `order id` string, `größe` int, s struct<x: int>")
    values = [
        '{"id":1,"order id":"a","größe":3,"s":{"x":1}}',
        ' {\n\t"s" : { } ,\r\n "größe" : null , "id" : 2 } \n',
        '{"id":3}',
    ]
    assert len(vouched(reader, decode, [value.encode() for value in values])) == (3 if reader == "native" else 2)
    ignoring = config("id long, s struct<x: int>", "ignore")
    new = [
        b'{"new":{"a":[1,-2.5e9,true,false,null,"\xc3\xa9\\u0000\\n"],"b":{},"c":[]},"id":1,"more":"x"}',
        b'{"id":2,"s":{"y":{"id":1},"x":1,"id":[[]]}}',
    ]
    assert len(vouched(reader, ignoring, new)) == (2 if reader == "native" else 0)


@pytest.mark.parametrize("reader", READERS)
def test_names_that_json_writes_otherwise_are_left_to_others(reader: str) -> None:
    assert not NativeColumns.can_read(schema.parse('`a"b` int'))
    assert not NativeColumns.can_read(schema.parse("s struct<`a\\b`: int>"))
    with reading_by(reader):
        decode = decoder(declared([('a"b', ("int",), True)], "reject"), refuse_nul=True).decode
    values = pa.array([rb'{"a\"b":1}', b'{"a"b":1}'] * 50, pa.binary())
    decoded = decode(pa.RecordBatch.from_arrays([pa.nulls(100, pa.binary()), values], ["key", "value"]))
    assert decoded.rows_at.to_pylist() == list(range(0, 100, 2))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "value",
    [
        b'{"id":1,"new":1,"new":2}',
        b'{"id":1,"new":{"a":1,"a":2}}',
        rb'{"id":1,"new":{"a":1,"\u0061":2}}',
        rb'{"id":1,"\u0069d":2}',
        b'{"id":1,"new":"\xed\xa0\x80"}',
        rb'{"id":1,"new":"\ud800"}',
        b'{"id":1,"\xff":1}',
        b'{"id":1,"new":01}',
        b'{"id":1,"new":[1,]}',
        b'{"id":1,"new":{"a":1,}}',
        b'{"id":1,"new":' + b"1" * 1001 + b"}",
        b'{"id":1,"new":' + b"[" * 1001 + b"]" * 1001 + b"}",
        b'{"id":1,"new":NaN}',
        b'{"id":1,"m":{"a":1,"a":2}}',
        rb'{"id":1,"m":{"a":1,"\u0061":2}}',
    ],
)
def test_what_is_ignored_is_checked(reader: str, value: bytes) -> None:
    decode = config("id long, m map<string,int>", "ignore")
    with pytest.raises(DecodeError):
        StrictReader(decode.columns, decode.unknown_fields, refuse_nul=True).row(value)
    assert vouched(reader, decode, [value]) == {}


@given(case=cases())
def test_hypothesis_agrees(case: tuple[str, str, bool, list[bytes]]) -> None:
    name, policy, refuse_nul, values = case
    columns = ", ".join(f"`{n}` {ddl(t)}" + " not null" * required for n, t, required in SCHEMAS[name])
    for reader in NATIVE:  # the other one is in test_decode_property
        vouched(reader, config(columns, policy), values, refuse_nul=refuse_nul)


@given(texts=st.lists(STRANGE, min_size=1, max_size=20), type=st.sampled_from(sorted(USUAL)))
def test_strange_values_of_every_type(texts: list[str], type: str) -> None:
    for reader in READERS:
        vouched(reader, config(f"f {type}"), [f'{{"f":{text}}}'.encode() for text in texts])


def floats(r: random.Random) -> Iterator[str]:
    """Numbers that are hard to round, and the shortest spellings of any."""
    while True:
        number = struct.unpack("<d", r.randbytes(8))[0]
        if number == number and 1e-20 < abs(number) < 1e40:
            yield repr(number)
        digits, exponent = r.randrange(10 ** r.randint(1, 19)), r.randint(-30, 30)
        yield f"{digits}e{exponent}"
        whole = (1 << r.choice([53, 24])) * 2 + 1
        yield f"{whole * 10 ** r.randint(0, 3) + r.choice([-1, 0, 1])}.{r.choice(['0', '5', '00001'])}"
        yield f"0.{'0' * r.randint(0, 8)}{r.randrange(10**18)}"
        # As near to the middle between two floats as 19 digits come, from either side.
        power, bits = r.randint(18, 27), r.choice([53, 24])
        between = Fraction(2 * (r.getrandbits(bits - 1) | 1 << (bits - 1)) + 1, 2 ** (bits - 60 + int(power * 3.3219)))
        yield f"{r.choice([math.floor, math.ceil])(between * 10**power)}e-{power}"
        narrow = struct.unpack("<f", struct.pack("<I", r.randrange(0x30000000, 0x50000000)))[0]
        yield f"{narrow:.{r.randint(1, 17)}g}"


@pytest.mark.parametrize("reader", READERS)
def test_floats_are_rounded_once(reader: str) -> None:
    made = floats(random.Random(1))
    numbers = [next(made) for _ in range(30_000 if reader == "native" else 3_000)]
    for type, least in (("double", 20_000), ("float", 15_000)):
        read = vouched(reader, config(f"f {type}"), [f'{{"f":{number}}}'.encode() for number in numbers])
        assert reader == "arrow" or len(read) > least


def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    for _ in NATIVE:  # the other one is in test_decode_fuzz
        counts: Counts = play_native(seed=1, records=50_000, seconds=60, case=tmp_path / "case.json")
        assert counts.taken > 5_000
        assert counts.refused > 5_000
        assert counts.records - counts.doubtful > 5_000


@pytest.mark.parametrize("reader", READERS)
def test_slices_empty_values_and_no_values(reader: str) -> None:
    columns = column_reader(reader, config("id long, t string, b boolean, l array<int>"))
    values = pa.array([b'{"id":1,"t":"a","b":true,"l":[1]}', b"", b'{"id":3}', b"x", b'{"id":5,"b":null}'], pa.binary())
    for start in range(5):
        for stop in range(start + 1, 6):
            rows, doubtful = columns.read(values.slice(start, stop - start))
            rows.validate(full=True)
            assert rows.column("id").to_pylist() == [n + 1 for n in range(start, stop) if n % 2 == 0]
            assert doubtful.to_pylist() == [n - start for n in range(start, stop) if n % 2]
    empty, doubtful = columns.read(pa.array([b"", b""], pa.binary()))
    assert len(empty) == 0
    assert doubtful.to_pylist() == [0, 1]


def test_values_it_is_not_made_for() -> None:
    for _ in NATIVE:
        columns = NativeColumns(schema.parse("id long"), refuse_nul=True, ignore_unknown=False)
        for values in (pa.array([b"{}", None], pa.binary()), pa.array(["{}"]), pa.array([b"{}"], pa.large_binary())):
            with pytest.raises(ValueError, match="expected binary values"):
                columns.read(values)
        data, wild = pa.py_buffer(b"{}"), [(0, 9, 2), (0, -1, 2), (2, 1, 2)]
        for offsets in wild:
            broken = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(struct.pack("=3i", *offsets)), data])
            with pytest.raises(ValueError, match="make no sense"):
                columns.read(broken)


def test_memory_is_given_back() -> None:
    for _ in NATIVE:
        columns = NativeColumns(
            schema.parse("t string, l array<struct<t: string, d: decimal(38,0)>>"),
            refuse_nul=True,
            ignore_unknown=False,
        )
        good = b'{"t":"' + b"x" * 5_000 + b'","l":[{"t":"y","d":1},{"t":null}]}'
        values = pa.array([good, good[:-1]] * 100, pa.binary())
        process = psutil.Process()
        columns.read(values)
        before = process.memory_info().rss
        for _ in range(400):  # 400 MB, all in all
            rows, _ = columns.read(values)
            kept = rows.column("l")
            del rows
            assert len(kept) == 100
        assert process.memory_info().rss - before < 100 << 20


@pytest.mark.parametrize("reader", READERS)
def test_threads_do_not_meet(reader: str) -> None:
    columns = column_reader(reader, config("id long, t string"))
    failures: list[str] = []

    def read(number: int) -> None:
        values = pa.array([f'{{"id":{number},"t":"{number}"}}'.encode(), b"{"] * 500, pa.binary())
        for _ in range(20):
            rows, doubtful = columns.read(values)
            if rows.to_pylist() != [{"id": number, "t": str(number)}] * 500 or len(doubtful) != 500:
                failures.append(str(number))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in NATIVE:
        import avow_native
        from avow_native import build

        path = avow_native.status().path
        assert path is not None
        stale, broken = tmp_path / "stale.so", tmp_path / "broken.so"
        shutil.copy(path, stale)
        broken.write_bytes(b"not a library")
        monkeypatch.setattr(build, "libraries", lambda found=(broken, stale): iter(found))
        assert avow_native._found.__wrapped__()[1].path == stale
        monkeypatch.setattr(build, "sources_hash", lambda: "another")
        library, status = avow_native._found.__wrapped__()
        assert library is None
        assert "made from other sources" in str(status.why_not)
        monkeypatch.setattr(build, "libraries", lambda found=(broken,): iter(found))
        assert "cannot be loaded" in str(avow_native._found.__wrapped__()[1].why_not)
        monkeypatch.setattr(build, "libraries", lambda: iter([]))
        assert "python -m avow_native.build" in str(avow_native._found.__wrapped__()[1].why_not)
        assert isinstance(native.library(), ctypes.CDLL)


def test_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in NATIVE:
        from avow_native import build

        monkeypatch.setattr(build, "_compilers", lambda target: iter([]))  # noqa: ARG005
        with pytest.raises(build.BuildError, match="there is no C compiler"):
            build.build(folder=tmp_path)
        monkeypatch.setattr(build, "_compilers", lambda target: iter([["false"]]))  # noqa: ARG005
        with pytest.raises(build.BuildError, match="exit code 1"):
            build.build(folder=tmp_path)
        assert list(tmp_path.iterdir()) == []


# What is wrong in a copy of json.c, and must be found: a check that cannot fail is none.
CANARIES = {
    "an integer one too large": ("limit - (number.negative ? 0 : 1)", "limit"),
    "a required field that is absent": (
        "(field->field->required || !avow_append_null(&reader->no_memory, field))",
        "!avow_append_null(&reader->no_memory, field)",
    ),
    "a lone surrogate": ("(unit >= 0xdc00 && unit <= 0xdfff)", "false"),
    "a decimal beyond its precision": ("return *units < power_of_ten(type->precision);", "return true;"),
}


@pytest.mark.parametrize("canary", CANARIES)
def test_canaries(canary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in NATIVE:
        from avow_native import build

        right, wrong = CANARIES[canary]
        for file in [*build.sources(), *build.PACKAGE.glob("*.h")]:
            text = file.read_text()
            assert file.name != "json.c" or text.count(right) == 1
            (tmp_path / file.name).write_text(text.replace(right, wrong) if file.name == "json.c" else text)
        monkeypatch.setattr(build, "PACKAGE", tmp_path)
        library = ctypes.CDLL(str(build.build(folder=tmp_path, flags=["-O0"]).path))
        monkeypatch.setattr(native, "library", lambda library=library: library)
        with pytest.raises((AssertionError, pa.ArrowInvalid, UnicodeDecodeError)):
            play_native(seed=1, records=200_000, seconds=60, case=tmp_path / "case.json")
