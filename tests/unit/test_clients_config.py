"""What a consumer may be configured to do, and what that is said to mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

import avow
from avow.cli import main
from avow.clients.config import CommitConfig, CommitMode, ConsumerConfig, PollConfig, RetryConfig, explain
from avow.errors import ConfigError
from avow.guarantee import Guarantee


def config(guarantee: str = "at-least-once", **given: Any) -> ConsumerConfig:
    return ConsumerConfig.resolve(guarantee, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guarantee": "once"}, "'once' is not known"),
        ({"guarantee": "at-most-once", "commit": "async"}, "cannot keep at-most-once"),
        ({"guarantee": "at-most-once", "commit": "auto"}, "cannot keep at-most-once"),
        ({"guarantee": "exactly-once"}, "needs a database"),
        ({"guarantee": "exactly-once", "commit": "auto", "database": True}, "cannot keep exactly-once"),
        ({"database": True}, "stores positions in the Kafka consumer group"),
        ({"commit": "later"}, "'later' is not known"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CommitConfig(per="hour"), "commit.per: 'hour' is not known"),
        (lambda: RetryConfig(retries=-1), "retry.retries: -1 is out of range"),
        (lambda: RetryConfig(retry_backoff_ms=40_000), "out of range"),
        (lambda: PollConfig(max_poll_interval_ms=10_000), "out of range"),
        (lambda: PollConfig(partition_assignment_strategy="range,sticky"), "'range,sticky' is not known"),
    ],
)
def test_each_group_of_settings_checks_its_own(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_enums_are_taken_beside_words() -> None:
    assert config(Guarantee.AT_MOST_ONCE) == config("at-most-once")
    assert config(commit=CommitMode.ASYNC) == config(commit="async") == config(commit=CommitConfig("async"))


def test_the_default_commit_fits_the_guarantee() -> None:
    assert config("at-most-once").commit.mode == "sync"
    assert config("at-least-once").commit.mode == "auto"
    assert config("at-most-once").claims_first
    assert not config("at-least-once").claims_first
    assert config("exactly-once", database=True).in_one_act


def test_a_handler_that_failed_is_not_tried_again_where_that_could_do_its_work_twice() -> None:
    assert config("at-most-once").retries == 0
    assert config("at-least-once").retries == config("exactly-once", database=True).retries == 3
    assert "A record whose handler fails is not retried: the consumer stops" in "".join(explain(config("at-most-once")))
    declared = config("at-most-once", retry=RetryConfig(2))
    assert declared.retries == 2
    assert any("may repeat work" in line for line in explain(declared))
    assert not any("may repeat work" in line for line in explain(config(retry=RetryConfig(2))))


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
@pytest.mark.parametrize("dead_letters", [False, True])
def test_they_are_explained(guarantee: str, dead_letters: bool) -> None:
    commit = CommitConfig(per="record")
    lines = explain(config(guarantee, commit=commit, dead_letters=dead_letters, database=guarantee == "exactly-once"))
    assert lines[0].startswith(guarantee)
    assert any(("dead letter" if dead_letters else "stops") in line for line in lines)


def test_the_command_explains_without_touching_anything() -> None:
    said = CliRunner().invoke(main, ["consume", "t", "--guarantee", "at-most-once", "--explain"])
    assert said.exit_code == 0
    assert "before the handler is called" in said.output
    # Where errors of ours are shown by `main`, the exit code is theirs.
    refused = CliRunner().invoke(main, ["consume", "t", "--guarantee", "exactly-once", "--explain"])
    assert refused.exit_code == 2
    refused = CliRunner().invoke(main, ["consume", "t", "--guarantee", "at-most-once", "--commit", "auto", "--explain"])
    assert refused.exit_code == 2


def test_every_public_name_is_there() -> None:
    assert all(getattr(avow, name) is not None for name in avow.__all__)
