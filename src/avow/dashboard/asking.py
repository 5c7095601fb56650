"""What all questions and answers have in common.

Owns: the base of a question, and the error of an answer that there is none of. Must not know: any page.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from avow.errors import AvowError

PARTITION_MAX = 2**31 - 1  # as Kafka counts them
OFFSET_MAX = 2**63 - 2


class NotThere(AvowError):
    """What was asked for does not exist."""


class Ask(BaseModel):
    """What a page can be asked. A name that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def one_place(name: str, chosen: str, **typed: object) -> None:
    """A place is chosen by a word. Nothing that was typed beside it is passed over in silence.

    ``name`` is the field of the word; ``typed`` are the fields that have words of their own.
    """
    for word, value in typed.items():
        if value is not None and chosen != word:
            raise ValueError(f"{word} is given, and {name} is {chosen}: choose {name}={word}, or leave it out")
        if value is None and chosen == word:
            raise ValueError(f"{name} is {word}, and no {word} is given")


class Nothing(Ask):
    """Nothing can be asked of it."""
