"""Dead letters in PostgreSQL: choose, count and look at them. Changing them is the task's business."""

from __future__ import annotations

import base64
import json
from datetime import datetime

from avow.kafka.log import TopicPartition
from avow.settings import Pipeline, Postgres
from avow.sinks.base import DeadLetter, Selection
from avow.sinks.postgres.session import Session, as_sink_error, literal


def _where(selection: Selection) -> str:
    """As SQL, to follow ``WHERE pipeline = $1``."""
    parts = {
        "reason =": selection.reason and literal(selection.reason),
        "topic =": selection.topic and literal(selection.topic),
        "partition =": selection.partition,
        '"offset" >=': selection.from_offset,
        '"offset" <': selection.until_offset,
        "died_at >=": selection.since and literal(selection.since.isoformat()),
        "died_at <": selection.until and literal(selection.until.isoformat()),
    }
    return "".join(f" AND {column} {value}" for column, value in parts.items() if value is not None)


def select(
    session: Session, pipeline: str, selection: Selection, limit: int, *, lock: bool = False
) -> list[DeadLetter]:
    rows = session.query(
        'SELECT topic, partition, "offset", timestamp_ms, key, value, headers::text, reason, detail'
        f" FROM avow.dead_letters WHERE pipeline = $1{_where(selection)}"
        f' ORDER BY topic, partition, "offset" LIMIT {limit}{" FOR UPDATE" if lock else ""}',
        pipeline,
    )
    return [
        DeadLetter(topic, partition, offset, timestamp_ms, key, value, _headers(headers), reason, detail)
        for topic, partition, offset, timestamp_ms, key, value, headers, reason, detail in rows
    ]


def _headers(text: str) -> list[tuple[str, bytes | None]]:
    return [(key, None if value is None else base64.b64decode(value)) for key, value in json.loads(text)]


class PostgresLetters:
    """The dead letters of one pipeline, for looking at."""

    def __init__(self, pipeline: Pipeline) -> None:
        assert isinstance(pipeline.sink, Postgres)
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
        with as_sink_error("cannot read the dead letters"):
            rows = self._session.query(
                "SELECT reason, count(*), max(died_at) FROM avow.dead_letters"
                f" WHERE pipeline = $1{_where(selection)} GROUP BY reason ORDER BY 2 DESC",
                self._name,
            )
        return [(reason, count, last) for reason, count, last in rows]

    def partitions(self, selection: Selection) -> list[TopicPartition]:
        if not self._exists():
            return []
        rows = self._session.query(
            f"SELECT DISTINCT topic, partition FROM avow.dead_letters WHERE pipeline = $1{_where(selection)}"
            " ORDER BY topic, partition",
            self._name,
        )
        return [TopicPartition(*row) for row in rows]

    def select(self, selection: Selection, limit: int) -> list[DeadLetter]:
        if not self._exists():
            return []
        with as_sink_error("cannot read the dead letters"):
            return select(self._session, self._name, selection, limit)
