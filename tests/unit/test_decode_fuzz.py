"""A bounded run of the fuzzer, which has a command of its own for long ones: see ``tests/fuzz_decode.py``."""

from __future__ import annotations

from tests.fuzz_decode import run


def test_the_fast_decoder_agrees_with_the_strict_one() -> None:
    counts = run(seed=1, batches=1_500, seconds=12)
    assert counts["taken"] > 0
    assert counts["refused"] > 0
