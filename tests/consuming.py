"""A plain consumer as a process of its own: ``python -m tests.consuming JSON``.

It appends a line ``topic partition offset pid`` for each record that it handles, and does harm to itself where it is
told to: it dies (kill -9) or stops (SIGSTOP) at its n-th record, before or after its line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from avow import CommitConfig, Consumer, Guarantee, PollConfig, Record, RetryConfig, Transaction

TABLE = "CREATE TABLE {} (partition int, number bigint, once boolean)"


class Handler:
    """Writes its lines, and harms itself."""

    def __init__(self, lines: str, harm: str = "", at: int = 0, pace_s: float = 0.0, table: str = "") -> None:
        self._file = os.open(lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._harm = harm
        self._at = at
        self._pace_s = pace_s
        self._table = table
        self._seen = 0

    def __call__(self, record: Record, tx: Transaction | None = None) -> None:
        self._seen += 1
        time.sleep(self._pace_s)
        self._harmed("before")
        if tx is not None:
            tx.connection.execute(
                f"INSERT INTO {self._table} VALUES (%s, %s, %s)", (record.partition, record.offset, tx.first_time())
            )
        os.write(self._file, f"{record.topic} {record.partition} {record.offset} {os.getpid()}\n".encode())
        self._harmed("after")

    def _harmed(self, when: str) -> None:
        if self._seen == self._at and self._harm.endswith(when):
            os.kill(os.getpid(), signal.SIGKILL if self._harm.startswith("die") else signal.SIGSTOP)


def ask_to_stop(_: Record) -> None:
    """A handler that sends its own process SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def handled(lines: Path) -> list[tuple[int, int]]:
    """Partition and offset of every line, in their order."""
    if not lines.exists():
        return []
    return [(int(line.split()[1]), int(line.split()[2])) for line in lines.read_text().splitlines()]


def judged(lines: Path, there: set[tuple[int, int]]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """What was lost, and what was doubled. A record that was never there fails at once."""
    found = Counter(handled(lines))
    assert set(found) <= there, "a phantom"
    return there - set(found), {one for one, times in found.items() if times > 1}


def in_order(lines: Path) -> bool:
    """Whether no record was handled before one that stands before it in its partition."""
    furthest: dict[int, int] = {}
    for partition, offset in dict.fromkeys(handled(lines)):
        if offset < furthest.get(partition, -1):
            return False
        furthest[partition] = offset
    return True


def consumer_of(brokers: str, topics: list[str] | str, group: str, guarantee: str, **given: Any) -> Consumer:
    """A consumer from flat options: they come from another process, or from a table of test cases."""
    interval_ms = int(given.pop("commit_interval_s", 5.0) * 1000)
    commit = CommitConfig(given.pop("commit", None), given.pop("per", "batch"), interval_ms)
    retry = RetryConfig(given.pop("retries", None), int(given.pop("back_off_s", 0.1) * 1000))
    strategy = given.pop("strategy", "cooperative-sticky")
    poll = PollConfig(given.pop("max_records", 500), partition_assignment_strategy=strategy)
    return Consumer(
        topics,
        bootstrap_servers=brokers,
        group_id=group,
        guarantee=guarantee,
        commit=commit,
        retry=retry,
        poll=poll,
        **given,
    )


def main(given: dict[str, Any]) -> None:
    own = {name: given.pop(name) for name in ("lines", "harm", "at", "pace_s", "table") if name in given}
    canary = given.pop("canary", False)

    def event(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with consumer_of(**given, on_event=event) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        if canary:  # it says at-least-once, and commits first
            consumer.config = replace(consumer.config, guarantee=Guarantee.AT_MOST_ONCE)
        consumer.run(Handler(**own))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
