"""What ``sink.evolve`` has done to a lake's table, as a text in one of its properties: for audits.

Owns: that text. Must not know: any format, commits, what an audit makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from avow.kafka.log import TopicPartition
from avow.sinks.auditing import Evolved
from avow.sinks.lake.ledger_snapshot import LedgerSnapshot


def noted(text: str, before: pa.Schema, fields: Sequence[pa.Field], ledger: LedgerSnapshot) -> str:
    """With these columns, which the table has not had before or in another type: up to the positions of now."""
    known = {(name, was_float): positions for name, was_float, positions in json.loads(text or "[]")}
    positions = [[tp.topic, tp.partition, state.entry.position] for tp, state in sorted(ledger.partitions.items())]
    for field in fields:
        was_float = field.name in before.names
        # Of any other type a row of before has the same value in the wider one.
        if not was_float or before.field(field.name).type == pa.float32():
            known[field.name, was_float] = positions
    return json.dumps([[*column, positions] for column, positions in known.items()])


def evolved(text: str, tp: TopicPartition) -> list[Evolved]:
    return [
        Evolved(name, position, was_float)
        for name, was_float, positions in json.loads(text or "[]")
        for topic, partition, position in positions
        if TopicPartition(topic, partition) == tp
    ]
