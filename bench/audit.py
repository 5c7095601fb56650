"""Is an audit as cheap as the pipeline that it checks? ``python -m bench.audit``

The same topic is drained into each sink by the consumer engine, and then audited, in turn. Both times are of whole
processes, with what starts up; both costs are core-seconds of the process, of the brokers and of PostgreSQL.

Owns: the goal and the files. Neighbours: ``contenders``, ``measure``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import click
from rich.console import Console
from rich.table import Table

from avow.guarantee import Guarantee
from bench import contenders, measure
from bench.decode import SCHEMA
from bench.measure import Command, Rig, Run

SINKS = ("postgres", "kafka", "delta", "iceberg")
COST_AT_MOST = 1.0  # of the run's


@dataclass(frozen=True, slots=True)
class Pair:
    """A run and its audit."""

    run: Run
    audit: Run

    @property
    def problem(self) -> str:
        return self.run.problem or self.audit.problem

    @property
    def ratio(self) -> float:
        return spent(self.audit) / spent(self.run)


def spent(run: Run) -> float:
    """Core-seconds from first to last look."""
    first, last = run.samples[0].cpu_s, run.samples[-1].cpu_s
    return sum(last[group] - first[group] for group in measure.GROUPS)


def pipeline(rig: Rig, topic: str, kind: str) -> Path:
    folder = rig.new_folder(kind)
    sinks: dict[str, dict[str, Any]] = {
        "postgres": {"url": rig.url, "table": f"t_{uuid4().hex[:8]}"},
        "kafka": {"topic": f"out-{uuid4().hex[:8]}"},
        "delta": {"path": str(folder / "t")},
        "iceberg": {"table": "lake.t"},
    }
    decode = {"format": "raw"} if kind == "kafka" else {"format": "json", "schema": SCHEMA}
    lines = [f'name = "bench-{uuid4().hex[:8]}"', f'guarantee = "{Guarantee.EXACTLY_ONCE}"', 'engine = "consumer"']
    sections: dict[str, dict[str, Any]] = {
        "source": {"brokers": rig.cluster.bootstrap, "topics": [topic]},
        "decode": decode,
        "sink": {"kind": kind, **sinks[kind]},
    }
    for section, settings in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    if kind == "iceberg":
        lines += ["[sink.catalog]", f'warehouse = "{folder}/w"']
    file = folder / "pipeline.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def pair(rig: Rig, topic: str, kind: str) -> Pair:
    file = pipeline(rig, topic, kind)
    done = measure.run(contenders.avow_run(file, engine="consumer"), rig)
    audit = Command([sys.executable, "-m", "avow", "audit", str(file), "--out", "-"], file.parent)
    return Pair(done, measure.run(audit, rig))


@click.command(help=__doc__)
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--only", default=",".join(SINKS), show_default=True, help="Sinks, comma-separated.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(records: int, rounds: int, only: str, results: Path) -> None:
    console = Console()
    where = measure.machine()
    kinds = only.split(",")
    found: dict[str, list[Pair]] = {kind: [] for kind in kinds}
    with measure.rig(console) as rig:
        topic = rig.filled_topic(records, console)
        for number in range(1, rounds + 1):
            for kind in kinds:
                with console.status(f"round {number} of {rounds}: {kind}", refresh_per_second=1):
                    found[kind].append(pair(rig, topic, kind))
    table = Table(title=f"{records:,} records, exactly-once, consumer engine, medians over the rounds")
    for title in ("sink", "run: s", "core-s", "audit: s", "core-s", "audit / run, core-s", f"at most {COST_AT_MOST:g}"):
        table.add_column(title, justify="right")
    for kind, pairs in found.items():
        sound = [each for each in pairs if not each.problem]
        if not sound:
            table.add_row(kind, *["-"] * 5, pairs[0].problem)
            continue
        numbers = [
            median(value(each) for each in sound)
            for value in (
                lambda each: each.run.ended - each.run.started,
                lambda each: spent(each.run),
                lambda each: each.audit.ended - each.audit.started,
                lambda each: spent(each.audit),
                lambda each: each.ratio,
            )
        ]
        verdict = measure.verdict([each.ratio for each in sound], COST_AT_MOST, at_most=True)
        table.add_row(kind, *(f"{number:.2f}" for number in numbers), verdict)
    console.print(table)
    result = {
        "machine": where,
        "records": records,
        "rounds": {
            kind: [
                {"run_core_s": spent(each.run), "audit_core_s": spent(each.audit), "problem": each.problem}
                for each in pairs
            ]
            for kind, pairs in found.items()
        },
    }
    console.print(str(measure.save(results, "audit", result)), highlight=False)


if __name__ == "__main__":
    main()
