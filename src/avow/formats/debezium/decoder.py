"""Records that Debezium wrote: each becomes a row, a delete, or nothing, by what it is and by the sink's mode.

===========================  ==========================  ===============================================================
record                       upsert                      append and dedupe: the log of changes
===========================  ==========================  ===============================================================
c, r, u                      the row after it            the row after it
d                            delete by the record's key  the row before it
null value, behind a d       delete by the record's key  as ``tombstones`` says, skipped unless declared
t, and other kinds           as ``truncate`` and ``ignore`` say
===========================  ==========================  ===============================================================

Owns: this table. Must not know: how records are written (``connect.Payload``), encodings (``values``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pyarrow as pa

from avow.errors import ConfigError
from avow.formats.base import Decoded, DecodeError
from avow.formats.debezium.by_column import ChangeColumns
from avow.formats.debezium.change import NOT_A_CHANGE, Change, change_of
from avow.formats.debezium.columns import RowReader
from avow.formats.debezium.connect import Payload
from avow.formats.debezium.json_payload import JsonPayload
from avow.formats.debezium.keys import KeyReader
from avow.formats.debezium.plugin import DebeziumConfig
from avow.formats.debezium.values import Encoding
from avow.formats.rows import RowCollector, row_schema
from avow.formats.tombstones import Tombstones, key_fields
from avow.settings import PipelineConfig


class DebeziumDecoder:
    """Decodes the records of one pipeline."""

    def __init__(self, pipeline: PipelineConfig, *, refuse_nul: bool) -> None:
        decode = pipeline.decode
        assert isinstance(decode, DebeziumConfig)
        self._config = decode
        self._payload = _payload(decode, refuse_nul=refuse_nul)
        how = Encoding(
            self._payload,
            refuse_nul=refuse_nul,
            ignore_unknown=decode.unknown_fields == "ignore",
            decimal_mode=decode.decimal_handling_mode,
            time_mode=decode.time_precision_mode,
            binary_mode=decode.binary_handling_mode,
            millisecond_columns=frozenset(decode.millisecond_columns),
            unavailable=decode.unavailable_value,
        )
        self._schema = row_schema(decode)
        self._rows = RowReader(decode.columns.fields, how)
        keys = KeyReader(key_fields(pipeline), how)
        self._upserts = pipeline.sink.mode == "upsert"
        # Behind a transform sink.key names the transform's columns.
        checks = self._upserts and pipeline.transform is None
        self._check_key = keys.check if checks else None
        key_columns = key_fields(pipeline) if checks else None
        self._columns = (
            ChangeColumns(decode.columns.fields, key_columns, how)
            if decode.payload == "json" and ChangeColumns.can_read(decode.columns.fields)
            else None
        )
        self._tombstones = Tombstones(pipeline, keys.read)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        key_column, values = (batch.column(name).cast(pa.binary()) for name in ("key", "value"))
        records = list(zip(key_column.to_pylist(), values.to_pylist(), strict=True))
        rows = RowCollector(self._schema)
        by_column = self._by_column(records, rows)
        deleted: list[int] = []  # records that delete a row by their key, and null values
        skipped = 0
        for index, (key, value) in enumerate(records):
            if index in by_column:
                continue
            if value is None:
                deleted.append(index)
                continue
            try:
                change = self._change(value)
                if change is None:
                    skipped += 1
                elif change.op == "t" and self._config.truncate == "refuse":
                    _refuse_truncation(batch, index)
                elif change.op == "d" and self._upserts:
                    deleted.append(index)
                else:
                    row = self._rows.read(change)
                    if self._check_key:
                        self._check_key(key)
                    rows.add(index, row)
            except DecodeError as error:
                rows.refuse(index, error)
        decoded = rows.decoded(self._tombstones.apply(key_column, deleted))
        return replace(decoded, skipped=decoded.skipped + skipped)

    def _by_column(self, records: list[tuple[bytes | None, bytes | None]], rows: RowCollector) -> set[int]:
        """Read what can be read by column. Which records that were."""
        done: set[int] = set()
        for read, at in self._columns.read(records) if self._columns else ():
            rows.add_rows(read, at)
            done.update(at.to_pylist())
        return done

    def _change(self, value: bytes) -> Change | None:
        """None: a record to leave out, by declaration."""
        change = change_of(self._payload.read(value), self._payload)
        if isinstance(change, Change):
            return None if change.op == "t" and self._config.truncate == "ignore" else change
        if change not in self._config.ignore:
            raise DecodeError(
                NOT_A_CHANGE, f'a {change} record, and no change of a row; decode.ignore = ["{change}"] leaves it out'
            )
        return None


def _payload(config: DebeziumConfig, *, refuse_nul: bool) -> Payload:
    if config.registry is None:
        return JsonPayload(refuse_nul=refuse_nul)
    # Imported here: who reads JSON needs neither.
    from avow.formats.debezium.avro_payload import AvroPayload

    return AvroPayload(config.registry, refuse_nul=refuse_nul)


def _refuse_truncation(batch: pa.RecordBatch, index: int) -> NoReturn:
    place = [
        batch.column(name)[index].as_py() for name in ("topic", "partition", "offset") if name in batch.schema.names
    ]
    raise ConfigError(
        f"the table was truncated at its source (record {'/'.join(map(str, place)) or index})",
        advice="A truncation stands in one partition and has no order among the others, so it is not applied. Bring "
        'the target to the state of the source, then set decode.truncate = "ignore" to run past it.',
    )
