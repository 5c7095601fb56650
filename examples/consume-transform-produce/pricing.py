"""The transform of ``enrich.toml``: Arrow in, Arrow out, a whole batch at a time."""

import pyarrow as pa
import pyarrow.compute as pc

PRICES = {"pen": 2, "book": 15}


def priced(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Adds what an order costs; orders of what is not sold go out with no price."""
    each = pa.array([PRICES.get(item) for item in batch.column("item").to_pylist()], pa.int64())
    return batch.append_column("price", pc.multiply(each, batch.column("count")))
