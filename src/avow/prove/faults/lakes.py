"""Lakes: a commit that was made, and whose answer was lost."""

from __future__ import annotations

from avow.prove.faults.base import AtFailpoint


class LakeCommitUnknown(AtFailpoint):
    """The table has the commit, and the driver gets an error."""

    point = "commit-unknown"
    who = "answer"

    def fired(self) -> str:
        return f"a commit of pid {self._driver.pid} succeeded, and its answer was lost" if self.hit else ""
