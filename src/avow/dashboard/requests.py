"""Request parameters: the base model of every page's, and the error for what does not exist.

Owns: these. Must not know: any page.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from avow.errors import AvowError


class NotFound(AvowError):
    """What was requested does not exist: 404."""


class Params(BaseModel):
    """The parameters of a page, from its path and query. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_position(name: str, chosen: str, **typed: object) -> None:
    """Check that a position is chosen by ``name`` alone: a value typed for another choice is an error.

    ``name`` is the field of the word; ``typed`` are the fields that have words of their own.
    """
    for word, value in typed.items():
        if value is not None and chosen != word:
            raise ValueError(f"{word} needs {name}={word}, but {name} is {chosen}")
        if value is None and chosen == word:
            raise ValueError(f"{name}={word} needs a value for {word}")


class NoParams(Params):
    """No parameters."""
