"""A user's Python transform, as one would write it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def even_with_cents(rows: pa.RecordBatch) -> pa.RecordBatch:
    kept = rows.filter(pc.equal(pc.bit_wise_and(rows.column("id"), 1), 0))
    cents = pc.cast(pc.multiply(kept.column("amount"), 100), pa.int64())
    return kept.append_column("cents", cents)
