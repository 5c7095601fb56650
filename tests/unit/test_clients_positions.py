"""The bookkeeping of commits, against a world of its own: what the group would have, whatever is refused or lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avow.clients.positions import Positions
from avow.errors import ProtocolViolation
from avow.kafka.log import TopicPartition

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("handle"), st.sampled_from([ONE, TWO]), st.integers(1, 3)),
        st.tuples(st.just("fail"), st.sampled_from([ONE, TWO]), st.just(0)),
        st.tuples(st.just("rebalance"), st.sampled_from([ONE, TWO]), st.just(0)),
        st.tuples(st.sampled_from(["send", "last", "yes", "no", "unknown", "late"]), st.just(ONE), st.just(0)),
    ),
    max_size=60,
)


@given(ACTS)
def test_the_group_never_goes_back_nor_past_a_failed_record(acts: list[tuple[str, TopicPartition, int]]) -> None:
    positions = Positions()
    group = {ONE: 0, TWO: 0}  # what the group has
    handled = {ONE: 0, TWO: 0}  # in order, from 0
    failed: dict[TopicPartition, int] = {}
    sent: list[dict[TopicPartition, int]] = []  # on its way: never more than one
    late: list[dict[TopicPartition, int]] = []  # answers that nobody waits for any more
    for where in group:
        positions.assign(where, 0, confirmed=True)
    for act, where, number in acts:
        match act:
            case "handle" if where not in failed:
                handled[where] += number
                positions.move(where, handled[where])
            case "fail":
                failed[where] = handled[where]  # it stays there: nobody moves the position
            case "rebalance" if not sent:
                positions.revoke([where])
                assert where not in positions
                positions.assign(where, group[where], confirmed=True)
                handled[where] = group[where]  # the next owner begins there, and does it again
                failed.pop(where, None)
            case "send":
                newest = positions.send()
                assert not (newest and sent), "one at a time"
                if newest:
                    sent.append(newest)
            case "last":  # waited for; what was on its way arrives before it, and is answered after it
                late += sent
                for arrived in (*sent, newest := positions.send_last()):
                    assert all(position >= group[place] for place, position in arrived.items())
                    group |= arrived
                sent.clear()
                positions.answered(newest, yes=True)
                assert positions.unconfirmed == {}
            case "late" if late:
                positions.answered(late.pop(), yes=False)
            case "yes" | "no" | "unknown" if sent:
                arrived = sent.pop()
                if act != "no":  # unknown: it went through, and we do not learn it
                    for place, position in arrived.items():
                        assert position >= group[place], "an older commit has overtaken a newer one"
                        group[place] = position
                positions.answered(arrived, yes=act == "yes")
            case _:
                continue
        for place in group:
            assert group[place] <= failed.get(place, handled[place])
            assert positions[place] == handled[place]
    last = positions.send_last()
    assert group | last == handled, "the last commit has everything"


def test_a_position_does_not_go_back() -> None:
    positions = Positions()
    positions.assign(ONE, 5, confirmed=True)
    with pytest.raises(ProtocolViolation):
        positions.move(ONE, 4)


def test_an_adopted_start_is_committed_too() -> None:
    positions = Positions()
    positions.assign(ONE, 5, confirmed=False)
    assert positions.send() == {ONE: 5}
