"""Dead letters in PostgreSQL: choose, count and look at them. Changing them is the task's business."""

from __future__ import annotations

import base64
import json
from datetime import datetime

from avow.kafka.log import TopicPartition
from avow.settings import PipelineConfig
from avow.sinks.base import GLIMPSE_BYTES, DeadLetter, Glimpse, Selection
from avow.sinks.postgres.config import PostgresConfig
from avow.sinks.postgres.session import Session, as_sink_error


def _where(pipeline: str, selection: Selection) -> tuple[str, list[str]]:
    """As SQL, and the texts that stand in it as $1, $2, ...: what somebody has typed is never SQL."""
    texts = [pipeline]
    sql = "WHERE pipeline = $1"
    if selection.reason is not None:  # with or without the SQLSTATE that a refusal has at its end
        texts.append(selection.reason)
        sql += " AND (reason = $2 OR reason LIKE 'refused-by-sink-%' AND left(reason, -6) = $2)"
    since, until = (None if when is None else when.isoformat() for when in (selection.since, selection.until))
    for column, text in (
        ("topic =", selection.topic),
        ("died_at >=", since),
        ("died_at <", until),
    ):
        if text is not None:
            texts.append(text)
            sql += f" AND {column} ${len(texts)}"
    for column, number in (
        ("partition =", selection.partition),
        ('"offset" >=', selection.from_offset),
        ('"offset" <', selection.until_offset),
    ):
        if number is not None:
            sql += f" AND {column} {number}"
    return sql, texts


def select(
    session: Session, pipeline: str, selection: Selection, limit: int, *, lock: bool = False
) -> list[DeadLetter]:
    where, texts = _where(pipeline, selection)
    rows = session.query(
        'SELECT topic, partition, "offset", timestamp_ms, key, value, headers::text, reason, detail'
        f" FROM avow.dead_letters {where}"
        f' ORDER BY topic, partition, "offset" LIMIT {limit}{" FOR UPDATE" if lock else ""}',
        *texts,
    )
    return [
        DeadLetter(topic, partition, offset, timestamp_ms, key, value, _headers(headers), reason, detail)
        for topic, partition, offset, timestamp_ms, key, value, headers, reason, detail in rows
    ]


def _headers(text: str) -> list[tuple[str, bytes | None]]:
    return [(key, None if value is None else base64.b64decode(value)) for key, value in json.loads(text)]


class PostgresLetters:
    """The dead letters of one pipeline, for looking at."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        assert isinstance(pipeline.sink, PostgresConfig)
        self._name = pipeline.name
        self._session = Session(pipeline.sink.url.get_secret_value(), "avow-letters")

    def __enter__(self) -> PostgresLetters:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _exists(self) -> bool:
        with as_sink_error("cannot read the dead letters"):
            return self._session.query("SELECT to_regclass('avow.dead_letters') IS NOT NULL")[0] == (True,)

    def by_reason(self, selection: Selection) -> list[tuple[str, int, datetime]]:
        """Reason, how many, when the last one died."""
        if not self._exists():
            return []
        where, texts = _where(self._name, selection)
        with as_sink_error("cannot read the dead letters"):
            rows = self._session.query(
                f"SELECT reason, count(*), max(died_at) FROM avow.dead_letters {where} GROUP BY reason ORDER BY 2 DESC",
                *texts,
            )
        return [(reason, count, last) for reason, count, last in rows]

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        if not self._exists():
            return []
        where, texts = _where(self._name, selection)
        rows = self._session.query(
            f"SELECT DISTINCT topic, partition FROM avow.dead_letters {where} ORDER BY topic, partition", *texts
        )
        return [TopicPartition(*row) for row in rows]

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        if not self._exists():
            return []
        with as_sink_error("cannot read the dead letters"):
            return select(self._session, self._name, selection, limit)

    def glimpses(self, selection: Selection, limit: int) -> list[Glimpse]:
        if not self._exists():
            return []
        where, texts = _where(self._name, selection)
        with as_sink_error("cannot read the dead letters"):
            rows = self._session.query(
                'SELECT topic, partition, "offset", timestamp_ms, reason, detail,'
                f" substring(value FOR {GLIMPSE_BYTES}), coalesce(octet_length(value), 0)"
                f' FROM avow.dead_letters {where} ORDER BY topic, partition, "offset" LIMIT {limit}',
                *texts,
            )
        return [Glimpse(*row) for row in rows]
