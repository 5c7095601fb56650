"""A transform by Python: Arrow rows in, Arrow rows out. Every row keeps the columns that name its record."""

import pyarrow as pa
import pyarrow.compute as pc


def in_cents(rows: pa.RecordBatch) -> pa.RecordBatch:
    kept = rows.filter(pc.greater(rows.column("amount"), 0))
    return kept.append_column("cents", pc.cast(pc.round(pc.multiply(kept.column("amount"), 100)), pa.int64()))
