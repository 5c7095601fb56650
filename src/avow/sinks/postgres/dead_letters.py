"""Dead letters in PostgreSQL: select, count and list them. Changing them is the task's business."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from avow.kafka.log import TopicPartition
from avow.settings import PipelineConfig
from avow.sinks.base import (
    DEAD_LETTER_COLUMNS,
    PREVIEW_BYTES,
    DeadLetter,
    DeadLetterPreview,
    DeadLetterReader,
    Selection,
    dead_letter_of,
)
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.session import Session, as_sink_error, name

COLUMNS = ", ".join(map(name, DEAD_LETTER_COLUMNS)).replace('"headers"', "headers::text")
IN_ORDER = 'ORDER BY topic, partition, "offset"'


def _select(session: Session, pipeline: str, columns: str, selection: Selection, more: str) -> list[tuple[Any, ...]]:
    """The texts of a selection stand in the SQL as $1, $2, ...: what somebody has typed is never SQL."""
    texts = [pipeline]
    sql = f"SELECT {columns} FROM avow.dead_letters WHERE pipeline = $1"
    if selection.reason is not None:  # with or without the SQLSTATE that a refusal has at its end
        texts.append(selection.reason)
        sql += " AND (reason = $2 OR reason LIKE 'refused-by-sink-%' AND left(reason, -6) = $2)"
    for column, compared, value in replace(selection, reason=None).conditions():
        if isinstance(value, int):
            sql += f' AND "{column}" {compared} {value}'
        else:
            texts.append(value.isoformat() if isinstance(value, datetime) else value)
            sql += f' AND "{column}" {compared} ${len(texts)}'
    return session.query(f"{sql} {more}", *texts)


def select(
    session: Session, pipeline: str, selection: Selection, limit: int, *, lock: bool = False
) -> list[DeadLetter]:
    locked = " FOR UPDATE" if lock else ""
    rows = _select(session, pipeline, COLUMNS, selection, f"{IN_ORDER} LIMIT {limit}{locked}")
    return [dead_letter_of(row) for row in rows]


class PostgresDeadLetters(DeadLetterReader):
    """The dead letters of one pipeline, to be read."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._name = pipeline.name
        self._session = Session(pipeline.sink.url.get_secret_value(), "avow-letters", pipeline.sink.timeout_s)

    def close(self) -> None:
        self._session.close()

    def _select(self, columns: str, selection: Selection, more: str) -> list[tuple[Any, ...]]:
        with as_sink_error("cannot read the dead letters"):
            if self._session.query("SELECT to_regclass('avow.dead_letters') IS NULL")[0] == (True,):
                return []
            return _select(self._session, self._name, columns, selection, more)

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        rows = self._select("reason, count(*), max(died_at)", selection, "GROUP BY reason ORDER BY 2 DESC")
        return [(reason, count, last) for reason, count, last in rows]

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        return [TopicPartition(*row) for row in self._select("DISTINCT topic, partition", selection, "ORDER BY 1, 2")]

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        return [dead_letter_of(row) for row in self._select(COLUMNS, selection, f"{IN_ORDER} LIMIT {limit}")]

    def previews(self, selection: Selection, limit: int) -> list[DeadLetterPreview]:
        columns = (
            'topic, partition, "offset", timestamp_ms, reason, detail,'
            f" substring(value FOR {PREVIEW_BYTES}), coalesce(octet_length(value), 0)"
        )
        return [DeadLetterPreview(*row) for row in self._select(columns, selection, f"{IN_ORDER} LIMIT {limit}")]
