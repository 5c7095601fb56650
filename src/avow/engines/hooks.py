"""Named points of a delivery at which a test or the proof can step in. Release code only has the hooks that do nothing.

Hooks are a value, passed in with the run (``Pipeline.start(hooks=...)``) and pickled into its tasks; no environment
variable and no setting can name any. Neighbours: ``task`` (which calls them), ``avow.prove.failpoints`` (which harms).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from avow.guarantee import Act

if TYPE_CHECKING:  # a command that never delivers need not wait for Arrow
    import pyarrow as pa


class Hooks:
    """Does nothing. The points of a batch: ``staged``, ``mid-write``, ``commit-unknown``, and ``after-`` each act."""

    def reached(self, point: str, batch: int) -> None:
        """The work has come to this point."""

    def order(self, steps: tuple[frozenset[Act], ...]) -> tuple[frozenset[Act], ...]:
        """The acts in the order in which they are to be done."""
        return steps

    def rows(self, rows: pa.RecordBatch, offset_column: str) -> pa.RecordBatch:  # noqa: ARG002
        """The rows that are to be written."""
        return rows


NO_HOOKS = Hooks()
