"""Both readers of Avro against one another, on records of schemas made at random, damaged in many ways.

    python -m tests.fuzz_avro --examples 20000              # 300 damaged records each; --seed N plays it again
    python -m tests.fuzz_avro --examples 2000 --sanitize    # the C library compiled with gcc's sanitizers

A child process does the work: what ends it is a finding too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from avow import native
from tests.fuzz_decode import ROOT, sanitized
from tests.unit import test_avro


def play(examples: int, number: int) -> int:
    """How many damaged records were read by both."""
    took = 0

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(test_avro.examples())
    def one(example: tuple[Any, list[Any]]) -> None:
        nonlocal took
        schema, values = example
        good = [test_avro.written(schema, value) for value in values]
        chance = random.Random(number)
        records = [*good, *(test_avro._changed(chance, good) for _ in range(test_avro.MUTATED))]
        took += test_avro.assert_agree(schema, schema, records, refuse_nul=number % 2 == 0)

    one()
    return took


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--examples", type=int, default=1_000, help="schemas, each with a few records")
    options.add_argument("--seed", type=int, default=random.randrange(10**9))
    options.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan; needs gcc")
    options.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.library:
        library = ctypes.CDLL(str(chosen.library))
        native.library = lambda: library
    if chosen.child:
        took = play(chosen.examples, chosen.seed)
        print(f"{chosen.examples:,} schemas with {test_avro.MUTATED} damaged records each: {took:,} read by both alike")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz_avro", "--child"]
        command += ["--examples", str(chosen.examples), "--seed", str(chosen.seed)]
        environment = dict(os.environ)
        if chosen.sanitize:
            path, more = sanitized(Path(folder))
            command += ["--library", str(path)]
            environment |= more
        print(f"seed {chosen.seed}", flush=True)
        raise SystemExit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
