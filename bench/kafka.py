"""avow from topic to topic beside Spark's own Kafka sink, side by side: ``python -m bench.kafka``.

One run on one cluster: the same topic is copied by each contender in turn, round after round, into a fresh topic each
time, records as they are. Ratios are made within a round, and the median over the rounds counts. The output topics have
the broker's append time, which says when records came; what was committed is read afterwards.

Owns: who takes part, the ratios and their targets. Neighbours: ``measure`` (what a process costs), ``kafka_copy``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import click
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.table import Table

from avow.guarantee import Guarantee
from avow.kafka import metadata
from avow.local import jars
from bench import contenders, measure
from bench.measure import Command, Commit, Outcome, Rig, Round
from bench.records import PARTITIONS

EXACTLY, LEAST = (f"avow {word}" for word in (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE))
SPARK, TUNED = "Spark's Kafka sink", "Spark's Kafka sink, tuned"
# What exactly-once is to reach, as a multiple of each other contender's records/s.
TARGETS = {SPARK: 1.0, LEAST: 0.98, TUNED: 1.5}
TUNING = {"compression.type": "lz4", "linger.ms": "20", "batch.size": "1000000"}
SLOT_S = 0.1  # records that came within it count as one commit


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    rounds: int
    max_records: int
    master: str
    memory: str


def avow(rig: Rig, topic: str, output: str, options: Options, guarantee: str) -> Command:
    """``avow run --once`` as a person uses it."""
    folder = rig.new_folder("avow")
    file = folder / "pipeline.toml"
    file.write_text(
        f'name = "bench-{uuid4().hex[:8]}"\nguarantee = "{guarantee}"\n'
        f'[source]\nbrokers = "{rig.cluster.bootstrap}"\ntopics = ["{topic}"]\n'
        f'[decode]\nformat = "raw"\n[sink]\nkind = "kafka"\ntopic = "{output}"\n'
        f"[batch]\nmax_records = {options.max_records}\n"
        f'[spark]\nmaster = "{options.master}"\n"driver.memory" = "{options.memory}"\n'
    )
    return contenders.avow_run(file)


def spark(rig: Rig, topic: str, output: str, options: Options, given: dict[str, str]) -> Command:
    folder = rig.new_folder("copy")
    settings = {
        "topic": topic,
        "output": output,
        "brokers": rig.cluster.bootstrap,
        "max_records": options.max_records,
        "options": given,
        "checkpoint": str(folder / "copy-checkpoint"),
        "spark": {
            "spark.master": options.master,
            "spark.driver.memory": options.memory,
            "spark.jars": ",".join(map(str, jars.classpath("bench"))),
        },
    }
    return Command([sys.executable, "-m", "bench.kafka_copy", json.dumps(settings)], folder)


Start = Callable[[Rig, str, str, Options], Command]
FIELD: dict[str, Start] = {
    EXACTLY: lambda rig, topic, output, options: avow(rig, topic, output, options, Guarantee.EXACTLY_ONCE),
    LEAST: lambda rig, topic, output, options: avow(rig, topic, output, options, Guarantee.AT_LEAST_ONCE),
    SPARK: lambda rig, topic, output, options: spark(rig, topic, output, options, {}),
    TUNED: lambda rig, topic, output, options: spark(rig, topic, output, options, TUNING),
}


def one(rig: Rig, topic: str, start: Start, options: Options) -> Outcome:
    output = f"out-{uuid4().hex[:8]}"
    client = metadata.admin(rig.cluster.bootstrap)
    made = NewTopic(output, PARTITIONS, config={"message.timestamp.type": "LogAppendTime"})
    client.create_topics([made], operation_timeout=30)[output].result()
    run = measure.run(start(rig, topic, output, options), rig)
    commits, problem = look(rig, output, options.records)
    client.delete_topics([output], operation_timeout=30)[output].result()
    return Outcome(run, commits, run.problem or problem)


def look(rig: Rig, output: str, expected: int) -> tuple[list[Commit], str]:
    """When records came, and what is wrong with them; empty if every one is there once."""
    consumer = Consumer(
        {
            "bootstrap.servers": rig.cluster.bootstrap,
            "group.id": "bench-look",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        },
        logger=metadata.QUIET,
    )
    slots: Counter[int] = Counter()
    seen: set[int] = set()
    left = set(range(PARTITIONS))
    consumer.assign([TopicPartition(output, number, 0) for number in left])
    while left:
        for message in consumer.consume(10_000, 5):
            error = message.error()
            if error is None:
                slots[int(message.timestamp()[1] / 1000 / SLOT_S)] += 1
                seen.add(json.loads(message.value() or b"{}")["id"])
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(message.partition() or 0)
    consumer.close()
    rows = sum(slots.values())
    problem = "" if rows == len(seen) == expected else f"{rows:,} records, {len(seen):,} different, of {expected:,}"
    return [Commit((slot + 1) * SLOT_S, count) for slot, count in sorted(slots.items())], problem


def compare(rig: Rig, options: Options, console: Console) -> list[Round]:
    topic = rig.filled_topic(options.records, console)
    turns = {name: partial(one, rig, topic, start, options) for name, start in FIELD.items()}
    return measure.take_turns(options.rounds, turns, console)


def ratios(rounds: list[Round], against: str, *, warm: bool = False) -> list[float]:
    """By records/s, of all or after the first batch."""
    pairs = [(each[EXACTLY], each[against]) for each in rounds]
    spans = [(a.warm, b.warm) if warm else (a.drain, b.drain) for a, b in pairs if not a.problem and not b.problem]
    return [a.rows_per_s / b.rows_per_s for a, b in spans if a and b]


def speed_table(rounds: list[Round]) -> Table:
    table = Table(title="medians over the rounds", caption="start-up is not in records/s; wall has it")
    table.add_column("contender")
    for title in ("records/s", "after batch 1", "wall s", "core-s per million", "output"):
        table.add_column(title, justify="right")
    for name in FIELD:
        sound, told = measure.sound(rounds, name)
        if not sound:
            table.add_row(name, *["-"] * 4, told)
            continue
        warm = [outcome.warm.rows_per_s for outcome in sound if outcome.warm]
        table.add_row(
            name,
            f"{median(outcome.drain.rows_per_s for outcome in sound):,.0f}",
            f"{median(warm):,.0f}" if warm else "-",
            f"{median(outcome.whole.seconds for outcome in sound):.1f}",
            f"{median(outcome.drain.core_s_per_million() for outcome in sound):.1f}",
            told,
        )
    return table


def ratio_table(rounds: list[Round]) -> Table:
    table = Table(title=f"{EXACTLY} against the others, by records/s")
    for title in ("against", "ratio", "each round", "to reach", ""):
        table.add_column(title)
    for against, target in TARGETS.items():
        for warm in (False, True):
            found = ratios(rounds, against, warm=warm)
            middle = f"{median(found):.2f}" if found else "-"
            each = ", ".join(f"{ratio:.2f}" for ratio in found)
            name = "… after batch 1" if warm else against
            table.add_row(name, middle, each, f"{target:g}", measure.verdict(found, target))
    return table


@click.command(help=__doc__)
@click.option("--records", default=2_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--max-records", default=500_000, show_default=True, help="Of one batch, for all.")
@click.option("--master", default=contenders.MASTER, show_default=True, help="Spark's, for all.")
@click.option("--memory", default=contenders.MEMORY, show_default=True, help="Of the driver's JVM, for all.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(results: Path, **given: Any) -> None:
    options = Options(**given)
    console = Console()
    where = measure.machine()
    with measure.rig(console) as rig:
        rounds = compare(rig, options, console)
    console.print(speed_table(rounds), ratio_table(rounds))
    found = {
        "machine": where,
        "options": {name: getattr(options, name) for name in options.__slots__},
        "rounds": [{name: outcome.as_json() for name, outcome in each.items()} for each in rounds],
        "ratios": {against: [round(r, 3) for r in ratios(rounds, against)] for against in TARGETS},
    }
    console.print(str(measure.save(results, "kafka", found)), highlight=False)


if __name__ == "__main__":
    main()
