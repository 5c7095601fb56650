"""How long the dashboard's server takes for its pages, small and large: ``python -m bench.dashboard``.

Two turns on one cluster, each by the real command and over HTTP. *Ordinary*: a pipeline that has run, with dead
letters, and nothing else. *Large*: a topic of many records, one of many partitions, and one of huge values beside it.
The time is the server's own (``Server-Timing``): from the question to the finished page. The first asking of each is
told apart, as it pays for connections and templates.

Owns: what is asked, and of what. Neighbour: ``measure``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from confluent_kafka import Producer
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.table import Table

from avow.guarantee import Guarantee
from avow.kafka import metadata
from bench import contenders, measure
from bench.contenders import Task
from bench.decode import record
from bench.measure import Rig
from bench.records import PARTITIONS

TARGET_MS = 200.0  # of an ordinary page
MANY, WIDE, FAT = "many-records", "many-partitions", "huge-values"


@dataclass(frozen=True, slots=True)
class Options:
    records: int
    partitions: int
    value_mb: int
    times: int


@dataclass(frozen=True, slots=True)
class Timed:
    path: str
    status: int
    kb: int
    rows: int  # of its tables
    first_ms: float
    others_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return median(self.others_ms)

    def as_json(self) -> dict[str, Any]:
        others = {"median_ms": round(self.median_ms, 1), "most_ms": round(max(self.others_ms), 1)}
        page = {"path": self.path, "status": self.status, "kb": self.kb, "rows": self.rows}
        return {**page, "first_ms": self.first_ms, **others}


# What is there to be looked at


def pipeline(rig: Rig, console: Console) -> Path:
    """A pipeline that has run, with some dead letters."""
    topic = rig.filled_topic(20_000, console)
    send(rig, topic, ((number % PARTITIONS, b"not JSON") for number in range(20)))
    word = str(Guarantee.EXACTLY_ONCE)
    command = contenders.avow(rig, Task(topic, rig.make_table(), 500_000), word, engine="consumer")
    with console.status("running a pipeline"):
        subprocess.run(command.arguments, env=environment(rig), capture_output=True, check=True, timeout=600)
    return command.folder / "pipeline.toml"


def make(rig: Rig, topic: str, partitions: int, **config: str) -> None:
    client = metadata.admin(rig.cluster.bootstrap)  # held until the answer is there
    new = NewTopic(topic, partitions, 1, config={"min.insync.replicas": "1", **config})
    client.create_topics([new], operation_timeout=120)[topic].result()


def send(rig: Rig, topic: str, records: Iterable[tuple[int, bytes]]) -> None:
    settings = {"compression.type": "lz4", "linger.ms": 50, "message.max.bytes": 64 << 20}
    producer = Producer({"bootstrap.servers": rig.cluster.bootstrap, **settings}, logger=metadata.QUIET)
    for partition, value in records:
        while True:
            try:
                producer.produce(topic, value, partition=partition)
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(300):
        raise RuntimeError(f"{left} records not delivered")


def enlarge(rig: Rig, options: Options, console: Console) -> None:
    with console.status(f"{options.partitions:,} partitions"):
        make(rig, WIDE, options.partitions)
        send(rig, WIDE, ((number, b"{}") for number in range(0, options.partitions, 10)))
    with console.status(f"values of {options.value_mb} MB"):
        make(rig, FAT, 1, **{"max.message.bytes": str(64 << 20)})
        send(rig, FAT, ((0, os.urandom(options.value_mb << 19).hex().encode()) for _ in range(5)))
    with console.status(f"{options.records:,} records"):
        make(rig, MANY, PARTITIONS)
        send(rig, MANY, ((number % PARTITIONS, record(number)) for number in range(options.records)))


def environment(rig: Rig) -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": rig.url, "COLUMNS": "200"}


# Who looks


@contextmanager
def served(rig: Rig, file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "avow", "dashboard", str(file), "--port", "0", "--dir", str(rig.cluster.folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, env=environment(rig), text=True, **pipes)  # type: ignore[call-overload]
    try:
        for line in child.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0].rstrip("/")
                break
    finally:
        child.terminate()
        child.wait(60)


def asked(address: str, path: str, times: int) -> Timed:
    took: list[float] = []
    status, body = 0, b""
    for _ in range(times + 1):
        try:
            answer = urllib.request.urlopen(address + path, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body, status = answer.read(), answer.status
            took.append(float((answer.headers["Server-Timing"] or "dur=nan").partition("dur=")[2]))
    rows = body.partition(b"<tbody>")[2].count(b"<tr")
    return Timed(path, status, len(body) // 1024, rows, took[0], tuple(took[1:]))


def ordinary(rig: Rig, file: Path, times: int) -> list[Timed]:
    name = re.search(r'name = "(.+)"', file.read_text())[1]  # type: ignore[index]
    topic = re.search(r'"topics" = \["(.+)"\]', file.read_text())[1]  # type: ignore[index]
    paths = ["/pipelines", f"/pipelines/{name}", f"/pipelines/{name}/claims", f"/api/pipelines/{name}/charts"]
    paths += [f"/pipelines/{name}/letters", f"/pipelines/{name}/receipt?topic={topic}&partition=0&offset=7"]
    paths += ["/cluster", "/topics", f"/topics/{topic}", f"/topics/{topic}/groups", f"/topics/{topic}/messages"]
    paths += [f"/topics/{topic}/messages/0/7", "/groups", "/transactions", "/evidence", "/explained"]
    with served(rig, file) as address:
        return [asked(address, path, times) for path in paths]


def large(rig: Rig, file: Path, options: Options) -> list[Timed]:
    middle = options.records // PARTITIONS // 2
    paths = ["/cluster", "/topics", "/groups", "/transactions", f"/topics/{WIDE}", f"/topics/{WIDE}/messages"]
    paths += [f"/topics/{MANY}", f"/topics/{MANY}/messages", f"/topics/{MANY}/messages/1/{middle}"]
    paths += [f"/topics/{MANY}/messages?partition=1&at=offset&offset={middle}", f"/topics/{MANY}/messages?q=nowhere"]
    paths += [f"/topics/{FAT}", f"/topics/{FAT}/messages", f"/topics/{FAT}/messages/0/2"]
    with served(rig, file) as address:
        found = [asked(address, path, options.times) for path in paths]
    # A page that is fast because it shows nothing would be no page.
    if empty := [one.path for one in found if one.path.endswith(f"{FAT}/messages") and not one.rows]:
        raise click.ClickException(f"no record was shown: {', '.join(empty)}")
    return found


def table(title: str, timed: list[Timed], target: float | None) -> Table:
    made = Table(title=title)
    for heading in ("page", "median ms", "most ms", "first ms", "KB", ""):
        made.add_column(heading, justify="left" if heading == "page" else "right")
    for one in timed:
        late = target is not None and one.median_ms > target
        mark = "[red]late[/]" if late else "" if one.status == 200 else f"[red]{one.status}[/]"
        numbers = (f"{one.median_ms:.0f}", f"{max(one.others_ms):.0f}", f"{one.first_ms:.0f}", f"{one.kb:,}")
        made.add_row(one.path, *numbers, mark)
    return made


@click.command(help=__doc__)
@click.option("--records", default=10_000_000, show_default=True, help="Of the topic of many.")
@click.option("--partitions", default=5_000, show_default=True, help="Of the wide topic.")
@click.option("--value-mb", default=20, show_default=True, help="Of a huge value.")
@click.option("--times", default=5, show_default=True, help="Each page, after its first time.")
@click.option("--results", default=measure.RESULTS, type=click.Path(path_type=Path), show_default=True)
def main(results: Path, **given: Any) -> None:
    options = Options(**given)
    console = Console()
    where = measure.machine()
    with measure.rig(console) as rig:
        file = pipeline(rig, console)
        small = ordinary(rig, file, options.times)
        console.print(table(f"Ordinary: to reach, {TARGET_MS:.0f} ms", small, TARGET_MS))
        enlarge(rig, options, console)
        big = large(rig, file, options)
    console.print(table("Large", big, None))
    found = {
        "machine": where,
        "options": {name: getattr(options, name) for name in options.__slots__},
        "ordinary": [one.as_json() for one in small],
        "large": [one.as_json() for one in big],
    }
    console.print(str(measure.save(results, "dashboard", found)), highlight=False)


if __name__ == "__main__":
    main()
