"""Lakes: a commit that was made, and whose answer never came."""

from __future__ import annotations

from avow.prove.faults.base import AtFailpoint


class LakeCommitUnknown(AtFailpoint):
    """The table has taken a commit in, and the driver is told of an error instead."""

    point = "commit-unknown"
    who = "answer"

    def fired(self) -> str:
        return f"a commit of pid {self._driver.pid} was made, and its answer was lost" if self.struck else ""
