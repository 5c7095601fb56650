"""What the harness asks about any sink.

Owns: the shape of it. Must not know: any one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from avow.prove.check import COLUMNS, Row


class Around(Protocol):
    """What a witness is given of the site. All of it past the proxies."""

    @property
    def url(self) -> str:
        """PostgreSQL."""

    @property
    def bootstrap(self) -> str:
        """The brokers."""

    def ends(self, topic: str) -> dict[int, int]:
        """The end of each partition."""

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str]]:
        """A group's positions with their metadata."""

    def drop_topic(self, name: str) -> None: ...


class Witness(ABC):
    """Of the sink of one pipeline. ``folder`` is the pipeline's own; its input topic has its name."""

    cells_max: ClassVar[int] = 1_000  # that one pipeline is played in, before reading it back costs more than a new one

    def __init__(self, site: Around, folder: Path, pipeline: str, table: str) -> None:
        self.site, self.folder, self.pipeline, self.table = site, folder.absolute(), pipeline, table

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """What the pipeline file says under [sink] to get there."""

    @property
    def output_topic(self) -> str:
        """The topic that it is, to be followed by a reader while faults go on; empty if it is none."""
        return ""

    # How far it is. Asked while it may be down, from several threads.

    @abstractmethod
    def count(self) -> int | None:
        """How many rows there are, for the chart; None while nobody can say."""

    @abstractmethod
    def positions(self) -> dict[int, int]:
        """By partition; empty while nobody can say."""

    @abstractmethod
    def claiming_run(self) -> int:
        """The newest run that has claimed anything."""

    # What is in it, for the check: with fresh clients.

    @abstractmethod
    def numbered(self) -> list[Row]:
        """Rows that are records of ours."""

    @abstractmethod
    def places(self, lineage: Sequence[str]) -> list[tuple[int, int]]:
        """Of rows of any form: partition and offset of the records they came from."""

    @abstractmethod
    def dead(self) -> list[tuple[int, int]]:
        """The same of dead letters."""

    def close(self) -> None:
        """Nobody will ask any more."""
        return None


class TableWitness(Witness):
    """Rows are in a table, with their lineage in columns."""

    @abstractmethod
    def read(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """The whole table."""

    def numbered(self) -> list[Row]:
        return [Row(*row) for row in self.read(COLUMNS)]

    def places(self, lineage: Sequence[str]) -> list[tuple[int, int]]:
        _, partition, offset, _ = lineage
        return [(row[0], row[1]) for row in self.read([partition, offset])]
