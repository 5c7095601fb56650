"""The table of guarantees: what it says, and that all that is read from it agrees with it."""

from __future__ import annotations

import pytest

from avow.guarantee import PROMISES, Act, Anomaly, Guarantee, diagram

WRITE, CLAIM = frozenset({Act.WRITE}), frozenset({Act.CLAIM})
BOTH = WRITE | CLAIM


@pytest.mark.parametrize(
    ("word", "steps", "permits", "atomic"),
    [
        ("at-most-once", (CLAIM, WRITE), {Anomaly.LOST}, False),
        ("at-least-once", (WRITE, CLAIM), {Anomaly.DUPLICATED}, False),
        ("exactly-once", (BOTH,), set(), True),
    ],
)
def test_a_word_is_an_order_of_acts(
    word: str, steps: tuple[frozenset[Act], ...], permits: set[Anomaly], atomic: bool
) -> None:
    guarantee = Guarantee(word)
    assert guarantee.steps == steps
    assert guarantee.permits == permits
    assert guarantee.atomic is atomic


def test_there_are_three_words_and_each_has_its_row() -> None:
    assert list(PROMISES) == list(Guarantee)
    assert [str(word) for word in Guarantee] == ["at-most-once", "at-least-once", "exactly-once"]


@pytest.mark.parametrize("guarantee", Guarantee)
def test_every_order_writes_once_and_claims_once(guarantee: Guarantee) -> None:
    acts = [act for step in guarantee.steps for act in step]
    assert sorted(acts) == [Act.CLAIM, Act.WRITE]


@pytest.mark.parametrize("guarantee", Guarantee)
def test_an_anomaly_is_permitted_for_each_place_where_a_crash_can_fall(guarantee: Guarantee) -> None:
    assert len(guarantee.permits) == len(guarantee.steps) - 1


@pytest.mark.parametrize("guarantee", Guarantee)
def test_the_meaning_is_one_sentence_for_the_user(guarantee: Guarantee) -> None:
    assert guarantee.meaning.endswith(".")
    assert guarantee.meaning.count(".") == 1


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PROMISES[Guarantee.EXACTLY_ONCE] = PROMISES[Guarantee.AT_MOST_ONCE]  # type: ignore[index]


def test_the_diagram_of_a_weaker_word_shows_where_the_crash_hurts() -> None:
    lines = [line.strip() for line in diagram(Guarantee.AT_MOST_ONCE).splitlines()]
    assert lines[0] == "sequenceDiagram"
    assert lines[-3:] == [
        "task->>ledger: claim",
        "Note over task,ledger: a crash here: lost",
        "task->>sink: write",
    ]
    lines = [line.strip() for line in diagram(Guarantee.AT_LEAST_ONCE).splitlines()]
    assert lines[-3:] == [
        "task->>sink: write",
        "Note over task,ledger: a crash here: duplicated",
        "task->>ledger: claim",
    ]


def test_the_diagram_of_exactly_once_is_one_act() -> None:
    lines = [line.strip() for line in diagram(Guarantee.EXACTLY_ONCE).splitlines()]
    assert lines[-5:] == [
        "rect rgba(128, 128, 128, 0.2)",
        "Note over task,ledger: one atomic act",
        "task->>sink: write",
        "task->>ledger: claim",
        "end",
    ]
    assert "crash" not in diagram(Guarantee.EXACTLY_ONCE)
