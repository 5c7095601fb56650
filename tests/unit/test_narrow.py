"""The narrow check reads what EXPLAIN EXTENDED says; the texts here are Spark 4.1's own."""

from __future__ import annotations

import pytest

from avow.engines.sql import refuse_wide
from avow.errors import ConfigError

RECORDS = """\
   :- CTERelationDef 3, false
   :  +- SubqueryAlias records
   :     +- Project [id#30L]
   :        +- SubqueryAlias _pyspark_connect_temp_view_f017
   :           +- View (`_pyspark_connect_temp_view_f017`, [id#30L])
   :              +- MapInArrow <lambda>(id#18L)#29, [id#30L], false
   :                 +- Range (0, 3, step=1, splits=Some(2))
"""
NARROW = "      +- SubqueryAlias records\n         +- CTERelationRef 3, true, [id#30L], false, false\n"
OPTIMIZED = "MapInArrow <lambda>(id#40L)#29, [id#41L], false\n+- Range (0, 3, step=1, splits=Some(2))\n"


def explained(query: str, optimized: str = OPTIMIZED) -> str:
    return (
        "== Parsed Logical Plan ==\n'Project [*]\n+- 'Sort ['id ASC NULLS FIRST], true\n\n== Analyzed Logical Plan ==\n"
        f"id: bigint\nProject [id#30L]\n+- WithCTE\n{RECORDS}{query}\n== Optimized Logical Plan ==\n{optimized}\n"
        "== Physical Plan ==\n*(1) Sort [id#1]\n"
    )


def test_a_narrow_query_passes_whatever_its_constants_say() -> None:
    refuse_wide(explained(f"   +- Project [id#30L]\n{NARROW}"))
    constant = "   +- Project [id#30L, upper(\n  \n) AS z#31, \n== Optimized Logical Plan ==\n x AS h]\n"
    refuse_wide(explained(constant + NARROW))


@pytest.mark.parametrize(
    ("query", "named"),
    [
        (f"   +- Sort [id#30L ASC NULLS FIRST], true\n{NARROW}", "Sort"),
        (f"   +- GlobalLimit 3\n{NARROW}", "GlobalLimit"),
        (f"   :- Join Inner, (id#1L = id#2L)\n{NARROW}", "Join"),
        (f"   +- Project [x\n== Optimized Logical Plan ==\n AS x]\n      +- Window [rank()]\n{NARROW}", "Window"),
        (
            "   +- Filter id#30L IN (list#15 [])\n      :  +- Project [id#18L]\n      :     +- Range (0, 2, step=1)\n"
            + NARROW,
            "Subquery",
        ),
    ],
)
def test_what_needs_more_than_one_record_is_named(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"transform\.sql: .*{named} needs more than one record"):
        refuse_wide(explained(query))


def test_a_query_that_reads_no_record_and_a_plan_cut_short_are_refused() -> None:
    query = f"   +- Filter false\n{NARROW}"
    with pytest.raises(ConfigError, match="leaves every record out"):
        refuse_wide(explained(query, "LocalRelation <empty>, [id#41L]\n"))
    with pytest.raises(ConfigError, match="does not show its whole plan"):
        refuse_wide(explained(query).split("== Physical")[0])
