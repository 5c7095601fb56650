"""The strict reader of Protobuf against Google's library, on schemas and messages made at random."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests import protobuf_messages as messages
from tests.protobuf_messages import Case, Refused

from avow.formats.base import DecodeError
from avow.formats.protobuf.layout import columns, layout
from avow.formats.protobuf.reader import Rules, StrictReader
from avow.schema import parse

# A failing example is not made smaller: the compiler would run for minutes.
CHECKS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}


def reader_of(case: Case) -> StrictReader:
    return StrictReader(layout(case.schema, "t.M0"), Rules(refuse_nul=False))


def outcome_of_ours(case: Case, reader: StrictReader, data: bytes) -> object:
    try:
        return messages.comparable(reader.row(data), case.type.DESCRIPTOR)
    except DecodeError as error:
        return error


def outcome_of_google(case: Case, data: bytes) -> object:
    message = case.parse(data)
    if message is None:
        return None
    try:
        return messages.row(message)
    except (Refused, UnicodeDecodeError) as error:  # of proto2, text is only looked at when it is asked for
        return Refused(str(error))


@settings(max_examples=80, **CHECKS)  # type: ignore[arg-type]
@given(st.integers(min_value=0))
def test_what_googles_library_writes_is_read_the_same(seed: int) -> None:
    chance = random.Random(seed)
    case = messages.case(messages.schema_text(chance))
    reader, record = reader_of(case), layout(case.schema, "t.M0")
    assert parse(str(columns(record))) == columns(record)
    for _ in range(20):
        first, second = case.type(), case.type()
        messages.fill(chance, first)
        messages.fill(chance, second, 0.3)
        one, other = first.SerializePartialToString(), second.SerializePartialToString()
        is_refused = []
        # Two messages one after the other are one: fields given again, oneofs that change, messages in parts.
        for value in (one, other, one + other):
            expected, found = outcome_of_google(case, value), outcome_of_ours(case, reader, value)
            is_refused.append(isinstance(found, DecodeError))
            if isinstance(expected, Refused):
                assert is_refused[-1], (case.text, value, expected)
            elif not any(is_refused[:2]):  # we refuse what is bad, also where something good comes after it
                assert found == expected, (case.text, value)
            if len(is_refused) < 3:
                assert is_refused[-1] == isinstance(expected, Refused), (case.text, value, found, expected)


@settings(max_examples=40, **CHECKS)  # type: ignore[arg-type]
@given(st.integers(min_value=0))
def test_damaged_bytes_are_refused_where_googles_library_refuses_them_and_read_the_same_where_not(
    seed: int,
) -> None:
    chance = random.Random(seed)
    case = messages.case(messages.schema_text(chance))
    reader = reader_of(case)
    for _ in range(60):
        message = case.type()
        messages.fill(chance, message)
        data = messages.damaged(chance, message.SerializePartialToString())
        expected, found = outcome_of_google(case, data), outcome_of_ours(case, reader, data)
        if not isinstance(found, DecodeError):
            assert found == expected, (case.text, data)


def test_that_the_generator_makes_what_is_to_be_tested() -> None:
    chance, counts = random.Random(1), {"taken": 0, "refused": 0}
    for _ in range(20):
        case = messages.case(messages.schema_text(chance))
        reader = reader_of(case)
        for _ in range(20):
            message = case.type()
            messages.fill(chance, message)
            for data in (message.SerializePartialToString(), messages.damaged(chance, b"\x08\1" * 9)):
                found = outcome_of_ours(case, reader, data)
                counts["refused" if isinstance(found, DecodeError) else "taken"] += 1
    assert min(counts.values()) > 100, counts
