"""The checksum that a producer put beside a value: the header ``avow-crc32c``, eight hexadecimal digits.

Kafka's own checksum is made by the client that sends a batch and ends at the client that reads it. This one is made
where the value is, so it also finds what went wrong before and after: in a proxy, in a mirror, in somebody's code. A
record without the header is not checked; a batch without one costs one look at a column.

Owns: the check. Must not know: formats. Its neighbours are ``avow.kafka.headers``, which spells the header, and the
decoder of a pipeline, which is given only what passes here.
"""

from __future__ import annotations

from dataclasses import replace

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import indices
from avow.formats import envelope
from avow.formats.base import Decoded, Decoder, Reason, RefusedRecord, printable
from avow.kafka.headers import CHECKSUM, CHECKSUM_DIGITS, checksum

_SHOWN_CHARS_MAX = 40


class CheckedDecoder:
    """A decoder that is given only records whose value is what their producer sent."""

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        bad = {record.index: record for record in [*corrupted(batch), *envelope.refused(batch)]}
        if not bad:
            return self._inner.decode(batch)
        at = indices([index for index in range(batch.num_rows) if index not in bad])
        decoded = self._inner.decode(batch.take(at))
        refused = [replace(record, index=at[record.index].as_py()) for record in decoded.refused]
        return replace(
            decoded,
            rows_at=at.take(decoded.rows_at),
            deletes_at=at.take(decoded.deletes_at),
            refused=tuple(sorted([*refused, *bad.values()], key=lambda record: record.index)),
        )


def corrupted(batch: pa.RecordBatch) -> list[RefusedRecord]:
    """The records whose checksum is not that of their value."""
    if "headers" not in batch.schema.names:
        return []
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return []
    pairs = headers.flatten()
    indices = pc.indices_nonzero(pc.equal(pc.struct_field(pairs, "key"), CHECKSUM))
    if not len(indices):
        return []
    rows = pc.list_parent_indices(headers).take(indices)
    expected, values = pc.struct_field(pairs, "value").take(indices), batch.column("value").take(rows)
    if _all_match(expected, values):
        return []
    bad: dict[int, RefusedRecord] = {}
    for row, header, value in zip(rows.to_pylist(), expected.to_pylist(), values.to_pylist(), strict=True):
        actual = None if value is None else checksum(value)
        if header is None or header.lower() != actual:
            text = "null" if header is None else printable(header.decode(errors="replace"), _SHOWN_CHARS_MAX)
            has = "the value is null" if actual is None else f"the value's CRC32C is {actual.decode()}"
            bad[row] = RefusedRecord(
                row, Reason.CORRUPTED, f"checksum mismatch: the header {CHECKSUM} is {text}, {has}"
            )
    return list(bad.values())


def _all_match(expected: pa.Array, values: pa.Array) -> bool:
    """Whether every checksum is its value's; the quick way, for whole batches."""
    if (
        expected.null_count
        or values.null_count
        or pc.any(pc.not_equal(pc.binary_length(expected), CHECKSUM_DIGITS)).as_py()
    ):
        return False
    try:
        digits = bytes.fromhex(b"".join(expected.to_pylist()).decode("ascii"))
    except ValueError:
        return False
    computed = np.fromiter(map(google_crc32c.value, values.to_pylist()), np.uint32, len(values))
    return len(digits) == computed.nbytes and np.array_equal(np.frombuffer(digits, ">u4"), computed)
