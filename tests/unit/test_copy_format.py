"""Binary COPY data: avow-native and Arrow make the same bytes, and name what they cannot say."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.arrow_batches import EPOCH_DAYS, EPOCH_US, KINDS, array, batches

from avow import native
from avow.sinks.postgres.copy_format import EncodeError, chunks, plain_chunks

LOWEST_US, LOWEST_DAYS = -(2**63), -(2**31)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        pytest.skip(f"avow-native: {native.why_not()}")
    return found


def joined(parts: Iterable[memoryview]) -> bytes:
    return b"".join(bytes(part) for part in parts)


@given(batch=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6).flatmap(lambda names: batches(*names)))
@pytest.mark.usefixtures("library")
def test_both_encoders_give_the_same_bytes(batch: pa.RecordBatch) -> None:
    assert joined(chunks(batch)) == joined(plain_chunks(batch))


@given(batch=batches("string", "jsonb", "decimal(38,38)", "long", "binary"), size=st.integers(64, 200))
def test_chunks_of_any_size_are_the_same_bytes(library: ctypes.CDLL, batch: pa.RecordBatch, size: int) -> None:
    from avow_native import copy

    parts = [bytes(part) for part in copy.chunks(library, batch, size)]
    assert all(0 < len(part) <= size for part in parts)
    assert b"".join(parts) == joined(plain_chunks(batch))


def test_long_texts_are_sent_in_bounded_parts(library: ctypes.CDLL) -> None:
    from avow_native import copy

    texts = ["x" * 1_000_000, None, "", "é" * 500_000, "end"]
    batch = pa.RecordBatch.from_pydict({"a": pa.array(texts), "b": pa.array(texts).cast(pa.json_())})
    parts = [bytes(part) for part in copy.chunks(library, batch)]
    assert max(map(len, parts)) == copy.CHUNK_BYTES
    assert b"".join(parts) == joined(plain_chunks(batch))


def test_the_bytes_are_those_of_the_documentation() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([1, None], pa.int16()), "b": pa.array(["x", ""])})
    header = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0"
    first = b"\0\2" + b"\0\0\0\2\0\1" + b"\0\0\0\1x"
    second = b"\0\2" + b"\xff\xff\xff\xff" + b"\0\0\0\0"
    assert joined(plain_chunks(batch)) == header + first + second + b"\xff\xff"


@pytest.fixture(params=["native", "plain"])
def encoder(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native":
        request.getfixturevalue("library")
    native.allow(request.param == "native")
    yield request.param
    native.allow(True)


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("timestamp", LOWEST_US),
        ("timestamp", LOWEST_US + EPOCH_US),  # it would mean -infinity
        ("timestamp_ntz", LOWEST_US + EPOCH_US - 1),
        ("date", LOWEST_DAYS),
        ("date", LOWEST_DAYS + EPOCH_DAYS),
    ],
)
def test_a_time_that_would_be_another_one_is_named(kind: str, value: int) -> None:
    good = array(KINDS["long"], list(range(5)))
    bad = array(KINDS[kind], [0, None, 0, value, value])
    worse = array(KINDS["date"], [0, 0, 0, LOWEST_DAYS, 0])
    with pytest.raises(EncodeError, match="column 'b': date or timestamp out of range") as raised:
        joined(chunks(pa.RecordBatch.from_arrays([good, bad, worse], names=["a", "b", "c"])))
    assert (raised.value.row, raised.value.sqlstate) == (3, "22008")
    joined(chunks(pa.RecordBatch.from_arrays([bad.slice(0, 3)], names=["b"])))


@pytest.mark.usefixtures("encoder")
def test_what_a_null_hides_is_not_looked_at() -> None:
    hidden = pa.Array.from_buffers(
        pa.timestamp("us"), 2, [pa.py_buffer(b"\2"), array(KINDS["long"], [LOWEST_US, 0]).buffers()[1]]
    )
    data = joined(chunks(pa.RecordBatch.from_arrays([hidden], names=["a"])))
    assert data[19:25] == b"\0\1\xff\xff\xff\xff"


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("type_", [pa.int64(), pa.string(), pa.timestamp("us"), pa.decimal128(38, 9)])
def test_columns_without_a_value(type_: pa.DataType) -> None:
    for rows in (0, 3):
        batch = pa.RecordBatch.from_arrays([pa.nulls(rows, type_), pa.nulls(rows)], names=["a", "b"])
        assert joined(chunks(batch))[19:] == (b"\0\2" + b"\xff" * 8) * rows + b"\xff\xff"


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("type_", [pa.large_string(), pa.uint64(), pa.decimal128(5, -2), pa.timestamp("ns")])
def test_a_type_without_a_column_is_refused(type_: pa.DataType) -> None:
    with pytest.raises(TypeError, match="no PostgreSQL type for"):
        joined(chunks(pa.RecordBatch.from_arrays([pa.nulls(1, type_)], names=["a"])))


def test_broken_offsets_are_not_followed(library: ctypes.CDLL) -> None:
    from avow_native import copy

    for ends in ([0, 9, 3], [0, -1, 3], [0, 3, 1, 3]):
        buffers = [None, array(KINDS["int"], ends).buffers()[1], pa.py_buffer(b"abc")]
        column = pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)  # Arrow looks at the last one alone
        with pytest.raises(ValueError, match=r"row [01], column 0: the column's buffers are broken"):
            joined(copy.chunks(library, pa.RecordBatch.from_arrays([column], names=["a"])))
    with pytest.raises(ValueError, match="an Arrow buffer of 8 bytes should have 16"):
        copy._check(pa.py_buffer(bytes(8)), 128)
