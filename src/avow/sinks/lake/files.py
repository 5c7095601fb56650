"""Parquet files: where they go, how they are written, and what is told of them.

A file's name carries the pipeline (as a hash) and the run, so that files which no commit took in can be told from those
of a run in progress and from those of other writers.

Owns: names, stores, writing. Must not know: any table format, the ledger. Neighbours: ``staging``, which fills the
files, and the formats, which read the footers for their statistics.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

# Batches wait for one another until they are worth a row group.
ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A folder: on a disk or in an S3-compatible store. It is pickled into tasks; its options hold secrets."""

    url: str  # file:///... or s3://bucket/...
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of pyarrow's S3FileSystem

    @property
    def root(self) -> str:
        return self.url.removeprefix("file://").removeprefix("s3://")

    def under(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)

    @property
    def filesystem(self) -> pa.fs.FileSystem:
        return _s3(self.options) if self.url.startswith("s3://") else pyarrow.fs.LocalFileSystem()

    def listed(self) -> Iterator[pa.fs.FileInfo]:
        """Every file below it."""
        chosen = pyarrow.fs.FileSelector(self.root, allow_not_found=True, recursive=True)
        return (info for info in self.filesystem.get_file_info(chosen) if info.is_file)


@cache
def _s3(options: tuple[tuple[str, str], ...]) -> pa.fs.FileSystem:
    return pyarrow.fs.S3FileSystem(**dict(options))


def place(path: str, options: Mapping[str, str]) -> Place:
    """Where a path of the pipeline file is. A relative one is seen from here, where the driver runs."""
    if path.startswith("s3://"):
        return Place(path, tuple(sorted(options.items())))
    return Place(f"file://{Path(path.removeprefix('file://')).absolute()}")


# As object stores' clients and pyiceberg spell them, and as pyarrow does.
_S3_NAMES = {
    "access_key": ("aws_access_key_id", "s3.access-key-id"),
    "secret_key": ("aws_secret_access_key", "s3.secret-access-key"),
    "session_token": ("aws_session_token", "s3.session-token"),
    "region": ("aws_region", "aws_default_region", "s3.region"),
    "endpoint_override": ("aws_endpoint_url", "aws_endpoint", "s3.endpoint"),
}


def s3_options(settings: Mapping[str, str]) -> dict[str, str]:
    """A store's settings as pyarrow takes them."""
    given = {name.lower(): value for name, value in settings.items()}
    found = {ours: given[name] for ours, names in _S3_NAMES.items() for name in names if name in given}
    if found.get("endpoint_override", "").startswith("http://"):
        found["scheme"] = "http"
    return found


def digest(pipeline: str) -> str:
    return hashlib.sha256(pipeline.encode()).hexdigest()[:12]


def new_name(pipeline: str, run: int) -> str:
    return f"avow-{digest(pipeline)}-{run}-{uuid.uuid4().hex}.parquet"


def run_of(name: str, pipeline: str) -> int | None:
    """The run that wrote a file; None if it is not one of this pipeline's."""
    found = re.fullmatch(rf"avow-{digest(pipeline)}-(\d+)-[0-9a-f]{{32}}\.parquet", name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was written."""

    name: str  # below the folder of data files
    size: int
    rows: int
    footer: bytes = field(repr=False)  # Parquet's own: statistics of every column
    partition: Any = None  # the value that all of its rows share, where the table is partitioned

    def metadata(self) -> pq.FileMetaData:
        return pq.read_metadata(pa.BufferReader(self.footer))


class FileWriter:
    """Writes rows of one schema into files of about ``target`` bytes."""

    def __init__(
        self,
        folder: Place,
        schema: pa.Schema,
        name: tuple[str, int],
        target: int,
        partition: Any = None,
        subfolder: str = "",
    ) -> None:
        self._folder, self._schema, self._target = folder, schema, target
        self._pipeline, self._run = name
        self._partition, self._subfolder = partition, subfolder
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._files: list[DataFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> list[DataFile]:
        """End the last file. Gives all of them."""
        self._flush()
        self._end_file()
        return self._files

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._begin_file()
        assert self._writer is not None
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self._waiting_bytes = [], 0
        if self._stream.tell() >= self._target:
            self._end_file()

    def _begin_file(self) -> None:
        self._name = self._subfolder + new_name(self._pipeline, self._run)
        self._footers: list[pq.FileMetaData] = []
        if self._folder.url.startswith("file://"):
            Path(self._folder.root, self._name).parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._folder.filesystem.open_output_stream(f"{self._folder.root}/{self._name}")
        self._writer = pq.ParquetWriter(
            self._stream, self._schema, compression="zstd", store_schema=False, metadata_collector=self._footers
        )

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        self._writer = None
        (metadata,) = self._footers
        footer = pa.BufferOutputStream()
        metadata.write_metadata_file(footer)
        self._files.append(
            DataFile(self._name, size, metadata.num_rows, footer.getvalue().to_pybytes(), self._partition)
        )
