"""A scenario into a lake: its sink, and what is in its tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl

from avow import sinks
from avow.audit.auditor import audit
from avow.audit.report import AuditReport
from avow.ledger import NOTHING, Counts
from tests.fix_pipeline import Scenario, session_spark
from tests.fix_sinks import lake_frame


def sink(s: Scenario, kind: str, *lines: str) -> str:
    where = {
        "delta": f'path = "{s.folder}/{s.table}"',
        "iceberg": f'table = "lake.{s.table}"\ncatalog = {{ warehouse = "{s.folder}/warehouse" }}',
    }[kind]
    return "\n".join([f'kind = "{kind}"', where, *lines])


def frame(s: Scenario, kind: str, suffix: str = "") -> pl.DataFrame:
    return lake_frame(kind, s.folder, f"{s.table}{suffix}")


def ids(s: Scenario, kind: str) -> Counter[int]:
    return Counter(frame(s, kind)["id"].to_list())


def totals(s: Scenario, path: Any) -> Counts:
    with sinks.driver_sink(s.load(path)) as store:
        return sum((entry.counts for entry in store.entries().values()), NOTHING)


def audited(s: Scenario, path: Any) -> AuditReport:
    pipeline = s.load(path)
    return audit(pipeline, lambda: session_spark(pipeline))
