"""Whether a value is what its schema allows: one, with what is wrong with it, and many.

Owns: asking the library, and what is said of a value that is not valid. Must not know: Arrow. Neighbours: ``document``,
and ``proofs``, which says what need not be asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema_rs

from avow.formats.base import DecodeError
from avow.formats.json.document import with_room
from avow.formats.json_schema.document import FAILURES, without_panics

SCHEMA_VIOLATION = "schema-violation"  # it can be read, but is not what its schema allows
_TOGETHER = 64  # values that are parsed by one call: more are not quicker


def refuse_invalid(validator: jsonschema_rs.Validator, text: str) -> None:
    """Raises ``DecodeError`` for a JSON value, read before, that the schema does not allow."""
    try:
        with without_panics():
            validator.validate(with_room(json.loads, text))
    except jsonschema_rs.ValidationError as error:
        keyword = error.kind.name
        raise DecodeError(SCHEMA_VIOLATION, f"{error.message} ({keyword})", _path(error.instance_path)) from None
    except FAILURES as error:
        raise DecodeError(SCHEMA_VIOLATION, f"it cannot be validated: {error}") from None


def invalid(validator: jsonschema_rs.Validator, values: Sequence[bytes]) -> list[int]:
    """Which of many JSON objects, read before, are not valid, or are in doubt."""
    is_valid = validator.is_valid
    found: list[int] = []
    for start in range(0, len(values), _TOGETHER):
        some = values[start : start + _TOGETHER]
        try:
            with without_panics():
                # Each is one whole object, so that they are as many elements as there are values.
                valid = list(map(is_valid, json.loads(b"[" + b",".join(some) + b"]")))
            found += [start + index for index, good in enumerate(valid) if not good]
        except FAILURES:
            found += [start + index for index, value in enumerate(some) if not _is_valid(validator, value)]
    return found


def _is_valid(validator: jsonschema_rs.Validator, value: bytes) -> bool:
    try:
        with without_panics():
            return validator.is_valid(json.loads(value))
    except FAILURES:
        return False


def _path(steps: Sequence[str | int]) -> str:
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
