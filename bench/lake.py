"""avow into Delta and Iceberg against Spark's own writers, side by side: ``python -m bench.lake``.

One run on one cluster: the same topic is drained by each contender in turn, round after round, into a fresh folder each
time. Ratios are made within a round and the median over the rounds counts. Beside it, without Kafka: what a commit
costs after a thousand of them, and an upsert of a hundred thousand rows into two million. A contender that does not
work on this Spark is shown with the reason.

Owns: who takes part, the ratios and their targets. Neighbours: ``measure``, ``contenders``, ``spark_lake``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import click
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table import StaticTable
from rich.console import Console
from rich.table import Table

from avow import sinks
from avow.arrow import arrow_fields
from avow.engines.task import BatchWork, commit_task_outputs, decoded, deliver
from avow.guarantee import Guarantee
from avow.kafka.batches import HEADERS
from avow.kafka.log import TopicPartition
from avow.ledger import Entry, OffsetRange
from avow.local import jars
from avow.plan import load_checked
from avow.schema import parse
from avow.settings import Lineage, PipelineConfig
from avow.sinks.base import CommittingSink
from avow.sinks.delta.table import DeltaLakeTable
from avow.sinks.lake.files import location_of
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot
from avow.sinks.lake.task import DELETED
from bench import measure
from bench.contenders import MASTER, MEMORY, avow_run
from bench.decode import SCHEMA, record
from bench.measure import Command, Commit, Outcome, Rig, Round

OURS, AT_LEAST, ICEBERG = "avow delta", "avow delta at-least-once", "avow iceberg"
DELTA_SPARK, PARQUET, ICEBERG_SPARK = "delta-spark", "df.write.parquet", "iceberg-spark"


@dataclass(frozen=True, slots=True)
class Target:
    of: str
    against: str
    least: float
    what: str = "rows/s"


TARGETS = (
    Target(OURS, DELTA_SPARK, 6.0),
    Target(OURS, PARQUET, 1.5),
    Target(OURS, AT_LEAST, 0.98),
    Target(ICEBERG, ICEBERG_SPARK, 1.0),
    Target(DELTA_SPARK, OURS, 2.0, "core-seconds"),
)


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    rounds: int
    max_records: int
    commits: int
    upsert: int
    master: str
    memory: str


# Who takes part. Each gives the command, and how to read what it wrote: commits in order, and the ids.

Wrote = Callable[[], tuple[list[Commit], pa.ChunkedArray]]


def ours(rig: Rig, options: Options, topic: str, kind: str, guarantee: Guarantee) -> tuple[Command, Wrote]:
    folder = rig.new_folder("lake")
    sink = {"kind": "delta", "path": str(folder / "t")}
    if kind == "iceberg":
        sink = {"kind": "iceberg", "table": "lake.t"}
    lines = [f'name = "bench-{uuid4().hex[:8]}"', f'guarantee = "{guarantee}"', "[source]"]
    lines += [f'brokers = "{rig.cluster.bootstrap}"', f'topics = ["{topic}"]', "[decode]", 'format = "json"']
    lines += [f"schema = {json.dumps(SCHEMA)}", "[batch]", f"max_records = {options.max_records}", "[spark]"]
    lines += [f'master = "{options.master}"', f'"driver.memory" = "{options.memory}"', "[sink]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in sink.items()]
    lines += ["[sink.catalog]", f'warehouse = "{folder}/w"'] if kind == "iceberg" else []
    file = folder / "pipeline.toml"
    file.write_text("\n".join(lines) + "\n")
    if kind == "delta":
        return avow_run(file), lambda: of_delta(folder / "t")
    return avow_run(file), lambda: of_iceberg(folder / "w/lake/t")


def theirs(rig: Rig, options: Options, topic: str, kind: str) -> tuple[Command, Wrote]:
    folder = rig.new_folder(kind)
    settings = {
        "topic": topic,
        "brokers": rig.cluster.bootstrap,
        "schema": SCHEMA,
        "bare": False,
        "max_records": options.max_records,
        "format": kind,
        "path": str(folder / "t"),
        "checkpoint": str(folder / "checkpoint"),
        "spark": _spark(options),
    }
    command = Command([sys.executable, "-m", "bench.spark_lake", json.dumps(settings)], folder)
    path = folder / "t"
    reads: dict[str, Wrote] = {
        "delta": lambda: of_delta(path),
        "parquet": lambda: of_files(path),
        "iceberg": lambda: of_iceberg(path / "db/t"),
    }
    return command, reads[kind]


def _spark(options: Options) -> dict[str, str]:
    found = [*jars.classpath("bench"), *jars.classpath("lake")]
    listed = ",".join(map(str, found))
    return {"spark.master": options.master, "spark.driver.memory": options.memory, "spark.jars": listed}


def of_delta(path: Path) -> tuple[list[Commit], pa.ChunkedArray]:
    commits = []
    for file in sorted((path / "_delta_log").glob("*.json")):
        adds = [json.loads(line)["add"] for line in file.read_text().splitlines() if line.startswith('{"add"')]
        rows = sum(json.loads(add["stats"])["numRecords"] for add in adds)
        commits += [Commit(file.stat().st_mtime, rows)] if rows else []
    return commits, DeltaTable(path).to_pyarrow_table(columns=["id"])["id"]


def of_iceberg(path: Path) -> tuple[list[Commit], pa.ChunkedArray]:
    newest = max((path / "metadata").glob("*.metadata.json"), key=lambda file: file.stat().st_mtime_ns)
    table = StaticTable.from_metadata(str(newest))
    commits = []
    for snapshot in table.metadata.snapshots:
        assert snapshot.summary is not None
        rows = int(snapshot.summary.additional_properties.get("added-records", "0"))
        commits += [Commit(snapshot.timestamp_ms / 1000, rows)] if rows else []
    paths = [task.file.file_path.removeprefix("file://").removeprefix("file:") for task in table.scan().plan_files()]
    return commits, ds.dataset(paths).to_table(columns=["id"])["id"]


def of_files(path: Path) -> tuple[list[Commit], pa.ChunkedArray]:
    """Every file a commit: Spark's batches end when their last file does."""
    files = sorted(path.rglob("*.parquet"), key=lambda file: file.stat().st_mtime)
    commits = [Commit(file.stat().st_mtime, pq.read_metadata(file).num_rows) for file in files]
    return commits, ds.dataset(files).to_table(columns=["id"])["id"]


def field(rig: Rig, options: Options, topic: str) -> dict[str, Callable[[], tuple[Command, Wrote]]]:
    exactly, least = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
    return {
        OURS: lambda: ours(rig, options, topic, "delta", exactly),
        AT_LEAST: lambda: ours(rig, options, topic, "delta", least),
        ICEBERG: lambda: ours(rig, options, topic, "iceberg", exactly),
        DELTA_SPARK: lambda: theirs(rig, options, topic, "delta"),
        PARQUET: lambda: theirs(rig, options, topic, "parquet"),
        ICEBERG_SPARK: lambda: theirs(rig, options, topic, "iceberg"),
    }


def one(rig: Rig, start: Callable[[], tuple[Command, Wrote]], expected: int) -> Outcome:
    command, wrote = start()
    run = measure.run(command, rig)
    if run.problem:
        return Outcome(run, [], run.problem)
    commits, ids = wrote()
    different = pc.count_distinct(ids).as_py()
    wrong = "" if len(ids) == different == expected else f"{len(ids):,} rows, {different:,} different, of {expected:,}"
    return Outcome(run, commits, wrong)


def compare(rig: Rig, options: Options, console: Console) -> list[Round]:
    topic = rig.filled_topic(options.records, console)
    turns = {name: partial(one, rig, start, options.records) for name, start in field(rig, options, topic).items()}
    return measure.take_turns(options.rounds, turns, console)


def value(outcome: Outcome, what: str) -> float:
    return outcome.drain.rows_per_s if what == "rows/s" else outcome.drain.core_s_per_million()


def ratio(target: Target, rounds: list[Round]) -> float | None:
    pairs = [(each[target.of], each[target.against]) for each in rounds]
    found = [value(a, target.what) / value(b, target.what) for a, b in pairs if not (a.problem or b.problem)]
    return median(found) if found else None


# Without Kafka.

Costs = dict[str, dict[str, float]]
FEW = 20  # of commits over which the first ones are measured
MANY = 100  # and the last ones: upkeep that comes every so often has its share in them
PARTITIONS = (1, 12)  # of the topic whose positions a commit carries


def commit_cost(folder: Path, count: int) -> Costs:
    """Milliseconds of a commit: of the first ones, and of those after ``count``. By format and number of partitions."""
    told = {}
    for kind in ("delta", "iceberg"):
        for partitions in PARTITIONS:
            took = _commits_ms(folder, kind, partitions, count + MANY)
            first, last = took[:FEW], took[-MANY:]
            told[f"{kind}, {partitions} partition{'s'[: partitions - 1]}"] = {
                "first_ms": mean(first),
                "last_ms": mean(last),
                "first_median_ms": median(first),
                "last_median_ms": median(last),
                "last_worst_ms": max(last),
            }
    return told


def _commits_ms(folder: Path, kind: str, partitions: int, count: int) -> list[float]:
    pipeline = _local_pipeline(folder, kind, partitions)
    with sinks.driver_sink(pipeline) as store:
        store.prepare()
        store.prepare_table(parse(SCHEMA).fields, rest=False)
        run = store.open_run()
        store.adopt({TopicPartition("t", number): Entry(0, "id", run) for number in range(partitions)})
        assert isinstance(store, CommittingSink)
        return [_commit_ms(store, pipeline, run, number, partitions) for number in range(count)]


def _commit_ms(store: CommittingSink, pipeline: PipelineConfig, run: int, number: int, partitions: int) -> float:
    """One commit: a file of one row and a position, for each partition."""
    planned = {TopicPartition("t", p): OffsetRange("t", p, number, number + 1) for p in range(partitions)}
    work = BatchWork(pipeline, run, number, planned, store.task_context())
    staged = []
    for one in planned.values():
        read = decoded(partial(_read, number), pipeline)
        report = deliver(read, one, work, sinks.task_sink(pipeline, run, work.task_context))
        assert report.task_output is not None
        staged.append(report.task_output)
    began = time.monotonic()
    commit_task_outputs(staged, work, store)
    return 1000 * (time.monotonic() - began)


def _read(number: int, todo: OffsetRange) -> Iterator[pa.RecordBatch]:
    columns: dict[str, pa.Array] = {
        "topic": pa.array([todo.topic]),
        "partition": pa.array([todo.partition], pa.int32()),
        "offset": pa.array([number], pa.int64()),
        "timestamp": pa.array([number], pa.timestamp("us", "UTC")),
        "key": pa.nulls(1, pa.binary()),
        "value": pa.array([record(number)], pa.binary()),
        "headers": pa.nulls(1, HEADERS),
    }
    yield pa.RecordBatch.from_pydict(columns)


def _local_pipeline(folder: Path, kind: str, number: int) -> PipelineConfig:
    where = f'path = "{folder}/t{number}"'
    if kind == "iceberg":
        where = f'table = "b.t{number}"\ncatalog = {{ warehouse = "{folder}/w" }}'
    file = folder / f"{kind}-{number}.toml"
    file.write_text(
        f'name = "bench"\nguarantee = "exactly-once"\n[source]\nbrokers = "localhost:1"\ntopics = ["t"]\n[decode]\n'
        f'format = "json"\nschema = {json.dumps(SCHEMA)}\n[sink]\nkind = "{kind}"\n{where}\n'
    )
    return load_checked(file, {})


@dataclass(frozen=True, slots=True)
class Upsert:
    """Seconds for the same changes into two tables, one after the other. The first has to load classes too."""

    first_s: float = 0
    second_s: float = 0
    problem: str = ""


def upsert_cost(folder: Path, options: Options) -> dict[str, Upsert]:
    """By our merge, and by delta-spark's MERGE, which has no guard of offsets to check."""
    existing, changes = options.records, options.upsert
    step = max(1, existing // changes)
    before, source = _payments(range(existing)), _payments(range(0, 2 * changes * step, 2 * step))
    told = {}
    for name in (OURS, DELTA_SPARK):
        paths = [folder / f"{name.replace(' ', '-')}-{number}" for number in (1, 2)]
        for path in paths:
            write_deltalake(path, before)
        if name == OURS:
            found = Upsert(_our_merge(paths[0], source), _our_merge(paths[1], source))
        else:
            found = _their_merge(paths, source, folder / "changes.parquet", options)
        told[name] = found if found.problem else replace(found, problem=_wrong(paths, existing, source))
    return told


def _wrong(paths: list[Path], existing: int, source: pa.Table) -> str:
    fresh = pc.sum(pc.greater_equal(source["id"], existing)).as_py()
    for path in paths:
        there = DeltaTable(path).to_pyarrow_table(columns=["id", "_kafka_offset"])
        changed = pc.sum(pc.greater_equal(there["_kafka_offset"], LATER)).as_py()
        if (there.num_rows, changed) != (existing + fresh, source.num_rows):
            return f"{there.num_rows:,} rows, {changed:,} changed, of {existing + fresh:,} and {source.num_rows:,}"
    return ""


def _their_merge(paths: list[Path], source: pa.Table, changes: Path, options: Options) -> Upsert:
    pq.write_table(source, changes)
    settings = {"format": "delta", "paths": [str(path) for path in paths], "changes": str(changes)}
    command = [sys.executable, "-m", "bench.spark_lake", json.dumps({**settings, "spark": _spark(options)})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=measure.ROOT)
    if done.returncode:
        return Upsert(problem=done.stderr.splitlines()[-1])
    return Upsert(*json.loads(done.stdout.splitlines()[-1])["seconds"])


def _our_merge(path: Path, source: pa.Table) -> float:
    table = DeltaLakeTable(location_of(str(path), {}), {}, "bench", shown=str(path))
    table.load()
    lineage = Lineage("_kafka_topic", "_kafka_partition", "_kafka_offset", "_kafka_timestamp")
    rows = source.append_column(DELETED, pa.repeat(False, source.num_rows))
    began = time.monotonic()
    table.merge(rows, ["id"], lineage, LedgerSnapshot(), "bench")
    return time.monotonic() - began


LATER = 10**9  # offsets of changes: later than those that are there, so that the guard lets every one of them through


def _payments(ids: range) -> pa.Table:
    count = len(ids)
    columns: dict[str, pa.Array] = {}
    for one in arrow_fields(parse(SCHEMA).fields):
        if one.name == "id":
            columns["id"] = pa.array(ids, pa.int64())
        elif pa.types.is_string(one.type):
            columns[one.name] = pa.array([f"{one.name} {n}" for n in ids], pa.string())
        else:
            columns[one.name] = pa.nulls(count, one.type)
    lineage = {
        "_kafka_topic": pa.repeat(pa.scalar("t"), count),
        "_kafka_partition": pa.repeat(pa.scalar(0, pa.int32()), count),
        "_kafka_offset": pa.array(ids, pa.int64()),
        "_kafka_timestamp": pa.nulls(count, pa.timestamp("us", "UTC")),
    }
    lineage["_kafka_offset"] = pc.add(lineage["_kafka_offset"], LATER if ids.step > 1 else 0)
    return pa.table(columns | lineage)


def shown(rounds: list[Round]) -> Table:
    table = Table("contender", "rows/s", "core-s per million", "wall s", "table", title="medians over the rounds")
    for name in rounds[0]:
        sound = [each[name] for each in rounds if not each[name].problem]
        if not sound:
            table.add_row(name, "-", "-", "-", rounds[0][name].problem)
            continue
        speed, cost = (median(value(outcome, what) for outcome in sound) for what in ("rows/s", "core-seconds"))
        wall = median(outcome.whole.seconds for outcome in sound)
        table.add_row(name, f"{speed:,.0f}", f"{cost:.1f}", f"{wall:.1f}", "right")
    return table


def _upsert_ratio(upserts: dict[str, Upsert], which: str) -> tuple[str, str]:
    problem = " ".join(f"{name}: {upsert.problem}" for name, upsert in upserts.items() if upsert.problem)
    if problem:
        return f"unknown: {problem}", "4"
    found = getattr(upserts[DELTA_SPARK], which) / getattr(upserts[OURS], which)
    return f"{found:.2f} {'reached' if found >= 4 else 'missed'}", "4"


def ratios(options: Options, rounds: list[Round], commits: Costs, upserts: dict[str, Upsert]) -> Table:
    table = Table("of", "against", "what", "ratio", "to reach")
    for target in TARGETS if rounds else ():
        reached = ratio(target, rounds)
        told = "unknown" if reached is None else f"{reached:.2f} {'reached' if reached >= target.least else 'missed'}"
        table.add_row(target.of, target.against, target.what, told, f"{target.least:g}")
    for name, cost in commits.items():
        growth = cost["last_ms"] / cost["first_ms"]
        told = f"{growth:.2f} {'reached' if growth <= 3 else 'missed'}"
        table.add_row(f"{name}, commit after {options.commits:,}", "the first", "ms", told, "at most 3")
    for which in ("first_s", "second_s") if upserts else ():
        table.add_row(f"upsert, {DELTA_SPARK}", OURS, which, *_upsert_ratio(upserts, which))
    return table


def saved(rounds: list[Round], commits: Costs, upserts: dict[str, Upsert]) -> dict[str, Any]:
    found = [(target, ratio(target, rounds)) for target in TARGETS if rounds]
    return {
        "rounds": [{name: outcome.as_json() for name, outcome in each.items()} for each in rounds],
        "ratios": [{"of": t.of, "against": t.against, "what": t.what, "ratio": r, "target": t.least} for t, r in found],
        "commit_ms": commits,
        "upsert_s": {name: asdict(upsert) for name, upsert in upserts.items()},
    }


PARTS = ("append", "commits", "upsert")


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(PARTS), help="One part, and not the others. Commits need no cluster.")
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--max-records", default=500_000, show_default=True, help="Of one batch, for all.")
@click.option("--commits", default=1_000, show_default=True, help="After how many a commit is measured again.")
@click.option("--upsert", default=100_000, show_default=True, help="Rows to be brought in by key.")
@click.option("--master", default=MASTER, show_default=True)
@click.option("--memory", default=MEMORY, show_default=True)
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(only: str | None, results: Path, **given: Any) -> None:
    options = Options(**given)
    console = Console()
    where = measure.machine()
    wanted = PARTS if only is None else (only,)
    rounds: list[Round] = []
    if only != "commits":
        jars.classpath("lake")
    if "append" in wanted:
        with measure.rig(console) as rig:
            rounds = compare(rig, options, console)
        console.print(shown(rounds))
    with TemporaryDirectory(prefix="avow-bench-") as folder:
        commits = commit_cost(Path(folder), options.commits) if "commits" in wanted else {}
        upserts = upsert_cost(Path(folder), options) if "upsert" in wanted else {}
    console.print(ratios(options, rounds, commits, upserts))
    console.print({"commit_ms": commits, "upsert_s": upserts})
    result = {"machine": where, "options": asdict(options), **saved(rounds, commits, upserts)}
    name = "lake" if only is None else f"lake-{only}"
    console.print(str(measure.save(results, name, result)), highlight=False)


if __name__ == "__main__":
    main()
