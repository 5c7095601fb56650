"""The numbers that applications keep in a Delta table's log (``txn``), all of them in one pass.

The library gives one number at a time, and reads checkpoint and log from the store for each. Here the newest checkpoint
and the commits behind it are read once.

Owns: that reading. Must not know: what the numbers mean, the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow.parquet as pq

from avow.sinks.lake.files import Place


def transactions(log: Place, version: int) -> dict[str, int] | None:
    """The newest number of each application, as of a version.

    None where names alone do not lead there: the newest checkpoint is of a later version or in another form, or
    commits are missing. The library finds its way by listing the log.
    """
    try:
        begin = _checkpoint(log)
        if begin > version:
            return None
        found = dict(_in_checkpoint(log, begin)) if begin >= 0 else {}
        for number in range(begin + 1, version + 1):
            found.update(_in_commit(log, number))
    except FileNotFoundError:
        return None
    return found


def _checkpoint(log: Place) -> int:
    """The version of the newest; -1 if there is none yet."""
    try:
        told = json.loads(_content(log, "_last_checkpoint"))
    except FileNotFoundError:
        return -1
    return int(told["version"])


def _in_checkpoint(log: Place, version: int) -> Iterator[tuple[str, int]]:
    with log.filesystem.open_input_file(f"{log.root}/{version:020}.checkpoint.parquet") as file:
        told = pq.read_table(file, columns=["txn"])["txn"]
    return ((one["appId"], one["version"]) for one in told.drop_null().to_pylist())


def _in_commit(log: Place, version: int) -> Iterator[tuple[str, int]]:
    for line in _content(log, f"{version:020}.json").splitlines():
        if b'"txn"' in line and (told := json.loads(line).get("txn")) is not None:
            yield told["appId"], told["version"]


def _content(log: Place, name: str) -> bytes:
    with log.filesystem.open_input_stream(f"{log.root}/{name}") as stream:
        content: bytes = stream.read()
    return content
