"""The contract of a format as tests, for pytest. Subclass it and name the plugin:

    from avow.testing.formats import FormatContract

    class TestCsv(FormatContract):
        plugin = CSV

The records are the plugin's own samples, and thousands made of them by cutting, doubling and changing bytes.

Owns: what must hold for every format. Must not know: any one of them, Kafka or a sink.
"""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from avow.formats.base import DETAIL_CHARS_MAX, Decoded, Decoder, FormatPlugin, Reason
from avow.formats.rows import row_schema
from avow.formats.text import refuse_nul_within
from avow.formats.tombstones import key_fields
from avow.settings import PipelineConfig

MANY = 150  # records in a batch: enough for a decoder to take its fast way
ROUNDS = 12  # batches of records with changed bytes

Outcome = tuple[str, Any]  # "row", "delete" or "refused"; and the columns, or the reason


class FormatContract:
    """What every format must do."""

    plugin: ClassVar[FormatPlugin]

    def test_every_good_sample_gives_its_row(self) -> None:
        good = self.plugin.samples().good
        assert good, "samples() has no good record"
        expected = [_row(row) for _, row in good]
        for (value, _), outcome in zip(good, expected, strict=True):
            assert self.decode([value]) == [outcome], f"alone: {value!r}"
        assert self.decode([value for value, _ in good] * MANY) == expected * MANY

    def test_every_bad_sample_is_refused_alone(self) -> None:
        good, bad = self.plugin.samples().good, self.plugin.samples().bad
        assert bad, "samples() has no bad record"
        for value, reason in bad:
            assert self.decode([value]) == [("refused", reason)], f"alone: {value!r}"
            for at in (0, MANY // 2, MANY):
                values = [good[n % len(good)] for n in range(MANY)]
                expected = [_row(row) for _, row in values]
                expected.insert(at, ("refused", reason))
                among = [value for value, _ in values]
                among.insert(at, value)
                # One by one: of long lists, pytest looks for the differences for minutes.
                for record, (found, wanted) in enumerate(zip(self.decode(among), expected, strict=True)):
                    assert found == wanted, f"record {record}, with {value!r} at {at} of {len(among)}"
        assert self.decode([value for value, _ in bad] * 9) == [("refused", reason) for _, reason in bad] * 9

    def test_no_bytes_make_the_decoder_raise_and_a_batch_is_decoded_as_its_records_are(self) -> None:
        chance = random.Random(self.plugin.format)
        samples = self.plugin.samples()
        values = [value for value, _ in (*samples.good, *samples.bad)]
        for _ in range(ROUNDS):
            changed = [_changed(chance, values) for _ in range(MANY)]
            together = self.decode(changed)
            for value, outcome in zip(changed, together, strict=True):
                assert self.decode([value]) == [outcome], f"alone, and together with others: {value!r}"
                refuse_nul_within(outcome[1])

    def test_a_slice_is_decoded_as_the_whole(self) -> None:
        samples = self.plugin.samples()
        values = [value for value, _ in (*samples.good, *samples.bad)] * 9
        whole, outcomes = _batch(values), self.decode(values)
        for start, size in ((1, len(values) - 1), (len(values) // 2, 3), (len(values), 0)):
            found = _outcomes(self._decoder.decode(whole.slice(start, size)), size, self._pipeline)
            assert found == outcomes[start : start + size]

    def test_null_values_are_what_the_pipeline_declares(self) -> None:
        good = [value for value, _ in self.plugin.samples().good]
        values = [None, *good, None, *good * MANY, None]
        refused = ("refused", Reason.TOMBSTONE.value)
        refusing = self.pipeline({"tombstones": "dead-letter"})
        decoded = self.plugin.decoder(refusing, refuse_nul=True).decode(_batch(values))
        outcomes = _outcomes(decoded, len(values), refusing)
        assert [n for n, outcome in enumerate(outcomes) if outcome == refused] == _nulls(values)
        skipping = self.pipeline({"tombstones": "skip"})
        decoded = self.plugin.decoder(skipping, refuse_nul=True).decode(_batch(values))
        assert decoded.skipped == len(_nulls(values))
        assert len(decoded.rows) == len(values) - decoded.skipped
        if not any(field.required for field in skipping.decode.columns):
            keeping = self.pipeline({"tombstones": "keep"})
            decoded = self.plugin.decoder(keeping, refuse_nul=True).decode(_batch(values))
            assert {*_nulls(values)} <= {*decoded.rows_at.to_pylist()}

    def test_a_delete_is_never_lost(self) -> None:
        """Under upsert a null value deletes a row, or is a dead letter: whatever its key is."""
        columns = self.pipeline().decode.columns
        key = next((field.name for field in columns if field.required), columns.fields[0].name)
        pipeline = self.pipeline(sink={"mode": "upsert", "key": [key]})
        chance = random.Random(self.plugin.format)
        keys = [None, b"", b"1", b"a", b"\0", b"\xff", b"{}", *(chance.randbytes(n % 40) for n in range(MANY))]
        decoder = self.plugin.decoder(pipeline, refuse_nul=True)
        decoded = decoder.decode(_batch([None] * len(keys), keys))
        assert decoded.deletes.schema.names == [field.name for field in key_fields(pipeline)]
        assert len(decoded.rows) == decoded.skipped == 0
        outcomes = _outcomes(decoded, len(keys), pipeline)
        assert outcomes[0] == ("refused", Reason.TOMBSTONE_KEY.value)

    def test_the_settings_travel_to_other_processes(self) -> None:
        pipeline = self.pipeline()
        again = pickle.loads(pickle.dumps(pipeline))
        assert again.decode == pipeline.decode
        assert row_schema(again.decode) == row_schema(pipeline.decode)

    def test_the_settings_and_the_plan_are_explained(self) -> None:
        for name, field in self.plugin.Config.model_fields.items():
            assert field.description, f"{name} has no description: what is allowed cannot be shown in an error"
        does, *promises = self.plugin.explain(self.pipeline())
        for sentence in (does, *promises):
            assert re.fullmatch(r"[A-Z].*\.", sentence), f"not a sentence: {sentence!r}"

    # What the tests are made of

    def pipeline(self, decode: dict[str, Any] | None = None, sink: dict[str, Any] | None = None) -> PipelineConfig:
        """A pipeline of the samples' format. Its sink is never opened."""
        return PipelineConfig.model_validate(
            {
                "name": "contract",
                "guarantee": "exactly-once",
                "source": {"brokers": "localhost:9092", "topics": ["t"]},
                "decode": self.plugin.Config.model_validate({**self.plugin.samples().decode, **(decode or {})}),
                "sink": {"kind": "postgres", "url": "postgresql://localhost/d", "table": "t", **(sink or {})},
            }
        )

    def decode(self, values: Sequence[bytes | None]) -> list[Outcome]:
        """What becomes of each record."""
        return _outcomes(self._decoder.decode(_batch(values)), len(values), self._pipeline)

    @cached_property
    def _pipeline(self) -> PipelineConfig:
        return self.pipeline()

    @cached_property
    def _decoder(self) -> Decoder:
        return self.plugin.decoder(self._pipeline, refuse_nul=True)


def _batch(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None) -> pa.RecordBatch:
    columns = [[None] * len(values) if keys is None else keys, values]
    return pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], ["key", "value"])


def _row(row: Mapping[str, object]) -> Outcome:
    return "row", _comparable(dict(row))


def _comparable(value: Any) -> Any:
    """A value that equals itself: NaN does not."""
    if isinstance(value, dict):
        return {name: _comparable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(inner) for inner in value]
    return "NaN" if value != value else value


def _nulls(values: Sequence[bytes | None]) -> list[int]:
    return [index for index, value in enumerate(values) if value is None]


def _outcomes(decoded: Decoded, size: int, pipeline: PipelineConfig) -> list[Outcome]:
    """What became of each record, after a look at what must hold for every batch. None was skipped."""
    decoded.rows.validate(full=True)
    decoded.deletes.validate(full=True)
    assert decoded.rows.schema == row_schema(pipeline.decode)
    outcomes: dict[int, Outcome] = {}
    for kind, rows, at in (
        ("row", decoded.rows, decoded.rows_at.to_pylist()),
        ("delete", decoded.deletes, decoded.deletes_at.to_pylist()),
    ):
        assert at == sorted(at), f"{kind}s are not in the order of their records"
        outcomes |= {index: (kind, _comparable(row)) for index, row in zip(at, rows.to_pylist(), strict=True)}
    for record in decoded.refused:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", record.reason), f"not a short code: {record.reason!r}"
        assert record.detail.isprintable(), f"not printable: {record.detail!r}"
        assert 0 < len(record.detail) <= DETAIL_CHARS_MAX
        outcomes[record.index] = ("refused", str(record.reason))
    places = len(decoded.rows) + len(decoded.deletes) + len(decoded.refused)
    assert places == len(outcomes) == size, f"{size} records are in {places} places, {len(outcomes)} of them different"
    assert [record.index for record in decoded.refused] == sorted(record.index for record in decoded.refused)
    return [outcomes[index] for index in range(size)]


def _changed(chance: random.Random, values: Sequence[bytes]) -> bytes:
    """One of the values with some of its bytes cut, doubled or replaced."""
    value = chance.choice(values)
    for _ in range(chance.randint(1, 3)):
        start, end = sorted(chance.randrange(len(value) + 1) for _ in range(2))
        part = chance.choice((b"", b"\0", b"\xff", chance.randbytes(2), value[start:end] * 2, chance.choice(values)))
        value = chance.choice((value[:start], value[:start] + part + value[end:], value[:start] + part + value[start:]))
    return value[:10_000]
