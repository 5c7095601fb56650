"""What a reader that followed an output saw, against what is there in the end."""

from __future__ import annotations

from avow.prove.live_reader import compare

SPARK_CLUSTER = {(0, 0), (0, 1), (0, 4), (1, 0)}


def test_the_same() -> None:
    assert compare([(1, 0), (0, 0), (0, 1), (0, 4)], SPARK_CLUSTER) == {}
    assert compare([], set()) == {}


def test_what_it_must_never_see() -> None:
    assert compare([(0, 0), (0, 1), (0, 2), (0, 4), (1, 0)], SPARK_CLUSTER) == {"aborted-read": 1}
    assert compare([(0, 0), (0, 1), (1, 0)], SPARK_CLUSTER) == {"lost": 1}
    assert compare([(0, 0), (0, 1), (0, 4), (0, 4), (1, 0)], SPARK_CLUSTER) == {"duplicated": 1}
    assert compare([(0, 1), (0, 0), (0, 4), (1, 0)], SPARK_CLUSTER) == {"reordered": 1}
    # Back to the beginning, as a reader goes that has lost its place.
    assert compare([(0, 0), (0, 1), (0, 0), (0, 1), (0, 4), (1, 0)], SPARK_CLUSTER) == {"duplicated": 2, "reordered": 1}
