"""Which cells of the matrix a proof runs: by name, or those that a user's pipeline file declares.

Owns: the selection. Must not know: how a cell is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from avow.prove.cells import ENGINES, Cell, matrix, quick
from avow.settings import PipelineConfig


@dataclass(frozen=True, slots=True)
class CellFilter:
    """Names of each kind; none: all of them."""

    faults: Collection[str] = ()
    guarantees: Collection[str] = ()
    sinks: Collection[str] = ()
    modes: Collection[str] = ()
    engines: Collection[str] = ()

    def matches(self, cell: Cell) -> bool:
        wanted = (self.faults, self.guarantees, self.sinks, self.modes, self.engines)
        names = (cell.fault.name, cell.guarantee, cell.sink, cell.mode, cell.engine)
        return all(not allowed or name in allowed for allowed, name in zip(wanted, names, strict=True))


def select_cells(only: CellFilter, *, quick_only: bool, pipeline: PipelineConfig | None = None) -> list[Cell]:
    """``quick_only``: one cell per fault, for each sink that is named."""
    cells: Iterable[Cell]
    if pipeline is not None:
        cells = _of_pipeline(pipeline, quick_only)
    elif quick_only:
        cells = chain.from_iterable(quick(sinks=[sink], engines=only.engines) for sink in only.sinks)
        cells = cells if only.sinks else quick(engines=only.engines)
    else:
        cells = matrix()
    return [cell for cell in cells if only.matches(cell)]


def _of_pipeline(pipeline: PipelineConfig, quick_only: bool) -> Iterable[Cell]:
    """The column of the matrix that it declares, and the canaries into the same sink, whose pipelines are our own."""
    guarantee, kind, mode = pipeline.guarantee, pipeline.sink.kind, pipeline.sink.mode
    engines = [name for name, engine in ENGINES.items() if engine.name == pipeline.engine]
    cells = quick(guarantee, mode, [kind], engines) if quick_only else matrix(mode)
    return (
        cell
        for cell in cells
        if cell.sink == kind
        and cell.engine in engines
        and (cell.canary or (cell.guarantee, cell.mode) == (guarantee, mode))
    )
