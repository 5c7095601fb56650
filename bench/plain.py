"""The plain consumer: one record, one INSERT, one COMMIT. Offsets go to Kafka as they do by default, every 5 s.

Run as a process of its own by ``contenders``; its one argument is JSON. It ends after a number of records.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import Consumer, Message
from psycopg import sql

INSERT = sql.SQL("INSERT INTO {} VALUES ({}, %s, %s, %s, to_timestamp(%s / 1000.0))")


def row(message: Message, columns: list[str]) -> list[Any]:
    value = message.value()
    assert value is not None
    document = json.loads(value)
    where = (message.topic(), message.partition(), message.offset(), message.timestamp()[1])
    return [*(document[name] for name in columns), *where]


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    columns: list[str] = settings["columns"]
    values = sql.SQL(", ").join([sql.Placeholder()] * len(columns))
    insert = INSERT.format(sql.Identifier(settings["table"]), values)
    consumer = Consumer(
        {
            "bootstrap.servers": settings["brokers"],
            "group.id": f"bench-{uuid4().hex[:8]}",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([settings["topic"]])
    left: int = settings["records"]
    with psycopg.connect(settings["url"]) as connection:
        while left:
            message = consumer.poll(1)
            if message is None:
                continue
            if error := message.error():
                sys.exit(str(error))
            connection.execute(insert, row(message, columns))
            connection.commit()
            left -= 1
    consumer.close()


if __name__ == "__main__":
    main()
