"""Small ranges that are decoded as one: what becomes of each."""

from __future__ import annotations

from pathlib import Path

from avow.engines import task
from avow.ledger import Counts, OffsetRange
from avow.plan import load_checked
from avow.settings import PipelineConfig
from avow.testing.bench import TOPIC, batch

FILE = """
name = "p"
guarantee = "exactly-once"
source = { brokers = "localhost:1", topics = ["t"] }
decode = { format = "json", schema = "id long not null" }
sink = { kind = "postgres", url = "postgresql://u@localhost/d", table = "t" }
dead_letters = { max_share = 1.0 }
"""


def joined(folder: Path, values: list[list[bytes]]) -> task._JoinedRanges:
    file = folder / "p.toml"
    file.write_text(FILE)
    pipeline: PipelineConfig = load_checked(file, {})
    batches = [batch(one, number, 0, [None] * len(one)) for number, one in enumerate(values)]
    todo = [OffsetRange(TOPIC, number, 0, 9 + len(one)) for number, one in enumerate(values)]
    return task._JoinedRanges(batches, todo, task.BatchWork(pipeline, 1, 0, {}))


def test_dead_letters_are_those_of_their_range(tmp_path: Path) -> None:
    good, bad = b'{"id": 1}', b"{"
    values = [[], [good], [bad, good, bad], [], [bad], [good, good], []]
    found = joined(tmp_path, values)
    late = task._dead_letter(found._whole, 6, task.REFUSED, "no")
    outcomes = found._outcomes({6: late}, judged=True)
    assert [outcome.counts for outcome in outcomes] == [
        Counts(),
        Counts(1, 1),
        Counts(3, 1, 2),
        Counts(),
        Counts(1, 0, 1),
        Counts(2, 1, 1),
        Counts(),
    ]
    assert outcomes[5].dead.first == late
