"""A scenario into PostgreSQL: its sink, and what is in its tables besides rows."""

from __future__ import annotations

from tests.fix_pipeline import Scenario


def sink(s: Scenario, *lines: str) -> str:
    return "\n".join(['kind = "postgres"', 'url = "${env:DATABASE_URL}"', f'table = "{s.table}"', *lines])


def dead(s: Scenario) -> list[tuple[object, ...]]:
    return s.rows('SELECT partition, "offset", reason FROM avow.dead_letters WHERE pipeline = %s ORDER BY 1, 2', s.name)


def totals(s: Scenario) -> tuple[int, ...]:
    found = s.rows(
        "SELECT sum(read)::int, sum(written)::int, sum(dead)::int, sum(skipped)::int FROM avow.ledger"
        " WHERE pipeline = %s",
        s.name,
    )
    return found[0]
