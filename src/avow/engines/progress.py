"""What a run reports while it runs. Apart from the engines, so that showing it needs no Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from avow.engines.hooks import NO_HOOKS, Hooks
from avow.ledger import Counts, Entry

if TYPE_CHECKING:  # it brings Kafka's client
    from avow.kafka.log import TopicPartition


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run has come to, reported after every batch; by the consumer engine once a second, if there is something
    new. It is about the partitions that this process reads."""

    run: int
    batch: int  # the newest
    offsets: int  # covered since the last report
    seconds: float  # that took
    counts: Counts  # over the pipeline's life
    lag_records: int
    lag_seconds: (
        float | None
    )  # the age of the oldest record that is not claimed; None: there is none, or it is not known


@dataclass(frozen=True, slots=True)
class Observer:
    """Who is called with what a run reports, and what a test does at its named points."""

    progress: Callable[[Progress], None] = lambda _: None
    event: Callable[[str], None] = lambda _: None  # a line for a person: started, failed and trying again, ...
    began: Callable[[int, Mapping[TopicPartition, Entry]], None] = lambda *_: None  # with the ledger as it was then
    hooks: Hooks = NO_HOOKS


SILENT = Observer()
