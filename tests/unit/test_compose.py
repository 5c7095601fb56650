"""``compose.yaml`` and ``avow up`` are one shape, written twice: Docker cannot read ours."""

from __future__ import annotations

import re
from pathlib import Path

from avow.local.broker import Broker
from avow.local.jars import KAFKA_VERSION
from avow.local.postgres import programs

COMPOSE = Path(__file__).parents[2].joinpath("compose.yaml").read_text()
# Where a node is and what it is called: these differ by nature.
OF_THE_NODE = {
    "node.id",
    "listeners",
    "advertised.listeners",
    "controller.quorum.voters",
    "inter.broker.listener.name",
    "log.dirs",
}


def test_the_brokers_settings_are_the_same() -> None:
    ours = Broker(1, Path("x"), 9092, {1: 1, 2: 2, 3: 3}).settings()
    theirs = dict(re.findall(r"^  KAFKA_(\w+): (.+)$", COMPOSE, re.MULTILINE))
    for key, value in ours.items():
        if key not in OF_THE_NODE:
            assert theirs.get(key.upper().replace(".", "_")) == str(value), key


def test_the_versions_are_the_same() -> None:
    assert f"image: apache/kafka:{KAFKA_VERSION}" in COMPOSE
    assert "image: postgres:18" in COMPOSE
    assert "18" in programs().parent.name
