"""What a consumer declares: its guarantee, when it commits, and what it does with a record that fails.

Owns: which of these go together, and what they come to, in words. Must not know: Kafka, any database. Its neighbour is
``consumer``, which keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import ConfigError
from avow.guarantee import Act, Guarantee

Commit = Literal["auto", "sync", "async"]
Per = Literal["record", "batch"]
OnFailure = Literal["stop", "dead-letter"]
Assignment = Literal["cooperative", "eager"]

RETRIES = 3  # unless declared
LONGEST_S_MAX = 86_400.0  # the client's own limit


@dataclass(frozen=True, slots=True)
class Terms:
    """What was declared. ``checked`` says whether it can be kept."""

    guarantee: Guarantee
    commit: Commit
    retries: int  # of one record
    per: Per = "batch"
    on_failure: OnFailure = "stop"
    back_off_s: float = 0.1  # before the first of them; doubled each time, never above 30 s
    commit_interval_s: float = 5.0
    assignment: Assignment = "cooperative"
    max_records: int = 500  # of a batch
    longest_s: float = 3600.0  # that a batch may take; then the group gives its partitions to others
    hooks: Hooks = NO_HOOKS

    @property
    def claims_first(self) -> bool:
        return self.hooks.order(self.guarantee.steps)[0] == frozenset({Act.CLAIM})

    @property
    def in_one_act(self) -> bool:
        return len(self.guarantee.steps) == 1


def checked(
    guarantee: str,
    commit: str | None,
    *,
    per: str,
    on_failure: str,
    retries: int | None,
    back_off_s: float,
    commit_interval_s: float,
    assignment: str,
    max_records: int,
    longest_s: float,
    database: bool,
) -> Terms:
    """The terms, or a ConfigError that says why they cannot be kept."""
    try:
        word = Guarantee(guarantee)
    except ValueError:
        raise ConfigError(
            f"guarantee: {guarantee!r} is not known", advice=f"It is one of {', '.join(Guarantee)}."
        ) from None
    for name, value, known in (
        ("commit", commit or "auto", get_args(Commit)),
        ("per", per, get_args(Per)),
        ("on_failure", on_failure, get_args(OnFailure)),
        ("assignment", assignment, get_args(Assignment)),
    ):
        if value not in known:
            raise ConfigError(f"{name}: {value!r} is not known", advice=f"It is one of {', '.join(known)}.")
    if retries is None:
        # A handler that failed may have done its work: nobody can say, as when the answer to a COMMIT is lost.
        retries = 0 if word == Guarantee.AT_MOST_ONCE else RETRIES
    for name, number, least, most in (
        ("retries", retries, 0, 1_000),
        ("back_off_s", back_off_s, 0, 30),
        ("commit_interval_s", commit_interval_s, 0, 3_600),
        ("max_records", max_records, 1, 100_000),
        ("longest_s", longest_s, 60, LONGEST_S_MAX),
    ):
        if not least <= number <= most:
            raise ConfigError(f"{name}: {number} is out of range", advice=f"It is from {least:,} to {most:,.0f}.")
    default = {Guarantee.AT_LEAST_ONCE: "auto"}.get(word, "sync")
    if commit not in (None, "sync") and word == Guarantee.AT_MOST_ONCE:
        raise ConfigError(
            f"commit: {commit!r} cannot keep at-most-once",
            advice="The handler may run only when Kafka has said that the position is committed: commit is sync.",
        )
    if word == Guarantee.EXACTLY_ONCE:
        if commit not in (None, "sync"):
            raise ConfigError(
                f"commit: {commit!r} cannot keep exactly-once",
                advice="The position is in the handler's own transaction, and commits with it: leave commit out.",
            )
        if not database:
            raise ConfigError(
                "exactly-once needs a database: the handler's writes and the position are one transaction there",
                advice="Give a PostgreSQL URL as database. Into Kafka, a pipeline does it: avow run --engine consumer.",
            )
    elif database:
        raise ConfigError(
            f"a database is given, and {word} keeps its positions in the Kafka group",
            advice="Leave database out, or declare exactly-once.",
        )
    return Terms(
        guarantee=word,
        commit=commit or default,  # type: ignore[arg-type]
        per=per,  # type: ignore[arg-type]
        on_failure=on_failure,  # type: ignore[arg-type]
        retries=retries,
        back_off_s=back_off_s,
        commit_interval_s=commit_interval_s,
        assignment=assignment,  # type: ignore[arg-type]
        max_records=max_records,
        longest_s=longest_s,
    )


def explain(terms: Terms) -> list[str]:
    """What the terms mean, a sentence a line."""
    unit = "record" if terms.per == "record" else "batch"
    lines = [f"{terms.guarantee}: {terms.guarantee.meaning}"]
    match terms.guarantee:
        case Guarantee.AT_MOST_ONCE:
            lines += [
                f"Each {unit}'s position is committed to the group, and confirmed, before the handler sees it.",
                f"A crash loses what is left of the {unit} in hand. A commit that is refused is not handled.",
            ]
        case Guarantee.AT_LEAST_ONCE:
            when = {
                "auto": f"every {terms.commit_interval_s:g} s, without waiting",
                "sync": f"after each {unit}, and waited for",
                "async": f"after each {unit}, without waiting; one at a time, so that none overtakes a newer one",
            }[terms.commit]
            lines += [
                f"A position is committed to the group after its records are handled: {when}.",
                "The last commit, at the end and when partitions go to another consumer, is always waited for.",
                "A crash repeats what was handled since the last commit.",
            ]
        case Guarantee.EXACTLY_ONCE:
            lines += [
                f"The handler's writes through tx.connection and the {unit}'s position are one transaction.",
                "A crash leaves both or neither. What the handler does elsewhere is not part of it.",
            ]
    failed = {
        "stop": "the consumer stops, and its position is at that record",
        "dead-letter": "it is kept as a dead letter with its bytes and the error, and the next is handled",
    }[terms.on_failure]
    if terms.retries:
        lines.append(f"A record whose handler fails is tried {terms.retries} more times with back-off; then {failed}.")
    else:
        lines.append(f"A record whose handler fails is not tried again: {failed}.")
    if terms.claims_first and terms.retries:
        lines.append("A handler that fails when its work is done does it again: at-most-once holds if that cannot be.")
    if terms.claims_first and terms.on_failure == "stop":
        lines.append(f"What follows it in its {unit} is lost: its position was committed before.")
    moved = {
        "cooperative": "Only partitions that move are interrupted when consumers come and go",
        "eager": "All partitions are given back and shared out anew when consumers come and go",
    }[terms.assignment]
    lines.append(
        f"{moved}; a {unit} in hand is finished first, for up to {terms.longest_s:g} s. A handler that takes longer "
        "loses its partitions to others."
    )
    lines.append("Records of one partition are handled in order, one at a time.")
    return lines
