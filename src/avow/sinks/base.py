"""What a sink offers, as data: which guarantees it keeps in which mode, and what each pair comes to.

Owns: the shape of an offer. Must not know: any one sink. Its neighbours are ``avow.sinks`` (the registry) and
``plan``, which reads the offers and refuses the rest before any I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from avow.guarantee import Guarantee
from avow.settings import Mode


@dataclass(frozen=True, slots=True)
class Offer:
    """One mode of a sink: the guarantees it keeps, each with what it comes to in this mode."""

    notes: Mapping[Guarantee, str]  # one sentence each, shown to users as it is

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        return frozenset(self.notes)


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink, by the word in ``sink.kind``."""

    kind: str
    title: str  # as people write it
    offers: Mapping[Mode, Offer]
    assumes: tuple[str, ...]  # what must hold outside avow for the offers to hold

    def offered(self, mode: Mode) -> frozenset[Guarantee]:
        """The guarantees this kind keeps in a mode; none if it lacks the mode."""
        offer = self.offers.get(mode)
        return offer.guarantees if offer else frozenset()
