"""The numbers that applications keep in a Delta table's log (``txn``), all of them in one pass.

The library gives one number at a time, and reads checkpoint and log from the store for each. Here the newest checkpoint
and the commits behind it are read once.

Owns: that reading. Must not know: what the numbers mean, the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow.parquet as pq

from avow.sinks.lake.files import Location


def transactions(log: Location, version: int) -> dict[str, int] | None:
    """The newest number of each application, as of a version.

    None where names alone do not lead there: the newest checkpoint is of a later version or in another form, or
    commits are missing. The library finds its way by listing the log.
    """
    try:
        begin = _checkpoint(log)
        if begin > version:
            return None
        numbers = dict(_in_checkpoint(log, begin)) if begin >= 0 else {}
        for number in range(begin + 1, version + 1):
            numbers.update(_in_commit(log, number))
    except FileNotFoundError:
        return None
    return numbers


def _checkpoint(log: Location) -> int:
    """The version of the newest; -1 if there is none yet."""
    try:
        checkpoint = json.loads(_content(log, "_last_checkpoint"))
    except FileNotFoundError:
        return -1
    return int(checkpoint["version"])


def _in_checkpoint(log: Location, version: int) -> Iterator[tuple[str, int]]:
    with log.filesystem.open_input_file(f"{log.root}/{version:020}.checkpoint.parquet") as file:
        transactions = pq.read_table(file, columns=["txn"])["txn"]
    return ((txn["appId"], txn["version"]) for txn in transactions.drop_null().to_pylist())


def _in_commit(log: Location, version: int) -> Iterator[tuple[str, int]]:
    for line in _content(log, f"{version:020}.json").splitlines():
        if b'"txn"' in line and (txn := json.loads(line).get("txn")) is not None:
            yield txn["appId"], txn["version"]


def _content(log: Location, name: str) -> bytes:
    with log.filesystem.open_input_stream(f"{log.root}/{name}") as stream:
        content: bytes = stream.read()
    return content
