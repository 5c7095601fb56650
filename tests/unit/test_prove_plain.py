"""The command lines of plain consumers: each is one that ``avow consume`` takes."""

from __future__ import annotations

from random import Random

import pytest
from click.testing import CliRunner

from avow.cli import main
from avow.guarantee import Guarantee
from avow.prove import plain_consumer


def command(word: Guarantee, seed: int) -> list[str]:
    return plain_consumer.command(word, "t", "127.0.0.1:1,127.0.0.1:2", {"session.timeout.ms": 6000}, Random(seed))


@pytest.mark.parametrize("word", Guarantee)
def test_a_member_declares_the_word(word: Guarantee) -> None:
    asked = [*command(word, 1), "--explain"]
    said = CliRunner(env={"DATABASE_URL": "postgresql://me@localhost/scratch"}).invoke(main, asked)
    assert said.exit_code == 0, said.output
    assert said.output.startswith(f"{word}: ")
    tried = "is not retried" if word is Guarantee.AT_MOST_ONCE else f"is retried {plain_consumer.RETRIES} times"
    assert tried in said.output
    assert "--kafka session.timeout.ms=6000" in " ".join(asked)


def test_the_seed_chooses_how_it_commits_where_the_word_leaves_that_open() -> None:
    def targets(word: Guarantee) -> set[str]:
        found = [command(word, seed) for seed in range(30)]
        return {line[line.index("--commit") + 1] for line in found if "--commit" in line}

    assert targets(Guarantee.AT_LEAST_ONCE) == set(plain_consumer.COMMITS)
    assert command(Guarantee.AT_LEAST_ONCE, 7) == command(Guarantee.AT_LEAST_ONCE, 7)
    assert not targets(Guarantee.AT_MOST_ONCE) | targets(Guarantee.EXACTLY_ONCE)
