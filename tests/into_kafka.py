"""A scenario into a topic: its sink, and what is in it."""

from __future__ import annotations

import json

from tests.kafka_stage import Read


def sink(target: str, *lines: str) -> str:
    return "\n".join(['kind = "kafka"', f'topic = "{target}"', *lines])


def ids(found: list[Read]) -> list[int]:
    return sorted(json.loads(one.value or b"{}")["id"] for one in found)
