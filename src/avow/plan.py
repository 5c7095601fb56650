"""What a pipeline promises, hop by hop, as far as it can be known without I/O.

``load_checked`` reads a pipeline file, ``declare_checked`` takes the same as values; both refuse a guarantee that the
sink does not offer in its mode. ``plan`` explains what is left.

Owns: the explanation and that refusal. Must not know: Kafka, Spark or a database; it opens nothing. Its neighbours
are ``settings`` (the tree), ``sinks`` (the offers) and ``guarantee`` (the order of acts).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from avow import formats, native
from avow.guarantee import Act, Anomaly, Guarantee
from avow.settings import TOPIC, PipelineConfig, Problem, TableSinkConfig, declared, load
from avow.sinks import SINKS, SinkPlugin, plugin_of

TABLES_SHOWN = 10  # of topics with a table each


@dataclass(frozen=True, slots=True)
class Hop:
    """One stage on a record's way."""

    name: str
    does: str
    promises: tuple[str, ...] = ()
    permits: tuple[str, ...] = ()  # what may happen here and is not a broken promise
    assumes: tuple[str, ...] = ()  # what must hold outside avow


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline explained. Holds no value from the environment, only its ``${env:NAME}``."""

    pipeline: str
    guarantee: Guarantee
    meaning: str
    permits: tuple[Anomaly, ...]
    hops: tuple[Hop, ...]
    warnings: tuple[str, ...]
    native: str  # whether avow-native is used

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """For a person: a paragraph for each hop, no line longer than ``width`` if its words allow."""
        permits = ", ".join(self.permits) or "nothing"
        lines = [f"{self.pipeline}: {self.guarantee}", *_wrapped(self.meaning, width)]
        lines += _wrapped(f"Permitted anomalies: {permits}.", width)
        for number, hop in enumerate(self.hops, start=1):
            lines += ["", f"{number}. {hop.name}", *_wrapped(hop.does, width, "   ")]
            labelled = [("promises", hop.promises), ("permits", hop.permits), ("assumes", hop.assumes)]
            for label, texts in labelled:
                for sentence in texts:
                    lines += _wrapped(sentence, width, f"   {label:8} ")
        lines += ["", *_wrapped(self.native, width)]
        if self.warnings:
            lines += ["", "Warnings"]
        for warning in self.warnings:
            lines += _wrapped(warning, width, "   ! ")
        return "\n".join(lines)


def _wrapped(text: str, width: int, label: str = "") -> list[str]:
    """The text in lines; the label stands before the first of them."""
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)


def load_checked(
    path: Path,
    env: Mapping[str, str] = os.environ,
    sinks: Mapping[str, SinkPlugin] = SINKS,
    *,
    engine: str | None = None,
) -> PipelineConfig:
    """The pipeline of a file, if everything that can be checked without I/O is right."""
    return load(path, env, check=partial(_problems, sinks=sinks), engine=engine)


def declare_checked(document: dict[str, Any], env: Mapping[str, str]) -> PipelineConfig:
    """The pipeline of values that were never in a file, checked like one that was."""
    return declared(document, env, check=partial(_problems, sinks=SINKS))


def _problems(pipeline: PipelineConfig, sinks: Mapping[str, SinkPlugin]) -> Iterator[Problem]:
    sink = sinks[pipeline.sink.kind]
    mode = pipeline.sink.mode
    offered = sink.offered(mode)
    if not offered:
        yield Problem(("sink", "mode"), f"{sink.title} does not offer {mode}", f"modes: {', '.join(sink.offers)}")
    elif pipeline.guarantee not in offered:
        words = ", ".join(word for word in Guarantee if word in offered)
        yield Problem(("guarantee",), f"{sink.title} cannot keep it with {mode}", f"with {mode}: {words}")
    yield from sink.problems(pipeline)


def plan(pipeline: PipelineConfig) -> Plan:
    """Explain a checked pipeline."""
    guarantee = pipeline.guarantee
    hops = [_source(pipeline), _decode(pipeline)]
    if pipeline.transform is not None:
        hops.append(_transform(pipeline))
    hops += [_sink(pipeline), _dead_letters(pipeline), _positions(pipeline)]
    return Plan(
        pipeline=str(pipeline.shown("name")),
        guarantee=guarantee,
        meaning=guarantee.meaning,
        permits=tuple(sorted(guarantee.permits)),
        hops=tuple(hops),
        warnings=tuple(_warnings(pipeline)),
        native=_native(pipeline),
    )


def _native(pipeline: PipelineConfig) -> str:
    why_not = native.why_not() if pipeline.native else "native = false"
    if why_not:
        return f"Reads, decodes and encodes without avow-native ({why_not}): slower, otherwise the same."
    return "Reads, decodes and encodes with avow-native's C library, on this machine."


def _source(pipeline: PipelineConfig) -> Hop:
    source = pipeline.source
    skips = source.on_data_loss == "skip"
    lost = "Records that retention deleted before they were claimed"
    return Hop(
        "source",
        f"Read {_topics(pipeline)} from Kafka at {source.shown('brokers')}, from the ledger's positions; partitions "
        f"without a position from {_start(source.shown('start'))}.",
        promises=(
            "Only committed records are read, each partition in offset order.",
            "A first position is written to the ledger before anything is read.",
            "A topic that was deleted and created again, or a truncated log, stops the run with its own exit code.",
            *(() if skips else (f"{lost} stop the run with retention-loss.",)),
        ),
        permits=(f"{lost} are claimed as skipped, and the run continues.",) if skips else (),
        assumes=(
            "The topic is durable: replicated, min.insync.replicas 2 or more, no unclean leader election.",
            "A message that its producer wrote twice counts as two records.",
        ),
    )


def _topics(pipeline: PipelineConfig) -> str:
    source = pipeline.source
    if source.topics_pattern is not None:
        return f"every topic that matches {source.shown('topics_pattern')}"
    topics = source.shown("topics")
    return f"topic{'s' if len(topics) > 1 else ''} {', '.join(topics)}"


def _start(start: Any) -> str:
    match start:
        case "earliest" | "latest":
            return f"the {start} offset"
        case datetime():
            return f"the first record at or after {start.isoformat()}"
        case str():  # ${env:NAME}
            return start
        case _:
            count = sum(len(partitions) for partitions in start.values())
            return f"the declared offsets of {count} partition(s), and the earliest offset of any other"


_TOMBSTONES = {
    "delete": "A null value deletes the row of its key.",
    "dead-letter": "A null value makes the record a dead letter.",
    "skip": "A record with a null value is counted as skipped.",
    "keep": "A record with a null value becomes a row of nulls.",
}


def _decode(pipeline: PipelineConfig) -> Hop:
    if pipeline.decode.is_resolved:
        does, *promises = formats.plugin_of(pipeline).explain(pipeline)
    else:
        does = f"Decode each topic's records as {pipeline.decode.shown('format')}, by the topic's own schema."
        promises = ["The columns of each table are those that the schema registry has for its topic when it is read."]
    deletes = pipeline.tombstones == "delete"
    return Hop(
        "decode",
        does,
        promises=(
            "No value is rounded, truncated or set to null: a value that does not fit makes its record a dead letter.",
            *promises,
            _TOMBSTONES[pipeline.tombstones],
        ),
        assumes=("The key of a record with a null value contains the columns of sink.key.",) if deletes else (),
    )


def _transform(pipeline: PipelineConfig) -> Hop:
    assert pipeline.transform is not None
    how = "SQL" if pipeline.transform.sql is not None else f"the function {pipeline.transform.shown('python')}"
    keys = ", ".join(pipeline.sink.shown("key"))
    return Hop(
        "transform",
        f"Pass the records through {how}.",
        promises=(
            "Every row keeps the lineage of its record; a record without a row is counted as skipped.",
            "A wide transform (join, grouping, sorting over records) is refused when the run starts.",
        ),
        assumes=(
            "The transform is deterministic: it gives the same rows for the same record.",
            *((f"The transform outputs the key columns {keys}, never null.",) if keys else ()),
        ),
    )


def _sink(pipeline: PipelineConfig) -> Hop:
    sink = plugin_of(pipeline)
    offer = sink.offers[pipeline.sink.mode]
    guarantee = pipeline.guarantee
    return Hop(
        "sink",
        f"{sink.title} {pipeline.sink.target}, {pipeline.sink.mode}: {_order(guarantee)}.{_tables(pipeline)}",
        promises=(
            offer.notes[guarantee],
            *(_topic_promises(pipeline) if pipeline.sink.by_topic else ()),
            "A claimed offset is never written again, and no offset is skipped: each claim starts where the last one "
            "ended.",
        ),
        permits=tuple(_PERMITTED[anomaly] for anomaly in sorted(guarantee.permits)),
        assumes=sink.assumes,
    )


def _tables(pipeline: PipelineConfig) -> str:
    """Where each topic has a table of its own: which that is, as far as the file names topics."""
    if not pipeline.sink.by_topic:
        return ""
    text = f" Each topic has a table of its own: {TOPIC} is its name, with _ for each . and -."
    tables = [f"{topic} into {pipeline.for_topic(topic).sink.target}" for topic in pipeline.source.topics]
    shown = ", ".join(tables[:TABLES_SHOWN])
    more = f" and {len(tables) - TABLES_SHOWN} more" if len(tables) > TABLES_SHOWN else ""
    return f"{text} {shown}{more}." if tables else text


def _topic_promises(pipeline: PipelineConfig) -> tuple[str, ...]:
    assert isinstance(pipeline.sink, TableSinkConfig)
    alone = pipeline.sink.on_topic_failure == "stop-topic"
    return (
        "A batch is one commit or more for each table, and never one of two tables.",
        "What stops a topic by name (a table that does not fit, a recreated topic, too many dead letters) stops "
        + ("that topic alone, and the run ends with exit code 20." if alone else "the run."),
    )


_PERMITTED = {
    Anomaly.LOST: "lost: a crash between claim and write loses the claimed records that are not written yet.",
    Anomaly.DUPLICATED: "duplicated: a crash between write and claim writes the same records again.",
}


def _order(guarantee: Guarantee) -> str:
    """The acts in the order that the guarantee's own table gives."""
    acts = {Act.WRITE: "write the rows", Act.CLAIM: "claim their offsets"}
    steps = [" and ".join(acts[act] for act in Act if act in step) for step in guarantee.steps]
    return f"{steps[0]} in one act" if guarantee.atomic else ", then ".join(steps)


def _dead_letters(pipeline: PipelineConfig) -> Hop:
    sink = plugin_of(pipeline)
    return Hop(
        "dead letters",
        f"Store each record that cannot be decoded or written in {sink.dead_letter_place(pipeline)}, with its bytes, "
        "headers and the reason.",
        promises=(
            sink.dead_letter_promise,
            "read = written + dead + skipped, per partition and in total.",
            f"The run stops when more than {pipeline.dead_letters.max_share * 100:g}% of the records are dead letters.",
        ),
        permits=tuple(_PERMITTED[anomaly] for anomaly in sorted(pipeline.guarantee.permits)),
    )


def _positions(pipeline: PipelineConfig) -> Hop:
    if plugin_of(pipeline).ledger_in_group:
        return Hop(
            "positions",
            f"Store each position as a committed offset of the consumer group {pipeline.shown('name')}, which is the "
            "ledger.",
            promises=(
                "Every claim is a transaction with a transactional.id per partition, so a zombie's late claim is "
                "fenced.",
                "An offset that another client committed to the group, or a consumer that joined it, stops the run.",
            ),
            assumes=("The group is reserved for this pipeline.",),
        )
    return Hop(
        "positions",
        f"Commit each position to the consumer group {pipeline.shown('name')} after its claim, for lag tools.",
        promises=("The group's offsets are never read back: a run starts from the ledger in the sink.",),
        permits=("The group's offsets can be behind the ledger, but never ahead of it.",),
        assumes=("No other consumer uses this group.",),
    )


def _warnings(pipeline: PipelineConfig) -> Iterator[str]:
    guarantee, mode = pipeline.guarantee, pipeline.sink.mode
    if guarantee is Guarantee.AT_MOST_ONCE:
        yield "at-most-once: records can be lost after a crash."
    if guarantee is Guarantee.AT_LEAST_ONCE and mode == "append":
        absorb = " dedupe or upsert would discard them." if len(plugin_of(pipeline).offers) > 1 else ""
        yield f"at-least-once with append: duplicates are possible after a crash.{absorb}"
    if mode == "upsert" and guarantee is not Guarantee.EXACTLY_ONCE:
        yield (
            "upsert: a deleted row leaves no offset to compare with, so a late replay can restore it; not under "
            "exactly-once."
        )
    if mode != "append":
        yield f"{mode}: records of one key in two partitions have no order; {_WINNER[mode]}."
    if pipeline.source.on_data_loss == "skip":
        yield 'source.on_data_loss = "skip": records that retention deletes before their claim are counted as skipped.'
    if pipeline.source.start == "latest":
        yield 'source.start = "latest": records from before the first run are not read.'
    for key in pipeline.secrets_in_file:
        yield f'{key} contains a secret in the file: put it into an environment variable and write "${{env:NAME}}".'
    if "max_share" not in pipeline.dead_letters.model_fields_set:
        yield f"dead_letters.max_share is not declared: the default is {pipeline.dead_letters.max_share:.0%}."
    if pipeline.dead_letters.max_share == 1:
        yield "dead_letters.max_share = 1: the run never stops, even if every record is bad."
    yield from plugin_of(pipeline).warnings(pipeline)


_WINNER = {"dedupe": "the first to arrive wins", "upsert": "the last to arrive wins"}
