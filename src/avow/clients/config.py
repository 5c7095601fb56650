"""How a consumer is configured: its guarantee, when it commits, how it polls, what becomes of a record that fails.

Each group of settings checks its own values; ``ConsumerConfig.resolve`` checks which of them go together.

Owns: these values, and the sentences that explain them. Must not know: Kafka's client, any database. Its neighbour is
``consumer``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from avow.engines.hooks import NO_HOOKS, Hooks
from avow.errors import ConfigError
from avow.guarantee import Act, Guarantee

COOPERATIVE = "cooperative-sticky"
RETRIES = 3  # unless declared

Word = TypeVar("Word", bound=StrEnum)


class CommitMode(StrEnum):
    AUTO = "auto"  # every auto_commit_interval_ms, without waiting
    SYNC = "sync"  # each unit, waited for
    ASYNC = "async"  # each unit, without waiting


class CommitUnit(StrEnum):
    RECORD = "record"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """When positions are committed. Without ``mode``: auto under at-least-once, else sync."""

    mode: CommitMode | str | None = None
    per: CommitUnit | str = CommitUnit.BATCH
    auto_commit_interval_ms: int = 5_000

    def __post_init__(self) -> None:
        if self.mode is not None:
            _known("commit.mode", self.mode, CommitMode)
        _known("commit.per", self.per, CommitUnit)
        _in_range("commit.auto_commit_interval_ms", self.auto_commit_interval_ms, 0, 3_600_000)


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How often a record whose handler failed is tried again: 3 times, or under at-most-once not at all."""

    retries: int | None = None
    retry_backoff_ms: int = 100  # before the first retry; doubled each time
    retry_backoff_max_ms: int = 30_000

    def __post_init__(self) -> None:
        _in_range("retry.retries", self.retries or 0, 0, 1_000)
        _in_range("retry.retry_backoff_max_ms", self.retry_backoff_max_ms, 0, 3_600_000)
        _in_range("retry.retry_backoff_ms", self.retry_backoff_ms, 0, self.retry_backoff_max_ms)


@dataclass(frozen=True, slots=True)
class PollConfig:
    """How many records are polled at a time, and how long handling them may take before partitions are reassigned."""

    max_poll_records: int = 500  # of one batch
    max_poll_interval_ms: int = 3_600_000
    partition_assignment_strategy: str = COOPERATIVE  # or range, roundrobin, range,roundrobin

    def __post_init__(self) -> None:
        _in_range("poll.max_poll_records", self.max_poll_records, 1, 100_000)
        _in_range("poll.max_poll_interval_ms", self.max_poll_interval_ms, 60_000, 86_400_000)  # the client's own limit
        strategy = self.partition_assignment_strategy
        if strategy != COOPERATIVE and not {*strategy.split(",")} <= {"range", "roundrobin"}:
            raise _unknown("poll.partition_assignment_strategy", strategy, [COOPERATIVE, "range", "roundrobin"])


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """The declared settings, with defaults filled in."""

    guarantee: Guarantee
    commit: CommitConfig
    retry: RetryConfig
    poll: PollConfig
    dead_letters: bool  # else a record that keeps failing stops the consumer
    hooks: Hooks = NO_HOOKS

    @classmethod
    def resolve(
        cls,
        guarantee: Guarantee | str,
        *,
        commit: CommitConfig | CommitMode | str | None = None,
        retry: RetryConfig | None = None,
        poll: PollConfig | None = None,
        dead_letters: bool = False,
        database: bool = False,
        hooks: Hooks = NO_HOOKS,
    ) -> ConsumerConfig:
        """Raises ``ConfigError`` for settings that contradict each other. ``commit`` may be the mode alone."""
        word = _known("guarantee", guarantee, Guarantee)
        commit = commit if isinstance(commit, CommitConfig) else CommitConfig(commit)
        _check_together(word, commit, database=database)
        if commit.mode is None:
            commit = replace(commit, mode=CommitMode.AUTO if word == Guarantee.AT_LEAST_ONCE else CommitMode.SYNC)
        retry = retry or RetryConfig()
        if retry.retries is None:
            # A handler that failed may have done its work: that is unknown, as when the answer to a COMMIT is lost.
            retry = replace(retry, retries=0 if word == Guarantee.AT_MOST_ONCE else RETRIES)
        return cls(word, commit, retry, poll or PollConfig(), dead_letters, hooks)

    @property
    def retries(self) -> int:
        return self.retry.retries or 0

    @property
    def claims_first(self) -> bool:
        return self.hooks.order(self.guarantee.steps)[0] == frozenset({Act.CLAIM})

    @property
    def in_one_act(self) -> bool:
        return len(self.guarantee.steps) == 1


def _check_together(guarantee: Guarantee, commit: CommitConfig, *, database: bool) -> None:
    committed_first = "Use commit mode sync: the handler may run only after Kafka has acknowledged the commit."
    in_transaction = "Leave commit out: the position is committed in the handler's transaction."
    if guarantee != Guarantee.AT_LEAST_ONCE and commit.mode not in (None, CommitMode.SYNC):
        advice = committed_first if guarantee == Guarantee.AT_MOST_ONCE else in_transaction
        raise ConfigError(f"commit mode {str(commit.mode)!r} cannot keep {guarantee}", advice=advice)
    if guarantee == Guarantee.EXACTLY_ONCE and not database:
        raise ConfigError(
            "exactly-once needs a database: the handler's writes and the position are committed in one transaction "
            "there",
            advice="Give a PostgreSQL URL as database. For exactly-once into Kafka use a pipeline: avow run --engine "
            "consumer.",
        )
    if guarantee != Guarantee.EXACTLY_ONCE and database:
        raise ConfigError(
            f"a database was given, but {guarantee} stores positions in the Kafka consumer group",
            advice="Leave database out, or declare exactly-once.",
        )


def _known(name: str, value: str, words: type[Word]) -> Word:
    try:
        return words(value)
    except ValueError:
        raise _unknown(name, value, list(words)) from None


def _unknown(name: str, value: str, words: Collection[str]) -> ConfigError:
    return ConfigError(f"{name}: {value!r} is not known", advice=f"Use one of {', '.join(words)}.")


def _in_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}: {value:,} is out of range", advice=f"Use {least:,} to {most:,}.")


def explain(config: ConsumerConfig) -> list[str]:
    """What the settings mean, one sentence per line."""
    unit = str(config.commit.per)
    lines = [f"{config.guarantee}: {config.guarantee.meaning}"]
    match config.guarantee:
        case Guarantee.AT_MOST_ONCE:
            lines += [
                f"Each {unit}'s position is committed to the group, and acknowledged, before the handler is called.",
                f"A crash loses the unhandled rest of the current {unit}. If the commit is refused, the {unit} is "
                "not handled.",
            ]
        case Guarantee.AT_LEAST_ONCE:
            when = {
                "auto": f"every {config.commit.auto_commit_interval_ms / 1000:g} s, asynchronously",
                "sync": f"after each {unit}, synchronously",
                "async": f"after each {unit}, asynchronously; one commit at a time, so that none overtakes a newer one",
            }[str(config.commit.mode)]
            lines += [
                f"A position is committed to the group after its records are handled: {when}.",
                "The last commit, at the end and when partitions are revoked, is always synchronous.",
                "After a crash, records handled since the last commit are handled again.",
            ]
        case Guarantee.EXACTLY_ONCE:
            lines += [
                f"The handler's writes through tx.connection and the {unit}'s position are committed in one "
                "transaction.",
                "A crash leaves both or neither. Effects outside that connection are not part of the transaction.",
            ]
    failed = "the consumer stops, and its position stays at that record"
    if config.dead_letters:
        failed = "it becomes a dead letter with its bytes and the error, and the next record is handled"
    if config.retries:
        lines.append(f"A record whose handler fails is retried {config.retries} times with back-off; then {failed}.")
    else:
        lines.append(f"A record whose handler fails is not retried: {failed}.")
    if config.claims_first and config.retries:
        lines.append(
            "A retried handler may repeat work that it had done before it failed: at-most-once then depends on the "
            "handler."
        )
    if config.claims_first and not config.dead_letters:
        lines.append(f"The records after it in its {unit} are lost: their position was already committed.")
    moved = "When consumers join or leave, all partitions are revoked and reassigned"
    if config.poll.partition_assignment_strategy == COOPERATIVE:
        moved = "When consumers join or leave, only partitions that move are interrupted"
    lines.append(
        f"{moved}; the current {unit} is finished first, for up to {config.poll.max_poll_interval_ms / 1000:g} s. A "
        "handler that takes longer loses its partitions to other consumers."
    )
    lines.append("Records of one partition are handled in order, one at a time.")
    return lines
