"""Parquet files: where they go, how they are written, and what is known of them.

A file's name carries the pipeline (as a hash) and the run, so that files which no commit took in can be told apart from
those of a run in progress and from those of other writers.

Owns: names, stores, writing. Must not know: any table format, the ledger. Neighbours: ``task``, which fills the
files, and the formats, which read the footers for their statistics.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from avow.errors import ConfigError
from avow.sinks.lake.config import SCHEMES, STORE_OPTIONS

# Batches wait for one another until they are worth a row group.
ROW_GROUP_BYTES = 32 << 20

HIGHEST = "\U0010ffff"  # the character that sorts behind all others
TEXT_MAX = HIGHEST * 32  # sorts behind every text that does not begin with it


@dataclass(frozen=True, slots=True)
class Location:
    """A folder: on a disk or in an S3-compatible store. It is pickled into tasks."""

    url: str  # file:///... or s3://bucket/..., or as a table spells it
    store: bytes = field(default=b"", repr=False)  # pyarrow's file system, pickled, with its secrets; none for a disk

    @property
    def root(self) -> str:
        return path_of(self.url)

    def under(self, name: str) -> Location:
        return Location(f"{self.url}/{name}", self.store)

    @property
    def filesystem(self) -> pa.fs.FileSystem:
        return _opened(self.store) if self.store else pyarrow.fs.LocalFileSystem()

    def listed(self) -> Iterator[pa.fs.FileInfo]:
        """Every file below it."""
        row_filter = pyarrow.fs.FileSelector(self.root, allow_not_found=True, recursive=True)
        return (info for info in self.filesystem.get_file_info(row_filter) if info.is_file)


@cache
def _opened(store: bytes) -> pa.fs.FileSystem:
    return pickle.loads(store)


def path_of(url: str) -> str:
    """The path in a store of what a writer of any kind has named: Java's say file:/ and s3a://."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", url)
    if scheme is None:
        return url
    if scheme[1] not in SCHEMES:
        raise ConfigError(
            f"{url}: the storage scheme {scheme[1]} is not supported",
            advice=f"Supported are {', '.join(SCHEMES)}.",
        )
    return re.sub(r"^file:(//)?|^[^:]*://", "", url)


def in_s3(url: str) -> bool:
    return url.startswith(("s3://", "s3a://"))


def location_of(path: str, options: Mapping[str, str]) -> Location:
    """Where a path of the pipeline file is. A relative one is seen from here, where the driver runs."""
    if in_s3(path):
        return Location(f"s3://{path_of(path)}", pickle.dumps(pyarrow.fs.S3FileSystem(**_s3(options))))
    return Location(f"file://{Path(path_of(path)).absolute()}")


def _s3(options: Mapping[str, str]) -> dict[str, Any]:
    """A store's options, in the names of the client that writes the log, as pyarrow takes them."""
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if ours := STORE_OPTIONS[name.lower().removeprefix("aws_")]:
            arguments[ours] = value.lower() == "true" if ours in ("anonymous", "force_virtual_addressing") else value
    return arguments


def digest(pipeline: str) -> str:
    return hashlib.sha256(pipeline.encode()).hexdigest()[:12]


def new_name(pipeline: str, run: int) -> str:
    return f"avow-{digest(pipeline)}-{run}-{uuid.uuid4().hex}.parquet"


def run_of(name: str, pipeline: str) -> int | None:
    """The run that wrote a file; None if it is not one of this pipeline's."""
    match = re.fullmatch(rf"avow-{digest(pipeline)}-(\d+)-[0-9a-f]{{32}}\.parquet", name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was written."""

    name: str  # below the folder of data files
    size: int
    rows: int
    footer: bytes = field(repr=False)  # Parquet's own: statistics of every column
    partition: Any = None  # the value that all of its rows share, where the table is partitioned
    bounded: bool = True  # whether a least and a greatest value is known of each column

    def metadata(self) -> pq.FileMetaData:
        return pq.read_metadata(pa.BufferReader(self.footer))


@cache
def dictionary_columns(schema: pa.Schema) -> list[str]:
    """The columns that get a dictionary: texts, bytes and numbers of 32 bits. Values of wider columns (ids, amounts,
    times, offsets) rarely repeat: there it costs a third of the time of writing, and makes files larger (``python -m
    bench.parquet``). By their paths in the file, which nested columns have of their own."""
    stream = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), stream, store_schema=False)
    file_schema = pq.read_metadata(pa.BufferReader(stream.getvalue())).schema
    columns = (file_schema.column(number) for number in range(len(file_schema)))
    return [column.path for column in columns if column.physical_type in ("BYTE_ARRAY", "INT32")]


class FileWriter:
    """Writes rows of one schema into files of about ``target`` bytes."""

    def __init__(
        self,
        folder: Location,
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
        self._bounded &= _bounded(table)
        self._waiting, self._waiting_bytes = [], 0
        if self._stream.tell() >= self._target:
            self._end_file()

    def _begin_file(self) -> None:
        self._name = self._subfolder + new_name(self._pipeline, self._run)
        self._footers: list[pq.FileMetaData] = []
        self._bounded = True
        if not self._folder.store:
            Path(self._folder.root, self._name).parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._folder.filesystem.open_output_stream(f"{self._folder.root}/{self._name}")
        self._writer = pq.ParquetWriter(
            self._stream,
            self._schema,
            compression="zstd",
            use_dictionary=dictionary_columns(self._schema),
            store_schema=False,
            metadata_collector=self._footers,
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
            DataFile(
                self._name, size, metadata.num_rows, footer.getvalue().to_pybytes(), self._partition, self._bounded
            )
        )


def _bounded(rows: pa.Table) -> bool:
    """Parquet's statistics leave out NaN and long texts, so these are looked for here: there is no bound of a NaN,
    an infinity, or a text behind ``TEXT_MAX``."""
    for column in rows.columns:
        if pa.types.is_floating(column.type):
            bad = pc.invert(pc.is_finite(column))
        elif pa.types.is_string(column.type):
            bad = pc.starts_with(column, TEXT_MAX)
        else:
            continue
        if pc.any(bad).as_py():
            return False
    return True
