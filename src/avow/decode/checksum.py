"""The checksum that a producer put beside a value: the header ``avow-crc32c``, eight hexadecimal digits.

Kafka's own checksum is made by the client that sends a batch and ends at the client that reads it. This one is made
where the value is, so it also finds what went wrong before and after: in a proxy, in a mirror, in somebody's code. A
record without the header is not checked; a batch without one costs one look at a column.

Owns: the check. Must not know: formats. Its neighbours are ``avow.kafka.headers``, which spells the header, and the
decoder of a pipeline, which is given only what passes here.
"""

from __future__ import annotations

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from avow.arrow import indices
from avow.decode import envelope
from avow.decode.result import Dead, Decoded, Decoder, Reason, printable
from avow.kafka.headers import CHECKSUM, CHECKSUM_DIGITS, checksum

_SAID_CHARS_MAX = 40


class Checked:
    """A decoder that is given only records whose value is what their producer sent."""

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner
        self.schema = inner.schema
        self.key_schema = inner.key_schema

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        bad = [*{dead.index: dead for dead in [*corrupted(batch), *envelope.unfit(batch)]}.values()]
        if not bad:
            return self._inner.decode(batch)
        gone = {dead.index for dead in bad}
        sound = indices([row for row in range(batch.num_rows) if row not in gone])
        found = self._inner.decode(batch.take(sound))
        moved = [Dead(sound[dead.index].as_py(), dead.reason, dead.detail) for dead in found.dead]
        return Decoded(
            found.rows,
            sound.take(found.kept),
            found.deletes,
            sound.take(found.deleted),
            tuple(sorted([*moved, *bad], key=lambda dead: dead.index)),
            found.skipped,
        )


def corrupted(batch: pa.RecordBatch) -> list[Dead]:
    """The records whose checksum says something else than their value."""
    if "headers" not in batch.schema.names:
        return []
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return []
    pairs = headers.flatten()
    there = pc.indices_nonzero(pc.equal(pc.struct_field(pairs, "key"), CHECKSUM))
    if not len(there):
        return []
    rows = pc.list_parent_indices(headers).take(there)
    said, values = pc.struct_field(pairs, "value").take(there), batch.column("value").take(rows)
    if _all_match(said, values):
        return []
    bad: dict[int, Dead] = {}
    for row, one, value in zip(rows.to_pylist(), said.to_pylist(), values.to_pylist(), strict=True):
        is_one = None if value is None else checksum(value)
        if one is None or one.lower() != is_one:
            text = "nothing" if one is None else printable(one.decode(errors="replace"), _SAID_CHARS_MAX)
            has = "there is no value" if is_one is None else f"the value's is {is_one.decode()}"
            bad[row] = Dead(row, Reason.CORRUPTED, f"the header {CHECKSUM} says {text}, and {has}")
    return list(bad.values())


def _all_match(said: pa.Array, values: pa.Array) -> bool:
    """Whether all do, with as little work for each as can be."""
    if said.null_count or values.null_count or pc.any(pc.not_equal(pc.binary_length(said), CHECKSUM_DIGITS)).as_py():
        return False
    try:
        digits = bytes.fromhex(b"".join(said.to_pylist()).decode("ascii"))
    except ValueError:
        return False
    found = np.fromiter(map(google_crc32c.value, values.to_pylist()), np.uint32, len(values))
    return len(digits) == found.nbytes and np.array_equal(np.frombuffer(digits, ">u4"), found)
