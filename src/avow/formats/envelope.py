"""What is around a record's value: its timestamp, and the names of its headers.

Kafka takes any 64-bit number for a timestamp and any bytes for a header's name. A sink's column holds moments up to the
year 9999 (-1, none, is one of them), and names are text: a record beyond that is a dead letter, not another record.

Owns: these two checks. Must not know: formats. Its neighbour is ``checksum``, which asks it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from avow.formats.base import Reason, RefusedRecord
from avow.kafka.headers import NOT_UTF8

LAST_MS = 253_402_300_799_999  # the end of the year 9999


def refused(batch: pa.RecordBatch) -> Iterator[RefusedRecord]:
    """The records that cannot be taken, whatever their values are."""
    if "timestamp" in batch.schema.names:
        yield from _out_of_range(batch.column("timestamp"))
    if "headers" in batch.schema.names:
        yield from _bad_header_names(batch.column("headers"))


def _out_of_range(stamps: pa.Array) -> Iterator[RefusedRecord]:
    per_ms = 1 if stamps.type.unit == "ms" else 1000
    numbers = stamps.cast(pa.int64())
    least_most = pc.min_max(numbers).as_py()
    least, most = least_most["min"], least_most["max"]
    if least is None or (least >= -per_ms and most < (LAST_MS + 1) * per_ms):
        return
    for row, number in enumerate(numbers.to_pylist()):
        if number is not None and not -per_ms <= number < (LAST_MS + 1) * per_ms:
            yield RefusedRecord(
                row, Reason.TIMESTAMP, f"timestamp {number // per_ms} ms is out of range: -1 to {LAST_MS}"
            )


def _bad_header_names(headers: pa.Array) -> Iterator[RefusedRecord]:
    if headers.null_count == len(headers):
        return
    names = pc.struct_field(headers.flatten(), "key")
    indices = pc.indices_nonzero(pc.equal(names, NOT_UTF8))
    for row in sorted(set(pc.list_parent_indices(headers).take(indices).to_pylist())):
        yield RefusedRecord(
            row, Reason.HEADER_NAME, f"a header name is not UTF-8; the dead letter has its value as {NOT_UTF8}"
        )
